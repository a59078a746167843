"""A run with a parent continues its bundle: same codes, same vocabulary, its weights."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recsys import Recommender
from recsys.artifacts import Workspace, read_manifest, verify, write_artifact
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.errors import ArtifactError, ConfigError
from recsys.models.checkpoint import load_model
from recsys.training import bundle, draft, ids, target
from recsys.training.parent import check_codes
from recsys.training.settings import DraftConfig
from recsys.training.supervised import Material
from recsys.training.target import TrainedTarget
from recsys.vocabulary import Vocabulary

DEPLOYED = {"epochs": 20, "evaluate_every": 20, "learning_rate": 1e-2, "eval_users": 40}
NEWER = {
    "epochs": 20, "evaluate_every": 20, "learning_rate": 1e-2, "eval_users": 40,
    "update": "lora", "lora": {"rank": 4, "dropout": 0.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(module_context):
    """The home of a bundle of a target from scratch: users go to the next number."""
    home, make_context = module_context
    context = make_context(target={**DEPLOYED, "prompt": {"max_items": 6, "block": 2}})
    for make in (target.stage, draft.train, bundle.stage):
        make(context)
    return home


@pytest.fixture
def deployed(make_context, trained, tmp_path):
    """That bundle, in a home of the test's own."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path, "toy").bundle


@pytest.fixture
def newer(make_context, deployed, shop, tmp_path):
    """A run on data in which they go two numbers on, with the codes of the bundle."""
    workspace = Workspace(tmp_path, "newer")
    shop.write_parents(workspace, dataset=shop.chain_dataset(seed=5, step=2))

    def make(*, lora=None, parent="toy", update="lora", **values):
        section = {**NEWER, "update": update, "lora": {**NEWER["lora"], **(lora or {})}}
        context = make_context(
            name="newer", parent=parent, ids={"method": "imported"}, target=section, **values
        )
        ids.stage(context)
        return context

    return make


def test_lora_trains_an_adapter_of_the_parents_weights(newer, deployed):
    path = target.stage(newer(lora={"merge": False}))
    manifest = verify(path, "target")
    assert manifest.parents["bundle"] == read_manifest(deployed, "bundle").digest
    assert set(manifest.parents) == {"dataset", "ids", "bundle"}
    before, after = manifest.info["validation_before"], manifest.info["validation"]
    assert before["ndcg@10"] < 0.4 < 0.6 < after["ndcg@10"], "chance is .17"
    assert (path / "model" / "adapter" / "adapter_model.safetensors").is_file()
    served = load_file(deployed / "target" / "model.safetensors")
    kept = load_file(path / "model" / "model.safetensors")
    assert served.keys() == kept.keys()
    assert all(torch.equal(kept[name], value) for name, value in served.items())
    assert Vocabulary.load(path) == Vocabulary.load(deployed)
    assert manifest.config["prompt"] == {"max_items": 6, "block": 2}, "the bundle's"
    assert str(deployed) not in (path / "manifest.json").read_text()


def test_a_full_update_starts_from_the_parents_weights(newer, deployed):
    path = target.stage(newer(update="full"))
    manifest = verify(path, "target")
    before, after = manifest.info["validation_before"], manifest.info["validation"]
    assert before["ndcg@10"] < 0.4 < 0.6 < after["ndcg@10"], "chance is .17"
    assert manifest.info["trained_parameters"] == manifest.info["parameters"]
    assert not (path / "model" / "adapter").exists()


def test_a_draft_continues_from_the_parents_draft(newer, deployed):
    context = newer(update="full")
    target.stage(context)
    model, tokenizer = draft.start(
        context.settings.section("draft", DraftConfig),
        TrainedTarget.load(context.workspace),
        Material.load(context.workspace),
        deployed / "draft",
    )
    assert tokenizer is None
    served = load_file(deployed / "draft" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in served.items())
    assert read_manifest(draft.train(context)).parents["bundle"] == read_manifest(deployed).digest


