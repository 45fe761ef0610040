"""What documents begin with is computed once, and nothing else changes: loss, gradients and metrics are the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from helpers.groups import completion, rollout_group
from helpers.lora import LORA, save_both
from helpers.models import lively_model
from helpers.training import CPU, assert_same_gradients, cpu_learner, make_test_documents
from helpers.trees import are_covered, flash_on_cpu, flash_operations_on_cpu, make_branching_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table

from llamarl.algo.batch import Document, make_documents
from llamarl.algo.losses import LOSSES, REFERENCE_LOGPROBS, aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.train import compiler, packing
from llamarl.train.attention import FlashDocuments, MaskedDocuments, document_attention
from llamarl.train.learner import Learner
from llamarl.train.packing import PADDING, Pack, Sharing, make_packs
from llamarl.train.policy import ComputeSettings, Policy, load_policy, sharing_of
from llamarl.train.reference import add_reference_column
from llamarl.train.tree_attention import FlashTrees
from llamarl.train.trees import LEVELS, TreeBranch, cut, grow_trees, plain_trees
from llamarl.types import CompletionGroup, RolloutGroup, bytes_to_floats

ON = Sharing("on")
DOCUMENTS = make_branching_documents()
words = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=24)


def documents_of(tokens: list[list[int]]) -> list[Document]:
    return [
        Document(
            np.array([7, *one], np.int32), 1, zeros := np.zeros(len(one), np.float32), zeros.astype(np.int64), zeros
        )
        for one in tokens
    ]


def paths(trees: list[TreeBranch], documents: list[Document]) -> dict[int, list[int]]:
    """The tokens of each document, read from the branches."""
    found: dict[int, list[int]] = {}

    def walk(branch: TreeBranch, before: list[int]) -> None:
        assert branch.start == len(before)
        tokens = [*before, *documents[branch.document].tokens[branch.start : branch.end].tolist()]
        for item in branch.ending:
            assert item not in found
            found[item] = tokens
        for child in branch.children:
            walk(child, tokens)

    for tree in trees:
        walk(tree, [])
    return found


@given(words, st.integers(1, 5), st.sampled_from([0.0, 0.1, 1.0]))
def test_every_document_is_a_path_of_one_tree(tokens: list[list[int]], least: int, join: float) -> None:
    documents = documents_of(tokens)
    trees = grow_trees(documents, least=least, join=join)
    assert paths(trees, documents) == {number: one.tokens.tolist() for number, one in enumerate(documents)}
    assert all(tree.depth <= LEVELS for tree in trees)
    assert sum(tree.num_tokens for tree in trees) <= sum(len(one.tokens) for one in documents)


@given(words, st.integers(1, 40))
def test_parts_of_a_tree_keep_to_the_limit_and_lose_nothing(tokens: list[list[int]], limit: int) -> None:
    documents = documents_of(tokens)
    parts = [part for tree in grow_trees(documents, least=1, join=0.0) for part in cut(tree, limit)]
    assert paths(parts, documents) == {number: one.tokens.tolist() for number, one in enumerate(documents)}
    for part in parts:  # what goes beyond is one long document
        assert part.num_tokens <= max(limit, *(len(documents[item].tokens) for item in part.documents))


def test_a_run_is_shared_only_if_it_saves_more_than_its_joins_cost() -> None:
    """A prompt with 8 answers as long as itself: shared. A short header before 2 prompts: not worth a level."""
    header, rng = [1] * 20, np.random.default_rng(0)
    prompts = [[*header, *([number] * 100)] for number in (2, 3)]
    answers = [[*prompt, *rng.integers(4, 9, 100).tolist()] for prompt in prompts for _ in range(8)]
    trees = grow_trees(documents_of(answers), least=16, join=0.05)
    assert [(tree.length, len(tree.children), tree.depth) for tree in trees] == [(121, 8, 2)] * 2
    (tree,) = grow_trees(documents_of(answers), least=16, join=0.001)
    assert (tree.length, len(tree.children), tree.depth) == (21, 2, 3)
    assert not any(tree.children for tree in grow_trees(documents_of(answers), least=200, join=0.0))


def test_a_long_opening_of_all_prompts_is_a_level_of_its_own() -> None:
    documents = make_branching_documents(4, 4, opening=30)
    (tree,) = grow_trees(documents, least=1, join=0.0)
    assert tree.depth == 3 and tree.length >= 30


def test_a_third_level_must_save_more_than_its_parts_of_attention_cost() -> None:
    """Two answers that happen to begin alike are not worth it, and a graph of their own neither; a long opening is."""
    rng = np.random.default_rng(0)
    opening = rng.integers(0, 99, 300).tolist()
    prompts = [rng.integers(100, 200, 100).tolist() for _ in range(6)]
    begun = rng.integers(200, 300, 40).tolist()
    ends = [[*(begun if sample < 2 else []), *rng.integers(300, 400, 200).tolist()] for sample in range(8)]
    alike = documents_of([[number, *prompt, *end] for number, prompt in enumerate(prompts) for end in ends])
    opened = documents_of([[*opening, number, *prompt, *end] for number, prompt in enumerate(prompts) for end in ends])
    for documents, part, levels in ((alike, 0.0, 2), (alike, 200.0, 1), (alike, 20.0, 1), (opened, 200.0, 2)):
        sharing = Sharing("auto", least=32, join=0.01, square=1e-6, part=part)
        packs = make_packs(documents, 16_384, long_rows=True, sharing=sharing)
        assert {max(pack.levels) for pack in packs} == {levels}


def read_back(pack: Pack) -> dict[int, tuple[list[int], list[int]]]:
    """By document: the tokens of its nodes, and what is predicted where, by following parents."""
    flat, positions = pack.tokens_RT.flatten(), pack.positions_RT.flatten()
    found: dict[int, tuple[list[int], list[int]]] = {}
    for sequence in set(pack.sequence_N.tolist()):
        of_it = pack.sequence_N == sequence
        at = pack.at_N[of_it]
        number = int(pack.nodes_RT.flatten()[at[-1]])
        tokens: list[int] = []
        while number >= 0:
            node = pack.nodes[number]
            own = slice(node.first, node.first + node.length)
            assert positions[own].tolist() == list(range(node.start, node.end)), "positions go on behind the parent"
            tokens, number = [*flat[own].tolist(), *tokens], node.parent
        found[sequence] = tokens, [tokens[int(positions[one])] for one in at]
        assert all(flat[one] == tokens[int(positions[one])] for one in at)
    return found


@given(st.integers(1, 6), st.integers(1, 6), st.integers(16, 200), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_what_goes_in_can_be_read_back_from_the_packs_of_all_ranks(
    groups: int, samples: int, budget: int, ranks: int, long_rows: bool, seed: int
) -> None:
    documents = make_branching_documents(groups, samples, seed)
    packs = [
        make_packs(documents, budget, rank=rank, num_ranks=ranks, long_rows=long_rows, sharing=ON)
        for rank in range(ranks)
    ]
    assert len({len(mine) for mine in packs}) == 1, "ranks make equally many passes"
    found: dict[int, tuple[list[int], list[int]]] = {}
    for pack in (pack for mine in packs for pack in mine if pack.counts):
        here = read_back(pack)
        assert not here.keys() & found.keys()
        found |= here
        size = sum(pack.lengths)
        assert size <= max(budget, *(node.end for node in pack.nodes)), "only one long document goes beyond a pack"
        assert (pack.nodes_RT != PADDING).sum() == size
    for number, document in enumerate(documents):
        tokens, before = found[number]
        assert tokens == document.tokens[: len(tokens)].tolist()
        assert before == document.tokens[document.places - 1].tolist()


def figures(learner: Learner, documents: list[Document]) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    seen = learner.accumulate(documents)
    gradients = {name: grad.clone() for name, grad in learner.optimizer.gradients().items()}
    return seen.loss(), seen.metrics(documents, 4.0), gradients


def assert_equal_to_plain(documents: list[Document], loss: str = "aipo", **how: object) -> None:
    algo = AlgoConfig(loss=loss, entropy=0.05, reference_kl=0.1, gspo_low=0.5, gspo_high=0.5)
    plain = figures(cpu_learner(loss=LOSSES[loss], algo=algo), documents)
    shared = figures(cpu_learner(loss=LOSSES[loss], algo=algo, share_prompts="on", **how), documents)  # type: ignore[arg-type]
    assert shared[0] == pytest.approx(plain[0], rel=1e-5, abs=1e-5)
    assert shared[1] == pytest.approx(plain[1], rel=1e-4, abs=1e-5)
    assert_same_gradients(shared[2], plain[2], tolerance=2e-5)


@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.integers(2, 6),
    st.integers(0, 99),
    st.sampled_from([0, 20]),
    st.sampled_from([16_384, 100, 40]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(sorted(LOSSES)),
)
def test_random_trees_equal_plain_packs(
    groups: int, samples: int, seed: int, opening: int, tokens_per_pack: int, recompute: str, loss: str
) -> None:
    documents = make_branching_documents(groups, samples, seed, opening=opening)
    assert_equal_to_plain(documents, loss, tokens_per_pack=tokens_per_pack, recompute=recompute)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_on_trees_equals_plain_packs(loss: str) -> None:
    assert_equal_to_plain(DOCUMENTS, loss, tokens_per_pack=100)


def attend(pack: Pack, how: MaskedDocuments | FlashTrees | FlashDocuments) -> list[Tensor]:
    """Output of attention, and gradients of what goes in."""
    torch.manual_seed(0)
    shapes = [(*pack.tokens_RT.shape, heads, 8) for heads in (4, 2, 2)]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, k, v = given
    out = how(0, q, k, v)
    weights = torch.randn(out.shape) * (pack.nodes_RT != PADDING)[..., None, None]
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    grads = [one.grad for one in given]
    assert all(grad is not None for grad in grads)
    return [(out * (pack.nodes_RT != PADDING)[..., None, None]).detach(), *(grad for grad in grads if grad is not None)]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 99), st.sampled_from([0, 20]))
def test_attention_in_parts_equals_one_mask(groups: int, samples: int, seed: int, opening: int) -> None:
    documents = make_branching_documents(groups, samples, seed, opening=opening)
    (pack,) = make_packs(documents, 10_000, long_rows=True, sharing=ON)
    how = document_attention(pack, long_rows=True)
    if not isinstance(how, FlashTrees):
        return  # nothing was shared
    with flash_on_cpu():
        found = attend(pack, how)
    for mine, expected in zip(found, attend(pack, MaskedDocuments(pack)), strict=True):
        assert torch.allclose(mine, expected, atol=1e-9)


@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 99), st.sampled_from([0, 20]))
def test_parts_cover_their_levels(groups: int, samples: int, seed: int, opening: int) -> None:
    """The kernel reads and writes what the starts say; a token that no run covers would stay unwritten."""
    documents = make_branching_documents(groups, samples, seed, opening=opening)
    (pack,) = make_packs(documents, 10_000, long_rows=True, sharing=ON)
    if not pack.is_shared:
        return
    trees = FlashTrees(pack)
    assert pack.tokens_RT.numel() - sum(level.shape[0] for level in trees.levels) >= 2, "the tail is no constant"
    sizes = [level.shape[0] for level in trees.levels]
    assert are_covered(trees.starts_D, pack.tokens_RT.numel())
    for part, (above, below) in enumerate(trees.pairs):
        queries, keys = trees.starts[2 * part : 2 * part + 2]
        assert are_covered(queries, sizes[below]) and are_covered(keys, sizes[above])
        assert queries.diff().max() <= trees.longests[2 * part] and keys.diff().max() <= trees.longests[2 * part + 1]
        assert (keys.diff() > 0).all(), "attention to nothing has no value"


def groups(count: int = 3, samples: int = 4, prompt: int = 40) -> list[RolloutGroup]:
    """Groups whose prompts have this many tokens, and answers 6."""
    rng = np.random.default_rng(0)
    return [
        rollout_group(
            rng.integers(1, 23, prompt).tolist(),
            [
                (completion(rng.integers(1, 23, 6).tolist(), versions=[3] * 6), float(number % 2))
                for number in range(samples)
            ],
            ordinal=ordinal,
        )
        for ordinal in range(count)
    ]


def test_an_update_says_how_many_tokens_it_shared() -> None:
    """Prompts of 40 tokens with 4 answers: 3 times 40 tokens of each group are not computed, wherever that pays."""
    wanted = {group.ordinal for group in groups()}
    plain, shared, chosen = (
        cpu_learner(share_prompts=mode).update(3, groups(), wanted=wanted) for mode in ("off", "on", "auto")
    )
    assert [one.timings["shared_tokens"] for one in (plain, shared, chosen)] == [0.0, 360.0, 360.0]
    assert shared.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-5)
    for ordinal, kept in plain.logprobs.items():
        for mine, other in zip(kept, shared.logprobs[ordinal], strict=True):
            assert np.allclose(bytes_to_floats(mine), bytes_to_floats(other), atol=1e-5)


def test_sharing_that_is_on_and_not_applied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that were cut into single documents: nothing is wrong but the time, and the figure says so."""

    def forgetful(trees: list[TreeBranch], budget: int, num_ranks: int) -> list[list[TreeBranch]]:
        return [plain_trees(make_documents(groups(), version=3, algo=AlgoConfig()))]

    monkeypatch.setattr(packing, "_deal", forgetful)
    assert cpu_learner(share_prompts="on").update(3, groups()).timings["shared_tokens"] == 0.0


