"""Where the line begins: the prompt of every ordinal, tokenised, with the way its answers are to be sampled."""

from __future__ import annotations

from msgspec.structs import replace

from llamarl.config import Config
from llamarl.controller.evaluation import is_evaluation
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.task import Task
from llamarl.types import PromptGroup, tokens_to_bytes


class Prompts:
    def __init__(self, task: Task, tokenizer: Tokenizer, config: Config) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._training, self._greedy = config.training_sampling, config.greedy_sampling
        self._evaluation = task.evaluation(config.evaluate.prompts)
        # A small task may hold out fewer problems than the setting asks for: then all of them, each once.
        self.evaluate = replace(config.evaluate, prompts=len(self._evaluation))

    def group(self, ordinal: int) -> PromptGroup:
        if is_evaluation(ordinal):
            problem = self._evaluation[(-ordinal - 1) % len(self._evaluation)]
            sampling = self._greedy
        else:
            problem, sampling = self._task.problem(ordinal), self._training
        return PromptGroup(ordinal, problem, tokens_to_bytes(self._tokenizer.encode(problem.prompt)), sampling)
