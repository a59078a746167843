"""The audit of a benchmark, on data sets whose faults are known, and the canary."""

import json

import numpy as np
import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from recsys.artifacts import write_artifact
from recsys.commands import audit as command
from recsys.dataset import Dataset
from recsys.errors import DataError
from recsys.evaluation.audit import audit, is_beyond_chance, read_report
from recsys.evaluation.canary import compare, plant, take_users
from recsys.evaluation.protocol import EvaluationConfig
from recsys.interactions import Interactions
from recsys.splits import leave_one_out

CONFIG = EvaluationConfig(ks=(1, 10), resamples=100)


def dataset_of(sequences, items, times=None, titles=None, split=None):
    """A data set of users' item numbers; leave-one-out unless labels are given."""
    events = Interactions.of(
        [user for user, taken in sequences.items() for _ in taken],
        [f"i{item}" for taken in sequences.values() for item in taken],
        None if times is None else [t for own in times.values() for t in own],
        item_ids=np.asarray([f"i{i}" for i in range(items)]),
    )
    labels = leave_one_out(events) if split is None else np.asarray(split, np.uint8)
    titles = titles or list(events.item_ids)
    texts = [""] * items
    table = pa.table({"item_id": list(events.item_ids), "title": titles, "text": texts})
    return Dataset(events, labels, table)


def finding(found, name):
    (one,) = (f for f in found["findings"] if f["name"] == name)
    return one


def test_equal_users_are_counted_by_their_whole_sequence():
    """a and b are the same five events; d and e the same three; c is alone."""
    shop = dataset_of(
        {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3, 4], "c": [4, 3, 2, 1, 0], "d": [5, 6, 7],
         "e": [5, 6, 7]},
        8,
    )  # fmt: skip
    one = finding(audit(shop, CONFIG), "equal users")
    figures = {"share": 0.8, "share_long": round(2 / 3, 6), "users_long": 3, "trained": 0.0}
    assert one["figures"] == figures
    assert one["verdict"] == "bad"


