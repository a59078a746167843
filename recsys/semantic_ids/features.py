"""Item features: text ⊕ collaborative ⊕ attributes, one float32 row an item.

Each block is reduced by a truncated SVD, brought to rows of length 1, weighted, and set beside the
others, so a squared distance is a weighted sum of the blocks' distances. Blocks that a data set has
nothing for are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import svds

from recsys.dataset import ITEM_COLUMNS
from recsys.errors import ConfigError, DataError
from recsys.interactions import Histories


@dataclass(frozen=True)
class FeatureConfig:
    """Settings of the item features. A weight of 0 leaves a block out.

    Attributes:
        text_weight: of titles and texts.
        text_dim: kept dimensions of their TF-IDF.
        text_model: folder of a sentence-transformers model; replaces TF-IDF.
        embedding_column: column of items.parquet with ready embeddings (list of float); replaces
            both.
        collaborative: what histories say of an item: `ppmi`, its co-occurrence with others, or
            `sasrec`, the vector that it has in the run's SASRec.
        collaborative_weight: of that.
        collaborative_dim: kept dimensions of the PPMI matrix.
        window: items at most this far apart in a history co-occur.
        attribute_weight: of the attribute columns.
        attribute_dim: kept dimensions of the TF-IDF of attribute values.
    """

    text_weight: float = 1.0
    text_dim: int = 128
    text_model: Path | None = None
    embedding_column: str | None = None
    collaborative: Literal["ppmi", "sasrec"] = "ppmi"
    collaborative_weight: float = 1.0
    collaborative_dim: int = 128
    window: int = 10
    attribute_weight: float = 0.5
    attribute_dim: int = 64


@dataclass(frozen=True)
class Features:
    """Item features and what they are made of.

    Attributes:
        matrix: (items, D) float32.
        blocks: name -> number of columns, in their order.
        encoder: the same of other items; None where texts go through a model, which stays outside.
    """

    matrix: NDArray[np.float32]
    blocks: dict[str, int]
    encoder: FeatureEncoder | None = None


@dataclass(frozen=True, eq=False)
class Words:
    """A fitted TF-IDF with its truncated SVD: documents -> rows of length 1.

    Attributes:
        terms: of the vocabulary, in the order of its columns.
        idf: (T,) float64.
        projection: (T, D) float32, right singular vectors over the roots of the singular values.
        text: documents are texts; else lists of values.
    """

    terms: list[str]
    idf: NDArray[np.float64]
    projection: NDArray[np.float32]
    text: bool

    def encode(self, documents: list[str] | list[list[str]]) -> NDArray[np.float32]:
        """(n, D) unit rows; zero where a document has no known term."""
        weights = self._vectorizer.transform(documents)
        return _unit(np.asarray(weights @ self.projection))

    @cached_property
    def _vectorizer(self) -> Any:
        vectorizer = _vectorizer(self.text, self.terms)
        vectorizer.idf_ = self.idf
        return vectorizer


@dataclass(frozen=True, eq=False)
class FeatureEncoder:
    """Features of items that were not there when the others' were made.

    What is collaborative is not known of them; it is predicted from their content, and brought to
    the length that it has where it is known: short ones fall between the codes.

    Attributes:
        blocks: as in `Features`.
        weights: name -> weight of the block.
        embedding_column: column of ready embeddings, instead of texts.
        words: of the texts; None without.
        values: of the attribute values; None without.
        numbers: attribute -> mean and standard deviation.
        columns: attributes that are looked at, in order.
        prediction: (F, D) from text and attributes to what is collaborative.
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
        """(n, D) features of a table of items with the columns of those that it was made from."""
        parts = {}
        if "text" in self.blocks:
            if self.words is not None:
                block = self.words.encode(_texts(items))
            else:
                block = _unit(_embedding_column(items, str(self.embedding_column)))
            parts["text"] = self.weights["text"] * block
        if "attributes" in self.blocks:
            columns, values = items.select(self.columns), None
            if self.values is not None:
                values = self.values.encode(_values(columns, self.numbers))
            block = _attribute_rows(columns, self.numbers, values)
            parts["attributes"] = self.weights["attributes"] * block
        if "collaborative" in self.blocks:
            content = np.concatenate([np.zeros((items.num_rows, 0)), *parts.values()], axis=1)
            predicted = _unit(content @ self.prediction)
            parts["collaborative"] = self.weights["collaborative"] * predicted
        return np.concatenate(list(parts.values()), axis=1).astype(np.float32)


