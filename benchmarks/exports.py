"""Served lists next to each of their parts, on the exports of a dozen shops.

    export RECSYS_DATASETS=... RECSYS_HOME=...
    python benchmarks/exports.py --out results.jsonl

Each data set is written as a plain export: events.csv and, where items are described, items.csv.
It is run with no setting but its name, `recsys run events.csv --items items.csv --name NAME`, and
where there are no times also with `--column timestamp=file-order`, which says so. The report of
that run gives Recall@10 and NDCG@10 of the served list and of each part on test, with paired 95 %
bootstrap intervals over users. A row is appended to `--out` as each run ends. `--table` only prints
the rows.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = Iterable[Mapping[str, object]]
Export = tuple[Rows, Rows | None]
RAW = Path(os.environ.get("RECSYS_DATASETS", "var/raw"))
PARTS = ("model", "popularity", "item-kNN", "directional", "successors", "SASRec")
TYPES = {"0": "purchase", "2": "view"}  # retailrocket; its authors name no others
ITEM_TEXT = re.compile(r"Title: (.*?)\. Category: (.*?)\. Brand: (.*?)\. Price: (.*?)\.")


def s3rec(folder: str, name: str) -> Export:
    """Users in lines, items in order; attributes by item."""
    attributes = json.loads((RAW / folder / f"{name}_item2attributes.json").read_text())

    def events() -> Iterator[dict[str, object]]:
        for line in (RAW / folder / f"{name}.txt").read_text().splitlines():
            user, *items = line.split()
            yield from ({"user": user, "item": item} for item in items)

    items = (
        {"item": k, "attributes": "|".join(map(str, dict.fromkeys(v)))}
        for k, v in attributes.items()
    )
    return events(), items


def yelp() -> Export:
    """S3-Rec's interactions with the names and categories of LETTER's files."""
    events, _ = s3rec("s3rec-yelp", "Yelp")
    texts = json.loads((RAW / "letter-yelp" / "Yelp.item.json").read_text())
    items = (
        {"item": int(key) + 1, "name": value["title"], "categories": value["description"]}
        for key, value in texts.items()
    )
    return events, items


def instruments() -> Export:
    """LETTER's interactions; its items have no description."""
    users = json.loads((RAW / "letter-instruments" / "Instruments.inter.json").read_text())
    return ({"user": user, "item": item} for user, items in users.items() for item in items), None


def movielens_100k() -> Export:
    """The files of GroupLens as they would be exported from tables."""
    folder = RAW / "movielens-100k"
    genres = [line.split("|")[0] for line in (folder / "u.genre").read_text().splitlines() if line]

    def items() -> Iterator[dict[str, object]]:
        for line in (folder / "u.item").read_text(encoding="latin-1").splitlines():
            item, title, date, _, _, *flags = line.split("|")
            own = [genre for genre, flag in zip(genres, flags, strict=False) if flag == "1"]
            yield {"item_id": item, "title": title, "released": date, "genres": "|".join(own)}

    names = ("user_id", "item_id", "rating", "timestamp")
    lines = (folder / "u.data").read_text().splitlines()
    return (dict(zip(names, line.split("\t"), strict=True)) for line in lines), items()


def movielens_small() -> Export:
    """Already two csv files with headers."""
    folder = RAW / "movielens-latest-small-2016"
    return _read(folder / "ratings.csv"), _read(folder / "movies.csv")


def amazon(reviews: str, meta: str | None) -> Export:
    """Raw reviews, and raw descriptions if they are there."""

    def events() -> Iterator[dict[str, object]]:
        for review in _lines(RAW / reviews):
            names = ("reviewerID", "asin", "overall", "unixReviewTime")
            yield {name: review[name] for name in names}

    def items() -> Iterator[dict[str, object]]:
        for item in _lines(RAW / str(meta)):
            text = " ".join(item.get("description") or [])
            own = {name: item.get(name, "") for name in ("title", "brand")}
            yield {"asin": item["asin"], **own, "description": text}

    return events(), items() if meta else None


def pixrec(name: str) -> Export:
    """One line per user with titles for ids; the last item is the target."""
    folder = RAW / "amazon2023-pixrec-processed"
    described: dict[str, dict[str, object]] = {}

    def number(text: str) -> str:
        if text not in described:
            found = ITEM_TEXT.match(text)
            title, category, brand, _ = found.groups() if found else (text, "", "", "")
            described[text] = {"item": f"i{len(described)}", "title": title, "category": category,
                               "brand": "" if brand == "Unknown" else brand}  # fmt: skip
        return str(described[text]["item"])

    events = [
        {"user": f"u{user}", "item": number(text)}
        for user, line in enumerate(_lines(folder / f"{name}.jsonl"))
        for text in (*line["user_history"], line["target_item"])
    ]
    return events, described.values()


def retailrocket() -> Export:
    """Sessions of events with a type each, in order."""

    def events() -> Iterator[dict[str, object]]:
        lines = (
            (RAW / "retailrocket-behaviours" / "retail_beh.train.inter").read_text().splitlines()
        )
        for line in lines[1:]:
            session, items, types, _ = line.split("\t")
            for item, kind in zip(items.split(), types.split(), strict=True):
                yield {"session": session, "item": item, "event": TYPES.get(kind, f"type{kind}")}

    return events(), None


