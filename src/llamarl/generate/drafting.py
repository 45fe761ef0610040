"""Decoding with drafts, where few answers run: several tokens of an answer in one step.

A decode step takes as long for one row as for many, since reading the weights dominates. So where slots are free, they take
copies of the running sequences, each one token further along its draft, and an ordinary step samples the next token of all.
Random numbers follow from (seed, ordinal, sample, position) alone, so what a copy samples is what its sequence would have
sampled there, if it came to that point. The tokens of a draft count as long as they are those that were sampled; behind the
first that is not, one more sampled token is right. So the answers are the same as without drafts, whatever the drafts are.

Copies share the pages of their sequence. What a copy has written behind the last token that counts is overwritten later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llamarl.generate.device_runner import Burst, DeviceRunner, opening_at
from llamarl.generate.drafts import MATCHED, DraftChoice, SuffixIndex
from llamarl.generate.scheduler import Scheduler
from llamarl.generate.sequences import DecodeBatch, GroupUnderway, Key, Running, Sampled, Sequence
from llamarl.generate.slots import Opening
from llamarl.types import bytes_to_tokens

MOST_ROWS = 64  # running sequences; with more, a step costs more with copies than without
_PROMPT = (-1, -1)  # the text of the prompt in a group's index
_MOST_EARLIER = 200_000  # tokens of earlier answers that are kept, about 40 MB

Drafter = Callable[[Sequence, list[int], int], list[int]]  # sequence, its tokens, most tokens of the draft


class DraftCounts(NamedTuple):
    """Tokens that were drafted, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


