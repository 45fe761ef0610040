"""Predicts how long a transfer takes, from its plan and the speed of the links."""

from __future__ import annotations

from msgspec import Struct

from llamarl.layout.plan import TransferPlan

BUCKET_BYTES = 32 << 20  # largest message


class Links(Struct, frozen=True, kw_only=True):
    """Speeds of the links of each GPU, in each direction. Trainers and generators are on different hosts, unless `together`
    fills the hosts one after the other."""

    nvlink_gb_s: float = 450.0
    nic_gb_s: float = 50.0
    gpus_per_host: int = 8
    together: bool = False
    message_s: float = 10e-6  # latency of a message, besides its bytes


class Prediction(Struct, frozen=True):
    """Time and bytes of a transfer."""

    predicted_s: float
    floor_s: float  # with every link busy all the time and messages free of latency
    total_bytes: int
    minimum_bytes: int
    max_sent_bytes: int
    max_received_bytes: int


def predict(plan: TransferPlan, links: Links) -> Prediction:
    sent, received = plan.sent_bytes, plan.received_bytes
    return Prediction(
        predicted_s=max(_busy_s(plan, links)),
        floor_s=_floor_s(plan, links),
        total_bytes=plan.total_bytes,
        minimum_bytes=plan.minimum_bytes,
        max_sent_bytes=max(sent),
        max_received_bytes=max(received),
    )


def _busy_s(plan: TransferPlan, links: Links) -> list[float]:
    """Seconds that each rank sends or receives. Both directions and both kinds of link work at the same time."""
    busy: dict[tuple[str, int, float], float] = {}
    for (source, target), num_bytes in plan.bytes_between.items():
        rate = _gb_s(plan, links, source, target)
        seconds = num_bytes / rate / 1e9 + -(-num_bytes // BUCKET_BYTES) * links.message_s
        for end in (("sent", source, rate), ("received", target, rate)):
            busy[end] = busy.get(end, 0.0) + seconds
    return list(busy.values()) or [0.0]


def _gb_s(plan: TransferPlan, links: Links, source: int, target: int) -> float:
    same_host = source // links.gpus_per_host == (plan.num_sources + target) // links.gpus_per_host
    return links.nvlink_gb_s if links.together and same_host else links.nic_gb_s


def _floor_s(plan: TransferPlan, links: Links) -> float:
    """Least time: no rank receives faster than its link, and all sources together send no faster than all of their links."""
    rates = {_gb_s(plan, links, source, target) for source, target in plan.bytes_between}
    fastest = sum(rates) if rates else links.nic_gb_s
    per_source = plan.minimum_bytes / plan.num_sources
    return max(per_source, *plan.received_bytes) / fastest / 1e9


def describe(plan: TransferPlan, found: Prediction) -> str:
    sent, received = plan.sent_bytes, plan.received_bytes
    num_moves = sum(len(moves) * len(one.names) for one, moves in zip(plan.reshardings, plan.moves, strict=True))
    return "\n".join(
        [
            f"{plan.num_sources} trainer ranks to {plan.num_targets} generator ranks: {num_moves:,} pieces",
            f"  predicted  {found.predicted_s:.4f} s  (floor of the links: {found.floor_s:.4f} s)",
            f"  moved      {found.total_bytes / 1e9:,.2f} GB in all; at least {found.minimum_bytes / 1e9:,.2f} GB are wanted",
            f"  a trainer rank sends        {min(sent) / 1e9:.3f} to {max(sent) / 1e9:.3f} GB",
            f"  a generator rank receives   {min(received) / 1e9:.3f} to {max(received) / 1e9:.3f} GB",
        ]
    )
