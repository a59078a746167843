"""Bundles in repositories of the Hugging Face Hub."""

import fnmatch
import inspect
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from toy_bundle import counted_codes, items_table, write_bundle
from transformers import AutoModelForCausalLM

from recsys.bundle import DRAFT, TARGET
from recsys.errors import ArtifactError
from recsys.recommender import Recommender
from recsys.testing import tiny_model
from recsys.vocabulary import Vocabulary

LEVELS = (4, 3, 3)
CODES = counted_codes(20, LEVELS)
VOCABULARY = Vocabulary.from_levels(LEVELS)
PROBE = torch.tensor([[1, 2, 6, 9, 3, 7, 10]])
HISTORIES = [["i3"], ["i0", "i19", "i7"], []]


def make_bundle(path):
    ids, titles = [f"i{i}" for i in range(20)], [f"Thing {i}" for i in range(20)]
    table = items_table(ids, titles, brand=["Acme"] * 20)
    draft = tiny_model(vocabulary=VOCABULARY.size, layers=1, seed=1)
    return write_bundle(path, table, CODES, LEVELS, draft=draft)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository as the Hub's client makes it."""
    folder = tmp_path_factory.mktemp("hub")
    make_bundle(folder / "bundle")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def repositories(monkeypatch, tmp_path):
    """A double of the Hub: revision -> folder, for `org/shop`; it makes what the client makes."""
    real, found = inspect.signature(huggingface_hub.snapshot_download), {}

    def download(*arguments, **options):
        given = real.bind(*arguments, **options).arguments
        assert given["repo_id"] == "org/shop"
        source, local = found[given["revision"]], Path(given["local_dir"])
        for file in source.rglob("*"):
            name = file.relative_to(source).as_posix()
            if file.is_file() and fnmatch.fnmatch(name, given["allow_patterns"]):
                (local / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, local / name)
        (local / ".cache" / "huggingface").mkdir(parents=True, exist_ok=True)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    return found


def lists(recommender):
    return [[(i.item_id, i.score) for i in found] for found in recommender.recommend(HISTORIES, 5)]


@pytest.mark.parametrize(("part", "shape"), [(TARGET, {}), (DRAFT, {"layers": 1, "seed": 1})])
def test_stock_transformers_loads_the_weights(folder, part, shape):
    stock = AutoModelForCausalLM.from_pretrained(folder / "bundle" / part).eval()
    wanted = tiny_model(vocabulary=VOCABULARY.size, **shape)  # what the bundle was made of
    with torch.inference_mode():
        assert torch.equal(stock(PROBE).logits, wanted(PROBE).logits)


def test_no_user_and_no_history_leaves(folder):
    for file in (folder / "bundle").rglob("*"):
        assert file.suffix in {"", ".json", ".safetensors", ".parquet", ".npy"}, file


@pytest.mark.parametrize("name", ["target/model.safetensors", "catalog/items.parquet"])
def test_an_altered_file_is_named(copy, name):
    data = bytearray((copy / "bundle" / name).read_bytes())
    data[-1] ^= 1
    (copy / "bundle" / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"'{name}' does not match its checksum"):
        Recommender.from_pretrained(copy)


def test_a_repository_is_downloaded(repositories, folder, tmp_path):
    repositories["main"] = folder
    found = Recommender.from_pretrained("org/shop")
    assert lists(found) == lists(Recommender.load(folder / "bundle"))
    assert found.bundle.path == tmp_path / "var" / "hub" / "org--shop@main" / "bundle"
    repositories["v1/a"] = folder
    pinned = Recommender.from_pretrained("org/shop", revision="v1/a")
    assert pinned.bundle.path.parent.name == "org--shop@v1--a"


def test_files_of_an_earlier_revision_are_removed(repositories, folder, tmp_path):
    repositories["main"] = folder
    Recommender.from_pretrained("org/shop")
    bundle = make_bundle(tmp_path / "smaller" / "bundle")
    shutil.rmtree(bundle / DRAFT)
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in [name for name in manifest["files"] if name.startswith(DRAFT)]:
        del manifest["files"][name]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    repositories["main"] = bundle.parent
    assert Recommender.from_pretrained("org/shop").bundle.draft is None


@pytest.mark.parametrize("name", ["shop", "../etc/passwd", "org/../shop", "a/b/c", ".x/y"])
def test_what_is_no_repository_is_refused(repositories, name):
    with pytest.raises(ArtifactError, match="neither a folder nor the id of a repository"):
        Recommender.from_pretrained(name)


def test_a_failed_download_is_reported(repositories, monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ArtifactError, match="org/shop at main was not downloaded: no connection"):
        Recommender.from_pretrained("org/shop")


def test_a_repository_of_something_else_is_refused(repositories, tmp_path):
    (tmp_path / "other" / "bundle").mkdir(parents=True)
    repositories["main"] = tmp_path / "other"
    with pytest.raises(ArtifactError, match=r"manifest\.json is missing"):
        Recommender.from_pretrained("org/shop")


def test_a_folder_has_no_revision(folder):
    with pytest.raises(ArtifactError, match="has no revision 'v1'"):
        Recommender.from_pretrained(folder, revision="v1")