def build_features(
    items: pa.Table,
    histories: Histories,
    config: FeatureConfig,
    seed: int = 0,
    vectors: NDArray[np.float32] | None = None,
) -> Features:
    """Features of every item.

    Args:
        items: table with `item_id`, `title`, `text` and attribute columns, in dense order.
        histories: TRAINING events alone; anything else leaks the answers into the IDs.
        config: blocks, weights and dimensions.
        seed: of the SVD's start vectors.
        vectors: (items, D) that SASRec has, for `collaborative: sasrec`.

    Raises:
        ConfigError: a model folder or an embedding column that is not there.
        DataError: no block has anything to say.
    """
    blocks: dict[str, NDArray[np.float32]] = {}
    words = values = None
    numbers: dict[str, tuple[float, float]] = {}
    if config.text_weight > 0:
        block, words = _fit_text(items, config, seed)
        blocks["text"] = config.text_weight * block
    used = {*ITEM_COLUMNS, config.embedding_column}
    columns = items.select([c for c in items.column_names if c not in used])
    if config.attribute_weight > 0:
        block, numbers, values = _fit_attributes(columns, config.attribute_dim, seed)
        blocks["attributes"] = config.attribute_weight * block
    # a block without anything to say has no part in the prediction of another either
    blocks = {name: block for name, block in blocks.items() if block.any()}
    prediction = np.zeros((0, 0))
    if config.collaborative_weight > 0:
        if config.collaborative == "sasrec":
            if vectors is None:
                raise ConfigError("features.collaborative: sasrec wants the vectors of one")
            block = sasrec_block(histories, vectors)
        else:
            block = collaborative_block(
                histories, items.num_rows, config.window, config.collaborative_dim, seed
            )
        content = np.concatenate([np.zeros((items.num_rows, 0)), *blocks.values()], axis=1)
        prediction = predict_from(block, content)
        blocks["collaborative"] = config.collaborative_weight * fill_unseen(block, content)
        blocks = {name: block for name, block in blocks.items() if block.any()}
    if not blocks:
        raise DataError(
            "items have no text, no attributes and no co-occurrence in training: "
            "there is nothing to make semantic IDs of"
        )
    matrix = np.concatenate(list(blocks.values()), axis=1).astype(np.float32)
    sizes = {name: block.shape[1] for name, block in blocks.items()}
    weights = {name: float(getattr(config, f"{_WEIGHTS[name]}_weight")) for name in blocks}
    encoder = FeatureEncoder(
        sizes,
        weights,
        config.embedding_column,
        words,
        values,
        numbers,
        columns.column_names,
        prediction,
    )
    own = config.text_model is None or config.embedding_column is not None or "text" not in blocks
    return Features(matrix, sizes, encoder if own else None)


_WEIGHTS = {"text": "text", "attributes": "attribute", "collaborative": "collaborative"}


def _fit_text(
    items: pa.Table, config: FeatureConfig, seed: int
) -> tuple[NDArray[np.float32], Words | None]:
    """(items, D) embeddings of title and text, D = 0 where there is no text; its fitted TF-IDF."""
    if config.embedding_column is not None:
        return _unit(_embedding_column(items, config.embedding_column)), None
    texts = _texts(items)
    if not any(texts):
        return np.zeros((len(texts), 0), np.float32), None
    if config.text_model is not None:
        return _unit(_sentence_embeddings(texts, config.text_model)), None
    return _tfidf_svd(True, texts, config.text_dim, seed)


def _fit_attributes(
    columns: pa.Table, dim: int, seed: int
) -> tuple[NDArray[np.float32], dict[str, tuple[float, float]], Words | None]:
    """(items, D) features of attribute columns; moments of the numbers, fitted TF-IDF of the rest.

    Strings, booleans and lists are values, weighted by TF-IDF, in rows of length 1; numbers are
    standardised (a missing one is the mean) and scaled to the same mean square.
    """
    numbers = {
        name: _moments(columns[name])
        for name in columns.column_names
        if pa.types.is_integer(columns[name].type) or pa.types.is_floating(columns[name].type)
    }
    documents, words = _values(columns, numbers), None
    block = np.zeros((columns.num_rows, 0), np.float32)
    if any(documents):
        block, words = _tfidf_svd(False, documents, dim, seed)
    return _attribute_rows(columns, numbers, None if words is None else block), numbers, words


