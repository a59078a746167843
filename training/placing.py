"""Codes of a run with a parent: old items keep theirs, and new items get free ones.

New items are placed as the service places them (`recsys.placement`): by their content, and beside
the nearest code if another item has it. No old code moves. The code book was learned from older
items, so its fit to new ones is measured, and the report says when a full rebuild pays.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.bundle import CATALOG, ITEM_ENCODER, QUANTIZER, Bundle
from recsys.dataset import ITEM_COLUMNS, Dataset
from recsys.errors import ConfigError, ItemError
from recsys.live import Epochs, NewItem
from recsys.semantic_ids.encoder import PLACED, ItemEncoder
from recsys.semantic_ids.report import health

SAMPLE = 10_000  # old items whose error is measured
# Above one of these, a rebuild is advised.
MOST_PLACED = 0.3  # share of the items that were placed since the code book was learned
MOST_MOVED = 0.5  # share of the new items whose own codes were taken
MOST_ERROR = 1.25  # error of new items over that of old ones


def place(
    dataset: Dataset, parent: Bundle, folder: Path
) -> tuple[NDArray[np.int32], dict[str, Any]]:
    """Codes of all items of a data set, and the report on them.

    Writes the parent's quantiser and encoder into `folder`, with the codes that each item would get
    if it were new.

    Args:
        dataset: with items of the parent's schema; imported codes are used for new items.
        parent: the bundle whose codes are kept.
        folder: of the artifact.

    Returns:
        (items, L) codes, and `health` with `new_items`, `placed` (items that were placed since the
        code book was learned) and `drift` (see `measure_drift`), if there are new items.

    Raises:
        ConfigError: a new item that cannot be placed; the message names it.
    """
    ids = dataset.item_ids.tolist()
    numbers = parent.catalog.index(ids)
    new = np.flatnonzero(numbers < 0)
    codes = np.zeros((len(ids), parent.catalog.codes.shape[1]), np.int32)
    codes[numbers >= 0] = parent.catalog.codes[numbers[numbers >= 0]]
    if len(new):
        codes[new] = _codes_of(dataset, new, parent)
    for part in (QUANTIZER, ITEM_ENCODER):
        if (parent.path / CATALOG / part).is_dir():
            shutil.copytree(parent.path / CATALOG / part, folder / part)
    placed = parent.manifest.info.get("placed", 0) + len(new)
    report = {**health(codes), "new_items": len(new), "placed": placed}
    if (coder := parent.coder) is not None:
        meant = coder.encode(dataset.items.take(pa.array(new)))[0] if len(new) else codes[:0]
        if (file := folder / ITEM_ENCODER / PLACED).is_file():
            as_new = np.load(file, allow_pickle=False)[numbers]
            as_new[new] = meant
            np.save(file, as_new, allow_pickle=False)
        if len(new):
            report["drift"] = measure_drift(dataset.items, new, codes, meant, placed, coder)
    return codes, report


def _codes_of(dataset: Dataset, new: NDArray[np.int64], parent: Bundle) -> NDArray[np.int32]:
    """(m, L) codes of the new items, which the live catalog finds."""
    rows = dataset.items.take(pa.array(new)).to_pylist()
    given = [None] * len(new) if dataset.codes is None else dataset.codes[new].tolist()
    items = [
        NewItem(
            row["item_id"],
            row["title"] or "",
            row["text"] or "",
            {key: v for key, v in row.items() if key not in ITEM_COLUMNS and v is not None},
            codes,
        )
        for row, codes in zip(rows, given, strict=True)
    ]
    try:
        catalog = Epochs(parent, coder=parent.coder).upsert(items).catalog
    except ItemError as error:
        raise ConfigError(
            f"ids: {len(new)} items are new to {parent.path}: {error}; or learn new IDs with a run "
            "without a parent"
        ) from error
    return np.asarray(catalog.codes[[catalog.find(item.item_id) for item in items]])


def measure_drift(
    items: pa.Table,
    new: NDArray[np.int64],
    codes: NDArray[np.int32],
    meant: NDArray[np.int32],
    placed: int,
    coder: ItemEncoder,
) -> dict[str, Any]:
    """How well the code book fits new items.

    Args:
        items: all items.
        new: (m,) places of the new ones.
        codes: (items, L).
        meant: (m, L) codes that the encoder computes for the new items.
        placed: items that were placed since the code book was learned.
        coder: of the parent.

    Returns:
        `moved`, the share of new items whose own codes were taken; `shared`, the number of new
        items that share a leaf; `error_new` and `error_old`, the mean squared distance of an item's
        features, encoded as a new item's, from their quantisation; `placed_share`; and `advice`:
        sentences, empty while the code book fits.
    """
    old = np.setdiff1d(np.arange(items.num_rows), new)
    if len(old) > SAMPLE:
        old = np.sort(np.random.default_rng(0).choice(old, SAMPLE, replace=False))
    leaves, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)[1:]
    drift = {
        "moved": float((meant != codes[new]).any(axis=1).mean()),
        "shared": int((counts[leaves.reshape(-1)[new]] > 1).sum()),
        "error_new": _error(items.take(pa.array(new)), coder),
        "error_old": _error(items.take(pa.array(old)), coder) if len(old) else 0.0,
        "placed_share": placed / items.num_rows,
    }
    advice = []
    if drift["placed_share"] > MOST_PLACED:
        advice.append(
            f"{drift['placed_share']:.0%} of the items were placed since the code book was learned."
        )
    if drift["moved"] > MOST_MOVED:
        advice.append(f"The codes of {drift['moved']:.0%} of the new items were taken.")
    if drift["error_new"] > MOST_ERROR * drift["error_old"]:
        advice.append(
            f"The code book describes new items worse than old ones (error "
            f"{drift['error_new']:.3g} against {drift['error_old']:.3g})."
        )
    if advice:
        advice.append("A full rebuild pays: recsys run with all events, under another --name.")
    return {**drift, "advice": advice}


def _error(items: pa.Table, coder: ItemEncoder) -> float:
    features, quantizer = coder.features.encode(items), coder.quantizer
    gaps = features - quantizer.reconstruct(quantizer.encode(features))
    return float((gaps**2).sum(axis=1).mean())
