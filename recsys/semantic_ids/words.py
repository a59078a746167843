"""Words: TF-IDF of texts or of lists of values, reduced by a truncated SVD."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

COMMON = 4096  # terms from which features of items are predicted
# Further passes of the randomised SVD over the matrix and further columns of its sketch: a bound on
# its time, which methods that iterate until they converge do not have.
POWER_ITERATIONS, OVERSAMPLING = 4, 32
# The same in float32, from so many entries or rows on.
MANY, MANY_ROWS, FEWER_ITERATIONS, FEWER = 1 << 22, 1 << 15, 2, 8
ROWS_AT_A_TIME = 1 << 16  # bounds the memory of what is made beside a matrix of all items


@dataclass(frozen=True, eq=False)
class Words:
    """A fitted TF-IDF with its truncated SVD: documents -> rows of length 1.

    Attributes:
        terms: terms of the vocabulary, in the order of the columns.
        idf: (T,) float64 inverse document frequencies.
        projection: (T, D) float32 right singular vectors, divided by the square roots of the
            singular values.
        text: whether documents are texts; otherwise they are lists of values.
    """

    terms: list[str]
    idf: NDArray[np.float64]
    projection: NDArray[np.float32]
    text: bool

    def encode(self, documents: list[str] | list[list[str]]) -> NDArray[np.float32]:
        """(n, D) rows of length 1; zero for documents without a known term."""
        return unit_rows(np.asarray(self._weights(documents) @ self.projection))

    def common(self, documents: list[str] | list[list[str]]) -> sparse.csr_array:
        """(n, <=COMMON) weights of the commonest terms of documents."""
        return self._weights(documents)[:, np.argsort(self.idf, kind="stable")[:COMMON]]

    def _weights(self, documents: list[str] | list[list[str]]) -> sparse.csr_array:
        return sparse.csr_array(self._vectorizer.transform(documents))

    @cached_property
    def _vectorizer(self) -> Any:
        vectorizer = _vectorizer(self.text, self.terms)
        vectorizer.idf_ = self.idf
        return vectorizer


def fit_words(
    text: bool, documents: list[str] | list[list[str]], dim: int, seed: int
) -> tuple[NDArray[np.float32], Words | None]:
    """Fit a TF-IDF; return rows of length 1 and the fit, or no columns and None without terms."""
    vectorizer = _vectorizer(text)
    try:
        weights = vectorizer.fit_transform(documents)
    except ValueError:  # scikit-learn: "empty vocabulary", "no terms remain"
        return np.zeros((len(documents), 0), np.float32), None
    left, projection = truncated_svd(sparse.csr_array(weights), dim, seed)
    terms = vectorizer.get_feature_names_out().tolist()
    return unit_rows(left), Words(terms, vectorizer.idf_, projection, text)


def _vectorizer(text: bool, terms: list[str] | None = None) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not text:
        return TfidfVectorizer(analyzer=list, vocabulary=terms)
    # A word of a single item makes it similar to no other item.
    return TfidfVectorizer(
        sublinear_tf=True, stop_words="english", ngram_range=(1, 2), min_df=2, vocabulary=terms
    )


def truncated_svd(
    matrix: sparse.csr_array, dim: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(n, <=dim) left singular vectors times the square roots of their singular values.

    A large matrix is decomposed by the randomised method of Halko, Martinsson and Tropp, "Finding
    structure with randomness" (2011), which passes a fixed number of times over the matrix. Its
    random vectors are drawn from the seed and the largest entry of each column is made positive, so
    the result is deterministic. Also returns the (m, <=dim) matrix that maps rows of `matrix` to
    rows of the result.

    Raises:
        ValueError: a value is not finite.
    """
    if not np.isfinite(matrix.data).all():
        raise ValueError("a matrix with values that are not finite has no decomposition")
    further, iterations, matrix = OVERSAMPLING, POWER_ITERATIONS, matrix.astype(np.float64)
    if matrix.nnz > MANY or matrix.shape[0] > MANY_ROWS:
        further, iterations, matrix = FEWER, FEWER_ITERATIONS, matrix.astype(np.float32)
    if dim + further <= min(matrix.shape):
        left, values, right = _randomised_svd(matrix, dim + further, iterations, seed)
    else:
        left, values, right = np.linalg.svd(matrix.toarray(), full_matrices=False)
    left, values, right = left[:, :dim], values[:dim], right[:dim]
    keep = values > values.max(initial=0) * 1e-6
    left, values, right = left[:, keep], values[keep], right[keep]
    sign = np.sign(left[np.abs(left).argmax(axis=0), np.arange(left.shape[1])])
    root = np.sqrt(values)
    return np.asarray(left * sign * root, np.float32), np.asarray(right.T * sign / root, np.float32)


def _randomised_svd(
    matrix: sparse.csr_array, dim: int, iterations: int, seed: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(n, r) left vectors, (r,) values and (r, m) right vectors, r <= dim.

    Directions are made orthogonal by the eigenvectors of (dim, dim) products, which takes a small
    part of the time of decomposing the tall matrices.
    """
    right = np.random.default_rng(seed).standard_normal((matrix.shape[1], dim), matrix.dtype)
    for _ in range(1 + iterations):
        product = matrix @ right
        turn, values = _spectrum(product)
        left = product @ (turn / values)
        product = matrix.T @ left
        turn, values = _spectrum(product)
        right = product @ (turn / values)
    # A row of the matrix, mapped by the right vectors, is exactly its row of the left ones.
    return matrix @ right / values, values, right.T


def _spectrum(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(d, r) right vectors and (r,) singular values of (n, d) rows, the largest first."""
    squares, turn = np.linalg.eigh((rows.T @ rows).astype(np.float64))
    keep = squares > 10 * np.finfo(rows.dtype).eps * squares.max(initial=0)
    turn, squares = turn[:, keep][:, ::-1], squares[keep][::-1]
    return turn.astype(rows.dtype), np.sqrt(squares).astype(rows.dtype)


def attribute_terms(items: pa.Table, left_out: Container[str]) -> list[list[str]]:
    """`attribute=value` terms of each item, from all columns but those that are left out."""
    terms: list[list[str]] = [[] for _ in range(items.num_rows)]
    for name in (name for name in items.column_names if name not in left_out):
        for own, value in zip(terms, items[name].to_pylist(), strict=True):
            values = value if isinstance(value, list) else [value]
            own.extend(f"{name}={v}" for v in values if v is not None and v != "")
    return terms


def unit_rows(
    matrix: NDArray[np.floating], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Scale (n, D) rows to length 1, into `out`, which may be `matrix`; zero rows stay zero."""
    unit = np.empty(matrix.shape, np.float32) if out is None else out
    for start in range(0, len(matrix), ROWS_AT_A_TIME):
        some = matrix[start : start + ROWS_AT_A_TIME]
        norms = np.linalg.norm(some, axis=1, keepdims=True)
        unit[start : start + ROWS_AT_A_TIME] = some / np.where(norms > 0, norms, 1)
    return unit
