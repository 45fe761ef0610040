"""The `math` scorer: reads LaTeX, compares expressions, and bounds the work of both."""