def test_short_prompts_and_single_answers_stay_plain_packs_where_attention_is_cut() -> None:
    on_gpu = ComputeSettings(torch.device("cuda"), torch.bfloat16, share_prompts="auto")
    sharing = sharing_of(lively_model().shape, on_gpu)
    for documents in (
        make_test_documents(30),
        make_branching_documents(5, 1, longest=40),
        make_branching_documents(longest=8),
    ):
        (plain,) = make_packs(documents, 16_384, long_rows=True)
        (chosen,) = make_packs(documents, 16_384, long_rows=True, sharing=sharing)
        assert torch.equal(plain.tokens_RT, chosen.tokens_RT) and plain.nodes == chosen.nodes


def test_short_prompts_are_shared_where_a_mask_does_it() -> None:
    """On a CPU it costs nothing: the default job, 4 tokens behind 6, trains in half the time."""
    documents = make_branching_documents(longest=8)
    (plain,), (chosen,) = (cpu_learner(share_prompts=mode).policy.packs(documents) for mode in ("off", "auto"))
    assert chosen.is_shared and chosen.tokens_RT.numel() < plain.tokens_RT.numel()


def test_trees_are_cut_smaller_where_ranks_would_wait_for_each_other() -> None:
    """Three prompts on two ranks: two whole trees on one of them would take twice as long as one on the other."""
    documents = make_documents(groups(3, 8, prompt=10), version=3, algo=AlgoConfig())
    for mode in ("on", "auto"):
        sharing = Sharing(mode, square=1e-6, join=1e-3, least=4)
        packs = [
            make_packs(documents, 10_000, rank=rank, num_ranks=2, long_rows=True, sharing=sharing, multiple_of=1)
            for rank in range(2)
        ]
        fill = [sum(sum(pack.lengths) for pack in mine) for mine in packs]
        assert max(fill) < 1.3 * min(fill)
        assert sum(fill) < 0.7 * sum(len(one.tokens) for one in documents)


