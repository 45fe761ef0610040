"""Jobs: the only room that knows all others. Config -> controller, engine and executors; run, and resume."""
