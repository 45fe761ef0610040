"""What is learned from: rollouts packed into tensors, advantages, and losses as small pure functions."""