def test_a_version_can_be_the_parent_of_the_next(newer, deployed, make_context):
    context = newer(lora={"merge": False})
    target.stage(context)
    draft.train(context)
    second = bundle.stage(context)
    manifest = verify(second, "bundle")
    assert manifest.parents["bundle"] == read_manifest(deployed).digest
    assert manifest.info["parent"] == "toy"
    old, new = Recommender.load(deployed), Recommender.load(second)
    assert (second / "catalog" / "quantizer").is_dir()
    assert np.array_equal(new.catalog.codes, old.catalog.codes)
    ways = [[r.item_id for r in rec.recommend([["i3", "i5", "i7"]], k=1)[0]] for rec in (old, new)]
    assert ways[1] == ["i9"] != ways[0]
    # What is served now, adapter added in, is what the next version stands on.
    third = make_context(
        name="third", parent="newer", ids={"method": "imported"},
        target={**NEWER, "epochs": 1, "lora": {"rank": 2, "merge": False}},
    )  # fmt: skip
    copy = Workspace(third.workspace.home, "third")
    with write_artifact(copy.dataset, "dataset") as folder:
        Material.load(context.workspace).dataset.save(folder)
    ids.stage(third)
    again = target.stage(third)
    kept = load_file(again / "model" / "model.safetensors")
    for name, value in load_model(second / "target").state_dict().items():
        assert torch.equal(kept[name], value), name


def test_the_codes_of_a_bundle_are_kept_by_item_id(newer, deployed):
    context = newer()
    path = context.workspace.run("ids")
    manifest = verify(path, "ids")
    assert manifest.parents["bundle"] == read_manifest(deployed).digest
    codes, catalog = np.load(path / "codes.npy"), Bundle.load(deployed).catalog
    items = Material.load(context.workspace).dataset.item_ids
    assert np.array_equal(codes, catalog.codes[catalog.index(items.tolist())])
    assert json.loads((path / "report.json").read_text())["new_items"] == 0


def test_a_new_item_that_cannot_be_placed_is_named(newer, deployed):
    bundled = Bundle.load(deployed)
    rows = np.arange(3, len(bundled.catalog))
    with write_artifact(deployed.with_name("smaller"), "bundle") as folder:
        for part in ("vocabulary.json", "prompts.json"):
            (folder / part).write_bytes((deployed / part).read_bytes())
        (folder / "catalog").mkdir()
        part = Catalog(bundled.catalog.items.take(rows), bundled.catalog.codes[rows])
        part.save(folder / "catalog")
    with pytest.raises(ConfigError, match=r"3 items are new to .*item 'i\d+'.*no item encoder"):
        newer(parent="smaller")


def test_items_may_come_and_go_while_codes_stay(newer, deployed):
    material, served = Material.load(newer().workspace), Bundle.load(deployed)
    check_codes(served, material)
    fewer = np.arange(5, len(served.catalog))
    smaller = Catalog(served.catalog.items.take(fewer), served.catalog.codes[fewer])
    check_codes(replace(served, catalog=smaller), material)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("swap", r"2 of 27 items have other codes than in .*, such as 'i0'; "),
        ("deep", "has other levels"),
        ("wide", "has other levels.*outside"),
        ("strange", "no item of the data set"),
    ],
)
def test_other_codes_are_refused_with_an_example(newer, deployed, change, says):
    material, served = Material.load(newer().workspace), Bundle.load(deployed)
    codes = material.codes.copy()
    if change == "swap":
        codes[[0, 1]] = codes[[1, 0]]
    elif change == "deep":
        codes = np.concatenate([codes, codes[:, :1]], axis=1)
    elif change == "wide":
        codes[4, 1] = 3
    else:
        table = served.catalog.items
        table = table.set_column(0, "item_id", [[f"x{i}" for i in range(table.num_rows)]])
        served = replace(served, catalog=Catalog(table, served.catalog.codes))
    with pytest.raises(ConfigError, match=says):
        check_codes(served, replace(material, codes=codes))


def test_a_run_is_not_its_own_parent(make_context, deployed):
    with pytest.raises(ConfigError, match="another --name"):
        target.stage(make_context(parent="toy"))
    with pytest.raises(ArtifactError, match="is not an artifact"):
        target.stage(make_context(parent="nobody"))
