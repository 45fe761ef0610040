"""Whether what an environment server tells of a session agrees with what was sampled in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from llamarl.serve.sessions import TrainingSession
from llamarl.types import ClaimedAnswer, bytes_to_floats, tokens_to_bytes

_MOST_OFF = 1e-3  # a log-prob travels as text


def disagreement(session: TrainingSession, claims: Sequence[ClaimedAnswer]) -> str:
    """What is wrong with the claims; empty if every answer of the session is claimed once, with its ids and log-probs."""
    turns = {
        (tokens_to_bytes(turn.prompt), tokens_to_bytes(turn.tokens)): turn
        for branch in session.branches()
        for turn in branch.trained
    }
    claimed = Counter((claim.prompt, claim.tokens) for claim in claims)
    for claim in claims:
        turn = turns.get((claim.prompt, claim.tokens))
        if turn is None:
            return "tells of an answer that was not sampled here"
        told = bytes_to_floats(claim.logprobs)
        if len(told) != len(turn.tokens) or not np.allclose(told, turn.logprobs, rtol=0, atol=_MOST_OFF):
            return "tells other log-probs than were sampled with"
    if missing := len(turns.keys() - claimed.keys()):
        return f"says nothing of {missing} of {len(turns)} answers that were sampled"
    return ""