def test_the_reference_and_the_probe_are_the_same_on_trees() -> None:
    plain, shared = (cpu_learner(share_prompts=mode) for mode in ("off", "on"))
    columns = [add_reference_column(learner.policy, groups()) for learner in (plain, shared)]
    for mine, other in zip(*columns, strict=True):
        for one, two in zip(mine.rollouts, other.rollouts, strict=True):
            found = [bytes_to_floats(rollout.columns[REFERENCE_LOGPROBS]) for rollout in (one, two)]
            assert np.allclose(found[0], found[1], atol=1e-5)
    probe = CompletionGroup(groups()[0].prompt, tuple(one.completion for one in groups()[0].rollouts))
    gaps = [learner.update(3, (), probe).metrics["logprob_gap"] for learner in (plain, shared)]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-5)


@pytest.mark.parametrize("how", [{}, {"tokens_per_pack": 40}, {"recompute": "full"}], ids=str)
def test_adapters_on_trees_are_those_of_plain_packs_switched_on_and_off(how: dict[str, object], tmp_path: Path) -> None:
    save_both(tmp_path)
    learners = []
    for mode in ("off", "on"):
        computing = ComputeSettings(CPU, torch.float32, lora=LORA, share_prompts=mode, **how)  # type: ignore[arg-type]
        policy = load_policy(tmp_path / "model", computing, adapter=tmp_path / "adapter")
        learners.append(Learner(policy, aipo_loss, settings=TrainerConfig(), algo=AlgoConfig(), updates=10))
    plain, shared = (figures(learner, DOCUMENTS) for learner in learners)
    assert shared[0] == pytest.approx(plain[0], rel=1e-5, abs=1e-5)
    assert_same_gradients(shared[2], plain[2])
    values = list[dict[int, list[float]]]()
    for learner in learners:
        assert learner.policy.model.adapters is not None
        with learner.policy.model.adapters.off():
            values.append(by_document(learner.policy))
    assert values[0].keys() == values[1].keys()
    for number, expected in values[0].items():
        assert values[1][number] == pytest.approx(expected, abs=1e-5)


