"""The roles of the line. Executors know the messages they answer; they know neither each other nor the engine."""
