"""The page of a run: reads run folders, live and afterwards, and never writes into them. Knows no engine."""
