"""Worker processes for scorers and tools that must not run here: limited, killable, and without state between answers."""
