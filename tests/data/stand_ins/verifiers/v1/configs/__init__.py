"""Settings of environments."""
