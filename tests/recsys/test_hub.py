"""A bundle as a folder for the Hugging Face Hub, and the way back."""

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
from typer.testing import CliRunner

from recsys.artifacts import read_manifest, write_artifact
from recsys.bundle import DRAFT, EVAL, TARGET
from recsys.errors import ArtifactError, ConfigError
from recsys.exporting.commands import app
from recsys.exporting.hub import export
from recsys.recommender import Recommender
from recsys.testing import assert_as_exact, exact_twin, tiny_model
from recsys.vocabulary import Vocabulary

LEVELS = (4, 3, 3)
CODES = counted_codes(20, LEVELS)
VOCABULARY = Vocabulary.from_levels(LEVELS)
PROBE = torch.tensor([[1, 2, 6, 9, 3, 7, 10]])
HISTORIES = [["i3"], ["i0", "i19", "i7"], []]
USER = "customer-4711"  # of the report's examples


def make_bundle(path, target=None, extra=None, items=20):
    def parts(folder):
        (folder / EVAL).mkdir()
        (folder / EVAL / "validation.json").write_text("{}")
        if extra:
            (folder / extra).write_text("[]")

    table = items_table(
        [f"i{i}" for i in range(items)],
        [f"Thing {i}" for i in range(items)],
        brand=["Acme"] * items,
    )
    draft = tiny_model(vocabulary=VOCABULARY.size, layers=1, seed=1)
    return write_bundle(
        path, table, CODES[:items], LEVELS, target=target, draft=draft, extra=parts, merge=False
    )


