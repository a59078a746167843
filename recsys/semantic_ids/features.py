"""Item features: text ⊕ attributes ⊕ collaborative, one float32 row per item.

Each block is reduced by a truncated SVD, normalised to rows of length 1, weighted and concatenated,
so a squared distance is a weighted sum of the blocks' distances. Blocks without data are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from recsys.dataset import AVAILABILITY, ITEM_COLUMNS
from recsys.errors import ConfigError, DataError
from recsys.interactions import Histories
from recsys.semantic_ids.collaborative import ppmi_block, predict, sasrec_block
from recsys.semantic_ids.settings import FeatureConfig
from recsys.semantic_ids.words import Words, attribute_terms, fit_words, unit_rows


@dataclass(frozen=True)
class Features:
    """Item features, their blocks and their encoder.

    Attributes:
        matrix: (items, D) float32.
        blocks: name -> number of columns, in their order.
        encoder: encodes other items.
        predicted: (items, D) the collaborative features as content predicts them; None without any.
    """

    matrix: NDArray[np.float32]
    blocks: dict[str, int]
    encoder: FeatureEncoder
    predicted: NDArray[np.float32] | None = None

    def as_new(self) -> NDArray[np.float32] | None:
        """(items, D) what the encoder would make of each item if it were new; None without content.

        The collaborative features are predictions without the item.
        """
        if not {"text", "attributes"} & set(self.blocks):
            return None
        matrix = self.matrix.copy()
        if self.predicted is not None and "collaborative" in self.blocks:
            start = sum(self.blocks.get(name, 0) for name in ("text", "attributes"))
            matrix[:, start : start + self.predicted.shape[1]] = self.predicted
        return matrix


@dataclass(frozen=True, eq=False)
class FeatureEncoder:
    """Encodes items that were added after the features were fitted.

    Their collaborative features are predicted from their content and scaled to the length of known
    ones, because short vectors lie between the codes.

    Attributes:
        blocks: as in `Features`.
        weights: name -> weight of the block.
        embedding_column: column of ready embeddings that replaces texts, or None.
        words: TF-IDF of the texts, or None.
        values: TF-IDF of the attribute values, or None.
        numbers: numeric attribute -> mean and standard deviation.
        columns: attributes in use, in order.
        prediction: (F, D) regression of collaborative features on terms of text and attributes.
    """

    blocks: dict[str, int]
    weights: dict[str, float]
    embedding_column: str | None
    words: Words | None
    values: Words | None
    numbers: dict[str, tuple[float, float]]
    columns: list[str]
    prediction: NDArray[np.float64]

    def encode(self, items: pa.Table) -> NDArray[np.float32]:
        """(n, D) features of items, a table with the columns of the fitted items."""
        parts = {}
        if "text" in self.blocks:
            if self.words is not None:
                block = self.words.encode(_texts(items))
            else:
                block = unit_rows(_embedding_column(items, str(self.embedding_column)))
            parts["text"] = self.weights["text"] * block
        if "attributes" in self.blocks:
            columns, values = items.select(self.columns), None
            if self.values is not None:
                values = self.values.encode(attribute_terms(columns, self.numbers))
            block = _attribute_rows(columns, self.numbers, values)
            parts["attributes"] = self.weights["attributes"] * block
        if "collaborative" in self.blocks:
            predicted = unit_rows(self.terms(items) @ self.prediction)
            for name in ("collaborative", "predicted"):
                if name in self.blocks:
                    parts[name] = self.weights[name] * predicted
        return np.concatenate(list(parts.values()), axis=1).astype(np.float32)

    def terms(self, items: pa.Table) -> sparse.csr_array:
        """(n, F) what collaborative features are predicted from: terms, numbers, embeddings.

        Unlike the blocks, terms are not reduced: a brand of three items says much about them.
        """
        parts = [sparse.csr_array((items.num_rows, 0))]
        if "text" in self.blocks and self.words is not None:
            parts.append(self.words.common(_texts(items)))
        elif "text" in self.blocks:
            rows = unit_rows(_embedding_column(items, str(self.embedding_column)))
            parts.append(sparse.csr_array(rows))
        if "attributes" in self.blocks:
            columns = items.select(self.columns)
            if self.values is not None:
                parts.append(self.values.common(attribute_terms(columns, self.numbers)))
            parts.append(sparse.csr_array(_attribute_rows(columns, self.numbers, None)))
        return sparse.csr_array(sparse.hstack(parts, format="csr"))


def build_features(
    items: pa.Table,
    histories: Histories,
    config: FeatureConfig,
    seed: int = 0,
    vectors: NDArray[np.float32] | None = None,
) -> Features:
    """Fit the features of all items, in dense order.

    Args:
        items: table with `item_id`, `title`, `text` and attribute columns.
        histories: training events only; others would leak the targets into the semantic IDs.
        config: blocks, weights and dimensions.
        seed: seed of the SVD's start vectors.
        vectors: (items, D) item vectors of SASRec, for `collaborative: sasrec`.

    Raises:
        ConfigError: a missing embedding column.
        DataError: there is no data for any block.
    """
    blocks, encoder = _fit_content(items, config, seed)
    as_new = None
    if config.collaborative_weight > 0:
        block = _collaborative(items, histories, config, vectors, seed)
        predicted, prediction = predict(block, encoder.terms(items))
        encoder = replace(encoder, prediction=prediction)
        # Zeros would put all unseen items together, far from similar items.
        unseen = ~block.any(axis=1)
        block[unseen] = predicted[unseen]
        blocks["collaborative"] = config.collaborative_weight * block
        as_new = config.collaborative_weight * predicted
        blocks["predicted"] = config.predicted_weight * predicted
    blocks = {name: block for name, block in blocks.items() if block.any()}
    if not blocks:
        raise DataError(
            "items have no text, no attributes and no co-occurrence in training, so there is "
            "nothing to make semantic IDs of; add texts or attributes to the items"
        )
    matrix = np.concatenate(list(blocks.values()), axis=1, dtype=np.float32)
    sizes = {name: block.shape[1] for name, block in blocks.items()}
    names = {name: f"{name.removesuffix('s')}_weight" for name in blocks}
    weights = {block: float(getattr(config, setting)) for block, setting in names.items()}
    encoder = replace(encoder, blocks=sizes, weights=weights)
    return Features(matrix, sizes, encoder, as_new)


def _fit_content(
    items: pa.Table, config: FeatureConfig, seed: int
) -> tuple[dict[str, NDArray[np.float32]], FeatureEncoder]:
    """The blocks that do not depend on events, without empty ones, and their encoder."""
    blocks: dict[str, NDArray[np.float32]] = {}
    words = values = None
    numbers: dict[str, tuple[float, float]] = {}
    if config.text_weight > 0:
        block, words = _fit_text(items, config, seed)
        blocks["text"] = config.text_weight * block
    used = {*ITEM_COLUMNS, *AVAILABILITY, config.embedding_column}
    columns = items.select([c for c in items.column_names if c not in used])
    if config.attribute_weight > 0:
        block, numbers, values = _fit_attributes(columns, config.attribute_dim, seed)
        blocks["attributes"] = config.attribute_weight * block
    # An empty block does not take part in the prediction either.
    blocks = {name: block for name, block in blocks.items() if block.any()}
    sizes = {name: block.shape[1] for name, block in blocks.items()}
    column, names = config.embedding_column, columns.column_names
    no = np.zeros((0, 0))
    return blocks, FeatureEncoder(sizes, {}, column, words, values, numbers, names, no)


def _collaborative(
    items: pa.Table,
    histories: Histories,
    config: FeatureConfig,
    vectors: NDArray[np.float32] | None,
    seed: int,
) -> NDArray[np.float32]:
    if config.collaborative == "ppmi":
        return ppmi_block(histories, items.num_rows, config.window, config.collaborative_dim, seed)
    if vectors is None:
        raise ConfigError(
            "features.collaborative: 'sasrec' needs the vectors of a trained SASRec; train one, or "
            "choose 'ppmi'"
        )
    return sasrec_block(histories, vectors)


def _fit_text(
    items: pa.Table, config: FeatureConfig, seed: int
) -> tuple[NDArray[np.float32], Words | None]:
    """(items, D) embeddings of title and text, D = 0 without any text; the fitted TF-IDF."""
    if config.embedding_column is not None:
        return unit_rows(_embedding_column(items, config.embedding_column)), None
    texts = _texts(items)
    if not any(texts):
        return np.zeros((len(texts), 0), np.float32), None
    return fit_words(True, texts, config.text_dim, seed)


def _fit_attributes(
    columns: pa.Table, dim: int, seed: int
) -> tuple[NDArray[np.float32], dict[str, tuple[float, float]], Words | None]:
    """(items, D) features of attribute columns; moments of the numbers, fitted TF-IDF of the rest.

    Strings, booleans and lists are weighted by TF-IDF, in rows of length 1. Numbers are
    standardised (the mean replaces missing ones) and scaled to the same mean square.
    """
    numbers = {
        name: _moments(columns[name])
        for name in columns.column_names
        if pa.types.is_integer(columns[name].type) or pa.types.is_floating(columns[name].type)
    }
    documents, words = attribute_terms(columns, numbers), None
    block = np.zeros((columns.num_rows, 0), np.float32)
    if any(documents):
        block, words = fit_words(False, documents, dim, seed)
    return _attribute_rows(columns, numbers, None if words is None else block), numbers, words


def _attribute_rows(
    columns: pa.Table, numbers: dict[str, tuple[float, float]], values: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """(n, D) features of attribute columns: numbers, and the rows of all other values."""
    parts: list[NDArray[np.floating]] = []
    if numbers:
        scores = [_standardised(columns[name], *moments) for name, moments in numbers.items()]
        parts.append(np.stack(scores, axis=1) / np.sqrt(len(numbers)))
    if values is not None:
        parts.append(values)
    if not parts:
        return np.zeros((columns.num_rows, 0), np.float32)
    return np.asarray(np.concatenate(parts, axis=1) / np.sqrt(len(parts)), np.float32)


def _texts(items: pa.Table) -> list[str]:
    """Title and text of each item. A title that is the item's id says nothing and is left out."""

    def joined(item: str, title: str, text: str | None) -> str:
        if title == item:
            return text or ""
        if not text:
            return title
        return text if text.startswith(title) else f"{title}. {text}"

    ids, titles, texts = (items[name].to_pylist() for name in ITEM_COLUMNS)
    return list(map(joined, ids, titles, texts))


