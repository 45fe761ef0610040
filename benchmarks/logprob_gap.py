"""Do generator and trainer agree on the log-probs of what was sampled, with the same weights?

    python benchmarks/logprob_gap.py MODEL [--dtype bfloat16] [--device cuda] [--samples 16] [--new 128]
    python benchmarks/logprob_gap.py MODEL --generator bfloat16 --trainer float32      # what each side contributes
    python benchmarks/logprob_gap.py src/llamarl/assets/tiny --prompt 31+33= --prompt 7+38= --samples 64 --new 8

Answers to six prompts are sampled at T = 1 by the generator as it runs in a job (on a GPU: graphs and kernels), then read by
the trainer's passes. What differs is arithmetic alone. Of a model with experts, the gap is told with the experts
replayed that computed each token, and with those that the trainer chooses itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llamarl.algo.batch import document_of
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import AS_THE_MODEL, Limits, Precision
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.train.policy import ComputeSettings, Policy, load_policy
from llamarl.types import CompletionGroup, Problem, PromptGroup, Sampling, tokens_to_bytes

PROMPTS = (
    "Q: Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether?\nA:",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village",
    "In 1905, Albert Einstein",
    "Question: What is 17 + 25?\nAnswer:",
)

DTYPES = ("bfloat16", "float16", "float32")


def sample(
    folder: Path,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    dtype: torch.dtype,
    device: torch.device,
    precision: Precision = AS_THE_MODEL,
) -> list[CompletionGroup]:
    limits = Limits(
        slots=sampling.samples * len(prompts),
        max_prompt_tokens=max(map(len, prompts)),
        max_new_tokens=sampling.max_new_tokens,
    )
    published = torch.bfloat16 if dtype == torch.float16 else dtype  # as a trainer of that precision holds its weights
    model = load_model(folder, dtype=published, device=device).to(dtype)
    eos_ids = Tokenizer.load(folder).eos_ids
    decoder = ContinuousDecoder(model, limits, eos_ids=eos_ids, seed=0, precision=precision, record_routes=True)
    decoder.version = 0
    for ordinal, tokens in enumerate(prompts):
        decoder.add(PromptGroup(ordinal, Problem("", ""), tokens_to_bytes(tokens), sampling))
    done: list[CompletionGroup] = []
    while not decoder.idle:
        done += decoder.step()
    return done


def gaps(folder: Path, groups: Sequence[CompletionGroup], computing: ComputeSettings) -> Tensor:
    """Differences of log-probs of all sampled tokens, as a job measures them."""
    return _gaps(load_policy(folder, replace(computing, replay_routes=True)), groups)


def gaps_by_routing(folder: Path, groups: Sequence[CompletionGroup], computing: ComputeSettings) -> dict[str, Tensor]:
    """Differences of log-probs of all sampled tokens; with experts, by who chooses them."""
    policy = load_policy(folder, replace(computing, replay_routes=True))
    if policy.route_format is None:
        return {"": _gaps(policy, groups)}
    return {" with replay": _gaps(policy, groups), " without replay": _gaps(policy.without_replay(), groups)}


def _gaps(policy: Policy, groups: Sequence[CompletionGroup]) -> Tensor:
    documents = [document_of(group.prompt, one, version=0) for group in groups for one in group.completions]
    packs = policy.packs(documents, same_everywhere=True)
    routing = policy.route_sums()
    found = [(policy.logprobs(pack, routing).cpu() - pack.behavior_logprobs_N.cpu()).abs() for pack in packs]
    if routing is not None and policy.route_format is not None:
        told = routing.totals(policy.computing.mesh).metrics()
        print(", ".join(f"{name} {value:.3g}" for name, value in told.items()), flush=True)
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for side in ("dtype", "generator", "trainer"):
        parser.add_argument(
            f"--{side}", choices=DTYPES, help="of both sides" if side == "dtype" else "of this side alone"
        )
    parser.add_argument("--prompt", action="append", help="instead of the six; may be given several times")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    device, names = torch.device(args.device), [args.generator or args.dtype, args.trainer or args.dtype]
    generator, trainer = (getattr(torch, name or "bfloat16") for name in names)
    sampling = Sampling(samples=args.samples, max_new_tokens=args.new, temperature=1.0)
    prompts = [Tokenizer.load(args.model).encode(text) for text in args.prompt or PROMPTS]
    groups = sample(args.model, prompts, sampling, generator, device)
    for compiled in (False, True) if device.type == "cuda" else (False,):
        found = gaps_by_routing(args.model, groups, ComputeSettings(device, trainer, compiled=compiled))
        for how, gap in found.items():
            print(
                f"{generator} and {trainer} on {device}, trainer {'compiled' if compiled else 'plain'}{how}: mean "
                f"|difference| {gap.mean():.2e}, largest {gap.max():.2e}, over {len(gap):,} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