def _attribute_rows(
    columns: pa.Table, numbers: dict[str, tuple[float, float]], values: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """(n, D) features of attribute columns: numbers, and rows made of all other values."""
    parts: list[NDArray[np.floating]] = []
    if numbers:
        scores = [_standardised(columns[name], *moments) for name, moments in numbers.items()]
        parts.append(np.stack(scores, axis=1) / np.sqrt(len(numbers)))
    if values is not None:
        parts.append(values)
    if not parts:
        return np.zeros((columns.num_rows, 0), np.float32)
    return np.asarray(np.concatenate(parts, axis=1) / np.sqrt(len(parts)), np.float32)


def _values(columns: pa.Table, numbers: dict[str, tuple[float, float]]) -> list[list[str]]:
    """`attribute=value` of each item, of all columns that are no numbers."""
    words: list[list[str]] = [[] for _ in range(columns.num_rows)]
    for name in columns.column_names:
        if name in numbers:
            continue
        for row, value in zip(words, columns[name].to_pylist(), strict=True):
            values = value if isinstance(value, list) else [value]
            row.extend(f"{name}={v}" for v in values if v is not None and v != "")
    return words


def collaborative_block(
    histories: Histories, num_items: int, window: int, dim: int, seed: int
) -> NDArray[np.float32]:
    """(items, D) truncated SVD of the PPMI of co-occurrence; zeros for items never seen.

    Levy and Goldberg, "Neural Word Embedding as Implicit Matrix Factorization" (2014): a context is
    an item at most `window` places away, contexts are smoothed by the power 0.75, and the singular
    values are split evenly.
    """
    counts = _cooccurrence(histories, num_items, window)
    if not counts.nnz:
        return np.zeros((num_items, 0), np.float32)
    item_mass = np.asarray(counts.sum(axis=1)).reshape(-1)
    context_mass = np.asarray(counts.sum(axis=0)).reshape(-1) ** 0.75
    pairs = counts.tocoo()
    expected = item_mass[pairs.row] * context_mass[pairs.col] / context_mass.sum()
    pairs.data = np.maximum(np.log(pairs.data / expected), 0)
    return _unit(_svd(pairs.tocsr(), dim, seed)[0])


def sasrec_block(histories: Histories, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """(items, D) a model's vectors, centred, in rows of length 1; zeros for items never seen.

    What it has for those is where they began, pushed away by every sample that they were in.

    Args:
        histories: training events.
        vectors: (items, D).
    """
    seen = np.bincount(histories.items, minlength=len(vectors)) > 0
    centred = vectors - vectors[seen].mean(axis=0)
    return np.where(seen[:, None], _unit(centred), np.float32(0))


def fill_unseen(
    collaborative: NDArray[np.float32], content: NDArray[np.floating]
) -> NDArray[np.float32]:
    """Rows of items without co-occurrence, predicted from their content by ridge regression.

    A zero would put all new items together, far from what they resemble; the prediction is short
    where content says little.

    Args:
        collaborative: (items, D), zero rows where nothing is known.
        content: (items, F), zero rows where there is no content either; those stay zero.
    """
    unseen = ~collaborative.any(axis=1) & content.any(axis=1)
    if not unseen.any():
        return collaborative
    out = collaborative.copy()
    out[unseen] = content[unseen] @ predict_from(collaborative, content)
    return out


def predict_from(
    collaborative: NDArray[np.float32], content: NDArray[np.floating]
) -> NDArray[np.float64]:
    """(F, D) ridge regression of what is collaborative on content, over items that have both."""
    both = collaborative.any(axis=1) & content.any(axis=1)
    x = content[both].astype(np.float64)
    gram = x.T @ x + np.eye(x.shape[1])
    return np.asarray(np.linalg.solve(gram, x.T @ collaborative[both]))


def _cooccurrence(histories: Histories, num_items: int, window: int) -> sparse.csr_array:
    """(items, items) symmetric counts of different items within `window` places of each other."""
    rows, items = histories.rows, histories.items
    counts = sparse.csr_array((num_items, num_items), dtype=np.float64)
    for gap in range(1, min(window, int(histories.lengths.max(initial=0)) - 1) + 1):
        same = (rows[gap:] == rows[:-gap]) & (items[gap:] != items[:-gap])
        one, other = items[:-gap][same], items[gap:][same]
        counts = counts + sparse.csr_array(
            (np.ones(len(one)), (one, other)), shape=(num_items, num_items)
        )
    return counts + counts.T


def _texts(items: pa.Table) -> list[str]:
    """The text of each item, behind its title where it does not begin with it; empty stays empty.

    A title without a text is a placeholder, and says nothing.
    """
    titles, texts = (items[name].to_pylist() for name in ("title", "text"))
    return [
        text if not text or text.startswith(title) else f"{title}. {text}"
        for title, text in zip(titles, texts, strict=True)
    ]


def _embedding_column(items: pa.Table, name: str) -> NDArray[np.float32]:
    if name not in items.column_names:
        raise ConfigError(
            f"ids.features.embedding_column: items have no column {name!r}; "
            f"they have {', '.join(items.column_names)}"
        )
    try:
        embeddings = np.asarray(items[name].to_pylist(), np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"items.{name}: want one list of numbers an item: {error}") from error
    if embeddings.ndim != 2 or not np.isfinite(embeddings).all():
        raise DataError(f"items.{name}: want finite lists of one length, one an item")
    return embeddings


def _sentence_embeddings(texts: list[str], folder: Path) -> NDArray[np.float32]:
    if not folder.is_dir():
        raise ConfigError(f"ids.features.text_model: {folder} is not a folder")
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "ids.features.text_model needs sentence-transformers, which is not installed; "
            "`pip install sentence-transformers`, or leave text_model empty to use TF-IDF"
        ) from error
    model = SentenceTransformer(str(folder), local_files_only=True, trust_remote_code=False)
    return np.asarray(model.encode(texts, convert_to_numpy=True), np.float32)


def _vectorizer(text: bool, terms: list[str] | None = None) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not text:
        return TfidfVectorizer(analyzer=_as_it_is, vocabulary=terms)
    # A word of one item alone likens it to none.
    return TfidfVectorizer(
        sublinear_tf=True, stop_words="english", ngram_range=(1, 2), min_df=2, vocabulary=terms
    )


def _as_it_is(document: list[str]) -> list[str]:
    return document


def _tfidf_svd(
    text: bool, documents: list[str] | list[list[str]], dim: int, seed: int
) -> tuple[NDArray[np.float32], Words | None]:
    """Unit rows of the truncated SVD of a TF-IDF matrix; no columns where no word is left."""
    vectorizer = _vectorizer(text)
    try:
        weights = vectorizer.fit_transform(documents)
    except ValueError:  # scikit-learn: "empty vocabulary", "no terms remain"
        return np.zeros((len(documents), 0), np.float32), None
    left, projection = _svd(sparse.csr_array(weights), dim, seed)
    terms = vectorizer.get_feature_names_out().tolist()
    return _unit(left), Words(terms, vectorizer.idf_, projection, text)


def _svd(
    matrix: sparse.csr_array, dim: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(n, <=dim) left singular vectors times the square roots of their singular values.

    The start vector is drawn from the seed and each column's largest entry is made positive, so
    the answer is one. Also the (m, <=dim) matrix that maps rows of `matrix` to it.
    """
    matrix = matrix.astype(np.float64)
    if dim < min(matrix.shape):
        start = np.random.default_rng(seed).standard_normal(min(matrix.shape))
        left, values, right = svds(matrix, k=dim, v0=start, solver="arpack")
        left, values, right = left[:, ::-1], values[::-1], right[::-1]
    else:
        left, values, right = np.linalg.svd(matrix.toarray(), full_matrices=False)
    keep = values > values[0] * 1e-6
    left, values, right = left[:, keep], values[keep], right[keep]
    sign = np.sign(left[np.abs(left).argmax(axis=0), np.arange(left.shape[1])])
    root = np.sqrt(values)
    return np.asarray(left * sign * root, np.float32), np.asarray(right.T * sign / root, np.float32)


def _moments(column: pa.ChunkedArray) -> tuple[float, float]:
    """Mean and standard deviation of the numbers that are known; (0, 0) without any."""
    values = np.asarray(pc.cast(column, pa.float64()).to_numpy(), np.float64)
    known = values[np.isfinite(values)]
    return (float(known.mean()), float(known.std())) if len(known) else (0.0, 0.0)


def _standardised(column: pa.ChunkedArray, mean: float, deviation: float) -> NDArray[np.float64]:
    values = np.asarray(pc.cast(column, pa.float64()).to_numpy(), np.float64)
    known = np.isfinite(values)
    if deviation == 0:
        return np.zeros(len(values))
    return np.where(known, np.clip((values - mean) / deviation, -3, 3), 0)


def _unit(matrix: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rows scaled to length 1; a zero row stays."""
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    return np.asarray(matrix / np.where(norms > 0, norms, 1), np.float32)
