"""The ledger holds what was written or says where it is damaged; the audit finds every group that does not add up."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller.ledger import (
    Audit,
    Closed,
    Dropped,
    Issued,
    Opened,
    Passed,
    Record,
    Rewound,
    Trained,
    Visible,
    audit,
    encode_line,
    read_ledger,
)
from llamarl.errors import InputError

ordinals = st.integers(-(2**62), 2**62)
records = st.one_of(
    st.builds(Opened, ordinals, ordinals),
    st.builds(Issued, ordinals, st.text(), ordinals),
    st.builds(
        Passed, ordinals, st.text(), ordinals, ordinals, ordinals, st.floats(allow_nan=False, allow_infinity=False)
    ),
    st.builds(Dropped, ordinals, st.text()),
    st.builds(Trained, ordinals, st.lists(ordinals).map(tuple)),
    st.builds(Visible, ordinals),
    st.builds(Rewound, ordinals, st.text()),
    st.builds(Closed, st.text()),
)

HISTORY: list[Record] = [
    Opened(2, 2),
    Visible(0),
    Issued(0, "generator/0", 0),
    Passed(0, "generated", 7, 0, 0, 0.0),
    Issued(1, "generator/0", 0),
    Dropped(1, "time-out\nof the scorer"),
    Trained(0, (0,)),
    Visible(1),
    Closed("finished"),
]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def encoded(history: list[Record]) -> bytes:
    return b"".join(map(encode_line, history))


@settings(max_examples=50)
@given(st.lists(records, max_size=8))
def test_records_are_read_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, history: list[Record]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "ledger", encoded(history))
    assert list(read_ledger(path)) == history


def test_a_record_is_one_line_that_a_person_can_read() -> None:
    line = encode_line(Dropped(1, "two\nlines"))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert b'{"record":"Dropped","ordinal":1,"reason":"two\\nlines"}' in line


def test_a_torn_last_line_is_left_out_wherever_it_was_torn(tmp_path: Path) -> None:
    whole = encoded(HISTORY)
    last = len(encode_line(HISTORY[-1]))
    for missing in range(1, last + 1):
        path = write(tmp_path / "ledger", whole[:-missing])
        assert list(read_ledger(path)) == HISTORY[:-1]


def test_a_changed_byte_is_named_with_its_line(tmp_path: Path) -> None:
    whole = encoded(HISTORY)
    for at in range(len(whole)):
        if whole[at : at + 1] == b"\n":
            continue  # without its end, a line runs into the next: the test below
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        line = whole[:at].count(b"\n") + 1
        if damaged[at] == ord("\n"):
            continue
        with pytest.raises(InputError, match=f"ledger:{line}: damaged record"):
            list(read_ledger(write(tmp_path / "ledger", bytes(damaged))))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data.replace(b"\n", b" ", 1), id="two lines run together"),
        pytest.param(lambda data: b"\n" + data, id="an empty line"),
        pytest.param(lambda data: b"\x00" * 4096 + data, id="a page of zeros"),
        pytest.param(lambda data: b"hello\n", id="another file"),
    ],
)
def test_damage_before_the_last_line_is_an_error(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    with pytest.raises(InputError, match="ledger:1: damaged record"):
        list(read_ledger(write(tmp_path / "ledger", damage(encoded(HISTORY)))))


def test_a_whole_line_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    foreign = encode_line(Visible(1)).replace(b"Visible", b"Visibly")
    body = foreign.split(b" ", 1)[1].rstrip(b"\n")
    line = b"%08x %s\n" % (zlib.crc32(body), body)
    with pytest.raises(InputError, match="ledger:1: not a ledger record"):
        list(read_ledger(write(tmp_path / "ledger", line)))


def test_a_ledger_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        list(read_ledger(tmp_path / "ledger"))


def groups(*numbers: int) -> list[Record]:
    return [Issued(ordinal, "generator/0", 0) for ordinal in numbers]


def audit_of(*history: Record, num_groups: int = 2, closed: bool = True) -> Audit:
    end: list[Record] = [Closed("finished")] if closed else []
    return audit([Opened(num_groups, 1), *history, *end])


def test_every_group_trained_or_dropped_once_is_clean() -> None:
    found = audit_of(*groups(0, 1), Trained(0, (0,)), Dropped(1, "time-out"))
    assert found.clean
    assert (found.trained, found.dropped, found.updates, found.rewinds) == (1, {"time-out": 1}, 1, 0)


def test_a_group_that_was_never_settled_is_unfinished() -> None:
    found = audit_of(*groups(0, 1), Trained(0, (0,)))
    assert not found.clean
    assert found.unfinished == (1,)


def test_a_group_that_was_never_even_issued_is_unfinished() -> None:
    found = audit_of(*groups(0), Trained(0, (0,)), num_groups=3)
    assert found.unfinished == (1, 2)


@pytest.mark.parametrize(
    "second",
    [Trained(1, (0,)), Trained(0, (0,)), Dropped(0, "late")],
    ids=["other update", "same update", "dropped too"],
)
def test_a_group_that_counts_twice_is_found(second: Record) -> None:
    found = audit_of(*groups(0, 1), Trained(0, (0, 1)), second)
    assert not found.clean
    assert found.counted_twice == (0,)


def test_a_group_dropped_twice_is_found() -> None:
    assert audit_of(*groups(0, 1), Trained(0, (1,)), Dropped(0, "a"), Dropped(0, "b")).counted_twice == (0,)


def test_a_group_that_was_trained_but_never_issued_is_found() -> None:
    found = audit_of(*groups(0, 1), Trained(0, (0, 1)), Trained(1, (7,)))
    assert not found.clean
    assert found.never_issued == (7,)


def test_issuing_again_under_the_same_ordinal_is_no_second_group() -> None:
    assert audit_of(*groups(0, 1), *groups(0, 1), Trained(0, (0, 1))).clean


def test_a_rewind_cancels_later_updates_so_that_they_must_be_redone() -> None:
    history = [*groups(0, 1), Trained(0, (0,)), Trained(1, (1,)), Rewound(1, "trainer/0")]
    cancelled = audit_of(*history)
    assert cancelled.unfinished == (1,)
    assert cancelled.updates == 1
    redone = audit_of(*history, Trained(1, (1,)))
    assert redone.clean
    assert (redone.updates, redone.rewinds, redone.trained) == (2, 1, 2)


def test_a_rewind_keeps_what_came_before_it_and_what_was_dropped() -> None:
    history = [*groups(0, 1), Dropped(1, "x"), Trained(0, (0,)), Rewound(1, "trainer/0")]
    assert audit_of(*history).clean
    assert audit_of(*history, Trained(0, (0,))).counted_twice == (0,), "update 0 was not cancelled"


def test_a_rewind_does_not_cancel_what_comes_after_it() -> None:
    assert audit_of(*groups(0, 1), Rewound(0, "trainer/0"), Trained(0, (0, 1))).clean


def test_only_a_closed_ledger_is_clean() -> None:
    found = audit_of(*groups(0, 1), Trained(0, (0, 1)), closed=False)
    assert not (found.unfinished or found.counted_twice or found.never_issued)
    assert not found.clean


def test_an_empty_ledger_is_not_clean() -> None:
    assert not audit([]).clean
