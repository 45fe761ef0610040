"""How the trainer computes: packs, attention, head, parallelism, optimizer. Applied to the model from outside."""
