"""Models as ONNX: the graphs against torch, and a ranking by NumPy against the recommender."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from toy_bundle import counted_codes, items_table, write_bundle
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from recsys.bundle import DRAFT, TARGET
from recsys.errors import ArtifactError, ConfigError
from recsys.exporting import onnx as onnx_export
from recsys.exporting.commands import app
from recsys.exporting.onnx import export
from recsys.recommender import Recommender, RecommendRequest
from recsys.testing import assert_as_exact, exact_twin, tiny_model
from recsys.vocabulary import Vocabulary

LEVELS = (4, 3, 3)
CODES = counted_codes(20, LEVELS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    size = Vocabulary.from_levels(LEVELS).size
    return write_bundle(
        tmp_path_factory.mktemp("home") / "shop",
        items_table([f"i{i}" for i in range(len(CODES))]),
        CODES,
        LEVELS,
        target=tiny_model("llama-gqa", size),
        draft=tiny_model(vocabulary=size, layers=1, seed=1),
    )


@pytest.fixture(scope="module")
def exported(bundle, tmp_path_factory):
    if not all(find_spec(name) for name in ("onnx", "onnx_ir", "onnxscript", "onnxruntime")):
        pytest.skip("the extra 'onnx' is not installed")
    out = tmp_path_factory.mktemp("onnx") / "shop"
    with pytest.MonkeyPatch.context() as patch:  # so that the target's weights lie in a file beside
        limit = (bundle / DRAFT / "model.safetensors").stat().st_size
        patch.setattr(onnx_export, "INLINE_BYTES", limit)
        return out, export(bundle, out)


def run(out, part, tokens):
    import onnxruntime

    session = onnxruntime.InferenceSession(out / f"{part}.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": np.asarray(tokens, np.int64)})[0]


@pytest.mark.parametrize("part", [TARGET, DRAFT])
@pytest.mark.parametrize("shape", [(1, 1), (1, 31), (5, 8)], ids=str)
def test_a_graph_has_the_logits_of_torch(bundle, exported, part, shape):
    out, gaps = exported
    assert 0 <= gaps[part] < 1e-3  # another graph differs in the first digit
    model = AutoModelForCausalLM.from_pretrained(bundle / part).eval()
    tokens = np.random.default_rng(7).integers(0, model.config.vocab_size, shape)
    with torch.inference_mode():
        wanted = [m(torch.from_numpy(tokens)).logits for m in (model, exact_twin(model))]
    assert_as_exact(run(out, part, tokens), *wanted)


def test_large_weights_lie_beside_the_graph(exported):
    out, _ = exported
    assert {file.name for file in out.glob("*.onnx*")} == {
        "target.onnx", "target.onnx.data", "draft.onnx"
    }  # fmt: skip


def test_padding_on_the_right_changes_no_prompt(bundle, exported):
    out, _ = exported
    tokens = np.random.default_rng(1).integers(0, 12, (1, 9))
    padded = np.concatenate([tokens, np.full((1, 4), 3)], axis=1)
    found = run(out, TARGET, padded)[:, :9]
    model = AutoModelForCausalLM.from_pretrained(bundle / TARGET, dtype=torch.float64).eval()
    with torch.inference_mode():
        exact = model(torch.from_numpy(tokens)).logits
    assert_as_exact(found, run(out, TARGET, tokens), exact)


def test_a_program_without_torch_ranks_the_catalog(bundle, exported):
    """The exported files are all that the ranking of `reference` reads."""
    out, _ = exported
    vocabulary = json.loads((out / "vocabulary.json").read_text())
    table = pq.read_table(out / "catalog" / "items.parquet")
    ids, codes = table["item_id"].to_pylist(), np.array(table["semantic_id"].to_pylist())
    tokens = codes + vocabulary["level_offsets"]
    history = [3, 17, 5]
    prompt = [*vocabulary["prefix"], *tokens[history].reshape(-1)]
    rows = np.array([[*prompt, *answer] for answer in tokens])
    logits = run(out, TARGET, rows).astype(np.float64)[:, len(prompt) - 1 : -1]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = np.take_along_axis(logits, tokens[:, :, None], 2).sum((1, 2))
    best = np.argsort(-scores)
    request = RecommendRequest([ids[i] for i in history], len(ids), exclude_seen=False)
    answers = [
        Recommender.load(bundle, dtype=dtype).recommend_batch([request])[0].recommendations
        for dtype in ("float32", "float64")
    ]
    for answer in answers:
        assert [r.item_id for r in answer] == [ids[i] for i in best]
    assert_as_exact(scores[best], *([r.score for r in answer] for answer in answers))


def test_a_graph_of_another_model_is_refused(exported):
    out, _ = exported
    other = tiny_model(vocabulary=Vocabulary.from_levels(LEVELS).size, seed=5)
    with pytest.raises(ArtifactError, match=r"target\.onnx: its logits differ from torch's"):
        onnx_export._compare(other, out / "target.onnx", 19)


def test_without_onnxruntime_nothing_is_compared(exported, bundle, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(onnx_export, "_write", lambda model, file: Path(file).touch())
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["onnx", "--bundle", str(bundle), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"onnx: {out}" in result.output
    assert {f.name for f in out.iterdir()} == {
        "target.onnx", "draft.onnx", "vocabulary.json", "prompts.json", "catalog"
    }  # fmt: skip
    assert onnx_export._compare(None, out / "target.onnx", 19) is None


def test_no_path_of_this_machine_is_written(exported, tmp_path):
    out, _ = exported
    for file in out.rglob("*.onnx*"):
        content = file.read_bytes()
        for path in (b"site-packages", b".py", str(out).encode(), str(Path.home()).encode()):
            assert path not in content


@pytest.mark.parametrize("package", ["onnx", "onnx_ir", "onnxscript"])
def test_a_missing_package_names_the_extra(bundle, monkeypatch, tmp_path, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'recbeam\[onnx\]'"):
        export(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()
