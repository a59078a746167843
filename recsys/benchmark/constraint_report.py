"""What `recsys benchmark constraint` shows of its document."""

from __future__ import annotations

from recsys.benchmark.report import Document, Report, Table


def report(document: Document) -> Report:
    """The report."""
    options = document["options"]
    size = f"{options['batch']} x {options['beams']} beams"
    tables = [
        Table(
            f"A trie, and a step of {size} by depth",
            ("items", "L x V", "build s", "cpu s", "B/item", "open ms", "0", "1", "2", "3 ms"),
            _build_lines(document),
        ),
        Table(
            f"Filters: making a mask, finding it again, and the steps of a search, {size}",
            ("items", "allowed", "first ms", "again ms", "steps ms", "filtered ms", "ratio"),
            [
                [
                    _count(row["items"]),
                    f"{row['eligible'] / row['items']:.2%}",
                    f"{row['first_ms']['p50']:.2f}",
                    f"{row['again_ms']['p50']:.3f}",
                    f"{row['plain_ms']['p50']:.3f}",
                    f"{row['filtered_ms']['p50']:.3f}",
                    f"{row['ratio']['p50']:.2f}",
                ]
                for row in document["filter"]
            ],
        ),
        Table(
            f"A step at {_count(document['huggingface'][0]['items'])} items, {size}",
            ("depth", "trie ms", "Hugging Face ms", "ratio", "B/item", "Hugging Face B/item"),
            [
                [
                    str(row["depth"]),
                    f"{row['trie_ms']['p50']:.3g}",
                    f"{row['dict_ms']['p50']:.3g}",
                    f"{row['ratio']['p50']:.0f}",
                    f"{row['trie_bytes_per_item']:.0f}",
                    f"{row['dict_bytes_per_item']:.0f}",
                ]
                for row in document["huggingface"]
            ],
        ),
    ]
    return Report("The item trie", _sentences(document), tables)


def _build_lines(document: Document) -> list[list[str]]:
    lines = []
    for row in document["build"]:
        about = (row["items"], row["levels"])
        steps = [
            f"{step['ms']['p50']:.3f}"
            for step in document["step"]
            if (step["items"], step["levels"]) == about
        ]
        lines.append(
            [
                _count(row["items"]),
                f"{row['levels']} x {row['codes']}",
                f"{row['build_s']:.2f}",
                f"{row['build_cpu_s']:.2f}",
                f"{row['bytes_per_item']:.1f}",
                f"{1000 * row['open_s']:.1f}",
                *(steps + [""] * (4 - len(steps))),
            ]
        )
    return lines


def _sentences(document: Document) -> list[str]:
    largest = max(document["build"], key=lambda row: (row["items"], row["bytes_per_item"]))
    costs = [row["ratio"]["p50"] for row in document["filter"]]
    reference = document["huggingface"]
    theirs, ours = (sum(row[f"{way}_ms"]["p50"] for row in reference) for way in ("dict", "trie"))
    return [
        f"{_count(largest['items'])} items of {largest['levels']} x {largest['codes']} codes: "
        f"built in {largest['build_s']:.1f} s, {largest['bytes_per_item']:.1f} bytes each, "
        f"opened in {1000 * largest['open_s']:.1f} ms.",
        f"With a filter the steps of a search cost {min(costs):.2f} to {max(costs):.2f} times as "
        "much.",
        f"Hugging Face's processor with a nested dict takes {theirs / ours:.0f} times as long as "
        "the trie over the steps of a search.",
    ]


def _count(value: float) -> str:
    for limit, name in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{name}"
    return f"{value:g}"
