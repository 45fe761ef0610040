"""Watching: the run folder, the timeline and the summary. Work first, watching after: nothing here decides anything."""