def _embedding_column(items: pa.Table, name: str) -> NDArray[np.float32]:
    if name not in items.column_names:
        raise ConfigError(
            f"ids.features.embedding_column: items have no column {name!r}; "
            f"they have {', '.join(items.column_names)}"
        )
    try:
        embeddings = np.asarray(items[name].to_pylist(), np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"items.{name}: want one list of numbers per item: {error}") from error
    if embeddings.ndim != 2 or not np.isfinite(embeddings).all():
        raise DataError(f"items.{name}: want finite lists of one length, one per item")
    return embeddings


def _moments(column: pa.ChunkedArray) -> tuple[float, float]:
    """Mean and standard deviation of the known numbers; (0, 0) if there are none."""
    values = np.asarray(pc.cast(column, pa.float64()).to_numpy(), np.float64)
    known = values[np.isfinite(values)]
    return (float(known.mean()), float(known.std())) if len(known) else (0.0, 0.0)


def _standardised(column: pa.ChunkedArray, mean: float, deviation: float) -> NDArray[np.float64]:
    values = np.asarray(pc.cast(column, pa.float64()).to_numpy(), np.float64)
    known = np.isfinite(values)
    if deviation == 0:
        return np.zeros(len(values))
    return np.where(known, np.clip((values - mean) / deviation, -3, 3), 0)
