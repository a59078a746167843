"""MovieLens: `u.data` and `u.item` (100k, latin-1), or `ratings.csv` and `movies.csv` (later ones).

The path is the folder. Genres and years become attributes; item ids are those of GroupLens.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa

from recsys.data.delimited import first_line, read_delimited
from recsys.data.raw import (
    EventStream,
    RawData,
    ReaderConfig,
    describe_all,
    events_table,
    items_table,
)
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
_EVENT_TYPES = {
    "userId": pa.string(),
    "movieId": pa.string(),
    "rating": pa.float32(),
    "timestamp": pa.int64(),
}
_MOVIE_TYPES = {"movieId": pa.string(), "title": pa.string(), "genres": pa.string()}


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions` and `items`.

    Raises:
        DataError: the folder holds neither edition.
    """
    for interactions, items in (("u.data", "u.item"), ("ratings.csv", "movies.csv")):
        if (config.path / interactions).is_file():
            return {"interactions": config.path / interactions, "items": config.path / items}
    raise DataError(sentence("no_movielens", path=config.path))


def read(config: ReaderConfig) -> EventStream:
    """Read a MovieLens data set.

    Raises:
        DataError: malformed files, or a csv file without GroupLens's header.
    """
    paths = files(config)
    if paths["interactions"].name == "u.data":
        ratings = read_delimited(
            paths["interactions"],
            "\t",
            types=_EVENT_TYPES,
            names=list(_EVENT_TYPES),
            quote=False,
            required=_EVENT_TYPES,
        )
        movies = _movies_100k(paths["items"])
    else:
        ratings = _with_header(paths["interactions"], _EVENT_TYPES, required=_EVENT_TYPES)
        table = _with_header(paths["items"], _MOVIE_TYPES, required=("movieId",))
        rows = zip(*(table[name].to_pylist() for name in _MOVIE_TYPES), strict=True)
        movies = {movie: (title, genres.split("|")) for movie, title, genres in rows}
    events = events_table(
        ratings["userId"],
        ratings["movieId"],
        timestamp=ratings["timestamp"],
        rating=ratings["rating"],
    )
    ids, missing = describe_all(movies, events)
    titles = {movie: title.strip() for movie, (title, _) in movies.items()}
    genres = {
        movie: [g for g in listed if g not in NO_GENRE] for movie, (_, listed) in movies.items()
    }
    years = {movie: _YEAR.search(title) for movie, title in titles.items()}
    attributes = {
        "genres": pa.array([genres.get(i, []) for i in ids], pa.list_(pa.string())),
        "year": pa.array([int(y[1]) if (y := years.get(i)) else None for i in ids], pa.int64()),
    }
    return RawData(
        events,
        items_table(ids, titles, {}, attributes),
        counts={"items_without_metadata": missing},
    ).stream()


def _movies_100k(path: Path) -> dict[str, tuple[str, list[str]]]:
    names = ["movieId", "title", "released", "video", "address", *GENRES]
    types = dict.fromkeys(names[:5], pa.string()) | dict.fromkeys(GENRES, pa.int8())
    table = read_delimited(
        path,
        "|",
        types=types,
        names=names,
        encoding="latin-1",
        quote=False,
        required=("movieId",),
    )
    flags = zip(*(table[genre].to_pylist() for genre in GENRES), strict=True)
    rows = zip(table["movieId"].to_pylist(), table["title"].to_pylist(), flags, strict=True)
    return {
        movie: (title, [genre for genre, flag in zip(GENRES, on, strict=True) if flag])
        for movie, title, on in rows
    }


def _with_header(
    path: Path, types: dict[str, pa.DataType], *, required: Collection[str]
) -> pa.Table:
    header = first_line(path)
    if header.split(",") != list(types):
        said = {"path": path, "wanted": ",".join(types), "shown": header[:60]}
        raise DataError(sentence("converted_movielens", **said))
    return read_delimited(path, ",", types=types, required=required)
