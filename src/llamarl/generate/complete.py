"""Answer one prompt with a model folder: the quickest way to see that a checkpoint works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from llamarl.errors import InputError, ModelError
from llamarl.generate.decoder import ContinuousDecoder, Limits
from llamarl.model.checkpoint import check_headers, load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Problem, PromptGroup, Sampling, bytes_to_tokens, tokens_to_bytes


def complete(
    folder: Path,
    prompt: str,
    sampling: Sampling,
    *,
    chat: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    starting: Callable[[], None] = lambda: None,
) -> list[str]:
    """The completions' texts. With `chat`, the prompt is a user's message, dressed by the model's chat template. `starting`
    is called when all that was asked for is found to be possible."""
    shape = check_headers(folder)
    tokenizer = Tokenizer.load(folder)
    tokens = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
    if not tokens:
        raise InputError("--prompt: is empty")
    if not tokenizer.eos_ids:
        raise ModelError(f"{folder}: names no end token")
    if len(tokens) + sampling.max_new_tokens > shape.max_positions:
        raise InputError(
            f"--max-new-tokens: prompt ({len(tokens)}) and completion ({sampling.max_new_tokens}) exceed "
            f"the model's {shape.max_positions} positions"
        )
    starting()
    model = load_model(folder, dtype=dtype, device=device)
    decoder = ContinuousDecoder(
        model,
        Limits(slots=sampling.samples, max_prompt_tokens=len(tokens), max_new_tokens=sampling.max_new_tokens),
        eos_ids=tokenizer.eos_ids,
        seed=seed,
    )
    decoder.add(PromptGroup(0, Problem(prompt, ""), tokens_to_bytes(tokens), sampling))
    while not (finished := decoder.step()):
        pass
    return [tokenizer.decode(bytes_to_tokens(completion.tokens).tolist()) for completion in finished[0].completions]
