"""Teacher data: trees equal slow searches, shards survive a kill, parents are named."""

import os
import signal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from recsys.artifacts import read_manifest, verify
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.errors import ArtifactError
from recsys.interactions import Histories
from recsys.models.checkpoint import build
from recsys.training import draft, target, teacher
from recsys.training.teacher import Prompts, Teacher, Trees, search_trees
from recsys.vocabulary import Vocabulary

CODES = np.stack(np.unravel_index(np.arange(24), (4, 3, 2)), 1).astype(np.int32)
CODES = np.concatenate([CODES[:5], CODES[7:9], CODES[12:20]])  # bushy and thin branches
VOCABULARY = Vocabulary.from_levels([4, 3, 2])
TOKENS = VOCABULARY.encode(CODES)
TRIE = ItemTrie.build(TOKENS)


def make_model(seed=0, layers=2):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "layers": layers}
    model = build(sizes, VOCABULARY).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def make_prompts(seed=0):
    rng = np.random.default_rng(seed)
    items = [rng.integers(0, len(TOKENS), n) for n in (1, 4, 2)]
    return [np.concatenate([[1], TOKENS[i].reshape(-1)]) for i in items]


def plain_log_probs(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor(np.asarray(tokens))[None]).logits[0, -1].log_softmax(-1)


def slow_levels(step, prompt, width):
    """Beam search with dictionaries: level by level, prefix -> score."""
    rows = {tuple(row) for row in TOKENS.tolist()}
    beams, levels = {(): 0.0}, []
    for level in range(TOKENS.shape[1]):
        prefixes = {row[: level + 1] for row in rows}
        scores = {}
        for prefix, score in beams.items():
            log_p = step([*prompt, *prefix])
            below = [p for p in prefixes if p[:level] == prefix]
            scores |= {p: score + float(log_p[p[-1]]) for p in below}
        beams = dict(sorted(scores.items(), key=lambda item: -item[1])[:width])
        levels.append(beams)
    return levels


def prefixes_of(trees, place):
    """Level by level: prefix -> score."""
    depth = TRIE.depth_start
    levels = []
    for level, (states, scores) in enumerate(
        zip(trees.states[place], trees.scores[place], strict=True)
    ):
        found = {}
        for state, score in zip(states.tolist(), scores.tolist(), strict=True):
            if state >= 0:
                assert depth[level + 1] <= state < depth[level + 2]
                found[tuple(TRIE.rows[TRIE.row_start[state], : level + 1].tolist())] = score
        levels.append(found)
    return levels


@pytest.mark.parametrize("beams", [1, 3, 6, 40])
def test_the_levels_are_those_of_a_slow_search(beams):
    model, prompts = make_model(), make_prompts()
    trees = search_trees(model, prompts, DeviceTrie.of(TRIE), beams)
    for place, prompt in enumerate(prompts):
        expected = slow_levels(lambda tokens: plain_log_probs(model, tokens), prompt, beams)
        for found, wanted in zip(prefixes_of(trees, place), expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)


def test_the_log_probs_are_the_targets_at_every_node():
    model, prompts = make_model(), make_prompts()
    trees = search_trees(model, prompts, DeviceTrie.of(TRIE), 4)
    said = trees.children_log_probs(np.arange(3), TRIE)
    for place, prompt in enumerate(prompts):
        for level, log_p in enumerate(said):
            states = [0] if level == 0 else trees.states[place, level - 1].tolist()
            for node, state in enumerate(states):
                if state < 0:
                    assert np.isneginf(log_p[place, node]).all()
                    continue
                prefix = TRIE.rows[TRIE.row_start[state], :level]
                whole = plain_log_probs(model, [*prompt, *prefix])
                children = range(TRIE.first_child[state], TRIE.first_child[state + 1])
                wanted = [float(whole[TRIE.alphabet[TRIE.symbol[child]]]) for child in children]
                assert log_p[place, node, : len(wanted)] == pytest.approx(wanted, rel=2e-3)
                assert np.isneginf(log_p[place, node, len(wanted) :]).all()


def test_the_log_probs_of_all_tokens_of_a_level_can_be_kept():
    model, prompts = make_model(), make_prompts()
    tokens = [sorted(set(level)) for level in TRIE.rows.T.tolist()]
    kept = [torch.tensor(level) for level in tokens]
    trees = search_trees(model, prompts, DeviceTrie.of(TRIE), 4, levels_of=kept)
    found = trees.split_levels(np.arange(3), [len(level) for level in tokens])
    assert [part.shape[1] for part in found] == [1, 4, 4]
    for place, prompt in enumerate(prompts):
        for level, log_p in enumerate(found):
            states = [0] if level == 0 else trees.states[place, level - 1].tolist()
            for node, state in enumerate(states):
                if state < 0:
                    continue
                prefix = TRIE.rows[TRIE.row_start[state], :level]
                whole = plain_log_probs(model, [*prompt, *prefix])
                wanted = [float(whole[token]) for token in tokens[level]]
                assert log_p[place, node] == pytest.approx(wanted, rel=2e-3)


def test_the_data_keep_what_the_runs_draft_compares(make_context):
    target.stage(make_context())
    kept = []
    for objective in ("atspeed-s", "atspeed-s-eq4"):
        own = {"beams": 4, "histories": 10}
        context = make_context(teacher=own, draft={"objective": objective})
        data = Teacher.load(teacher.stage(context))
        kept.append((data.config.level_tokens, data.trees.level_log_probs.shape[1]))
    assert kept == [(True, 3 + 4 * (3 + 3)), (False, 0)]


