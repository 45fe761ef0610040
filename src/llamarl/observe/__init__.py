"""Observing a run: the run folder, metrics, timeline, display and summary. Nothing here decides anything."""
