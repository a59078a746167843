"""Times of a shop's export: the finest unit decides the order, and contradictions are shown."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from recsys.data import growth
from recsys.data.cleaning import CleanConfig, Rules
from recsys.dataset import Dataset
from recsys.errors import ArtifactError, DataError
from recsys.retraining.news import settings_of_data

T = 1_700_000_000
DAY = 86_400
BERLIN = ZoneInfo("Europe/Berlin")
RIGHT = {f"u{n}": ["a", "b", "c", "d"] for n in range(3)}


def clicks() -> list[tuple[str, str, int]]:
    """(user, item, unix milliseconds): a, b, c, d within a second, newest first."""
    return [
        (f"u{user}", "abcd"[n], 1000 * (T + DAY * user) + 200 * n)
        for user in reversed(range(3))
        for n in reversed(range(4))
    ]


def csv(rows, head="user,item,timestamp") -> str:
    return "\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n"


def moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


FORMS = {
    "ms": lambda ms: ms,
    "us": lambda ms: ms * 1000 + 7,
    "ns": lambda ms: ms * 1_000_000 + 7,
    "seconds": lambda ms: f"{ms // 1000}.{ms % 1000:03}",
    "exponent": lambda ms: f"{ms / 10**12:.12f}e12",
    "iso": lambda ms: moment(ms).isoformat(timespec="milliseconds"),
    "zone": lambda ms: f"{moment(ms):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z",
    "comma": lambda ms: f'"{moment(ms):%Y-%m-%d %H:%M:%S},{ms % 1000:03}"',
    "micro": lambda ms: f"{moment(ms):%d.%m.%Y %H:%M:%S.%f}",
}


@pytest.mark.parametrize("form", FORMS)
def test_events_within_a_second_keep_their_order(shop, form):
    rows = [(user, item, FORMS[form](ms)) for user, item, ms in clicks()]
    assert shop(csv(rows)).histories == RIGHT


@pytest.mark.parametrize("kind", ["number", "text"])
def test_events_of_json_within_a_second_keep_their_order(shop, kind):
    form = FORMS["ms" if kind == "number" else "zone"]
    rows = [{"user": user, "item": item, "ts": form(ms)} for user, item, ms in clicks()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    assert shop(text, file="e.jsonl").histories == RIGHT


@pytest.mark.parametrize(
    "kind",
    [pa.timestamp("ms"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns"), pa.int64(),
     pa.float64(), pa.decimal128(20, 3)],
    ids=str,
)  # fmt: skip
def test_events_of_parquet_within_a_second_keep_their_order(shop, kind):
    users, items, times = zip(*clicks(), strict=True)
    column = pa.array(times, pa.int64())
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("ms", kind.tz)).cast(kind)
    elif kind != pa.int64():
        column = pa.array([ms / 1000 for ms in times]).cast(kind)
    table = pa.table({"user": users, "item": items, "ts": column})
    assert shop(table, file="e.parquet").histories == RIGHT


def test_a_date_and_a_fine_clock_keep_their_order(shop):
    rows = [(u, i, f"{moment(ms):%Y-%m-%d}", f"{moment(ms):%H:%M:%S}.{ms % 1000:03}")
            for u, i, ms in clicks()]  # fmt: skip
    assert shop(csv(rows, "user,item,date,clock")).histories == RIGHT


def test_an_item_that_comes_again_within_a_second_is_no_duplicate(shop):
    rows = [("u0", item, 1000 * T + 200 * n) for n, item in enumerate("abab")]
    rows += [("u1", "a", 1000 * T), ("u1", "b", 1000 * T), ("u1", "a", 1000 * T)]
    found = shop(csv(rows))
    assert found.histories == {"u0": ["a", "b", "a", "b"], "u1": ["a", "b"]}
    assert found.counts["duplicate_rows_dropped"] == 1


def test_a_data_set_keeps_what_is_below_a_second(shop, tmp_path):
    found = shop(csv(clicks())).data
    times = np.repeat([T + 2 * DAY, T + DAY, T], 4)  # users are numbered by first appearance
    assert found.interactions.timestamp.tolist() == times.tolist()
    assert found.interactions.nanosecond.tolist() == [200_000_000 * n for n in range(4)] * 3
    found.save(tmp_path)
    whole = shop(csv([(u, i, ms // 1000) for u, i, ms in clicks()])).data
    assert whole.interactions.nanosecond is None
    assert whole.events.nanosecond is None


def test_a_grown_data_set_keeps_the_order_within_a_second(shop, tmp_path):
    before = shop(csv([("u0", i, 1000 * T + 200 * n) for n, i in enumerate("abab")])).data
    new = pa.table(
        {
            "user": ["u0"] * 4,
            "item": ["b", "a", "b", "a"],
            "timestamp": [T + DAY] * 4,
            "nanosecond": [600_000_000, 400_000_000, 200_000_000, 0],
            "rating": pa.nulls(4, pa.float32()),
            "type": pa.nulls(4, pa.string()),
            "stored": [True] * 4,
        }
    )
    growth.write(tmp_path, new, before.items.slice(0, 0), growth.Erased.of(before, ()))
    rules = Rules(
        split="global-temporal", dates=(T + DAY, T + DAY + 1),
        clean=CleanConfig(skip=("near_duplicates",)),
    )  # fmt: skip
    made: Dataset = growth.grow(before, tmp_path, rules).dataset
    assert made.item_ids[made.interactions.item].tolist() == list("abab") * 2


# Ties: what the finest time does not decide.


@pytest.mark.parametrize("newest", [True, False])
def test_ties_have_the_order_of_the_file(shop, newest):
    rows = [(user, item, ms // 1000) for user, item, ms in clicks()]
    found = shop(csv(rows if newest else rows[::-1]))
    assert found.histories == RIGHT
    assert found.counts["events_at_the_same_time"] == 9
    assert ("newest first" in found.notes) == newest


@pytest.mark.parametrize("sign", [1, -1], ids=["oldest-first", "newest-first"])
def test_events_within_a_second_are_no_ties_and_no_baskets(shop, sign):
    found = shop(csv([(u, i, ms * 1000 + 7) for u, i, ms in clicks()[::sign]]))
    assert found.histories == RIGHT
    assert "newest first" not in found.notes
    assert "share their time" not in found.notes
    assert not found.data.baskets
    assert "events_at_the_same_time" not in found.counts


def test_ties_of_a_file_in_no_order_stay(shop):
    times = [T + DAY * ((7 * n) % 10) for n in range(20)]
    rows = [(f"u{n % 2}", item, time) for n, time in enumerate(times) for item in "ab"]
    found = shop(csv(rows))
    assert "newest first" not in found.notes
    assert all(items[:2] == ["a", "b"] for items in found.histories.values())


# Days and months.


def dates(form: str, days: range, month: int = 3) -> list[tuple[str, str, str]]:
    return [(f"u{n % 2}", f"i{n % 3}", f"{datetime(2024, month, day):{form}}")
            for n, day in enumerate(days)]  # fmt: skip


def test_days_and_months_that_contradict_each_other_are_refused(shop):
    rows = dates("%d/%m/%Y", range(1, 29)) + dates("%m/%d/%Y", range(1, 20), 4)
    with pytest.raises(DataError, match=r"13/03/2024.*04/13/2024.*data\.day_first"):
        shop(csv(rows))
    found = shop(csv(rows), day_first=True)
    assert found.counts["rows_with_unreadable_times_dropped"] == 7


def test_each_file_has_its_own_order_of_day_and_month(shop, raw):
    (raw / "exports").mkdir()
    (raw / "exports/1.csv").write_text(csv(dates("%d/%m/%Y", range(1, 29))))
    found = shop(csv(dates("%m/%d/%Y", range(1, 29), 4)), file="exports/2.csv")
    times = np.unique(found.data.interactions.timestamp).astype("datetime64[s]")
    assert {str(time)[:7] for time in times} == {"2024-03", "2024-04"}
    assert len(times) == 56
    assert "1.csv" in found.notes
    assert "13/03/2024" in found.notes
    assert "04/13/2024" in found.notes


def test_dates_of_items_that_contradict_each_other_are_refused(shop):
    rows = [("p0", "A", "13/03/2027"), ("p1", "B", "03/14/2027"), ("p2", "C", "01/02/2027")]
    with pytest.raises(DataError, match=r"valid_until.*13/03/2027.*03/14/2027.*data\.day_first"):
        shop(items=csv(rows, "item,title,valid_until"))


def test_a_date_of_an_item_that_cannot_be_read_is_counted(shop):
    rows = [("p0", "A", "2027-03-13"), ("p1", "B", "soon"), ("p2", "C", "2027-03-14"),
            ("p3", "D", "")]  # fmt: skip
    found = shop(items=csv(rows, "item,title,valid_until"))
    assert found.values("available_until")[1] is None
    assert found.counts["values_not_read"] == 1


# The last day of an item.


def end_of(year: int, month: int, day: int, zone: ZoneInfo = BERLIN) -> int:
    """Unix seconds at which a day ends."""
    following = datetime(year, month, day, tzinfo=zone).timestamp() + 36 * 3600
    return int(
        datetime.fromtimestamp(following, zone).replace(hour=0, minute=0, second=0).timestamp()
    )


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize(
    ("name", "form"), [("valid_until", "%Y-%m-%d"), ("gültig bis", "%d.%m.%Y")]
)
def test_an_item_is_valid_until_its_last_day_ends(shop, zone, name, form):
    days = [datetime(2026, 11, 26), datetime(2027, 3, 28), datetime(2027, 10, 31)]
    rows = [(f"p{n}", f"T{n}", f"{day:{form}}") for n, day in enumerate(days)]
    rows += [("p3", "T3", "")]
    found = shop(items=csv(rows, f"item,title,{name}"), time_zone=zone)
    right = [end_of(d.year, d.month, d.day, ZoneInfo(zone)) for d in days]
    assert found.values("available_until") == [*right, None]
    assert found.counts["last_days"] == 3


def test_an_item_is_valid_from_the_start_of_its_first_day(shop):
    rows = [(f"p{n}", f"T{n}", "2026-11-26", "2026-11-26") for n in range(4)]
    found = shop(
        items=csv(rows, "item,title,available_from,available_until"), time_zone="Europe/Berlin"
    )
    until = end_of(2026, 11, 26)
    assert found.values("available_from") == [until - DAY] * 4
    assert found.values("available_until") == [until] * 4


def test_a_time_of_day_ends_when_it_says(shop):
    rows = [("p0", "A", "2026-11-26 18:00"), ("p1", "B", "2026-11-26 00:00:00"),
            ("p2", "C", "2026-11-26T18:00:00Z"), ("p3", "D", "1795716000")]  # fmt: skip
    found = shop(items=csv(rows, "item,title,valid_until"), time_zone="Europe/Berlin")
    at = [datetime(2026, 11, 26, 18, tzinfo=BERLIN), datetime(2026, 11, 26, tzinfo=BERLIN),
          datetime(2026, 11, 26, 18, tzinfo=UTC)]  # fmt: skip
    assert found.values("available_until") == [*(int(m.timestamp()) for m in at), 1795716000]
    assert "last_days" not in found.counts


def test_a_data_set_of_an_earlier_version_names_the_command_that_makes_it_again():
    known = {"events": {"user": "u", "available 2": "a", "clock half": "h", "taken_back =-": "s"}}
    hours = {"events": known["events"] | {"clock hour": "h"}}
    for clean, mapping, part in (({"prices": 0}, known, "prices"), ({}, hours, "'clock hour'")):
        manifest = SimpleNamespace(config={"clean": clean}, info={"cleaning": {"mapping": mapping}})
        champion = SimpleNamespace(name="x", dataset=Path("d"), manifest=lambda _, m=manifest: m)
        with pytest.raises(ArtifactError, match=rf"{part}\).*recsys run EVENTS --name x --force"):
            settings_of_data(champion)
