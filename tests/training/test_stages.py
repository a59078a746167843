"""Stages target, draft and bundle, from artifacts to artifacts."""

import json
from pathlib import Path

import numpy as np
import pytest

from recsys.artifacts import Workspace, read_manifest, verify
from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.decoding import beam_search
from recsys.errors import ArtifactError, ConfigError, RequestError
from recsys.models.checkpoint import load_model
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.recommender import Recommender, RecommendRequest
from recsys.training import bundle, draft, ids, sasrec, target, teacher
from recsys.training.state import Progress
from recsys.training.validation import Validation
from recsys.vocabulary import Vocabulary


def digest_of_weights(path):
    return read_manifest(path).files["model/model.safetensors"]


def test_the_target_artifact_holds_model_vocabulary_and_log(make_context):
    path = target.stage(make_context())
    manifest = verify(path, "target")
    assert Vocabulary.load(path) == Vocabulary.from_levels([3, 3, 3])
    assert load_model(path / "model").config.vocab_size == Vocabulary.load(path).size
    lines = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "ndcg@10" in line] == [2, 4]
    assert set(manifest.parents) == {"dataset", "ids"}
    assert manifest.config["prompt"] == PromptConfig().as_dict()
    best = max(line["ndcg@10"] for line in lines if "ndcg@10" in line)
    assert manifest.info["validation"]["ndcg@10"] == pytest.approx(best, abs=1e-5)
    assert not make_context().workspace.run("target.checkpoint").exists()


def test_the_target_learns_the_chain_of_items(make_context):
    sizes = {"epochs": 40, "evaluate_every": 40, "learning_rate": 1e-2, "eval_users": 40}
    info = read_manifest(target.stage(make_context(target=sizes))).info
    assert info["validation"]["ndcg@10"] > 0.5, "chance is .17"


def test_equal_settings_give_equal_bits_and_another_seed_others(make_context, tmp_path):
    first = digest_of_weights(target.stage(make_context()))
    assert digest_of_weights(target.stage(make_context(force=True))) == first
    assert digest_of_weights(target.stage(make_context(seed=1))) != first