class Drafting:
    """Drafted steps of one decoder; see the module's docstring. `drafter` guesses; by default from siblings."""

    def __init__(
        self,
        schedule: Scheduler,
        device: DeviceRunner,
        eos_ids: frozenset[int],
        choice: DraftChoice,
        drafter: Drafter | None = None,
    ) -> None:
        self._schedule, self._device, self._eos_ids, self.choice = schedule, device, eos_ids, choice
        self._drafter = drafter or SiblingDrafts()
        self._known: dict[Key, list[int]] = {}  # sampled tokens that the host has read
        self.counts = DraftCounts()

    @property
    def applies(self) -> bool:
        """Whether few enough sequences run, and every one can have a copy."""
        num_running = len(self._schedule.running)
        return 0 < num_running <= min(MOST_ROWS, self._schedule.num_free_slots)

    def step(self, *, filtered: bool) -> Burst | None:
        """Sample one or more tokens for every running sequence; None if there is no draft. All bursts have been collected,
        and every sequence has pages for its draft and one more token."""
        running = [one for one in self._schedule.running.values() if one.may_run]
        drafts = self._drafts(running)
        if not any(drafts):
            return None
        copies = self._open_copies(running, drafts)
        slots = [slot for one, some in zip(running, copies, strict=True) for slot in (one.slot, *some)]
        batch = DecodeBatch(slots, [], [], [0] * len(slots))
        self._device.launch(batch, 1, filtered=filtered, drafted=True).wait()
        sampled = self._read(running, copies)
        self._device.close_all([slot for some in copies for slot in some])
        for one, draft, found in zip(running, drafts, sampled, strict=True):
            self._accept(one, draft, found)
        return self._device.look()

    def finish(self, group: GroupUnderway) -> None:
        """Hear that a group is complete."""
        self._forget(group.prompt.ordinal)
        if isinstance(self._drafter, SiblingDrafts):
            self._drafter.finish(group)

    def drop(self, ordinal: int) -> None:
        """Hear that a group was given up."""
        self._forget(ordinal)
        if isinstance(self._drafter, SiblingDrafts):
            self._drafter.drop(ordinal)

    def _forget(self, ordinal: int) -> None:
        for key in [key for key in self._known if key[0] == ordinal]:
            del self._known[key]

    def take_counts(self) -> DraftCounts:
        """Counts since the last call."""
        taken, self.counts = self.counts, DraftCounts()
        return taken

    def _drafts(self, running: list[Running]) -> list[list[int]]:
        self._learn(running)
        most = min(self.choice.most, self._schedule.num_free_slots // max(1, len(running)))
        drafts = []
        for one in running:
            left = one.sequence.group.prompt.sampling.max_new_tokens - one.max_count - 1
            known = self._known[one.sequence.key]
            drafts.append(self._draft(one.sequence, known, min(most, left)) if min(most, left) > 0 else [])
        return drafts

    def _draft(self, sequence: Sequence, known: list[int], most: int) -> list[int]:
        """What the drafter says, as far as it can be read at all."""
        draft = self._drafter(sequence, known, most)[:most]
        end = next((at for at, token in enumerate(draft) if not 0 <= token < self._device.vocab_size), len(draft))
        return draft[:end]

    def _learn(self, running: list[Running]) -> None:
        """Read the tokens that plain bursts have sampled meanwhile."""
        known = [self._known.setdefault(one.sequence.key, []) for one in running]
        behind = [(one, mine) for one, mine in zip(running, known, strict=True) if len(mine) < one.max_count]
        found = self._device.read(
            [one.slot for one, _ in behind],
            [one.max_count for one, _ in behind],
            [len(mine) for _, mine in behind],
        )
        for (_, mine), new in zip(behind, found, strict=True):
            mine.extend(new.tokens)

    def _open_copies(self, running: list[Running], drafts: list[list[int]]) -> list[list[int]]:
        """Put copies of each sequence into free slots, one for each token of its draft."""
        free, copies, openings = self._schedule.free_slots, list[list[int]](), list[Opening]()
        for one, draft in zip(running, drafts, strict=True):
            slots = [free.pop() for _ in draft]
            for ahead, (slot, token) in enumerate(zip(slots, draft, strict=True), start=1):
                self._device.set_pages(slot, one.pages)
                openings.append(opening_at(one, slot, one.max_count + ahead, token))
            copies.append(slots)
        self._device.open(openings)
        return copies

    def _read(self, running: list[Running], copies: list[list[int]]) -> list[Sampled]:
        """What each sequence and then its copies have sampled."""
        slots, starts = list[int](), list[int]()
        for one, some in zip(running, copies, strict=True):
            slots += [one.slot, *some]
            starts += range(one.max_count, one.max_count + 1 + len(some))
        found = iter(self._device.read(slots, [start + 1 for start in starts], starts))
        joined = []
        for some in copies:
            of_sequence = Sampled([], [], [])
            for _ in range(1 + len(some)):
                of_sequence.extend(next(found))
            joined.append(of_sequence)
        return joined

    def _accept(self, one: Running, draft: list[int], found: Sampled) -> None:
        """Keep what was sampled up to the first token that the draft did not have, or that ends the sequence."""
        count = 1
        while count <= len(draft) and draft[count - 1] == found.tokens[count - 1] not in self._eos_ids:
            count += 1
        self.counts = DraftCounts(self.counts.drafted + len(draft), self.counts.accepted + count - 1)
        kept, start = found.part(0, count), one.max_count
        self._known[one.sequence.key].extend(kept.tokens)
        one.max_count += count
        if count > 1:
            self._device.put_back(one.slot, kept, start)
            self._device.open([opening_at(one, one.slot, one.max_count, kept.tokens[-1])])
            if kept.tokens[-1] in self._eos_ids or not one.may_run:
                self._device.end(one.slot)


class SiblingDrafts:
    """Drafts from the answers of the same group, the last answers to the same prompt (of an evaluation before, or of an
    earlier epoch), the answer itself and the prompt."""

    def __init__(self) -> None:
        self._groups: dict[int, SuffixIndex] = {}  # by ordinal
        self._earlier: dict[bytes, SuffixIndex] = {}  # by prompt, oldest first
        self._num_earlier = 0  # tokens in these

    def __call__(self, sequence: Sequence, tokens: list[int], most: int) -> list[int]:
        group, ordinal = sequence.group, sequence.group.prompt.ordinal
        if ordinal not in self._groups:
            self._groups[ordinal] = self._take(group.prompt.prompt_tokens) or _index_of(group)
        index, start = self._groups[ordinal], group.tokens[-MATCHED:]
        _add_completions(index, group)
        if sequence.key not in index:
            index.extend(sequence.key, start)
        index.catch_up(sequence.key, tokens, len(start))
        return index.draft(sequence.key, most)

    def finish(self, group: GroupUnderway) -> None:
        """Keep the answers of a complete group for the next time that its prompt comes, if some were drafted, or if it is of
        an evaluation, which asks the same again."""
        was_drafted = self._groups.pop(group.prompt.ordinal, None) is not None
        if not was_drafted and group.prompt.kind != "evaluation":
            return
        self._take(group.prompt.prompt_tokens)
        index = _index_of(group)
        _add_completions(index, group)
        self._earlier[group.prompt.prompt_tokens] = index
        self._num_earlier += index.num_tokens
        while self._num_earlier > _MOST_EARLIER:
            self._take(next(iter(self._earlier)))

    def drop(self, ordinal: int) -> None:
        self._groups.pop(ordinal, None)

    def _take(self, prompt: bytes) -> SuffixIndex | None:
        index = self._earlier.pop(prompt, None)
        self._num_earlier -= index.num_tokens if index else 0
        return index


def _index_of(group: GroupUnderway) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(_PROMPT, group.tokens)
    return index


def _add_completions(index: SuffixIndex, group: GroupUnderway) -> None:
    """Add the answers that are complete, behind the end of their prompt."""
    for sample, done in group.completions.items():
        key = (group.prompt.ordinal, sample)
        if key not in index:
            index.extend(key, [*group.tokens[-MATCHED:], *bytes_to_tokens(done.tokens).tolist()])
