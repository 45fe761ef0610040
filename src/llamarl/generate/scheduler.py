"""Scheduling of sequences to slots and pages, on the host. Uses no tensor and no device.

Sequences start oldest first, one by one, as soon as a slot and enough pages are free. The samples of a group share the
pages of their prompt: full pages by reference, the last one as a copy that each sample goes on writing. When pages run out,
the youngest sequence is paused: it gives up slot and pages, waits in front of all others, and later goes on where it was.

Sequences that run wait for what is read between two bursts. So a long prompt is read in chunks, one before each burst, also
while no slot is free yet; its sequences start when all of it is read, and those behind it wait. Where a burst can read
prompts by the way (`beside.py`), and enough sequences run, nobody waits for a long one: the next ones are read ahead.

A conversation whose turn has ended is parked: it gives up its slot and keeps its pages until a reply comes, which is read
after them. If pages run out it loses them too, and is then read again from its first token.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator

from llamarl.generate.pages import PagePool, pages_for
from llamarl.generate.sequences import (
    AS_ALL_OTHERS,
    NOBODY,
    Admission,
    Extension,
    Fill,
    GroupOptions,
    GroupUnderway,
    Key,
    Running,
    Sampled,
    Sequence,
)
from llamarl.types import Completion, Given, PromptGroup, bytes_to_tokens

_SHORT_PROMPT = 512  # tokens; so many are read in about the time of a burst
_AHEAD = 3  # groups that wait and are read beside running sequences
_SPARE_PAGES = 2  # for each running sequence, left free by prompts that are read ahead


class Scheduler:
    """Decides which sequence has which slot and pages; see the module's docstring."""

    def __init__(
        self, slots: int, pool: PagePool, page_tokens: int, prefill_tokens: int = 0, beside_rows: int = 0
    ) -> None:
        """`prefill_tokens`: most tokens to read before a burst, 0: without limit. Prompts of up to 512 tokens never wait.
        `beside_rows`: tokens that every step of a burst can read beside its own, 0: none."""
        self.pool, self._page_tokens, self._num_slots, self.beside_rows = pool, page_tokens, slots, beside_rows
        self.prefill_tokens = prefill_tokens or sys.maxsize
        self._free_slots = list(range(slots - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self.running: dict[int, Running] = {}  # by slot, oldest first
        self._underway: dict[int, GroupUnderway] = {}
        self._parked: dict[Key, Sequence] = {}

    @property
    def idle(self) -> bool:
        return not self._underway

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_slots(self) -> list[int]:
        """A copy of the list of free slots; the last one is taken first."""
        return list(self._free_slots)

    @property
    def next_unread(self) -> int:
        """Tokens that are left to read of the sequence that starts next."""
        return self._waiting[0].num_unread if self._waiting else 0

    @property
    def ordinals(self) -> list[int]:
        """Groups with completions still missing."""
        return list(self._underway)

    def add(self, prompt: PromptGroup, options: GroupOptions = AS_ALL_OTHERS) -> None:
        group = GroupUnderway(prompt, bytes_to_tokens(prompt.prompt_tokens).tolist(), options)
        group.not_started = prompt.sampling.samples
        self._underway[prompt.ordinal] = group
        self._waiting.extend(Sequence(group, sample) for sample in range(prompt.sampling.samples))

    def admit(self, burst: int, steps: int) -> Admission:
        """Start what fits, with pages for `steps` steps. `burst` is the number of their first burst."""
        admission, beside = Admission(), self._reads_beside
        head = self._waiting[0] if self._waiting else None
        left_to_bursts = head is not None and beside and self._is_read_beside(head)
        if head is not None and not left_to_bursts and head.num_unread > self.prefill_tokens:
            self._read_chunk(self._waiting[0], admission)
            if self._waiting[0].num_unread:
                return admission  # what is left comes next time: an admission reads a sequence once
        while self._waiting and self._free_slots and self._may_read(self._waiting[0], admission, beside):
            if self._start(self._waiting[0], burst, steps, admission):
                self._waiting.popleft()
            elif self.running or not self.give_up_pages(but=self._waiting[0]):
                break
        # Only now: a page released earlier could be filled by another sequence before it is copied.
        for running in admission.started:
            if not running.sequence.group.not_started:
                self._forget_prompt(running.sequence.group)
        return admission

    @property
    def _reads_beside(self) -> bool:
        """Whether so many run that reading beside them is better than letting them wait: over a half, with which no answer is
        drafted, since copies take as many slots."""
        return self.beside_rows > 0 and 2 * len(self.running) > self._num_slots

    def _is_read_beside(self, sequence: Sequence) -> bool:
        """Whether a sequence is long enough for that, or was begun so."""
        begun = not sequence.sampled.tokens and sequence.group.num_read > 0
        least = 0 if begun else max(_SHORT_PROMPT, self.beside_rows)
        return sequence.num_unread > least and sequence.num_tokens > self.beside_rows

    def read_beside(self, steps: int) -> list[Extension]:
        """What a burst of so many steps reads by the way: the next tokens of the long sequences that start next. To be asked
        right before it is launched, since pages that are given up could go to a running sequence."""
        found, left, ordinals = list[Extension](), steps * self.beside_rows, set[int]()
        for sequence in self._waiting if self._reads_beside else ():
            ordinal = sequence.group.prompt.ordinal
            if ordinal in ordinals and not sequence.sampled.tokens:
                continue
            if not left or len(ordinals) == _AHEAD:
                break
            ordinals.add(ordinal)
            if self._is_read_beside(sequence) and (chunk := self._next_chunk(sequence, left)):
                # A step reads as many tokens as fit, the last ones again if fewer are left.
                start = min(chunk.start, max(0, chunk.start + len(chunk.tokens) - self.beside_rows))
                again = sequence.read[start : chunk.start]
                found.append(Extension(again + chunk.tokens, start, chunk.pages))
                left -= -(-len(found[-1].tokens) // self.beside_rows) * self.beside_rows
        return found

    def _may_read(self, sequence: Sequence, admission: Admission, beside: bool) -> bool:
        """Whether what is left to read of a sequence fits before this burst."""
        unread = sequence.num_unread
        if beside and self._is_read_beside(sequence):
            return False
        if unread <= _SHORT_PROMPT and unread <= self.prefill_tokens:
            return True
        already = admission.num_tokens if self.running else 0
        return already + unread <= self.prefill_tokens

    def _read_chunk(self, sequence: Sequence, admission: Admission) -> None:
        """Read the next chunk of a long sequence that waits, if there are pages for all of it."""
        chunk = self._next_chunk(sequence, self.prefill_tokens)
        if chunk is not None and chunk.start:
            admission.extensions.append(chunk)
        elif chunk is not None:
            admission.fills.append(Fill(chunk.tokens, chunk.pages))

    def _next_chunk(self, sequence: Sequence, most: int) -> Extension | None:
        """The next tokens of a sequence that waits, None without pages for all of it, which it holds from now on."""
        if sequence.sampled.tokens:
            pages, start, tokens = sequence.kept, sequence.num_kept, sequence.read[:-1]
        else:
            pages, start = sequence.group.prompt_pages or [], sequence.group.num_read
            tokens = sequence.group.tokens[:-1]
        missing = self._pages(len(tokens)) - len(pages)
        if missing + _SPARE_PAGES * len(self.running) > self.pool.num_free and not self._frees(missing, sequence):
            return None
        pages = pages + self.pool.take(missing)
        end = min(start + most, len(tokens))
        if sequence.sampled.tokens:
            sequence.kept, sequence.num_kept = pages, end
        else:
            sequence.group.prompt_pages, sequence.group.num_read = pages, end
            sequence.group.num_readings += not start
        return Extension(tokens[start:end], start, pages)

    def _frees(self, missing: int, sequence: Sequence) -> bool:
        """Take pages from others that have no slot, where none runs that would release some; True if that was enough."""
        while not self.running and missing > self.pool.num_free:
            if not self.give_up_pages(but=sequence):
                return False
        return not self.running

    def _start(self, sequence: Sequence, burst: int, steps: int, admission: Admission) -> bool:
        running = Running(sequence, self._free_slots[-1], [], len(sequence.sampled.tokens), burst)
        fresh = not sequence.sampled.tokens
        prompt_pages = self._pages(len(sequence.group.tokens) - 1) if fresh else 0
        missing = prompt_pages if sequence.group.prompt_pages is None else 0
        held = self._full_pages(sequence.group) if fresh else len(sequence.kept)
        own = max(0, self._pages(running.tokens_after(steps)) - held)
        # One spare page for each running sequence, so that none is paused right after its start.
        if missing + own + len(self.running) > self.pool.num_free:
            return False
        if fresh:
            self._open_prompt(sequence.group, admission)
            self._share_prompt(running, own, admission)
        else:
            self._go_on(running, own, admission)
        self.running[self._free_slots.pop()] = running
        admission.started.append(running)
        return True

    def _go_on(self, running: Running, own: int, admission: Admission) -> None:
        sequence = running.sequence
        running.pages = sequence.kept + self.pool.take(own)
        unread = sequence.read[sequence.num_kept : -1]
        if sequence.kept:
            running.shared_pages = self._full_pages(sequence.group)
            if unread:
                admission.extensions.append(Extension(unread, sequence.num_kept, running.pages))
        else:
            admission.fills.append(Fill(unread, running.pages))
        sequence.kept, sequence.num_kept = [], 0

    def _open_prompt(self, group: GroupUnderway, admission: Admission) -> None:
        if group.prompt_pages is None:
            group.num_readings += 1
            group.prompt_pages = self.pool.take(self._pages(len(group.tokens) - 1))
            if group.prompt_pages:
                admission.fills.append(Fill(group.tokens[:-1], group.prompt_pages))
        elif unread := group.tokens[group.num_read : -1]:
            admission.extensions.append(Extension(unread, group.num_read, group.prompt_pages))
        group.num_read = len(group.tokens) - 1

    def _share_prompt(self, running: Running, own: int, admission: Admission) -> None:
        group = running.sequence.group
        assert group.prompt_pages is not None
        full = self._full_pages(group)
        running.pages = group.prompt_pages[:full] + self.pool.take(own)
        running.shared_pages = full
        self.pool.share(group.prompt_pages[:full])
        if len(group.prompt_pages) > full:
            admission.copies.append((group.prompt_pages[full], running.pages[full]))
        group.not_started -= 1
        running.sequence.reading = group.num_readings

    def _forget_prompt(self, group: GroupUnderway) -> None:
        if group.prompt_pages is not None:
            self.pool.release(group.prompt_pages)
            group.prompt_pages, group.num_read = None, 0

    def grow(self, steps: int) -> list[Running] | None:
        """Give all running sequences pages for `steps` steps. Returns those that got more, or None if too few are free."""
        wanted = [
            (running, missing)
            for running in self.running.values()
            if (missing := self._pages(running.tokens_after(steps)) - len(running.pages)) > 0
        ]
        if sum(missing for _, missing in wanted) > self.pool.num_free:
            return None
        for running, missing in wanted:
            running.pages += self.pool.take(missing)
        return [running for running, _ in wanted]

    def give_up_pages(self, but: Sequence | None = None) -> bool:
        """Release pages of sequences without a slot, which can be read again: first the prompts, then the conversation parked
        last; not those of `but`. True if that freed a page."""
        before = self.pool.num_free
        for sequence in self._waiting:
            if but is None or but.sampled.tokens or sequence.group is not but.group:
                self._forget_prompt(sequence.group)
        holders = [one for one in (*self._waiting, *self._parked.values()) if one.kept and one is not but]
        while holders and self.pool.num_free == before:
            self._forget_kept(holders.pop())
        return self.pool.num_free > before

    def forget_everything_without_a_slot(self) -> None:
        """Release all pages held without a slot; their keys and values are of older weights."""
        for sequence in (*self._waiting, *self._parked.values()):
            self._forget_prompt(sequence.group)
            self._forget_kept(sequence)

    def _forget_kept(self, sequence: Sequence) -> None:
        self.pool.release(sequence.kept)
        sequence.kept, sequence.num_kept = [], 0

    @property
    def youngest(self) -> Running:
        return next(reversed(self.running.values()))

    def pause(self, running: Running, sampled: Sampled) -> None:
        """Take slot and pages from a sequence; it goes on before all others."""
        sequence = running.sequence
        sequence.sampled = sampled
        if not sampled.tokens:
            sequence.group.not_started += 1
        self._leave(running)
        self._waiting.appendleft(sequence)

    def park(self, running: Running, sampled: Sampled) -> Sequence:
        """Take a sequence out of its slot until a reply comes; it keeps its pages."""
        sequence = running.sequence
        sequence.sampled = sampled
        sequence.kept, sequence.num_kept = running.pages, len(sequence.read) - 1
        running.pages = []
        self._leave(running)
        self._parked[sequence.key] = sequence
        return sequence

    def parked(self, key: Key) -> Sequence | None:
        """The parked sequence, or None if its group was dropped meanwhile."""
        return self._parked.get(key)

    def reply(self, key: Key, tokens: list[int]) -> None:
        """Append a reply to a parked sequence, which then goes on before all that wait."""
        sequence = self._parked.pop(key)
        sequence.given.append(Given(len(sequence.sampled.tokens), len(tokens)))
        sequence.sampled.tokens.extend(tokens)
        sequence.sampled.logprobs.extend([0.0] * len(tokens))
        sequence.sampled.versions.extend([NOBODY] * len(tokens))
        self._waiting.appendleft(sequence)

    def finish(self, running: Running, completion: Completion) -> GroupUnderway | None:
        """Record a completion. Returns the group if this was its last one."""
        self._leave(running)
        return self._complete(running.sequence, completion)

    def finish_parked(self, key: Key, completion: Completion) -> GroupUnderway | None:
        """The same as `finish`, for a parked sequence."""
        sequence = self._parked.pop(key)
        self._forget_kept(sequence)
        return self._complete(sequence, completion)

    def _complete(self, sequence: Sequence, completion: Completion) -> GroupUnderway | None:
        group = sequence.group
        group.completions[sequence.sample] = completion
        if len(group.completions) < group.prompt.sampling.samples:
            return None
        return self._underway.pop(group.prompt.ordinal)

    def holds(self, ordinal: int) -> bool:
        return ordinal in self._underway

    def drop(self, ordinal: int) -> list[Running]:
        """Give up a group; returns its sequences that were in slots."""
        group = self._underway.pop(ordinal)
        self._forget_prompt(group)
        left = [running for running in self.running.values() if running.sequence.group is group]
        for running in left:
            self._leave(running)
        without = [one for one in (*self._waiting, *self._parked.values()) if one.group is group]
        for sequence in without:
            self._forget_kept(sequence)
            self._parked.pop(sequence.key, None)
        self._waiting = deque(one for one in self._waiting if one.group is not group)
        return left

    def read_again(self) -> Iterator[Admission]:
        """Fills that replace the keys and values of all running sequences, from their first token; then the next chunks of
        long ones."""
        whole = [(running.sequence.read[:-1], running.pages) for running in self.running.values()]
        chunk, start = self.prefill_tokens, 0
        yield Admission(fills=[Fill(tokens[:chunk], pages) for tokens, pages in whole])
        while long := [(tokens, pages) for tokens, pages in whole if len(tokens) > (start := start + chunk)]:
            yield Admission(
                extensions=[Extension(tokens[start : start + chunk], start, pages) for tokens, pages in long]
            )

    def _leave(self, running: Running) -> None:
        self.pool.release(running.pages)
        del self.running[running.slot]
        self._free_slots.append(running.slot)

    def _pages(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self._page_tokens)

    def _full_pages(self, group: GroupUnderway) -> int:
        return (len(group.tokens) - 1) // self._page_tokens
