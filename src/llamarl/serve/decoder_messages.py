"""What the HTTP side and the decoder's process say to each other; see `local_backend.py`."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from llamarl.serve.backend import Ask, BackendStats, Piece, Scores


class StartDecoder(Struct, frozen=True, tag=True):
    """The first message: what to load, and how much of it is to be decoded at once."""

    folder: str
    device: str
    dtype: str
    slots: int  # 0: 256 on a GPU, 16 on a CPU
    max_length: int  # 0: as the model, within limits
    seed: int


class BeginAnswer(Struct, frozen=True, tag=True):
    ordinal: int
    ask: Ask


class DropAnswer(Struct, frozen=True, tag=True):
    """Nobody waits for it any more."""

    ordinal: int


class ScoreTokens(Struct, frozen=True, tag=True):
    ordinal: int
    tokens: list[int]
    top: int


Command = StartDecoder | BeginAnswer | DropAnswer | ScoreTokens


class DecoderReady(Struct, frozen=True, tag=True):
    """The model is loaded."""

    device: str
    precision: str
    max_length: int


class DecoderEnds(Struct, frozen=True, tag=True):
    """Nothing is answered any more."""

    reason: str
    by_user: bool = False  # whether it is for the user to mend: a folder, a device, too little memory


class DecoderNews(Struct, tag=True):
    """All that is new since the last message, by the ordinal of the request."""

    pieces: list[tuple[int, Piece]] = []
    scores: list[tuple[int, Scores]] = []
    refused: list[tuple[int, str]] = []
    stats: BackendStats = BackendStats()

    def __bool__(self) -> bool:
        return bool(self.pieces or self.scores or self.refused)


Told = DecoderReady | DecoderEnds | DecoderNews

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_told = msgspec.msgpack.Decoder(Told).decode
