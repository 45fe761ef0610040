"""The ledger holds what was written or says where it is damaged; the audit finds every group that does not add up."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.controller.ledger import (
    Closed,
    Dropped,
    Issued,
    Opened,
    Passed,
    Record,
    Rewound,
    Trained,
    Visible,
    encode_record,
    read_ledger,
)
from llamarl.controller.ledger_state import Audit, audit
from llamarl.errors import InputError
from llamarl.io.record_log import SegmentWriter

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


def write(folder: Path, history: list[Record]) -> Path:
    writer = SegmentWriter(folder)
    for record in history:
        writer.append(encode_record(record))
    writer.close()
    return folder


@settings(max_examples=50)
@given(st.lists(records, min_size=1, max_size=8))
def test_records_are_read_back_as_they_were_written(history: list[Record]) -> None:
    with TemporaryDirectory() as folder:
        assert list(read_ledger(write(Path(folder), history))) == history


def test_a_person_can_read_a_record() -> None:
    assert encode_record(Dropped(1, "time-out")) == b'{"record":"Dropped","ordinal":1,"reason":"time-out"}'


def test_what_is_whole_but_no_record_is_an_error(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    for foreign in (b'{"record":"Visibly","version":1}', b"not json", b'{"record":"Visible","version":"one"}'):
        writer.append(foreign)
        writer.sync()
        with pytest.raises(InputError, match="not a ledger record"):
            list(read_ledger(tmp_path))


def test_a_ledger_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="no ledger there"):
            list(read_ledger(folder))


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
