"""Alignment modules against slow twins, batches of trees, and draft runs of every objective."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import assert_as_exact, exact_twin
from scipy.special import softmax

from recsys.artifacts import read_manifest, verify
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.errors import ConfigError
from recsys.interactions import Histories
from recsys.models.checkpoint import build
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.training import draft, target
from recsys.training.alignment import TreeAlignment, TreeBatches
from recsys.training.objective import NextToken, WordDistillation
from recsys.training.settings import AlignmentSettings, DraftConfig
from recsys.training.teacher import Prompts, search_trees
from recsys.vocabulary import Vocabulary

VOCABULARY = Vocabulary.from_levels([4, 3, 2])
CODES = np.stack(np.unravel_index(np.arange(24), (4, 3, 2)), 1).astype(np.int32)
CODES = np.concatenate([CODES[:5], CODES[7:9], CODES[12:20]])
TOKENS = VOCABULARY.encode(CODES)
TRIE = ItemTrie.build(TOKENS)
ENCODER = PromptEncoder(TOKENS, VOCABULARY.prefix, PromptConfig(4, 2))
BEAMS = 4


def make_model(seed=0, layers=2, scale=3.0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "layers": layers}
    model = build(sizes, VOCABULARY).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1)
    return model


def make_histories(count=12):
    rng = np.random.default_rng(0)
    return Histories.of([rng.integers(0, len(TOKENS), rng.integers(1, 8)) for _ in range(count)])


LEVEL_TOKENS = [torch.tensor(sorted(set(level))) for level in TOKENS.T.tolist()]


def make_batches(model, histories=None, max_tokens=200, **options):
    histories = histories or make_histories()
    prompts = Prompts.sample(histories, 0, seed=0)
    trees = search_trees(
        model, ENCODER.encode_all(prompts.histories), DeviceTrie.of(TRIE), BEAMS,
        levels_of=LEVEL_TOKENS if options.get("level_tokens") else (),
    )  # fmt: skip
    return TreeBatches(prompts, trees, ENCODER, TRIE, max_tokens, **options)


def tensors(batch, dtype=torch.float32):
    found = [torch.from_numpy(a) for a in batch.inputs]
    return [t.to(dtype) if t.is_floating_point() else t for t in found]


def test_a_batch_holds_prompt_next_item_and_tree():
    histories = Histories.of([[3, 1, 2, 0, 5, 6], [4]])
    data = make_batches(make_model(), histories)
    place = [i for i, p in enumerate(data.prompts.histories.lengths) if p == 5]
    batch = data.batch(np.array([*place, 0]))
    # Five items outgrow the window of four: two are dropped, a block.
    expected = np.concatenate([[1], TOKENS[[2, 0, 5]].reshape(-1), TOKENS[6]])
    assert batch.window[0].tolist() == expected.tolist()
    assert batch.lengths.tolist() == [10, 4]
    assert batch.asked[0].tolist() == [False] * 4 + [True] * 9, "the first item is not asked"
    assert batch.window[1, :4].tolist() == [1, *TOKENS[data.prompts.histories[0][0]]]
    assert batch.states.shape == (2, 3, BEAMS)
    assert [p.shape[1] for p in batch.log_probs] == [1, BEAMS, BEAMS]


def test_a_whole_history_has_no_next_item_loss():
    data = make_batches(make_model(), Histories.of([[4]]))
    assert not next(data.epoch(0)).asked.any()


def test_an_epoch_has_each_history_once_within_the_budget():
    data = make_batches(make_model(), max_tokens=120, seed=3)
    batches = list(data.epoch(0))
    assert len(batches) == data.count(0)
    assert sum(len(b.window) for b in batches) == len(data.prompts)
    assert max(b.size for b in batches) <= 120
    again = list(data.epoch(0, start=2))
    assert all(np.array_equal(a.window, b.window) for a, b in zip(again, batches[2:], strict=True))
    other = list(data.epoch(1))
    assert any(
        a.window.shape != b.window.shape or (a.window != b.window).any()
        for a, b in zip(other, batches, strict=False)
    )


def walk(batch, row, level, beam):
    """(node, child, state) of a sequence, from the root to a beam of a level."""
    path = []
    for depth in range(level, -1, -1):
        state = int(batch.states[row, depth, beam])
        parent = int(batch.parents[row, depth, beam]) if depth else 0
        above = int(batch.states[row, depth - 1, parent]) if depth else 0
        path.append((parent, state - int(TRIE.first_child[above]), state))
        beam = parent
    return path[::-1]


def sequences(batch, row, beam_steps, top_k):
    """Step by step: the sequences of one history, and its K-th best."""
    levels = batch.states.shape[1]
    for step in range(levels) if beam_steps == "all" else [levels - 1]:
        alive = [k for k in range(BEAMS) if batch.states[row, step, k] >= 0]
        alive.sort(key=lambda k: -batch.scores[row, step, k])
        alive = alive if top_k else alive[:1]
        yield [walk(batch, row, step, k) for k in alive], walk(batch, row, step, alive[-1])


def renormalised(values):
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    return values - np.log(np.exp(values).sum())


def slow_align(batch, log_q, beam_steps, top_k, rule):
    """The mean over histories, steps, sequences and levels, in four loops.

    `rule(log_p, log_q, child, log_p_last, log_q_whole)` is the loss of one level. Distributions
    are over the allowed tokens; a batch with levels has them over the level's tokens.
    """
    total = 0.0
    for row in range(len(batch.window)):
        steps = list(sequences(batch, row, beam_steps, top_k))
        for paths, last in steps:
            for path in paths:
                for level, (node, child, state) in enumerate(path):
                    p = renormalised(batch.log_probs[level][row, node])
                    kth_node, kth_child, _ = last[level]
                    kth = renormalised(batch.log_probs[level][row, kth_node])[kth_child]
                    prefix = TRIE.rows[TRIE.row_start[state], :level].tolist()
                    whole = log_q(row, prefix)
                    above = 0 if level == 0 else int(batch.states[row, level - 1, node])
                    below = range(TRIE.first_child[above], TRIE.first_child[above + 1])
                    raw = np.array([whole[TRIE.alphabet[TRIE.symbol[c]]] for c in below])
                    if batch.level_log_probs:
                        p = renormalised(batch.level_log_probs[level][row, node])
                        raw = whole[LEVEL_TOKENS[level].numpy()]
                    value = rule(p, renormalised(raw), child, kth, raw)
                    total += value / (len(path) * len(paths) * len(steps))
    return total / len(batch.window)


def rule_s(p, q, child, last, whole):
    best = np.argsort(-q)[:BEAMS]
    p, q = np.exp(renormalised(p[best])), np.exp(renormalised(q[best]))
    kth = p[-1] if len(p) == BEAMS else 0.0
    return float((q * np.log(q / p)).sum() - kth * (q * np.log(q)).sum())


def rule_eq4(p, q, child, last, whole):
    best = np.argsort(-q)[:BEAMS]
    return float((np.exp(q[best]) * (q[best] - p[best] - (q[best] - last))).sum())


def rule_r(p, q, child, last, whole):
    best = np.argsort(-p)[:BEAMS]
    return float(np.abs(np.exp(renormalised(p[best])) - np.exp(renormalised(q[best]))).sum() / 2)


def rule_released_s(p, q, child, last, whole):
    best = np.argsort(-q)[:BEAMS]
    p, q = np.exp(p[best]), np.exp(q[best])
    kth = p[-1] if len(p) == BEAMS else 0.0
    return float((q * np.log(q / p)).sum() - kth * (q * np.log(q)).sum())


def rule_released_r(p, q, child, last, whole):
    p, q = (softmax(v / 0.001) for v in (p, q))
    return float(np.abs(p - q).sum() / 2)


def rule_seq(p, q, child, last, whole):
    return -float(whole[child])


RULES = {
    "atspeed-s": rule_s,
    "atspeed-s-eq4": rule_eq4,
    "atspeed-r": rule_r,
    "atspeed-s*": rule_released_s,
    "atspeed-r*": rule_released_r,
    "seqkd": rule_seq,
}


@pytest.mark.parametrize("objective", RULES)
@pytest.mark.parametrize(
    ("beam_steps", "top_k", "changes"),
    [
        ("all", True, ()),
        ("all", False, ("top-1", "node-tokens")),
        ("last", True, ("last-beams", "node-tokens")),
        ("last", False, ("last-beams", "top-1")),
    ],
)
def test_the_loss_of_a_tree_equals_loops_over_its_sequences(objective, beam_steps, top_k, changes):
    settings = AlignmentSettings(objective.removesuffix("*"), alpha=1.0, ablations=changes)
    if objective.endswith("*"):
        settings = replace(settings, ablations=(*changes, "released"))
    data = make_batches(make_model(), level_tokens=settings.on_levels)
    batch = data.batch(np.arange(len(data.prompts))[::5])
    model = make_model(seed=1, layers=1).double()
    module = TreeAlignment(model, DeviceTrie.of(TRIE), settings)

    def log_q(row, prefix):
        tokens = [*batch.window[row, : batch.lengths[row]].tolist(), *prefix]
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).numpy()

    expected = slow_align(batch, log_q, beam_steps, top_k, RULES[objective])
    with torch.no_grad():
        found = module(*tensors(batch, torch.float64))
    assert found.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("flatten", [1.0, 2.0])
def test_tree_kd_equals_loops_over_nodes_and_children(flatten):
    data = make_batches(make_model())
    batch = data.batch(np.arange(len(data.prompts))[::3])
    model = make_model(seed=1, layers=1).double()
    catalog = [tuple(row) for row in TRIE.rows.tolist()]
    expected = []
    for row, length in enumerate(batch.lengths.tolist()):
        prompt, nodes = batch.window[row, :length].tolist(), {(): (1.0, 0)}
        for level in range(batch.states.shape[1] - 1):
            total, weights, below = 0.0, 0.0, {}
            for prefix, (probability, place) in nodes.items():
                tokens = sorted({item[level] for item in catalog if item[:level] == prefix})
                stored = batch.log_probs[level][row, place, : len(tokens)].astype(np.float64)
                with torch.no_grad():
                    logits = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1]
                p, q = np.exp(stored), logits.softmax(-1).numpy()[tokens]
                kl = (p * np.log(p / q)).sum()
                kl += (1 - p.sum()) * math.log((1 - p.sum()) / (1 - q.sum()))
                weight = probability ** (1 / flatten)
                total, weights = total + weight * kl, weights + weight
                for token, share in zip(tokens, p, strict=True):
                    below[*prefix, token] = probability * share
            expected.append(total / weights)
            beams = [
                catalog[TRIE.row_start[state]][: level + 1] if state >= 0 else None
                for state in batch.states[row, level].tolist()
            ]
            nodes = {b: (below[b], place) for place, b in enumerate(beams) if b is not None}
    settings = AlignmentSettings("tree-kd", alpha=1.0, flatten=flatten)
    with torch.no_grad():
        found = TreeAlignment(model, DeviceTrie.of(TRIE), settings)(*tensors(batch, torch.float64))
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-6)


@pytest.mark.parametrize("drafts", [2, 5])
def test_the_margin_of_a_tree_equals_sorting_its_prefixes(drafts):
    data = make_batches(make_model())
    batch = data.batch(np.arange(len(data.prompts))[::3])
    model = make_model(seed=1, layers=1).double()

    def score(tokens, length):
        with torch.no_grad():
            log_q = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return sum(log_q[i - 1, tokens[i]].item() for i in range(length, len(tokens)))

    catalog = [tuple(row) for row in TRIE.rows.tolist()]
    expected = []
    for row, length in enumerate(batch.lengths.tolist()):
        prompt, above = batch.window[row, :length].tolist(), [()]
        for level in range(batch.states.shape[1] - 1):
            beams = [
                catalog[TRIE.row_start[state]][: level + 1]
                for state in batch.states[row, level].tolist()
                if state >= 0
            ]
            children = {item[: level + 1] for item in catalog if item[:level] in above}
            scores = {prefix: score([*prompt, *prefix], length) for prefix in children}
            left_out = sorted(scores.values(), reverse=True)[drafts : drafts + 1]
            missed = [
                math.log1p(math.exp(best - scores[beam])) for best in left_out for beam in beams
            ]
            expected.append(sum(missed) / len(beams))
            above = beams
    values = []
    for weight in (0.0, 1.0):
        settings = AlignmentSettings("margin-kd", alpha=1.0, drafts=drafts, margin=weight)
        module = TreeAlignment(model, DeviceTrie.of(TRIE), settings)
        with torch.no_grad():
            values.append(module(*tensors(batch, torch.float64)).item())
    assert values[1] - values[0] == pytest.approx(np.mean(expected), abs=1e-7)


def test_the_recommendation_loss_is_that_of_supervised_training():
    data = make_batches(make_model())
    batch = data.batch(np.arange(8))
    model = make_model(seed=1).double()
    settings = AlignmentSettings("margin-kd", alpha=0.0)
    found = TreeAlignment(model, DeviceTrie.of(TRIE), settings, label_smoothing=0.1)(
        *tensors(batch, torch.float64)
    )
    window, asked = torch.from_numpy(batch.window), torch.from_numpy(batch.asked)
    wanted = NextToken(model, label_smoothing=0.1)(window, asked)
    with torch.no_grad():
        log_p = model(window[:, :-1]).logits[asked[:, 1:]].log_softmax(-1)
    own = log_p.gather(1, window[:, 1:][asked[:, 1:]][:, None]).mean()
    exact = -(0.9 * own + 0.1 * log_p.mean())
    assert_as_exact(found, wanted, exact)  # losses are summed in float32


def test_unconstrained_losses_run_the_target_again():
    big = make_model().double()
    data = make_batches(make_model())
    batch = data.batch(np.arange(len(data.prompts))[::5])
    settings = AlignmentSettings("atspeed-r", 1.0, ("unconstrained", "last-beams"))
    same = TreeAlignment(big, DeviceTrie.of(TRIE), settings, target=big)
    inputs = tensors(batch, torch.float64)
    assert abs(same(*inputs).item()) < 1e-10
    small = make_model(seed=1, layers=1).double()
    found = TreeAlignment(small, DeviceTrie.of(TRIE), settings, target=big)(*inputs).item()

    def whole(model, row, prefix):
        tokens = [*batch.window[row, : batch.lengths[row]].tolist(), *prefix]
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1).numpy()

    expected = 0.0
    for row in range(len(batch.window)):
        ((paths, _),) = sequences(batch, row, "last", top_k=True)
        for path in paths:
            for level, (_, _, state) in enumerate(path):
                prefix = TRIE.rows[TRIE.row_start[state], :level].tolist()
                p, q = whole(big, row, prefix), whole(small, row, prefix)
                expected += rule_r(p, q, 0, 0, 0) / (len(path) * len(paths))
    assert found == pytest.approx(expected / len(batch.window), abs=1e-7)


@pytest.mark.parametrize("objective", ["wordkd", "tvdkd"])
def test_word_distillation_by_hand(objective):
    models = make_model(), make_model(seed=1, layers=1)
    tokens = torch.tensor([[1, 2, 7, 9, 3, 6, 10]])
    asked = torch.tensor([[False] * 4 + [True] * 3])
    settings = AlignmentSettings(objective, alpha=0.25)
    found = WordDistillation(models[1], models[0], settings)(tokens, asked)

    def by_hand(big, small):
        with torch.no_grad():
            p, q = (m(tokens).logits[0, 3:6].log_softmax(-1) for m in (big, small))
        rec = -q[range(3), tokens[0, 4:7]].mean()
        rows = [
            sum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True))
            if objective == "wordkd"
            else sum(abs(math.exp(a) - math.exp(b)) for a, b in zip(x, y, strict=True)) / 2
            for x, y in zip(p.tolist(), q.tolist(), strict=True)
        ]
        return 0.25 * np.mean(rows) + 0.75 * rec.item()

    assert_as_exact(found, by_hand(*models), by_hand(*map(exact_twin, models)))


TEACHER = {"beams": 4, "histories": 60}
SHORT = {
    "epochs": 2, "evaluate_every": 1, "batch_tokens": 200,
    "accept_users": 10, "accept_beams": 3, "accept_nodes": 8,
}  # fmt: skip


def weights_of(path):
    return read_manifest(path).files["model/model.safetensors"]


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "margin-kd"},
        {"objective": "wordkd"},
        {"objective": "atspeed-s", "ablations": ["unconstrained", "top-1"]},
    ],
)
def test_a_draft_killed_by_sigkill_ends_with_the_same_bits(make_context, killed, options):
    target.stage(make_context(target={"epochs": 1, "evaluate_every": 0}))
    section = {**SHORT, "checkpoint_minutes": 0.0, **options}
    context = make_context(teacher=TEACHER, draft=section)
    straight = weights_of(draft.train(context))
    context.workspace.run("draft").rename(context.workspace.run("elsewhere"))
    killed(draft.train, context, steps=6)
    assert weights_of(draft.train(context)) == straight


def test_a_draft_on_trees_makes_its_teacher_as_a_parent(make_context):
    sections = {"teacher": TEACHER, "draft": {**SHORT, "objective": "margin-kd"}}
    target.stage(make_context())
    path = draft.train(make_context(**sections))
    manifest = verify(path, "draft")
    context = make_context()
    assert manifest.parents["teacher"] == read_manifest(context.workspace.run("teacher")).digest
    assert manifest.info["objective"] == "margin-kd"
    assert 0 <= manifest.info["validation"]["accepted_levels"] <= 2
    stamp = (path / "manifest.json").stat().st_mtime_ns
    draft.train(make_context(**sections))
    assert (path / "manifest.json").stat().st_mtime_ns == stamp
    draft.train(make_context(teacher={**TEACHER, "beams": 3}, draft=sections["draft"]))
    assert (path / "manifest.json").stat().st_mtime_ns != stamp


def test_teacher_data_without_the_tokens_of_levels_are_refused(make_context):
    target.stage(make_context())
    draft_section = {**SHORT, "objective": "atspeed-s"}
    context = make_context(teacher={**TEACHER, "level_tokens": False}, draft=draft_section)
    with pytest.raises(ConfigError, match="run `recsys train teacher` again"):
        draft.train(context)


def test_an_sft_draft_needs_no_teacher_and_logs_acceptance(make_context):
    target.stage(make_context())
    path = draft.train(make_context(draft={**SHORT, "objective": "sft"}))
    manifest = read_manifest(path)
    assert set(manifest.parents) == {"dataset", "ids", "target"}
    assert {"recall@10", "ndcg@10", "accepted_levels"} <= set(manifest.info["validation"])
    assert not make_context().workspace.run("teacher").exists()


def test_alpha_follows_the_objective_unless_given():
    assert DraftConfig(objective="atspeed-s").alignment.align_weight == 0.5
    assert DraftConfig(objective="margin-kd").alignment.align_weight == 1.0
    assert DraftConfig(objective="margin-kd", alpha=0.3).alignment.align_weight == 0.3