def test_a_mixture_is_searched_by_its_own_probabilities():
    p, q, prompts = make_model(), make_model(seed=1, layers=1), make_prompts()
    trees = search_trees(p, prompts, DeviceTrie.of(TRIE), 4, draft=q, mixture=0.3)
    only_p = search_trees(p, prompts, DeviceTrie.of(TRIE), 4)

    def step(tokens):
        a, b = plain_log_probs(p, tokens).exp(), plain_log_probs(q, tokens).exp()
        return (0.3 * a + 0.7 * b).log()

    for place, prompt in enumerate(prompts):
        expected = slow_levels(step, prompt, 4)
        for found, wanted in zip(prefixes_of(trees, place), expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
    root = [t.children_log_probs(np.arange(3), TRIE)[0] for t in (trees, only_p)]
    np.testing.assert_array_equal(*root, err_msg="what is kept is the target's in both")
    whole = search_trees(p, prompts, DeviceTrie.of(TRIE), 4, draft=q, mixture=1.0)
    np.testing.assert_array_equal(whole.states, only_p.states)


def test_trees_end_to_end_are_read_back_one_by_one():
    model, prompts = make_model(), make_prompts()
    whole = search_trees(model, prompts, DeviceTrie.of(TRIE), 4)
    parts = Trees.concatenate([search_trees(model, [p], DeviceTrie.of(TRIE), 4) for p in prompts])
    order = np.array([2, 0, 1, 0])
    for a, b in zip(
        whole.children_log_probs(order, TRIE), parts.children_log_probs(order, TRIE), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-3)
    np.testing.assert_array_equal(whole.states, parts.states)


def pairs_of(prompts):
    return [
        (history.tolist(), item)
        for history, item in zip(prompts.histories, prompts.following.tolist(), strict=True)
    ]


def test_prompts_are_prefixes_of_histories_and_whole_ones():
    histories = Histories.of([[3, 1, 2], [5], [], [7, 8]])
    every = pairs_of(Prompts.sample(histories, 0, seed=0))
    assert every == [
        ([3], 1), ([5], -1), ([7], 8), ([3, 1], 2), ([7, 8], -1), ([3, 1, 2], -1)
    ]  # fmt: skip
    some = pairs_of(Prompts.sample(histories, 4, seed=0))
    assert len(some) == 4
    assert all(pair in every for pair in some)
    seen = pairs_of(Prompts.sample(histories, 0, seed=0, held_out=np.array([0, 1])))
    assert seen == [([3], 1), ([7], 8), ([3, 1], 2), ([7, 8], -1)]


def test_dropped_items_leave_the_last_one_and_what_follows():
    histories = Histories.of([list(range(50))])
    prompts = Prompts.sample(histories, 0, seed=0, item_dropout=0.5)
    for history, item in pairs_of(prompts):
        assert history == sorted(set(history))
        assert item in (history[-1] + 1, -1)
    assert prompts.histories.lengths.sum() == pytest.approx(50 * 51 / 4, rel=0.1)


SECTION = {"beams": 4, "histories": 90, "shard": 20, "batch": 8}


def test_the_artifact_holds_what_was_asked_and_little_else(make_context):
    context = make_context(teacher=SECTION)
    target.stage(context)
    path = teacher.stage(context)
    manifest = verify(path, "teacher")
    assert set(manifest.parents) == {"dataset", "ids", "target"}
    assert len(list(path.glob("shard-*.safetensors"))) == 5
    assert not context.workspace.run("teacher.partial").exists()
    data = Teacher.load(path)
    assert len(data.prompts) == len(data.trees) == 90
    lengths = [load_file(shard)["offsets"] for shard in path.glob("shard-*.safetensors")]
    assert all((np.diff(np.diff(offsets)) >= 0).all() for offsets in lengths)
    assert data.config.beams == 4
    assert manifest.info["histories"] == 90
    # 3 children of the root, of at most 4 states of level 1 and of level 2: 27 values of 2 bytes.
    assert data.trees.log_probs.nbytes <= 90 * 27 * 2


def test_a_mixture_names_its_draft_and_follows_it(make_context):
    context = make_context(draft={"objective": "sft"})
    target.stage(context)
    folder = context.workspace.run("draft")
    mixed = make_context(teacher={**SECTION, "draft": str(folder)})
    with pytest.raises(ArtifactError, match="draft"):
        teacher.stage(mixed)
    draft.train(context)
    path = teacher.stage(mixed)
    before = verify(path, "teacher")
    assert before.parents["draft"] == read_manifest(folder).digest
    assert read_manifest(teacher.stage(mixed)).digest == before.digest
    draft.train(make_context(draft={"objective": "sft", "epochs": 1}))
    assert read_manifest(teacher.stage(mixed)).parents["draft"] == read_manifest(folder).digest
    assert read_manifest(path).digest != before.digest


def killed_behind_three_shards(context):
    """For a process of its own, which ends with it."""
    saved, save = [], teacher._save_shard

    def dying(*args):
        if len(saved) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(args)
        save(*args)

    teacher._save_shard = dying
    teacher.stage(context)


def test_a_run_killed_by_sigkill_goes_on_behind_its_last_shard(make_context, monkeypatch, forked):
    context = make_context(teacher=SECTION)
    target.stage(context)
    straight = read_manifest(teacher.stage(context)).digest
    again = make_context(teacher={**SECTION, "mixture": 0.4})  # which changes no data
    assert forked(killed_behind_three_shards, again) == -signal.SIGKILL
    partial = context.workspace.run("teacher.partial")
    assert len(list(partial.glob("shard-*.safetensors"))) == 3
    searched = []
    monkeypatch.setattr(
        teacher, "search_trees", lambda *a, **k: searched.append(len(a[1])) or search_trees(*a, **k)
    )
    assert read_manifest(teacher.stage(again)).digest == straight
    assert sum(searched) == 36, "two shards of five were left, of 18 histories each"
