"""Target and draft as ONNX, for programs without Python or torch.

target.onnx, draft.onnx   input_ids (B, T) int64 -> logits (B, T, V) float32
vocabulary.json           codes <-> tokens
prompts.json              how many items of a history a prompt has
catalog/items.parquet     item ids, and semantic IDs as the column `semantic_id`

A graph computes the logits of a whole prompt without a cache of keys and values. Attention is
causal, so prompts of unequal lengths are padded on the right with any token, and the logits at a
prompt's last token are its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys.bundle import CATALOG, DRAFT, PROMPTS, TARGET, Bundle
from recsys.catalog import FILE as ITEMS
from recsys.errors import ArtifactError, ConfigError
from recsys.exporting.folder import make_folder, require_new
from recsys.models.checkpoint import load_model
from recsys.vocabulary import FILE as VOCABULARY

TOLERANCE = 1e-4  # of the logits, relative to the largest one
INLINE_BYTES = 1 << 30  # larger weights lie beside the graph: a file of ONNX ends at 2 GiB


def export(bundle: Path, out: Path) -> dict[str, float | None]:
    """Write the models of a bundle as ONNX in float32, and compare them with torch.

    Returns:
        For each model, the largest difference of its logits from torch's on random prompts, as a
        share of the largest logit; None if onnxruntime is not installed.

    Raises:
        ArtifactError: not a bundle, `out` is not empty, or a graph differs from its model.
        ConfigError: a package of the extra is not installed.
    """
    try:
        import onnx  # noqa: F401 - torch needs it, and onnxscript
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"recsys export onnx: {error.name} is not installed; pip install 'recbeam[onnx]'"
        ) from error
    require_new(out, bundle)
    found = Bundle.load(bundle)
    make_folder(out / CATALOG)
    for name in (VOCABULARY, PROMPTS, f"{CATALOG}/{ITEMS}"):
        shutil.copyfile(found.path / name, out / name)
    gaps = {}
    for part, folder in ((TARGET, found.target), (DRAFT, found.draft)):
        if folder is not None:
            model = load_model(folder, torch.float32)
            file = out / f"{part}.onnx"
            _write(model, file)
            gaps[part] = _compare(model, file, found.encoder.max_tokens)
    return gaps


class _Forward(torch.nn.Module):
    """A causal LM as a function of tokens alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def _write(model: Any, file: Path) -> None:
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    example = torch.ones(2, 5, dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it lists packages that it could also support
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own code
            program = torch.onnx.export(
                _Forward(model).eval(),
                (example,),
                input_names=["input_ids"],
                output_names=["logits"],
                dynamic_shapes=(sizes,),
                dynamo=True,
                verbose=False,
            )
    finally:
        quiet.setLevel(level)
    assert program is not None  # noqa: S101 - so it is without a file
    ClearMetadataAndDocStringPass()(program.model)  # stack traces, with paths of this machine
    program.save(file, external_data=weights > INLINE_BYTES)


def _compare(model: Any, file: Path, longest: int) -> float | None:
    """The largest gap between graph and model on random prompts; None without onnxruntime."""
    # This turns off usage reports to its makers, and must be set before the import.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    rng, worst = np.random.default_rng(0), 0.0
    for shape in ((1, 1), (1, longest), (3, max(1, longest // 2))):
        tokens = rng.integers(0, model.config.vocab_size, shape)
        with torch.inference_mode():
            wanted = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
        (found,) = session.run(None, {"input_ids": tokens})
        worst = max(worst, float(np.abs(found - wanted).max() / np.abs(wanted).max()))
    if not worst <= TOLERANCE:
        raise ArtifactError(
            f"{file}: its logits differ from torch's by {worst:.1e} of the largest one, more than "
            f"{TOLERANCE:.0e}; do not use it"
        )
    return worst
