"""What `llamarl check` finds out: about this machine, and about a job on it."""
