"""The transformer, one definition in plain PyTorch for trainer and generator, and the files of models."""