def test_a_crash_before_the_artifact_needs_no_new_training(make_context, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(target, "save_model", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.stage(make_context())
    with monkeypatch.context() as patch:
        patch.setattr("recsys.training.objective.NextToken.forward", lambda *a: 1 / 0)
        first = digest_of_weights(target.stage(make_context()))
    assert digest_of_weights(target.stage(make_context(force=True))) == first


def test_imported_ids_need_no_centroids(make_context, tmp_path, shop):
    context = make_context()
    shop.write_parents(context.workspace, centroids=False)
    assert verify(target.stage(context), "target")


def test_only_training_events_are_trained_on(make_context, monkeypatch, shop):
    seen = []
    dataset = shop.chain_dataset()

    def spy(histories, *args, **kwargs):
        seen.append(histories)
        raise ConfigError("enough")

    monkeypatch.setattr("recsys.training.supervised.TrainingBatches.of", spy)
    with pytest.raises(ConfigError, match="enough"):
        target.stage(make_context())
    assert seen[0].lengths.tolist() == [7] * len(dataset.interactions.user_ids), "nine less two"


def test_a_data_set_without_two_training_events_is_refused(make_context, shop):
    context = make_context()
    shop.write_parents(context.workspace, dataset=shop.chain_dataset(length=3))
    with pytest.raises(ConfigError, match="nothing to train on"):
        target.stage(context)


WRONG = [
    (target, {"preset": "giant"}, "tiny, small, base"),
    (target, {"item_dropout": 1.0}, "item_dropout"),
    (target, {"epoch": 3}, "epochs"),
    (target, {"epochs": 0}, "epochs"),
    (target, {"max_minutes": 0.0}, "max_minutes"),
    (target, {"evaluate_every": -1}, "evaluate_every"),
    (target, {"update": "half"}, "update"),
    (target, {"lora": {"rank": 0}}, r"lora\.rank"),
    (target, {"lora": {"alpha": 0.0}}, r"lora\.alpha"),
    (target, {"lora": {"dropout": 1.0}}, r"lora\.dropout"),
    (target, {"lora": {"modules": []}}, r"lora\.modules"),
    (target, {"lora": {"ranks": 3}}, "did you mean 'rank'"),
    (teacher, {"beams": 0}, "beams"),
    (teacher, {"mixture": 1.5}, "mixture"),
    (teacher, {"source": "nobody"}, "source"),
    (draft, {"alpha": 1.5}, "alpha"),
    (draft, {"alpha": 1.0, "objective": "atspeed-s-eq4"}, "one token"),
    (draft, {"ablations": ["no-density"], "objective": "atspeed-s-eq4"}, "renormalises"),
    (draft, {"ablations": ["density"]}, r"ablations\[0\]"),
    (draft, {"objective": "magic"}, "objective"),
    (draft, {"temperature": 0.0}, "temperature"),
    (ids, {"method": "bundle"}, r"ids\.method"),
    (sasrec, {"epochs": 1, "hidden": 15}, "multiple of heads"),
]


@pytest.mark.parametrize(("module", "settings", "says"), WRONG)
def test_wrong_settings_are_refused_by_name(make_context, module, settings, says):
    section = module.__name__.rpartition(".")[2]
    with pytest.raises(ConfigError, match=says):
        module.stage(make_context(**{section: settings}))


def test_the_draft_is_the_target_cut_and_trained_on(make_context):
    context = make_context()
    target.stage(context)
    path = draft.train(context)
    manifest = verify(path, "draft")
    assert set(manifest.parents) == {"dataset", "ids", "target", "teacher"}
    assert manifest.info["objective"] == "margin-kd"
    model = load_model(path / "model")
    assert model.config.num_hidden_layers == 1
    assert (
        model.config.hidden_size
        == load_model(context.workspace.run("target") / "model").config.hidden_size
    )
    assert Vocabulary.load(path) == Vocabulary.load(context.workspace.run("target"))


def test_a_draft_of_its_own_sizes(make_context):
    context = make_context(
        draft={"init_from_target": False, "architecture": {"hidden_size": 16, "heads": 1}}
    )
    target.stage(context)
    assert load_model(draft.train(context) / "model").config.hidden_size == 16


def test_a_draft_needs_a_target_and_follows_a_new_one(make_context):
    with pytest.raises(ArtifactError, match="target"):
        draft.train(make_context())
    target.stage(make_context())
    first = digest_of_weights(draft.train(make_context()))
    target.stage(make_context(target={"epochs": 1}))
    assert digest_of_weights(draft.train(make_context())) != first


def make_bundle(context):
    target.stage(context)
    draft.train(context)
    return bundle.stage(context)


def test_the_bundle_is_whole_and_readable(make_context, shop):
    context = make_context(target={"prompt": {"max_items": 6, "block": 2}})
    path = make_bundle(context)
    read = Bundle.load(path, check=True)
    assert set(read.manifest.parents) == {"dataset", "ids", "target", "draft"}
    assert read.prompt == PromptConfig(6, 2)
    assert len(read.catalog) == shop.ITEMS
    assert (path / "catalog" / "quantizer" / "centroids.safetensors").is_file()
    scores = json.loads((path / "eval" / "validation.json").read_text())
    assert set(scores) == {"target", "draft"}
    assert load_model(read.target).config.vocab_size == read.vocabulary.size
    assert load_model(read.draft).config.vocab_size == read.vocabulary.size
    suffixes = {p.suffix for p in path.rglob("*") if p.is_file()}
    assert suffixes == {".json", ".safetensors", ".parquet"}, "nothing else, and no pickle"


def test_a_bundle_of_mismatched_parts_is_refused(make_context):
    context = make_context()
    make_bundle(context)
    target.stage(make_context(target={"epochs": 1}))
    with pytest.raises(ArtifactError, match=r"draft was made from another target"):
        bundle.stage(context)


def test_a_run_on_a_cpu_trains_no_draft_and_its_bundle_is_complete(make_context, capsys):
    context = make_context()
    target.stage(context)
    assert draft.stage(context) is None
    said = " ".join(capsys.readouterr().err.split())
    assert "a CPU answers sooner by plain beam search" in said
    assert "recsys train draft --name toy && recsys bundle --name toy" in said
    path = bundle.stage(context)
    assert set(read_manifest(path).parents) == {"dataset", "ids", "target"}
    plain = Recommender.load(path)
    requests = [RecommendRequest(["i3", "i4"], 5, mode=mode) for mode in ("beam", "strict")]
    first, second = plain.recommend_batch(requests)
    assert [r.item_id for r in first.recommendations] == [r.item_id for r in second.recommendations]
    with pytest.raises(RequestError, match="needs a draft model"):
        plain.recommend_batch([RecommendRequest(["i3"], 5, mode="relaxed", seed=1)])
    # Once there is one, runs keep it up to date.
    draft.train(context)
    target.stage(make_context(target={"epochs": 1}))
    assert draft.stage(context) == context.workspace.run("draft")
    assert "draft" in read_manifest(bundle.stage(context)).parents


@pytest.mark.parametrize(
    ("device", "section", "parent", "trained"),
    [
        ("cpu", {}, False, False),
        ("cuda", {}, False, True),
        ("cpu", {"objective": "atspeed-r"}, False, True),
        ("cpu", {}, True, True),
    ],
)
def test_a_run_trains_a_draft_where_answers_use_it(
    make_context, monkeypatch, tmp_path, device, section, parent, trained
):
    context = make_context(draft=section, **({"parent": "old"} if parent else {}))
    target.stage(make_context())
    (Workspace(tmp_path, "old").bundle / "draft").mkdir(parents=True)
    monkeypatch.setattr(draft, "answering_device", lambda *ignored: device)
    monkeypatch.setattr(draft, "train", lambda context: Path("trained"))
    assert draft.stage(context) == (Path("trained") if trained else None)


def test_objectives_are_tried_where_there_is_time_and_the_best_is_kept(make_context, monkeypatch):
    target.stage(make_context())
    passes = {"margin-kd": 2.0, "atspeed-s": 1.5, "atspeed-r": 1.75}
    trained = []

    def train_draft(model, target, dataset, encoder, config, checkpoints, **more):
        trained.append((config.objective, config.max_minutes))
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
        (checkpoints.folder / "log.jsonl").touch()
        return Progress(best={"accepted_levels": 1.0, "target_passes": passes[config.objective]})

    monkeypatch.setattr(draft, "train_draft", train_draft)
    context = make_context(draft={"max_minutes": 3.0})
    info = read_manifest(draft.train(context)).info
    assert info["objective"] == "atspeed-s"
    assert {name: row["target_passes"] for name, row in info["trials"].items()} == passes
    assert [name for name, _ in trained] == ["margin-kd", "atspeed-s", "atspeed-r", "atspeed-s"]
    assert [minutes for _, minutes in trained[:3]] == pytest.approx([0.4] * 3)
    assert trained[3][1] < 3.0, "teacher data and trials count"
    trained.clear()
    short = read_manifest(draft.train(make_context(draft={"max_minutes": 1.0})))
    assert "trials" not in short.info
    assert [name for name, _ in trained] == ["margin-kd"]


def test_validation_equals_counting_by_hand(make_context, shop):
    model = load_model(target.stage(make_context()) / "model")
    dataset = shop.chain_dataset()
    vocabulary = Vocabulary.from_levels([3, 3, 3])
    codes = np.stack(np.unravel_index(np.arange(shop.ITEMS), (3, 3, 3)), 1).astype(np.int32)
    encoder = PromptEncoder(vocabulary.encode(codes), vocabulary.prefix, PromptConfig())
    validation = Validation.of(model, encoder, dataset, users=1000)
    found = validation()
    examples = dataset.examples("valid")
    assert np.array_equal(examples.sample(10).users, examples.sample(10).users)
    assert len(examples.sample(10)) == 10
    trie = ItemTrie.build(encoder.item_tokens)
    gains = []
    for history, wanted in zip(examples.histories, examples.targets.items, strict=True):
        beams = beam_search(model, [encoder.encode(history)], trie, shop.ITEMS)
        ranked = [int(trie.items_of(row)[0]) for row in beams.rows[0].tolist()]
        unseen = [item for item in ranked if item not in set(history.tolist())][:10]
        gains.append(1 / np.log2(unseen.index(wanted) + 2) if wanted in unseen else 0.0)
    assert found["ndcg@10"] == pytest.approx(np.mean(gains))
    assert found["recall@10"] == pytest.approx(np.mean(np.array(gains) > 0))
