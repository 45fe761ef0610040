"""Reward models score as transformers does, for every family; what is none is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.errors import ModelError
from llamarl.model.classifier import load_classifier, open_classifier

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
PADDING = 2  # as the fixture has it
Make = Callable[[str], Any]
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(hf_reward_model: Make, family: str, tmp_path: Path) -> None:
    model = hf_reward_model(family)
    model.save_pretrained(tmp_path)
    texts = [[5, 7, 9, 11], [3], [8, 1, 4, 6, 10, 12, 3], [5, 7, PADDING], [5, 7]]
    ours = load_classifier(tmp_path, dtype=torch.float32, device=CPU).scores(texts)
    with torch.no_grad():
        theirs = [model(torch.tensor([text])).logits.item() for text in texts]
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert ours[3] == pytest.approx(ours[4], abs=1e-5), "padding at the end is not looked at"
    assert len({round(score, 3) for score in ours[:4]}) == 4, "nothing would be shown"


def spoil(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no reward model of a family we support"),
        ({"architectures": ["BertForSequenceClassification"], "model_type": "bert"}, "is no reward model"),
        ({"id2label": {"0": "good", "1": "bad"}}, "one label"),
        ({"hidden_size": 7777}, "config.json says"),
        ({"surprise": 1}, "not known here"),
    ],
)
def test_what_is_no_reward_model_is_refused(
    hf_reward_model: Make, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    hf_reward_model("llama").save_pretrained(tmp_path)
    open_classifier(tmp_path)
    spoil(tmp_path, **changes)
    with pytest.raises(ModelError) as error:
        open_classifier(tmp_path)
    assert complaint in str(error.value)
