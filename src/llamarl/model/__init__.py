"""The policy: one definition in plain PyTorch that the trainer and the generator share, and its files."""
