"""Evaluation of a model folder on a task: accuracy and pass@k with intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import Config
from llamarl.errors import InputError
from llamarl.generate.conversation import Conversations, make_conversations
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits, Precision
from llamarl.generate.llm import LLM
from llamarl.generate.prompting import check_chat_options, judged_text, prompt_tokens
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.judge import Judge
from llamarl.tasks.registry import own_scorers
from llamarl.tasks.statistics import Interval, bootstrap, pass_at_k, wilson
from llamarl.types import Completion, CompletionGroup, Problem, PromptGroup, Sampling, tokens_to_bytes

Progress = Callable[[int, int], None]  # called with the number of answers judged, and of all


class PassAtK(Struct, frozen=True):
    k: int
    value: float
    interval: Interval


class EvaluationResult(Struct, frozen=True):
    """Figures of an evaluation. Shares are of the answers that could be judged; `failed` counts the others."""

    problems: int
    samples: int  # answers to each problem
    accuracy: float  # mean over problems and samples; the mean reward where rewards are not 0 or 1
    interval: Interval
    pass_at: tuple[PassAtK, ...]
    truncated: int  # answers ended by the token limit
    too_long: int  # problems left out because their prompt exceeds generator.max_prompt_tokens
    failed: int  # answers that could not be judged
    tokens: int
    seconds: float


class Answer(Struct, frozen=True):
    """One answer and its reward; None if it could not be judged, for the `reason` given."""

    problem: int  # number of its problem, the same in every evaluation of the same problems
    sample: int
    prompt: str
    gold: str
    completion: str
    truncated: bool
    reward: float | None = None
    reason: str = ""


Tell = Callable[[Answer], None]


class EvaluationRun:
    """One evaluation. Every problem is asked `sampling.samples` times; answers are judged while others are decoded."""

    def __init__(
        self,
        decoder: ContinuousDecoder,
        tokenizer: Tokenizer,
        judge: Judge,
        sampling: Sampling,
        tell: Tell,
        conversations: Conversations | None = None,
        judged: str = "last",
    ) -> None:
        self._decoder, self._tokenizer, self._judge, self._sampling = decoder, tokenizer, judge, sampling
        self._tell, self._conversations, self._judged_part = tell, conversations, judged
        self._unjudged: dict[tuple[int, int], Answer] = {}
        self._rewards: dict[int, list[float]] = {}
        self._asked = self._judged = self._failed = self._truncated = self._too_long = self._tokens = 0

    def run(self, problems: Sequence[Problem], progress: Progress) -> EvaluationResult:
        start_s = time.monotonic()
        for number, problem in enumerate(problems):
            self._add(number, problem)
        if not self._asked:
            raise InputError(
                f"generator.max_prompt_tokens: no prompt fits into {self._decoder.limits.max_prompt_tokens} tokens; raise it"
            )
        while not self._decoder.idle:
            for group in self._step(progress):
                self._judge_group(group.ordinal, group.prompt.problem, group.completions)
            self._collect(0.0, progress)
        while self._judge.num_pending:
            self._collect(1.0, progress)
        return self._result(time.monotonic() - start_s)

    def _step(self, progress: Progress) -> list[CompletionGroup]:
        if self._conversations is None:
            return self._decoder.step()
        finished = self._conversations.step()
        for _ in self._conversations.take_failures():
            self._judged += self._sampling.samples
            self._failed += self._sampling.samples
            progress(self._judged, self._asked)
        return finished

    def _add(self, number: int, problem: Problem) -> None:
        tokens = tokens_to_bytes(prompt_tokens(self._tokenizer, problem))
        try:
            self._decoder.add(PromptGroup(number, problem, tokens, self._sampling))
            self._asked += self._sampling.samples
        except ValueError:
            self._too_long += 1

    def _judge_group(self, number: int, problem: Problem, completions: Sequence[Completion]) -> None:
        for sample, completion in enumerate(completions):
            self._tokens += completion.num_tokens
            self._truncated += completion.truncated
            text = judged_text(self._tokenizer, completion, self._judged_part)
            answer = Answer(number, sample, problem.prompt, problem.answer, text, completion.truncated)
            self._unjudged[number, sample] = answer
            self._judge.ask((number, sample), text, problem)

    def _collect(self, wait_s: float, progress: Progress) -> None:
        for key, outcome in self._judge.collect(wait_s):
            self._judged += 1
            answer = self._unjudged.pop(cast(tuple[int, int], key))
            if outcome.status == "ok":
                self._rewards.setdefault(answer.problem, []).append(outcome.reward)
                self._tell(replace(answer, reward=outcome.reward))
            else:
                self._failed += 1
                self._tell(replace(answer, reason=outcome.reason))
            progress(self._judged, self._asked)

    def _result(self, seconds: float) -> EvaluationResult:
        rewards = [self._rewards[number] for number in sorted(self._rewards)]
        means = [sum(row) / len(row) for row in rewards]
        shares = all(0.0 <= mean <= 1.0 for mean in means)
        alone = self._sampling.samples == 1 and shares
        return EvaluationResult(
            problems=len(rewards),
            samples=self._sampling.samples,
            accuracy=sum(means) / len(means) if means else 0.0,
            interval=wilson(sum(means), len(means)) if alone else bootstrap(means),
            pass_at=tuple(_pass_at(rewards, k) for k in _ks(self._sampling.samples)),
            truncated=self._truncated,
            too_long=self._too_long,
            failed=self._failed,
            tokens=self._tokens,
            seconds=seconds,
        )


def _ks(samples: int) -> list[int]:
    return [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < samples] + ([samples] if samples > 1 else [])


def _pass_at(rewards: Sequence[Sequence[float]], k: int) -> PassAtK:
    """pass@k, where a reward of 1 or more is right. Problems with fewer than k judged answers are left out."""
    values = [pass_at_k(len(row), sum(reward >= 1.0 for reward in row), k) for row in rewards if len(row) >= k]
    return PassAtK(k, sum(values) / len(values) if values else 0.0, bootstrap(values))


def evaluate(
    config: Config,
    problems: Sequence[Problem],
    *,
    samples: int,
    temperature: float,
    device: str,
    progress: Progress,
    tell: Tell = lambda answer: None,
    starting: Callable[[LLM], None] = lambda llm: None,
) -> EvaluationResult:
    """Ask a model the problems. `tell` gets each answer once it is judged; `starting` is called when all checks passed."""
    settings, talk = config.generator, config.conversation
    if config.agent:
        raise InputError(
            "agent: agents run only in a job, which evaluates with them; leave agent out, or see llamarl serve"
        )
    limits = Limits.of(config, sequences=max(1, len(problems)) * samples)
    llm = LLM(config.model_folder, device=device, dtype=settings.dtype, chat_options=config.task.chat_options)
    for problem in problems[:1]:
        check_chat_options(config.task, problem)
    if limits.length > llm.shape.max_positions:
        raise InputError(
            f"generator.max_new_tokens: prompt and completion may take {limits.length} tokens, "
            f"but {llm.folder} has {llm.shape.max_positions} positions"
        )
    judge = Judge.of(config, own_scorers(config.task))
    judge.prepare()
    starting(llm)
    sampling = replace(settings.sampling, samples=samples, temperature=temperature)
    decoder = llm.decoder(
        limits,
        seed=config.seed,
        precision=Precision.of(settings),
        max_turns=talk.max_turns if talk.tool else 1,
        stop=settings.stop,
    )
    conversations = make_conversations(config, decoder, llm.tokenizer) if talk.tool else None
    try:
        return EvaluationRun(decoder, llm.tokenizer, judge, sampling, tell, conversations, talk.judge).run(
            problems, progress
        )
    finally:
        judge.close()
        if conversations is not None:
            conversations.close()


def describe_evaluation(found: EvaluationResult, score_name: str = "accuracy") -> str:
    width = max(10, len(score_name))

    def line(name: str, value: float, interval: Interval) -> str:
        return f"{name:<{width}} {value:.3f}   95% interval {interval[0]:.3f} to {interval[1]:.3f}"

    def count(number: int, what: str) -> str:
        return f"{number} {what}{'s' if number != 1 else ''}"

    asked = f"{count(found.problems, 'problem')}, {count(found.samples, 'answer')} each"
    lines = [line(score_name, found.accuracy, found.interval)]
    lines += [line(f"pass@{one.k}", one.value, one.interval) for one in found.pass_at]
    lines.append(f"{asked}; {found.truncated} cut off at the token limit; {found.failed} could not be judged")
    if found.too_long:
        lines.append(f"{found.too_long} prompts were longer than generator.max_prompt_tokens and were left out")
    lines.append(f"{found.tokens} tokens in {found.seconds:.1f} s")
    return "\n".join(lines)