def test_a_twin_that_trains_on_the_target_is_named():
    """a is asked for i3, the last event; all events of its copy b are training events."""
    labels = [0, 0, 1, 2, 0, 0, 0, 0]
    shop = dataset_of({"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}, 4, split=labels)
    assert finding(audit(shop, CONFIG), "equal users")["figures"]["trained"] == 1.0


def test_equal_items_are_those_with_one_title():
    """i1 and i3 are both a red shirt; a has i1 before its target i3. Untitled items are unequal."""
    titles = ["i0", "red shirt", "blue shirt", "red shirt"]
    shop = dataset_of({"a": [0, 1, 2, 3], "b": [3, 1, 0, 2]}, 4, titles=titles)
    one = finding(audit(shop, CONFIG), "equal items")
    assert one["figures"] == {"items": 0.5, "targets": 0.5, "after_twin": 0.5}
    assert one["verdict"] == "bad"


def test_targets_in_the_history_and_unseen_targets_are_counted():
    """a is asked for i0 again, b for i4, which nobody has in training, c for i2."""
    shop = dataset_of({"a": [0, 1, 2, 0], "b": [0, 2, 3, 4], "c": [1, 0, 1, 2]}, 5)
    found = audit(shop, CONFIG)
    third = pytest.approx(1 / 3, abs=1e-6)
    assert finding(found, "masked targets")["figures"] == {"repeated": third, "masked": third}
    assert finding(found, "unseen targets")["figures"]["none"] == third


def report_of(best, config):
    rows = [
        {"ranker": name, "seen": seen, "targets": "next", "metric": "recall", "k": 10,
         "mean": mean, "low": mean - 0.1, "high": mean + 0.1}
        for name, mean in (("model", best), ("blended", best / 2), ("popularity", 1.0))
        for seen in config.seen_modes
    ]  # fmt: skip
    return {"rankers": ["blended", "model", "popularity"], "metrics": rows}


def walks(users, items, length=6):
    """Everybody walks up a ring of items, so that the successor of the last item is the target."""
    return {f"u{u}": [(u + step) % items for step in range(length)] for u in range(users)}


def test_a_heuristic_is_compared_with_the_best_that_is_no_heuristic():
    shop = dataset_of(walks(40, 40), 40)
    one = finding(audit(shop, CONFIG, report_of(0.8, CONFIG)), "shortcuts")
    assert one["figures"]["recall"]["masked"]["successors"] == 1.0
    assert one["figures"]["best_known"]["masked"] == ["model", 0.8]
    assert one["figures"]["share"]["masked"] == 1.25
    assert one["verdict"] == "bad"
    assert "125% of model (0.8000)" in one["meaning"]
    assert finding(audit(shop, CONFIG), "shortcuts")["verdict"] == "unknown"


def test_the_place_in_the_file_is_seen_to_predict_difficulty():
    """The first 40 users walk the ring; the other 40 jump at random among other items."""
    rng = np.random.default_rng(0)
    hard = {f"v{u}": (40 + rng.permutation(400)[:6]).tolist() for u in range(40)}
    shop = dataset_of({**walks(40, 40), **hard}, 440)
    one = finding(audit(shop, CONFIG), "file order")
    means = [row["mean"] for row in one["figures"]["quarters"]]
    assert means[:2] == [1.0, 1.0]
    assert max(means[2:]) < 0.3
    assert (one["verdict"], one["figures"]["beyond_chance"]) == ("mind", True)
    shuffled = {user: walks(40, 40)[user] for user in rng.permutation(list(walks(40, 40)))}
    found = audit(dataset_of(shuffled, 40), CONFIG)
    assert finding(found, "file order")["verdict"] == "good"
    assert finding(found, "id order")["verdict"] == "good"


def test_events_at_one_time_and_later_training_events_are_counted():
    """a's target shares its time with the event before; b's does not.

    Training events are at 1, 2 (a) and 7, 8 (b); the targets at 3 and 10: two and none are later.
    """
    times = {"a": [1, 2, 3, 3], "b": [7, 8, 9, 10]}
    shop = dataset_of({"a": [0, 1, 2, 3], "b": [3, 2, 1, 0]}, 4, times)
    found = audit(shop, CONFIG)
    figures = finding(found, "same times")["figures"]
    assert figures == {"ties": 0.25, "targets_with_last": 0.5, "targets": 0.5, "whole_days": False}
    assert finding(found, "future")["figures"] == {"later_training_events": 0.25}
    assert "recent popularity" in finding(found, "shortcuts")["figures"]["recall"]["masked"]


def test_without_times_the_audit_says_so_and_names_what_is_bad():
    found = audit(dataset_of(walks(40, 40), 40), CONFIG, report_of(0.8, CONFIG))
    assert finding(found, "same times")["verdict"] == "unknown"
    assert "shortcuts" in found["summary"]
    assert found["users"] == 40
    json.dumps(found, allow_nan=False)


def test_a_split_without_targets_is_refused():
    shop = dataset_of({"a": [0, 1], "b": [1, 0]}, 2)
    with pytest.raises(DataError, match="no user has a target in the test split"):
        audit(shop, CONFIG)


def test_the_command_reads_a_report_of_the_same_data_and_split(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    shop = dataset_of(walks(40, 40), 40)
    with write_artifact(tmp_path / "datasets" / "demo", "dataset") as folder:
        shop.save(folder)
    digest = Dataset.manifest(tmp_path / "datasets" / "demo").digest
    protocol = {"ks": [10], "resamples": 50, "users": 30}
    document = {**report_of(0.8, CONFIG), "split": "test", "protocol": protocol}
    with write_artifact(tmp_path / "reports" / "demo", "evaluation") as folder:
        made_from = {"made_from": {"dataset": digest}}
        (folder / "report.json").write_text(json.dumps(document | made_from))
    app = typer.Typer()
    app.command()(command)
    answer = CliRunner().invoke(app, ["--name", "demo", "--json"])
    found = json.loads(answer.stdout)
    assert found["users"] == 30
    assert finding(found, "shortcuts")["figures"]["best_known"]["masked"] == ["model", 0.8]
    shown = CliRunner().invoke(app, ["--name", "demo"]).stdout
    assert "shortcuts" in shown
    assert found["summary"].split()[0] in shown
    report = tmp_path / "reports" / "demo"
    assert read_report(report, "another", CONFIG) == (None, CONFIG)
    valid = EvaluationConfig(split="valid")
    assert read_report(report, digest, valid) == (None, valid)
    assert read_report(report, digest, CONFIG)[0] is not None
    assert read_report(report, digest, CONFIG, "of today") == (None, CONFIG)


def test_a_planted_copy_differs_in_the_last_event_of_each_user():
    shop = dataset_of({"a": [0, 1, 2, 3], "b": [3, 2, 1, 0, 4]}, 5)
    for split, places in (("test", [3, 8]), ("valid", [2, 7]), ("train", [1, 6])):
        copy = plant(shop, split)
        changed = np.flatnonzero(copy.interactions.item != shop.interactions.item)
        assert changed.tolist() == places
        assert copy.split.tolist() == shop.split.tolist()


def test_users_are_taken_with_their_events_and_the_whole_catalog():
    shop = dataset_of({"a": [0, 1, 2, 3], "b": [3, 2, 1, 0, 4], "c": [4, 0, 1]}, 5)
    few = take_users(shop, 2, seed=0)
    ids = few.interactions.user_ids.tolist()
    assert len(ids) == 2
    assert len(few.item_ids) == 5
    for user, history in zip(ids, few.interactions.histories, strict=True):
        place = shop.interactions.user_ids.tolist().index(user)
        assert history.tolist() == shop.interactions.histories[place].tolist()


def honest(dataset):
    """What a stage that reads training events learns; the reranker reads validation, too."""
    trained = str(dataset.train_histories.items.tolist())
    known = str(dataset.interactions.item[dataset.split < 2].tolist())
    fixed = {"ids/names.json": "fixed"}
    reranker = {"retrieval/retrieval.json": known, "retrieval/reranker_network.npy": known}
    return {"target/model.safetensors": trained, **reranker, **fixed}


def test_the_canary_is_content_with_training_events_alone():
    found = compare(dataset_of(walks(9, 9), 9), honest)
    assert found.verdict == "good"
    assert found.figures["changed"]["valid"] == [
        "retrieval/reranker_network.npy",
        "retrieval/retrieval.json",
    ]
    assert found.figures["changed"]["test"] == []
    assert "stages ids do not depend" in found.meaning


@pytest.mark.parametrize("last", [1, 2])
def test_the_canary_names_what_learned_from_the_split(last):
    def leaky(dataset):
        events = dataset.interactions.item[dataset.split <= last].tolist()
        return honest(dataset) | {"draft/model.safetensors": str(events)}

    found = compare(dataset_of(walks(9, 9), 9), leaky)
    assert found.verdict == "bad"
    assert found.meaning.count("draft/model.safetensors") == 1
    assert "target" not in found.meaning


def test_the_canary_decides_nothing_where_it_cannot_notice():
    calls = []

    def unstable(dataset):
        calls.append(dataset)
        return honest(dataset) | {"ids/codes.npy": str(len(calls))}

    shop = dataset_of(walks(9, 9), 9)
    found = compare(shop, unstable)
    assert (found.verdict, found.figures["unstable"]) == ("unknown", ["ids/codes.npy"])
    assert compare(shop, lambda _: {"ids/codes.npy": "fixed"}).verdict == "unknown"


def test_few_users_are_never_called_good():
    one = finding(audit(dataset_of(walks(40, 40), 40), CONFIG), "size")
    assert (one["verdict"], one["figures"]["half_interval"]) == ("bad", 0.0)  # all are hit
    assert one["meaning"].startswith("40 users are asked.")


@pytest.mark.parametrize(("users", "rate"), [(20, 0.3), (60, 0.1), (200, 0.05)])
def test_chance_is_rarely_taken_for_an_order(users, rate):
    rng, found = np.random.default_rng(0), 0
    for seed in range(60):
        values = (rng.random(users) < rate).astype(float)
        means = [part.mean() for part in np.array_split(values, 4)]
        found += is_beyond_chance(values, max(means) - min(means), seed)
    assert found <= 3  # of 60; .6 are expected


def test_an_order_without_chance_is_recognised():
    assert is_beyond_chance(np.repeat([1.0, 0.0], 20), 1.0, 0)
