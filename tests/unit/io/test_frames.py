"""Frames survive any splitting of the stream; anything else is refused before it takes memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from llamarl.io.frames import BadFrame, FrameReader, encode_frame


def test_a_reader_cuts_any_stream_into_the_frames_that_were_sent() -> None:
    payloads = [b"", b"one", bytes(100_000), b"last"]
    stream = b"".join(map(encode_frame, payloads))
    for size in (1, 7, 65_536, len(stream)):
        reader = FrameReader()
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        assert [payload for piece in pieces for payload in reader.feed(piece)] == payloads
        assert reader.incomplete_since_s is None


def test_an_oversized_header_is_refused_before_any_memory_is_taken() -> None:
    header = encode_frame(b"")[:8] + (2**63).to_bytes(8, "little")
    reader = FrameReader()
    assert peak_bytes(lambda: refuse(reader, [header])) < 10_000


def test_a_frame_that_lies_about_its_bytes_takes_no_more_memory_than_its_length() -> None:
    length, piece = 100_000_000, bytes(1_000_000)
    header = encode_frame(b"")[:8] + length.to_bytes(8, "little")
    reader = FrameReader(max_bytes=length)
    assert peak_bytes(lambda: refuse(reader, [header, *[piece] * 100])) < 1.3 * length


def refuse(reader: FrameReader, pieces: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        for piece in pieces:
            reader.feed(piece)


def peak_bytes(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