def write_report(path, bundle):
    """A report with the keys that `recsys evaluate` writes, and a user's history in it."""
    about = {"seen": "masked", "targets": "next", "k": 10}
    figures = {("blended", "recall"): 0.25, ("blended", "ndcg"): 0.125, ("model", "recall"): 0.2}
    figures[("model", "ndcg")] = 0.1
    rows = [
        {"ranker": r, "metric": m, "mean": v, "low": v - 0.01, "high": v + 0.02, **about}
        for (r, m), v in figures.items()
    ]
    gap = {"mean": 0.05, "low": 0.01, "high": 0.09, **about}
    document = {
        "schema": 1,
        "split": "test",
        "made_from": {"bundle": read_manifest(bundle).digest},
        "warnings": ["Few users."],
        "weaknesses": ["Worse than a guess."],
        "headline": about,
        "data": {"users": 50, "items": 20, "events": {"train": 90}, "users_evaluated": 40},
        "rankers": ["blended", "model"],
        "metrics": rows,
        "coverage": [{"ranker": r, "coverage": 0.5, **about} for r in ("blended", "model")],
        "comparisons": [{"ranker": "blended", "against": "model", "metric": "recall", **gap}],
        "examples": [{"user_id": USER, "history": [{"item_id": "i3", "title": "Thing 3"}]}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    bundle = make_bundle(home / "bundles" / "shop")
    write_report(home / "reports" / "shop" / "report.json", bundle)
    return home


@pytest.fixture(scope="module")
def bundle(home):
    return home / "bundles" / "shop"


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "shop"
    export(bundle, out, licence="cc-by-4.0")
    return out


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


def test_a_folder_is_loaded_as_the_bundle(bundle, folder):
    found = Recommender.from_pretrained(folder)
    original = Recommender.load(bundle)
    assert lists(found) == lists(original)
    assert found.manifest.digest == original.manifest.digest
    assert lists(Recommender.from_pretrained(bundle)) == lists(original), "a bundle, too"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_a_separate_adapter_is_merged(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(tiny_model(vocabulary=VOCABULARY.size), config)
    bundle = make_bundle(tmp_path / "home" / "lora", adapted)
    out = tmp_path / "out"
    export(bundle, out)
    assert not (out / "bundle" / TARGET / "adapter").exists()
    base = AutoModelForCausalLM.from_pretrained(bundle / TARGET)
    wanted = PeftModel.from_pretrained(base, bundle / TARGET / "adapter").eval()
    stock = AutoModelForCausalLM.from_pretrained(out / "bundle" / TARGET).eval()
    with torch.inference_mode():
        assert_as_exact(*(m(PROBE).logits for m in (stock, wanted, exact_twin(wanted))))
    assert lists(Recommender.from_pretrained(out)) == lists(Recommender.load(bundle))
    for file in out.rglob("*.json"):
        assert str(tmp_path) not in file.read_text(), "no path of this machine"


def test_the_card_has_the_figures_of_the_report(folder):
    card = huggingface_hub.ModelCard((folder / "README.md").read_text())
    assert card.data.license == "cc-by-4.0"
    assert card.data.library_name == "recbeam"
    assert card.data.model_name == "shop"
    figures = {r.metric_type: (r.metric_value, r.metric_args) for r in card.data.eval_results}
    interval = {"confidence": 0.95, "low": 0.24, "high": 0.27}
    assert figures["recall_at_10"] == (0.25, interval)
    assert figures["ndcg_at_10"][0] == 0.125
    assert {r.dataset_split for r in card.data.eval_results} == {"test"}
    for text in ("| model | recall@10 | 0.2000 | 0.1900 to 0.2200 |", "Worse than a guess."):
        assert text in card.text
    assert "title, text, brand" in card.text


def test_a_card_without_a_report_has_no_figures(bundle, tmp_path):
    alone = shutil.copytree(bundle, tmp_path / "alone")
    export(alone, tmp_path / "out")
    card = huggingface_hub.ModelCard((tmp_path / "out" / "README.md").read_text())
    assert card.data.eval_results is None
    assert card.data.license == "unknown"
    assert "no evaluation report" in card.text


def test_a_stale_report_beside_the_bundle_is_left_out(tmp_path):
    bundle = make_bundle(tmp_path / "bundles" / "shop")
    write_report(tmp_path / "reports" / "shop" / "report.json", bundle)
    make_bundle(bundle, items=19)
    export(bundle, tmp_path / "out")
    assert "no evaluation report" in (tmp_path / "out" / "README.md").read_text()


def test_settings_of_the_run_are_in_the_card(tmp_path):
    config = {"learning_rate": 0.003, "seed": 7, "base": "/home/jane/llama"}
    with write_artifact(
        tmp_path / "runs" / "shop" / "target",
        "target",
        config=config,
        info={"epochs": 6, "steps": 116, "seconds": 22.4},
    ):
        pass
    digest = read_manifest(tmp_path / "runs" / "shop" / "target").digest
    bundle = make_bundle(tmp_path / "bundles" / "shop")
    manifest = json.loads((bundle / "manifest.json").read_text())
    for parent, shown in ((digest, True), ("other", False)):
        manifest["parents"] = {"target": parent}
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        out = tmp_path / parent
        export(bundle, out)
        card = (out / "README.md").read_text()
        assert ("| target | learning_rate | 0.003 |" in card) == shown
        assert "jane" not in card


def test_no_user_and_no_history_leaves(folder):
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {file.relative_to(folder).parts[0] for file in files} == {"README.md", "bundle"}
    for file in files:
        assert USER.encode() not in file.read_bytes(), file
        assert file.suffix in {".md", ".json", ".safetensors", ".parquet", ".npy"}, file


def test_an_unknown_part_is_refused(tmp_path):
    bundle = make_bundle(tmp_path / "a", extra="histories.json")
    with pytest.raises(ArtifactError, match=r"'histories\.json' is no known part"):
        export(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_of_another_bundle_is_refused(bundle, tmp_path):
    other = make_bundle(tmp_path / "other", items=19)
    report = write_report(tmp_path / "report.json", other)
    with pytest.raises(ArtifactError, match="run `recsys evaluate` again"):
        export(bundle, tmp_path / "out", report=report)
    with pytest.raises(ArtifactError, match="not a report"):
        export(bundle, tmp_path / "out", report=tmp_path / "gone.json")
    report.write_text(json.dumps(json.loads(report.read_text()) | {"schema": 2}))
    with pytest.raises(ArtifactError, match="has schema 2, not 1"):
        export(bundle, tmp_path / "out", report=report)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(bundle, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not empty"):
        export(bundle, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_folder_in_the_bundle_is_refused(bundle):
    with pytest.raises(ArtifactError, match="lies in the bundle"):
        export(bundle, bundle / "hub")
    Recommender.load(bundle)


@pytest.mark.parametrize("name", ["target/model.safetensors", "catalog/items.parquet"])
def test_an_altered_file_is_named(copy, name):
    data = bytearray((copy / "bundle" / name).read_bytes())
    data[-1] ^= 1
    (copy / "bundle" / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"'{name}' does not match its checksum"):
        Recommender.from_pretrained(copy)


def test_an_edited_card_changes_nothing(copy, folder):
    (copy / "README.md").write_text("# Mine")
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert lists(Recommender.from_pretrained(copy)) == lists(Recommender.from_pretrained(folder))


def test_a_repository_is_downloaded(repositories, folder, tmp_path):
    repositories["main"] = folder
    found = Recommender.from_pretrained("org/shop")
    assert lists(found) == lists(Recommender.from_pretrained(folder))
    assert found.bundle.path == tmp_path / "var" / "hub" / "org--shop@main" / "bundle"
    repositories["v1/a"] = folder
    pinned = Recommender.from_pretrained("org/shop", revision="v1/a")
    assert pinned.bundle.path.parent.name == "org--shop@v1--a"


def test_files_of_an_earlier_revision_are_removed(repositories, folder, tmp_path):
    repositories["main"] = folder
    Recommender.from_pretrained("org/shop")
    smaller = tmp_path / "smaller"
    bundle = make_bundle(tmp_path / "next")
    shutil.rmtree(bundle / DRAFT)
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in [name for name in manifest["files"] if name.startswith(DRAFT)]:
        del manifest["files"][name]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    export(bundle, smaller)
    repositories["main"] = smaller
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


def test_the_command_names_the_folder(bundle, tmp_path):
    out = tmp_path / "out"
    arguments = ["hub", "--bundle", str(bundle), "--out", str(out), "--license", "mit"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"hub: {out}" in result.output
    assert huggingface_hub.ModelCard.load(out / "README.md").data.license == "mit"


def test_a_link_and_a_path_that_cannot_be_made_are_refused(bundle, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="is a link"):
        export(bundle, link)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be made"):
        export(bundle, tmp_path / "file" / "out")


def test_a_licence_is_one_word(tmp_path):
    with pytest.raises(ConfigError, match="--license"):
        export(tmp_path / "bundle", tmp_path / "out", licence="x\n# Heading")
