"""The data that is learned from, advantages, and losses as small pure functions."""
