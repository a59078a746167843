"""The example export: its dirt, and the road from its files to an answer over HTTP."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from toy_bundle import TINY_RUN, wait_until_ready

from recsys.data.prepare import DataConfig, build

SCRIPT = Path(__file__).parent.parent / "examples" / "shop" / "make_export.py"
NOTEBOOK = SCRIPT.with_name("shop.ipynb")
TINY = TINY_RUN | {"ids": {"levels": 3}, "retrieval": {"users": 50}}


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("make_export", SCRIPT)
    module = sys.modules["make_export"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_export"]


@pytest.fixture(scope="module")
def export(script, tmp_path_factory) -> Path:
    """A small export."""
    folder = tmp_path_factory.mktemp("export") / "shop"
    script.make_export(folder, customers=300, items=200, seed=0)
    return folder


def test_the_script_needs_nothing_of_the_project():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not [name for name in modules if name.startswith("recsys")]


def test_the_report_names_every_kind_of_dirt(export):
    made = build(
        DataConfig(
            source="table",
            path=str(export / "events.csv"),
            items=str(export / "products.csv"),
        )
    )
    assert made.report is not None
    assert {finding["rule"] for finding in made.report.findings()} >= {
        "damaged_rows_skipped", "rows_without_user_or_item_dropped",
        "rows_with_unreadable_times_dropped", "rows_with_impossible_times_dropped",
        "times_with_a_zone", "times_without_a_zone", "events_of_placeholder_users_dropped",
        "events_of_bots_dropped", "duplicate_rows_dropped", "near_duplicate_events_merged",
        "negative_events_dropped", "unknown_items", "repeated_item_rows_dropped",
        "item_texts_cleaned", "prices_read", "category_paths_split", "unavailable_items",
    }  # fmt: skip
    assert made.dataset.disliked is not None


def answer_over_http(bundle: Path, history: list[str], store: Path) -> list[dict]:
    from recsys.serving.app import create_app
    from recsys.serving.settings import ServingSettings

    settings = ServingSettings(bundle=bundle, histories=None, store=store, deadline_ms=60_000)
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        wait_until_ready(client)
        answer = client.post("/v1/recommendations", json={"history": history, "k": 5})
        assert answer.status_code == 200
        check_lists(client, history)
    return answer.json()["items"]


def check_lists(client: TestClient, history: list[str]) -> None:
    """One call of each list for a storefront, after a visit."""
    events = [{"user": "visitor", "item": item, "type": "view"} for item in history]
    assert client.post("/v1/events", json={"events": events}).json()["accepted"] == len(events)
    found = {}
    for name, query in {
        "trending": {},
        "latest": {},
        "together": {"item": history},
    }.items():
        response = client.get(f"/v1/lists/{name}", params=query)
        assert response.status_code == 200, response.text
        found[name] = response.json()
    listed = {name: [item["item_id"] for item in one["items"]] for name, one in found.items()}
    assert listed["trending"] == sorted(history)
    assert found["latest"]["note"]["code"] == "no_dates", "the export has no dates of products"
    assert listed["together"]
    assert not set(listed["together"]) & set(history)


@pytest.mark.slow
def test_the_notebook_runs_and_its_bundle_answers_over_http(tmp_path, monkeypatch):
    """Its cells run one after another in one namespace, as in a kernel, for a smaller shop."""
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(SCRIPT.parent.parent)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["outputs"] == [], "the notebook is stored without outputs"
        exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        if "parameters" in cell["metadata"].get("tags", ()):
            namespace |= {"customers": 300, "items": 200, "settings": {"minutes": 2, **TINY}}
    history = namespace["history"]
    items = answer_over_http(namespace["bundle"], history, tmp_path / "histories.db")
    assert [item["item_id"] for item in items] == [one.item_id for one in namespace["found"]]
    assert len({item["item_id"] for item in items} - set(history)) == 5
    names = set(namespace["products"]["name"].dropna())
    assert all(item["title"] in names | {item["item_id"]} for item in items)
