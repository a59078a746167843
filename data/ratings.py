"""Reads ratings: numbers, yes and no, and texts such as `4 out of 5 stars` and `★★★★☆`."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import read_available
from recsys.data.texts import each_value

POINTS = re.compile(
    r"(-?\d{1,9}(?:[.,]\d*)?)\s*(?:(?:/|out of|of|von|sur|de|su|van)\s*\d{1,3}(?:[.,]0+)?)?"
    r"\s*(?:(?:stars?|sternen?|sterne|stern|etoiles?|étoiles?|estrellas?|stelle?|sterren|points?|punkte?)"
    r"(?: rating)?)?",
    re.IGNORECASE,
)
FULL, EMPTY = "★⭐", "☆✩\ufe0f"  # the last one chooses how the sign before it is drawn


def read_ratings(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Ratings as numbers: (rows,) float32, null where a text is missing or no rating.

    Yes and no are 1 and 0.

    >>> said = pa.chunked_array([["4.0 out of 5 stars", "1/5", "★★★☆☆", "3,5", "no", "good"]])
    >>> read_ratings(said).to_pylist()
    [4.0, 1.0, 3.0, 3.5, 0.0, None]
    """
    answers = pc.cast(read_available(texts), pa.float32())
    return pc.coalesce(each_value(texts, _points, pa.float32()), answers)


def share_of_points(texts: pa.ChunkedArray) -> float:
    """The share of texts that are a number of points or of stars, without yes and no."""
    points = each_value(texts, _points, pa.float32())
    return 1 - points.null_count / len(points) if len(points) else 0.0


def _points(text: str) -> float | None:
    match = POINTS.fullmatch(text)
    if match is not None:
        return float(match[1].replace(",", "."))
    if text and not set(text) - set(FULL + EMPTY):
        return float(sum(text.count(star) for star in FULL))
    return None
