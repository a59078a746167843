"""ContentIndex: nearest items by the cosine of their words and attribute values (TF-IDF)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from recsys.dataset import ITEM_COLUMNS
from recsys.semantic_ids.words import attribute_terms

COMMONEST = 5000  # terms of more items are left out: they distinguish little and cost much


@dataclass(frozen=True, eq=False)
class Terms:
    """Terms with their inverse document frequencies, which weigh the documents of later items.

    Attributes:
        names: in the order of the columns.
        idf: (terms,) float32.
    """

    names: list[str]
    idf: NDArray[np.float32]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.idf):
            raise ValueError(f"{len(self.names)} terms with {len(self.idf)} frequencies")

    def encode(self, documents: list[list[str]]) -> sparse.csr_array:
        """(n, terms) float32 rows of length 1, or 0."""
        if not self.names:
            return sparse.csr_array((len(documents), 0), dtype=np.float32)
        return sparse.csr_array(self._vectorizer.transform(documents))

    @cached_property
    def _vectorizer(self) -> Any:
        vectorizer = _vectorizer(vocabulary=self.names)
        vectorizer.idf_ = self.idf
        return vectorizer


NO_TERMS = Terms([], np.zeros(0, np.float32))


@dataclass(frozen=True, eq=False)
class ContentIndex:
    """Sparse vectors of items; an item without terms has no neighbours.

    Attributes:
        rows: (items, terms) float32 CSR with rows of length 1, or 0.
        words: terms of titles and texts, which come first.
        values: terms of attribute values.
    """

    rows: sparse.csr_array
    words: Terms = NO_TERMS
    values: Terms = NO_TERMS

    def __post_init__(self) -> None:
        terms = len(self.words.names) + len(self.values.names)
        if self.rows.shape[1] != terms:
            raise ValueError(f"content of {self.rows.shape[1]} columns for {terms} terms")
        self.rows.sort_indices()  # products then add up terms in one order, by item and by term

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    @classmethod
    def of(cls, items: pa.Table) -> ContentIndex | None:
        """The index of a catalog: words of titles and texts, and attribute values, half and half.

        Args:
            items: table with `item_id`, `title`, `text` and attribute columns. Numbers and
                embeddings are left out.

        Returns:
            None if no term describes several items.
        """
        parts, terms = [], []
        for documents in (_words(items), _attribute_terms(items)):
            vectorizer = _vectorizer(min_df=2, max_df=COMMONEST)
            try:
                parts.append(vectorizer.fit_transform(documents))
            except ValueError:  # no term is left
                terms.append(NO_TERMS)
                continue
            names = vectorizer.get_feature_names_out().tolist()
            terms.append(Terms(names, np.asarray(vectorizer.idf_, np.float32)))
        if not parts:
            return None
        return cls(unit_rows(sparse.csr_array(sparse.hstack(parts, format="csr"))), *terms)

    def encode(self, items: pa.Table) -> sparse.csr_array:
        """(n, terms) rows of items that were added later, a table with the same columns."""
        parts = [self.words.encode(_words(items)), self.values.encode(_attribute_terms(items))]
        return unit_rows(sparse.csr_array(sparse.hstack(parts, format="csr")))

    @cached_property
    def columns(self) -> sparse.csr_array:
        """(terms, items) the rows transposed."""
        return sparse.csr_array(self.rows.T)

    def cosines(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, items) cosines of dense unit vectors (n, terms) with the items."""
        return cosines(self.rows, queries)


def cosines(rows: sparse.csr_array, queries: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, items) products of dense queries (n, terms) and sparse rows (items, terms).

    A query has the same bits alone and beside others: SciPy takes another path for one alone.
    """
    columns = np.zeros((queries.shape[1], max(2, len(queries))), np.float32)
    columns[:, : len(queries)] = queries.T
    return np.ascontiguousarray((rows @ columns)[:, : len(queries)].T)


def _vectorizer(**options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(analyzer=list, sublinear_tf=True, dtype=np.float32, **options)


def unit_rows(rows: sparse.csr_array) -> sparse.csr_array:
    """Scale rows to length 1; empty rows stay empty."""
    rows = sparse.csr_array(rows)
    squares = np.add.reduceat(np.append(rows.data**2, 0), rows.indptr[:-1])
    length = np.sqrt(np.where(np.diff(rows.indptr) > 0, squares, 1))
    rows.data = (rows.data / np.repeat(length, np.diff(rows.indptr))).astype(np.float32)
    return rows


def _words(items: pa.Table) -> list[list[str]]:
    """Lower-case words of each item's title and text; none for a title that is the item's id."""
    import re

    lines = zip(*(items[name].to_pylist() for name in ITEM_COLUMNS), strict=True)
    return [
        re.findall(r"\w+", f"{'' if title == item else title} {text or ''}".lower())
        for item, title, text in lines
    ]


def _attribute_terms(items: pa.Table) -> list[list[str]]:
    """`attribute=value` terms of each item, from columns that are not numeric."""
    kinds = zip(items.column_names, items.schema.types, strict=True)
    return attribute_terms(items, {*ITEM_COLUMNS, *(name for name, of in kinds if _is_number(of))})


def _is_number(of: pa.DataType) -> bool:
    """Whether it is a type of numbers, or of lists of them."""
    of = of.value_type if pa.types.is_list(of) else of
    return bool(pa.types.is_integer(of) or pa.types.is_floating(of))