def by_document(policy: Policy) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for pack in policy.packs(DOCUMENTS):
        for number, value in zip(pack.sequence_N.tolist(), policy.logprobs(pack).tolist(), strict=True):
            found.setdefault(number, []).append(value)
    return found


def test_compiled_blocks_share_one_graph_for_trees_of_all_sizes() -> None:
    """And compute the same. As on a GPU, with the parts in plain PyTorch; sizes must not be constants of the graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    attend_compiled = torch.compile(lambda how, q, k, v: how(0, q, k, v), backend="aot_eager", dynamic=None)
    made = []
    with flash_on_cpu():
        for seed, count in enumerate((3, 5, 2, 7)):
            rng = np.random.default_rng(seed)
            prompts = [[number, *rng.integers(0, 23, 9 + count).tolist()] for number in range(count)]
            answers = [
                [*prompt, way, *rng.integers(0, 23, 5).tolist()] for prompt in prompts for way in range(2 + count)
            ]
            documents = documents_of(answers) + (make_test_documents(count) if seed > 1 else [])
            sharing = Sharing("auto", join=0.02, least=4)
            (pack,) = make_packs(documents, 10_000, long_rows=True, sharing=sharing, multiple_of=1)
            assert max(pack.levels) == 1
            how = FlashTrees(pack)
            given = [torch.randn(1, pack.tokens_RT.numel(), heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
            for one in given:
                torch._dynamo.maybe_mark_dynamic(one, 1)
                one.requires_grad_()
            q, k, v = given
            expected, found = how(0, q, k, v), attend_compiled(how, q, k, v)
            assert torch.allclose(found, expected)
            grads = [torch.autograd.grad(out.square().sum(), given) for out in (expected, found)]
            assert all(torch.allclose(mine, other) for mine, other in zip(*grads, strict=True))
            made.append(counters["stats"]["unique_graphs"])
    assert made[0] == made[-1], "a graph made anew in the middle of a run costs seconds"


def test_flash_is_given_sums_that_lie_as_its_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor lays out what it computes itself as it likes. On a GPU it turned the sums that compiled blocks compute again,
    and gradients were wrong without a word. So they must come from an operation whose results it does not lay out."""
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    cut_as_inductor_does = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )

    plain = cpu_learner()
    plain.accumulate(DOCUMENTS)
    expected = dict(plain.optimizer.gradients())
    monkeypatch.setattr(compiler, "compile_backend", lambda: cut_as_inductor_does)
    monkeypatch.setattr("llamarl.train.policy.uses_long_rows", lambda device, dtype: True)
    torch._dynamo.reset()
    with flash_operations_on_cpu():
        learner = cpu_learner(share_prompts="on", compiled=True, recompute="full")
        learner.accumulate(DOCUMENTS)
    for name, grad in learner.optimizer.gradients().items():
        assert (grad - expected[name]).norm() < 0.02 * expected[name].norm(), name  # operands are rounded to fp16
    backward = torch.ops.aten._flash_attention_backward.default
    sums = [node.args[5] for graph in graphs for node in graph.graph.find_nodes(op="call_function", target=backward)]
    assert sums and {str(one.target) for one in sums} == {"llamarl.row_major.default"}
