"""The grid of captured shapes: no pass within it runs without a graph."""

import numpy as np
import pytest
import torch
from oracles import random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import beam_search, speculative
from recsys.decoding.engine import Engine
from recsys.decoding.grid import Grid
from recsys.decoding.planner import MOST_TREE_TOKENS, Plan, is_worth_trying, list_plans
from recsys.decoding.table import Table
from recsys.models.graphs import BATCHES, PassShape, list_sizes
from recsys.modes import Mode

TARGET = tiny_model("llama-gqa", layers=1, hidden=16, dtype=torch.float64)
DRAFT = tiny_model("llama", layers=1, hidden=16, seed=9, dtype=torch.float64)
RNG = np.random.default_rng(3)
TRIE = ItemTrie.build(random_catalog(RNG, 300, 4))
BEAMS, LONGEST, MOST = 5, 44, 32
HISTORIES = [RNG.integers(1, 64, LONGEST) for _ in range(MOST)]


@pytest.fixture(scope="module")
def engine():
    """An engine as on a GPU; a replay runs the captured computation again."""
    each = Engine(
        TARGET, TRIE, draft=DRAFT, draft_nodes=30, prefix_bytes=1 << 22, prompt_slots=LONGEST,
        graphs=True,
    )  # fmt: skip
    each.captures.capture_passes(MOST, LONGEST, BEAMS, each.plans)
    return each


def eager_passes(engine):
    return [graphs.statistics().fallbacks for graphs in engine.captures.passes]


def prompts_of(kind, batch, rng):
    """Prompts that are new, of which all but the last item is kept, or one new among kept ones."""
    if kind == "cold":
        return random_prompts(rng, batch, LONGEST)
    kept = [history[: LONGEST - rng.integers(0, 5)] for history in HISTORIES[:batch]]
    if kind == "mixed":
        kept[batch // 2] = rng.integers(1, 64, LONGEST)
    return kept


@pytest.mark.parametrize(
    ("plan", "kind"),
    [(p, k) for p in ("beam", "exhaustive", "draft") for k in ("cold", "kept")]
    + [("beam", "mixed")],
)
def test_no_pass_of_1_to_32_requests_runs_eagerly(engine, monkeypatch, kind, plan):
    monkeypatch.setattr(speculative, "counts_nodes", lambda device: False)
    rng = np.random.default_rng(7)
    plan = Plan(Mode(plan), 30 if plan == "draft" else 0)
    replays = 0
    for batch in (1, *(b + 1 for b in BATCHES if b < MOST), MOST):  # the least of each shape
        if not is_worth_trying(plan, batch, TRIE.branching[0]):
            continue
        engine.forget()
        if kind != "cold":
            engine.decode([history[:-4] for history in HISTORIES[:batch]], 1, mode="draft")
        before = eager_passes(engine), [g.statistics().replays for g in engine.captures.passes]
        found = engine.decode(prompts_of(kind, batch, rng), BEAMS, mode=plan.mode.value)
        assert eager_passes(engine) == before[0], batch
        assert found.beams.stats[0].target_passes <= 4
        replays += engine.captures.passes[0].statistics().replays - before[1][0]
    assert replays > len(BATCHES)


def test_smaller_k_uses_the_same_graphs(engine):
    before = eager_passes(engine)
    for beams in range(1, BEAMS + 1):
        engine.decode(prompts_of("cold", 32, RNG), beams, mode="beam")
        engine.decode(prompts_of("cold", 3, RNG), beams, mode="draft")
    assert eager_passes(engine) == before


@pytest.mark.parametrize("most", [1, 8, 9, 24, 100, 201, 4096])
def test_sizes_reach_the_largest_with_little_padding(most):
    sizes = list_sizes(most)
    assert sizes == sorted(set(sizes))
    assert most <= sizes[-1] < most + 8
    for tokens in range(9, most + 1):
        assert min(s for s in sizes if s >= tokens) <= 1.6 * tokens + 8


def test_trees_of_large_batches_are_not_tried():
    plans = list_plans(4, 256, (64, 128))
    assert plans == [Plan(), Plan(Mode.EXHAUSTIVE), Plan(Mode.DRAFT, 64), Plan(Mode.DRAFT, 128)]
    most = [max(b for b in range(1, 65) if is_worth_trying(p, b, 256)) for p in plans]
    assert most == [64, *(MOST_TREE_TOKENS // n for n in (256, 64, 128))]
    assert all(is_worth_trying(p, 1, 10**6) for p in plans)
    assert list_plans(1, 256, (64,)) == [Plan()]


@pytest.mark.parametrize(
    ("first_level", "size"), [(256, 320), (248, 256), (56, 64), (120, 128), (376, 384)]
)
def test_a_tree_below_a_kept_history_is_padded_to_whole_tiles(first_level, size):
    """Of 64 rows, with 8 new prompt tokens; 256 nodes of a first level were padded to 384."""
    grid = Grid(batch=1, prompt=200, widths=(20, 20, 20), patch=148, first_level=first_level)
    shapes = grid.of_target([Plan(Mode.EXHAUSTIVE)])
    wanted = PassShape(1, first_level + 8, 208 + first_level, first_level + 1).rounded()
    fitting = min((s for s in shapes if wanted.fits(s)), key=lambda s: s.tokens)
    assert fitting.new == size


def test_patch_passes_are_whole_tiles(monkeypatch):
    monkeypatch.setattr(speculative, "counts_nodes", lambda device: False)
    sizes, run = [], Table.run

    def spy(table):
        sizes.append(table.places - table.runs[-1] if table.runs else None)
        run(table)

    monkeypatch.setattr(Table, "run", spy)
    prompts = random_prompts(np.random.default_rng(2), 3, LONGEST)
    found = speculative.speculative_beam_search(TARGET, DRAFT, prompts, TRIE, BEAMS)
    assert torch.equal(found.rows, beam_search(TARGET, prompts, TRIE, BEAMS).rows)
    patches = [size for size in sizes if size is not None]
    assert 128 in patches
    assert all(size in (128, *range(BEAMS + 1)) for size in patches)  # the last level has no more
