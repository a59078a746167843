"""MovieLens: `u.data` and `u.item` (100k, latin-1), or `ratings.csv` and `movies.csv` (later ones).

The path is the folder. Genres and years become attributes; item ids are those of GroupLens.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import raw
from recsys.data.files import read_lines, read_text
from recsys.data.report import sentence
from recsys.errors import DataError

# In the order of the flags in u.item (file u.genre).
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
NO_GENRE = ("unknown", "(no genres listed)")
_YEAR = re.compile(r"\((\d{4})(?:[-–]\d{0,4})?\)\s*$")
_EVENT_TYPES = {"userId": "VARCHAR", "movieId": "VARCHAR", "rating": "FLOAT", "timestamp": "BIGINT"}
_MOVIE_TYPES = {"movieId": "VARCHAR", "title": "VARCHAR", "genres": "VARCHAR"}


def files(config: raw.ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions` and `items`.

    Raises:
        DataError: the folder holds neither edition.
    """
    for interactions, items in (("u.data", "u.item"), ("ratings.csv", "movies.csv")):
        if (config.path / interactions).is_file():
            return {"interactions": config.path / interactions, "items": config.path / items}
    raise DataError(sentence("no_movielens", path=config.path))


def read(config: raw.ReaderConfig) -> raw.EventStream:
    """Read a MovieLens data set.

    Raises:
        DataError: malformed files, or a csv file without GroupLens's header.
    """
    paths = files(config)
    if paths["interactions"].name == "u.data":
        ratings = _read(paths["interactions"], _EVENT_TYPES, sep="\t", header=False, quotechar="")
        movies = _movies_100k(paths["items"])
    else:
        ratings = _read(paths["interactions"], _EVENT_TYPES)
        table = _read(paths["items"], _MOVIE_TYPES, optional=("title", "genres"))
        rows = zip(*(table[name].to_pylist() for name in _MOVIE_TYPES), strict=True)
        movies = {movie: (title or "", (genres or "").split("|")) for movie, title, genres in rows}
    events = raw.events_table(
        ratings["userId"],
        ratings["movieId"],
        timestamp=ratings["timestamp"],
        rating=ratings["rating"],
    )
    ids, missing = raw.describe_all(movies, events)
    titles = {movie: title.strip() for movie, (title, _) in movies.items()}
    genres = {m: [g for g in listed if g not in NO_GENRE] for m, (_, listed) in movies.items()}
    years = {movie: _YEAR.search(title) for movie, title in titles.items()}
    attributes = {
        "genres": pa.array([genres.get(i, []) for i in ids], pa.list_(pa.string())),
        "year": pa.array([int(y[1]) if (y := years.get(i)) else None for i in ids], pa.int64()),
    }
    return raw.RawData(
        events,
        raw.items_table(ids, titles, {}, attributes),
        counts={"items_without_metadata": missing},
    ).stream()


def _movies_100k(path: Path) -> dict[str, tuple[str, list[str]]]:
    movies = {}
    for number, line in enumerate(read_text(path, "latin-1").splitlines(), 1):
        movie, *fields = line.split("|")
        if not movie or len(fields) != 4 + len(GENRES):
            raise DataError(f"{path}:{number}: no id, or other than {5 + len(GENRES)} columns")
        flags = zip(GENRES, fields[4:], strict=True)
        movies[movie] = (fields[0], [genre for genre, flag in flags if flag == "1"])
    return movies


def _read(
    path: Path, types: dict[str, str], optional: Collection[str] = (), **dialect: Any
) -> pa.Table:
    """Read a whole file; the columns may be empty in some rows only if they are `optional`.

    Raises:
        DataError: missing, not in the form of GroupLens, or a column is empty in a row.
    """
    _, first = next(read_lines(path))
    if not dialect and first.split(",") != list(types):
        said = {"path": path, "wanted": ",".join(types), "shown": first[:60]}
        raise DataError(sentence("converted_movielens", **said))
    options = {"sep": ",", "header": True, "quotechar": '"', **dialect}
    try:
        with duckdb.connect(":memory:") as connection:
            rows = connection.read_csv(str(path), columns=types, auto_detect=False, **options)
            table = rows.to_arrow_table()
    except duckdb.Error as error:
        raise DataError(f"{path}: {'; '.join(str(error).splitlines()[:3])}") from error
    for name in set(types) - set(optional):
        row = pc.index(pc.is_null(table[name]), True).as_py()
        if row >= 0:
            raise DataError(f"{path}: column {name!r} is empty in data row {row + 1}")
    return table
