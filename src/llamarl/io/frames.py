"""Messages on a byte stream: a fixed header (magic, checksum, length), then MessagePack. Anything else ends the stream.

All messages between our processes over a pipe or a socket pair are sent in these frames.
"""

from __future__ import annotations

import struct
import time
import zlib

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"LRL1"
MAX_FRAME_BYTES = 1 << 30


class BadFrame(Exception):
    """The peer sent bytes that are not a valid frame."""


def encode_frame(payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(payload), len(payload)) + payload


class FrameReader:
    """Splits a stream into payloads. `incomplete_since_s` is the time since when a frame has been incomplete."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self.incomplete_since_s: float | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes from the stream; returns the payloads that are now complete. Raises BadFrame."""
        self._buffer += data
        payloads = []
        while (payload := self._next()) is not None:
            payloads.append(payload)
        if not self._buffer:
            self.incomplete_since_s = None
        elif payloads or self.incomplete_since_s is None:
            self.incomplete_since_s = time.monotonic()
        return payloads

    def _next(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            if not _MAGIC.startswith(bytes(self._buffer[:4])):
                raise BadFrame("garbage instead of a frame")
            return None
        magic, checksum, length = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC:
            raise BadFrame("garbage instead of a frame")
        if length > self._max_bytes:
            raise BadFrame(f"a frame of {length} bytes; the limit is {self._max_bytes}")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer)[_HEADER.size : end] as view:
            if zlib.crc32(view) != checksum:
                raise BadFrame("a frame whose checksum does not match")
            payload = bytes(view)
        del self._buffer[:end]
        return payload
