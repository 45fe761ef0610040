"""Tasks, which supply prompts, and scorers, which judge completions."""
