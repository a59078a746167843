"""`benchmarks/scale.py`: the shop has the structure that it says, and exponents are slopes."""

import numpy as np
import pandas as pd
import scale


def test_customers_follow_an_item_by_one_of_three_of_its_group_half_of_the_time(tmp_path):
    total = scale.make_shop(2000, tmp_path)
    events = pd.read_csv(tmp_path / "events.csv", parse_dates=["time"])
    products = pd.read_csv(tmp_path / "products.csv").set_index("sku")
    assert len(events) == total
    assert total / 2000 == np.clip(total / 2000, 11, 13)
    assert len(products) == 2000
    assert set(events.sku) <= set(products.index)
    own = events.customer.diff() == 0
    assert (events.time.diff()[own] >= pd.Timedelta(0)).all()
    group = products.category[events.sku].to_numpy()
    assert 0.5 < (group[1:] == group[:-1])[own[1:]].mean() < 0.8
    pairs = pd.DataFrame({"item": events.sku.shift()[own], "following": events.sku[own]})
    counts = pairs.value_counts().reset_index(name="times")
    common = counts.groupby("item").times.apply(lambda times: times.nlargest(3).sum()).sum()
    assert 0.5 < common / len(pairs) < 0.75
    scale.make_shop(2000, tmp_path / "again")
    assert (tmp_path / "again" / "events.csv").read_bytes() == (
        tmp_path / "events.csv"
    ).read_bytes()


def test_an_exponent_is_the_slope_between_two_sizes():
    sizes = [
        {"items": 10, "events": 120, "data s": 2.0, "ids s": 0.0, "p50 ms": 3.0},
        {"items": 1000, "events": 12000, "data s": 200.0, "ids s": 1.0, "p50 ms": 30.0},
    ]
    (table,) = scale.report(sizes).tables
    assert table.rows == [
        ["events", "120", "1.2e+04", "1.00"],
        ["data s", "2", "200", "1.00"],
        ["p50 ms", "3", "30", "0.50"],
    ]
