"""Bytes on disk and between processes: files that only grow, checksummed records, framed messages. No torch here."""