def _read(path: Path) -> Iterator[dict[str, object]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


SETS: dict[str, Callable[[], Export]] = {
    "giftcards": lambda: amazon(
        "amazon2018-raw-giftcards/Gift_Cards_5.json.gz",
        "amazon2018-raw-giftcards/meta_Gift_Cards.json.gz",
    ),
    "fashion": lambda: amazon("amazon2018-raw-fashion/AMAZON_FASHION_5.json.gz", None),
    "boxes": lambda: pixrec("Subscription_Boxes"),
    "magazines": lambda: pixrec("Magazine_Subscriptions"),
    "ml-100k": movielens_100k,
    "ml-small": movielens_small,
    "lastfm": lambda: s3rec("s3rec-lastfm", "LastFM"),
    "retailrocket": retailrocket,
    "beauty": lambda: s3rec("s3rec-beauty", "Beauty"),
    "instruments": instruments,
    "sports": lambda: s3rec("s3rec-sports", "Sports_and_Outdoors"),
    "yelp": yelp,
}
WITH_TIMES = ("giftcards", "fashion", "ml-100k", "ml-small", "shop-0", "shop-1")
SHOPS = {"shop-0": 0, "shop-1": 1}  # name -> seed of the invented shop's export


def main() -> None:
    """Write the exports, run them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="rows, as JSON lines")
    parser.add_argument("--only", help="names of data sets, comma-separated")
    parser.add_argument("--exports", type=Path, default=Path("var/exports"), help="folder")
    parser.add_argument("--set", action="append", default=[], help="passed to `recsys run`")
    parser.add_argument("--table", action="store_true", help="print the rows of --out, run nothing")
    args = parser.parse_args()
    if not args.table:
        for name in args.only.split(",") if args.only else [*SHOPS, *SETS]:
            files = write(name, args.exports / name)
            row = run(name, files, args.set)
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    show([json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()])


def write(name: str, folder: Path) -> list[Path]:
    """Write the files of an export, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in SHOPS:
        script = Path(__file__).parent.parent / "examples/shop/make_export.py"
        seed = str(SHOPS[name])
        subprocess.run([sys.executable, script, "--out", folder, "--seed", seed], check=True)
        return [folder / "events.csv", folder / "products.csv"]
    events, items = SETS[name]()
    files = [_write(folder / "events.csv", events)]
    if items is not None:
        files.append(_write(folder / "items.csv", items))
    return files


def _write(path: Path, rows: Rows) -> Path:
    rows = iter(rows)
    first = next(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first), extrasaction="ignore")
        writer.writeheader()
        writer.writerow(first)
        writer.writerows(rows)
    return path


def run(name: str, files: list[Path], settings: list[str]) -> dict[str, Any]:
    """Run one export, and return its row."""
    command = [sys.executable, "-m", "recsys", "run", str(files[0]), "--name", name, "--json"]
    command += ["--items", str(files[1])] if len(files) > 1 else []
    if name not in WITH_TIMES:
        command += ["--column", "timestamp=file-order"]
    command += [text for setting in settings for text in ("--set", setting)]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    minutes = (time.perf_counter() - start) / 60
    row: dict[str, Any] = {"name": name, "rc": done.returncode, "minutes": round(minutes, 2)}
    home = Path(os.environ.get("RECSYS_HOME", "var"))
    report = home / "reports" / name / "report.json"
    return row | summary(json.loads(report.read_text())) if report.is_file() else row


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the table needs of a report: the headline figures, and the paired differences."""
    headline = report["headline"]
    at = {key: headline[key] for key in ("seen", "targets", "k")}

    def mine(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        return (row for row in rows if all(row[key] == value for key, value in at.items()))

    served = report["rankers"][0]
    served = served if isinstance(served, str) else served["name"]
    values = {(row["ranker"], row["metric"]): row["mean"] for row in mine(report["metrics"])}
    gaps = {
        (row["against"], row["metric"]): (row["mean"], row["low"], row["high"])
        for row in mine(report["comparisons"])
        if row["ranker"] == served
    }
    names = {ranker for ranker, _ in values} - {served}
    return {
        "headline": at,
        "users": report["data"]["users_evaluated"],
        "items": report["data"]["items"],
        "events": sum(report["data"]["events"].values()),
        "weaknesses": report["weaknesses"],
        "served": {metric: values[served, metric] for metric in ("recall", "ndcg")},
        "parts": {
            name: {
                metric: {"value": values[name, metric], "gain": gaps.get((name, metric))}
                for metric in ("recall", "ndcg")
            }
            for name in sorted(names)
        },
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print R@10 / NDCG@10; `-` marks a part that is significantly above what is served."""
    columns = ["data set", "users", "min", "served", *PARTS]
    table = Table(*columns, title="Recall@10 / NDCG@10 on test; + - significantly below or above")
    for row in rows:
        if "served" not in row:
            table.add_row(row["name"], f"rc {row['rc']}")
            continue
        cells = [row["name"], str(row["users"]), f"{row['minutes']:.1f}", _pair(row["served"])]
        for name in PARTS:
            part = row["parts"].get(name)
            cells.append("" if part is None else _cell(part))
        table.add_row(*cells)
    Console(width=160).print(table)


def _pair(values: Mapping[str, float]) -> str:
    return f"{values['recall']:.4f} / {values['ndcg']:.4f}"


def _cell(part: Mapping[str, Mapping[str, Any]]) -> str:
    signs = ""
    for metric in ("recall", "ndcg"):
        _, low, high = part[metric]["gain"] or (0, 0, 0)
        signs += "+" if low > 0 else "-" if high < 0 else "="
    return f"{_pair({m: v['value'] for m, v in part.items()})} {signs}"


if __name__ == "__main__":
    main()
