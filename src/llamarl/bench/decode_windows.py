"""Windows of a long decode run: some steps at a few lengths of answer tell how long all of it would take.

A step's time grows evenly with the tokens in the cache, so the mean over windows in the middle of equal parts is that of the
whole run. Answers jump from window to window; what lies between them is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llamarl.bench.decode_case import DecodeFigures
from llamarl.generate.sequences import Sequence
from llamarl.train.speed import synchronize

if TYPE_CHECKING:
    from llamarl.bench.decode import DecodeBench

_QUICK_S = 40.0  # whole runs are made if all of them take no longer
_WHOLE_RUNS = 15  # they take as long as so many steady ones: heavy tails have six sequences for a slot, twice
_POINTS = 5
_BURSTS = 16  # of a window at most
_WINDOW_S = 3.0  # likewise; one burst is always measured
_LEAST_BURSTS = 4  # of a whole answer, to be measured by windows at all
_PROMPTS = 16  # prompts that the decoder reads together
_READING_S = 3.0
_TAIL_S = 8.0  # of a window with heavy-tailed lengths
_PROFILED_BURSTS, _PROFILED_S = 3, 1.0
_POOL = 1000  # lengths to draw from for the sequences that a heavy-tailed window begins with


class DecodeWindows:
    """Measures a decoder by windows; see the module's docstring."""

    def __init__(self, bench: DecodeBench) -> None:
        self._bench, self._decoder, self._case = bench, bench.decoder, bench.case
        bursts = self._case.new // self._decoder.burst_steps
        self.fit = bursts >= _LEAST_BURSTS  # whether answers are long enough for windows
        self._points = max(1, min(_POINTS, bursts // 3))
        self._bursts = max(1, min(_BURSTS, bursts // self._points - 2))

    @property
    def needed(self) -> bool:
        """Whether runs to the very end would take too long."""
        return self.fit and self._whole_run_s() * _WHOLE_RUNS > _QUICK_S

    def _whole_run_s(self) -> float:
        """About how long one steady run would take."""
        read_s = self._read_s()
        self._start()
        step_s = self._step_s(self._case.new // 2)
        self._decoder.drop_all()
        return read_s + self._case.new * step_s

    def measure(self) -> DecodeFigures:
        case = self._case
        self._decoder.fill_cache()
        self._start()
        middles = [round((index + 0.5) * case.new / self._points) for index in range(self._points)]
        step_s = sum(self._step_s(middle) for middle in middles) / len(middles)
        lost_s = self._change_lost_s(case.new // 2)
        self._decoder.drop_all()
        return DecodeFigures(
            rate=case.batch / step_s,
            rate_with_prefill=case.batch * case.new / (self._read_s() + case.new * step_s),
            heavy_tailed=self._heavy_tailed(),
            change_lost_s=lost_s,
            windows=len(middles),
        )

    def profiles(self, profile: Callable[[Callable[[], object]], str]) -> tuple[str, str]:
        """What `profile` says of a few bursts in the middle of the answers, and of a second of heavy-tailed lengths."""
        self._decoder.fill_cache()
        self._start()
        self._warm_up(self._case.new // 2)
        steady = profile(lambda: self._run(_PROFILED_BURSTS))
        self._decoder.drop_all()
        self._start_tail()
        self._tail_rate()
        heavy = profile(lambda: self._tail_rate(_PROFILED_S))
        self._decoder.drop_all()
        return steady, heavy

    # All slots busy, with answers of one length

    def _start(self) -> None:
        """Fill all slots, with nothing sampled and no prompt read."""
        self._bench.add([self._case.new] * self._case.batch)
        self._decoder.begin(lambda _: 0)

    def _step_s(self, middle: int) -> float:
        """Seconds of a step in a window around this length of answer."""
        self._warm_up(middle)
        taken_s, done = self._run(self._bursts)
        return taken_s / (done * self._decoder.burst_steps)

    def _change_lost_s(self, middle: int) -> float:
        """What a window takes longer if weights change in it."""
        self._warm_up(middle)
        plain_s, done = self._run(self._bursts)
        weights = self._bench.clone_weights()
        self._warm_up(middle)
        changed_s, _ = self._run(done, lambda: self._bench.change(weights))
        return changed_s - plain_s

    def _warm_up(self, middle: int) -> None:
        """Capture what is needed, then go to the window's start."""
        start = max(0, middle - self._bursts * self._decoder.burst_steps // 2)
        self._decoder.jump(lambda _: start)
        self._run(1)
        self._decoder.jump(lambda _: start)

    def _run(self, bursts: int, halfway: Callable[[], None] | None = None) -> tuple[float, int]:
        """Seconds and number of bursts: so many, or as many as the time allows."""
        clock, device = self._bench.clock, self._bench.device
        synchronize(device)
        start_s, done = clock(), 0
        while done < bursts and (not done or clock() - start_s < _WINDOW_S):
            if halfway and done == bursts // 2:
                halfway()
            self._decoder.step()
            done += 1
        self._decoder.settle()
        synchronize(device)
        return clock() - start_s, done

    # Prompts

    def _read_s(self) -> float:
        """Seconds to read all prompts: of as many as are read together, if there is time for them, and of one otherwise."""
        self._reading_s(1)  # captures and compiles
        one_s = self._reading_s(1)
        together = min(_PROMPTS, self._case.num_prompts)
        if together > 1 and one_s * together < _READING_S:
            self._reading_s(together)
            return self._reading_s(together) * self._case.num_prompts / together
        return one_s * self._case.num_prompts

    def _reading_s(self, prompts: int) -> float:
        clock, device = self._bench.clock, self._bench.device
        self._bench.add([self._case.new] * min(self._case.batch, prompts * self._case.samples))
        synchronize(device)
        start_s = clock()
        self._decoder.admit()
        synchronize(device)
        taken_s = clock() - start_s
        self._decoder.drop_all()
        return taken_s

    # Heavy-tailed lengths

    def _heavy_tailed(self) -> float:
        """Tokens per second with continuous refill, as it is long after the start: the second of two windows that begin
        alike."""
        state = self._bench.chance.getstate()
        for _ in range(2):
            self._bench.chance.setstate(state)
            self._start_tail()
            rate = self._tail_rate()
            self._decoder.drop_all()
        return rate

    def _start_tail(self) -> None:
        """Fill the slots as they are found at any later time: a long answer is met in proportion to its length, and at any
        point of it."""
        case, chance = self._case, self._bench.chance
        pool = [case.heavy_tailed(chance, self._bench.longest) for _ in range(_POOL)]
        met = chance.choices(pool, weights=pool, k=case.num_prompts)
        for length in met:
            self._bench.add([length] * case.samples)
        ages: dict[int, int] = {}

        def age(sequence: Sequence) -> int:
            group = sequence.group.prompt
            return ages.setdefault(group.ordinal, chance.randrange(group.sampling.max_new_tokens))

        self._decoder.begin(age)

    def _tail_rate(self, seconds: float = 0.0) -> float:
        seconds = seconds or _TAIL_S
        clock, decoder, case = self._bench.clock, self._decoder, self._case
        synchronize(self._bench.device)
        before, start_s = decoder.tokens_sampled, clock()
        while clock() - start_s < seconds:
            while decoder.num_waiting < case.batch:
                self._bench.add([case.heavy_tailed(self._bench.chance, self._bench.longest)] * case.samples)
            decoder.step()
        decoder.settle()
        synchronize(self._bench.device)
        return (decoder.tokens_sampled - before) / (clock() - start_s)
