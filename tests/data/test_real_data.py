"""The readers on the public files, against the counts published with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys.data.engine import Prepared
from recsys.data.prepare import DataConfig, build


@pytest.fixture(scope="session")
def make(datasets: Path) -> Callable[..., Prepared]:
    """Build from public files, once each; where they are absent the test is skipped."""
    made: dict[str, Prepared] = {}

    def run(source: str, path: str, **section: Any) -> Prepared:
        paths = {"path": path, **{k: v for k, v in section.items() if k in ("items", "index")}}
        for name, relative in paths.items():
            if not (datasets / relative).exists():
                pytest.skip(f"no {relative} among the public data sets")
            paths[name] = str(datasets / relative)
        config = DataConfig(source=source, **(section | paths))
        if str(config) not in made:
            made[str(config)] = build(config)
        return made[str(config)]

    return run


# data set: source, path, users, items on sale, events, median, shortest and longest, repeats
COUNTS = {
    "s3rec-beauty": ("s3rec", "Beauty.txt", 22_363, 12_101, 198_502, 6, 5, 204, 0),
    "s3rec-sports": ("s3rec", "Sports_and_Outdoors.txt", 35_598, 18_357, 296_337, 6, 5, 296, 0),
    "s3rec-yelp": ("s3rec", "Yelp.txt", 30_431, 20_033, 316_354, 7, 5, 350, 11_830),
    "s3rec-lastfm": ("s3rec", "LastFM.txt", 1_090, 3_646, 52_551, 19, 5, 899, 0),
    "atspeed-beauty": ("atspeed", "", 19_383, 12_035, 138_870, 5, 2, 174, 0),
    "letter-beauty": ("lcrec", "", 22_363, 12_101, 198_502, 6, 5, 204, 0),
    "letter-instruments": ("lcrec", "", 24_772, 9_922, 206_153, 6, 5, 218, 0),
    "movielens-100k": ("movielens", "", 943, 1_682, 100_000, 65, 20, 737, 0),
    "movielens-latest-small-2016": ("movielens", "", 671, 9_125, 100_004, 71, 20, 2391, 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_published_ones(make: Callable[..., Prepared], name: str) -> None:
    source, file, *expected = COUNTS[name]
    stats = make(source, f"{name}/{file}".rstrip("/")).stats
    length = stats["length"]
    assert [
        stats["users"], stats["items"], stats["interactions"],
        length["median"], length["min"], length["max"], stats["repeats"],
    ] == expected  # fmt: skip


def test_atspeed_has_its_own_split_and_index(make: Callable[..., Prepared]) -> None:
    made = make("atspeed", "atspeed-beauty")
    data, stats = made.dataset, made.stats
    assert made.split == "own"
    splits = stats["splits"]
    assert [splits[s]["interactions"] for s in ("train", "valid", "test")] == [
        122_241,
        9_316,
        7_313,
    ]
    assert [splits[s]["users"] for s in ("valid", "test")] == [4_295, 3_553]
    assert round(splits["test"]["cold"] * 7_313) == 1_841
    assert data.codes is not None
    assert data.codes.shape == (12_035, 4)
    assert data.codes[[0, 12_034]].tolist() == [[47, 103, 234, 99], [208, 242, 77, 131]]
    assert len(np.unique(data.codes, axis=0)) == 12_023
    assert made.decisions == {"items_without_metadata": 12_035, "items_sharing_codes": 21}
    # The first lines of the three files: `1 1955 28 ...`, `1 11791`, `1 3004`, ids from 1.
    assert data.train_histories[0][:2].tolist() == [1954, 27]
    assert data.examples("valid").targets[0].tolist() == [11_790]
    assert data.examples("test", "all").targets[0].tolist() == [3_003]


def test_the_atomic_files_of_recbole_are_tables(make: Callable[..., Prepared]) -> None:
    from recsys.data.cleaning import CleanConfig

    columns = {
        "user": "user_id:token",
        "item": "item_id:token",
        "timestamp": "timestamp:float",
        "rating": "rating:float",
        "title": "movie_title:token_seq",
    }
    made = make(
        "table",
        "recbole-ml-100k/ml-100k.inter",
        items="recbole-ml-100k/ml-100k.item",
        columns=columns,
        clean=CleanConfig(skip=("near_duplicates", "negative_feedback")),
    ).dataset
    original = make("movielens", "movielens-100k").dataset
    assert made.interactions.user_ids.tolist() == original.interactions.user_ids.tolist()
    for name in ("timestamp", "rating", "user", "item"):
        one, other = getattr(made.interactions, name), getattr(original.interactions, name)
        np.testing.assert_array_equal(one, other)


def test_amazon_editions_are_read_from_their_own_files(make: Callable[..., Prepared]) -> None:
    cards = make("amazon", "amazon2018-raw-giftcards/Gift_Cards_5.json", duplicates="keep")
    stats = cards.stats
    assert [stats["users"], stats["items_with_events"], stats["interactions"]] == [458, 148, 2_972]
    assert [stats["items"], stats["repeats"]] == [1_547, 7]
    assert "items_without_metadata" not in cards.decisions
    packed = make("amazon", "amazon2018-raw-giftcards/Gift_Cards_5.json.gz", duplicates="keep")
    assert packed.dataset.items.equals(cards.dataset.items)
    np.testing.assert_array_equal(packed.dataset.interactions.item, cards.dataset.interactions.item)
    sample = make(
        "amazon",
        "amazon2014-raw-instruments-sample/Musical_Instruments_5.json",
        items="amazon-format-examples-quoted/meta_2014_one_record.txt",
    )
    assert len(sample.dataset.interactions) == 50
    assert sample.dataset.items["brand"][0].as_py() == "Magic Seasoning Blends"
    quoted = "amazon-format-examples-quoted"
    one = make(
        "amazon",
        f"{quoted}/review_2023_one_record.jsonl",
        items=f"{quoted}/meta_2023_one_record_images_omitted.jsonl",
    )
    assert one.decisions["timestamps_in_milliseconds"] == 1
    assert one.dataset.interactions.timestamp.tolist() == [1_588_687_728]
