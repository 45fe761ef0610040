"""Decoding: from prompts and weights to completions with the log-probs they were sampled with."""
