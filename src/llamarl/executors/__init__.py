"""The roles of the line. Executors know the messages they answer, not each other, nor the engine that runs them."""
