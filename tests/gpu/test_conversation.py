"""On a GPU, in graphs and bursts: conversations are parked and go on, and every sampled token is as likely as it was said."""

from __future__ import annotations

from random import Random

import pytest
import torch
from helpers.groups import prompt_group
from helpers.models import EOS, VOCABULARY, lively_model

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.model.transformer import causal_attention
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens, sampled_places

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_pages", [0, 24])
def test_logprobs_are_those_of_reading_the_whole_conversation(num_pages: int) -> None:
    model, random = lively_model().cuda(), Random(0)
    limits = Limits(slots=6, max_prompt_tokens=12, max_new_tokens=48, page_tokens=16, num_pages=num_pages, parked=12)
    decoder = ContinuousDecoder(model, limits, eos_ids=(EOS, 3, 4, 5), seed=3, max_turns=4)
    decoder.version = 0
    for ordinal in range(6):
        prompt = [random.randrange(1, VOCABULARY) for _ in range(random.randint(1, 12))]
        decoder.add(prompt_group(prompt, ordinal=ordinal, samples=3, max_new_tokens=48))
    found: list[CompletionGroup] = []
    while not decoder.idle:
        found += decoder.step()
        for sample in decoder.take_turns():
            decoder.reply(sample.key, [random.randrange(VOCABULARY) for _ in range(random.randint(1, 9))])
    assert len(found) == 6 and any(one.given for group in found for one in group.completions)
    for group in found:
        for one in group.completions:
            prompt_tokens, answer = bytes_to_tokens(group.prompt.prompt_tokens), bytes_to_tokens(one.tokens)
            tokens_1T = torch.tensor([[*prompt_tokens.tolist(), *answer.tolist()]], device="cuda")
            with torch.no_grad():
                hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1], device="cuda")[None], causal_attention)
                logprobs_TV = torch.log_softmax(model.logits(hidden_1TC[0, :-1]), dim=-1)
            all_T = logprobs_TV.gather(1, tokens_1T[0, 1:, None])[:, 0].cpu()
            expected = all_T[len(prompt_tokens) - 1 + torch.from_numpy(sampled_places(len(answer), one.given))]
            assert bytes_to_floats(one.behavior_logprobs) == pytest.approx(expected.numpy(), abs=2e-3)
