"""Bytes on disk and between processes: append-only files, checksummed records, framed messages. Nothing imports torch."""
