"""Where prompts come from (tasks) and what judges completions (scorers)."""
