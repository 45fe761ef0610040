"""Ranks that share packs compute what one rank computes: every loss, trees, recompute, log-probs, metrics, snapshots."""

from __future__ import annotations

import pytest
import torch
from helpers.meshes import run_mesh
from helpers.models import lively_model
from helpers.trainer_rank import probe_logprobs
from helpers.training import assert_same_gradients, cpu_learner
from helpers.trees import make_branching_documents
from torch import Tensor

from llamarl.algo.losses import LOSSES
from llamarl.config import AlgoConfig
from llamarl.model.checkpoint import save_model

DOCUMENTS = make_branching_documents()
CASES = {  # what one rank must compute for each: its loss, and whether documents are shared
    **{loss: (loss, "off") for loss in LOSSES},
    "gspo trees": ("gspo", "on"),
    "trees": ("aipo", "on"),
    "full": ("aipo", "off"),
    "selective": ("aipo", "off"),
    "flash": ("aipo", "off"),
    "flash trees": ("aipo", "on"),
    "compiled": ("aipo", "off"),
}
Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("context")
    save_model(lively_model(), folder / "model")
    return run_mesh("shared_packs", (1, 1, 1, 2), folder)["shared_packs"]


def check_case(found: Found, case: str, loss: str, sharing: str, count: int = len(DOCUMENTS)) -> None:
    algo = AlgoConfig(loss=loss, gspo_low=0.5, gspo_high=0.5, entropy=0.1, reference_kl=0.2)
    learner = cpu_learner(loss=LOSSES[loss], algo=algo, share_prompts=sharing)
    seen = learner.accumulate(DOCUMENTS[:count])
    mine = {name.removeprefix(f"{case}/"): value for name, value in found.items() if name.startswith(f"{case}/")}
    metrics = {name: mine.pop(name).item() for name in list(mine) if name.startswith("metric/")}
    expected = seen.metrics(DOCUMENTS[:count], 4.0)
    assert metrics == pytest.approx({f"metric/{name}": value for name, value in expected.items()}, rel=1e-4, abs=1e-5)
    assert mine.pop("loss").item() == pytest.approx(seen.loss(), abs=1e-5)
    work = mine.pop("work")
    if case in LOSSES:
        assert work.tolist() == list(seen.totals(DOCUMENTS[:count], 4.0).work), "each token counts once"
    assert (work[0] < sum(len(one.tokens) for one in DOCUMENTS[:count])) == (sharing == "on")
    assert_same_gradients(mine, learner.optimizer.gradients())


@pytest.mark.parametrize("case", list(CASES))
def test_shares_of_packs_add_up_to_what_one_rank_computes(found: Found, case: str) -> None:
    check_case(found, case, *CASES[case])


def test_one_short_document_for_all_ranks(found: Found) -> None:
    """Some ranks have nothing but padding."""
    check_case(found, "lonely", "aipo", "off", 1)


def test_every_rank_knows_the_log_probs_of_a_probe(found: Found) -> None:
    assert torch.allclose(found["logprobs"], probe_logprobs(cpu_learner().policy, DOCUMENTS), atol=1e-5)
