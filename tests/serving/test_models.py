"""Models and aliases: swapped, rolled back and refused while others ask."""

import asyncio
import gc
import json
import shutil
import weakref
from types import SimpleNamespace

import pytest
from toy_bundle import code

from recsys.serving import aliases
from recsys.serving.models import Model
from recsys.serving.service import Phase
from recsys.serving.stores.records import StoreError

URL = "/v1/recommendations"
ASK = {"history": ["B0001", "B0002"], "k": 3}


@pytest.fixture(scope="session")
def make_bundle(random_bundle):
    return lambda path, seed: random_bundle(path, 60, seed=seed)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, make_bundle):
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        make_bundle(folder / name, seed)
    return folder


@pytest.fixture
def models(bundles, tmp_path, settings_of):
    folder = tmp_path / "models"
    shutil.copytree(bundles, folder)
    return settings_of(bundle=folder / "one")


@pytest.fixture
async def client(models, running):
    async with running(models) as (client, _):
        yield client


async def answered_by(client, **request):
    response = await client.post(URL, json=ASK | request)
    assert response.status_code == 200, response.text
    name: str = response.json()["model"]["name"]
    return name


async def test_names_of_aliases_are_bounded_in_number(client, service, monkeypatch):
    monkeypatch.setattr(aliases, "MOST_ALIASES", 2)
    for n in range(3):
        refused = await client.put(f"/v1/aliases/new-{n}", json={"bundle": "none"})
        assert code(refused) == (404, "unknown_bundle")
    assert (await client.put("/v1/aliases/b", json={"bundle": "one"})).status_code == 200
    refused = await client.put("/v1/aliases/c", json={"bundle": "one"})
    assert code(refused) == (409, "alias_conflict")
    assert (await client.delete("/v1/aliases/b")).status_code == 204
    names = service.metrics.exposition().decode()
    assert 'alias="new-0"' not in names
    assert 'alias="b"' not in names


async def test_an_alias_is_set_listed_used_and_removed(client, service):
    assert code(await client.post(URL, json={**ASK, "model": "next"})) == (404, "unknown_model")
    put = await client.put("/v1/aliases/next", json={"bundle": "two"})
    version = put.json()["version"]
    assert put.json() == {
        "name": "next",
        "bundle": "two",
        "version": version,
        "previous": None,
        "previous_version": None,
        "rules": [],
    }
    assert await answered_by(client) == "one"
    assert await answered_by(client, model="next") == "two"
    assert (await client.put_item("new", {"like": "B0001"})).status_code == 200
    for alias in ("champion", "next"):  # a change is made in every loaded model
        assert (await client.get(f"/v1/items/new?model={alias}")).status_code == 200
    listed = (await client.get("/v1/models")).json()
    assert listed["available"] == ["one", "two"]
    assert {m["name"]: m["aliases"] for m in listed["models"]} == {
        "one": ["champion"],
        "two": ["next"],
    }
    assert [alias["name"] for alias in listed["aliases"]] == ["champion", "next"]
    assert (await client.delete("/v1/aliases/next")).status_code == 204
    assert [m.name for m in service.state.models.loaded] == ["one"]
    assert await client.named("aliases", "next") is None
    assert code(await client.delete("/v1/aliases/champion")) == (409, "alias_conflict")


def test_on_a_gpu_one_thread_computes_all(fake, models):
    shop, worker = fake(), SimpleNamespace(run=print)
    for device in ("cpu", "cuda"):
        shop.device = SimpleNamespace(type=device)
        assert (Model.of("a", shop, worker, models).aside is None) == (device == "cuda")


async def test_a_bundle_that_is_loaded_is_not_loaded_again(client, service, models, make_bundle):
    await client.put("/v1/aliases/next", json={"bundle": "one"})
    assert len(service.state.models.loaded) == 1
    shutil.rmtree(models.bundle)
    make_bundle(models.bundle, 5)  # of the same name, and another model
    await client.put("/v1/aliases/next", json={"bundle": "one"})
    assert len(service.state.models.loaded) == 2


async def test_swaps_and_rollbacks_under_load_fail_no_request(client, service, until):
    names: list[str] = []
    stop = False

    async def ask(number):
        while not stop:
            names.append(await answered_by(client, history=[f"B{number:04d}", "B0001"]))

    asking = [asyncio.create_task(ask(number)) for number in range(8)]
    for bundle in ("two", "one", "two"):
        seen = len(names)
        response = await client.put("/v1/aliases/champion", json={"bundle": bundle})
        assert response.json()["bundle"] == bundle
        assert await answered_by(client) == bundle
        await until(lambda seen=seen: len(names) > seen + 8)
    response = await client.post("/v1/aliases/champion/rollback")
    assert (response.json()["bundle"], response.json()["previous"]) == ("one", "two")
    await until(lambda: set(names[-8:]) == {"one"})
    stop = True
    await asyncio.gather(*asking)
    assert set(names) == {"one", "two"}
    await until(lambda: not service.state.models.retiring)
    assert [model.name for model in service.state.models.loaded] == ["one"]


async def test_an_old_model_stays_until_its_last_request_is_answered(models, fake, running, until):
    recommender = fake("one")
    async with running(models, recommender=recommender) as (client, service):
        recommender.gate.clear()
        old = asyncio.create_task(client.post(URL, json={"history": ["item-1"]}))
        await until(lambda: recommender.busy)
        waiting = asyncio.create_task(client.post(URL, json={"history": ["item-2"]}))
        await until(lambda: service.state.models.queue_depth() == 1)
        loading = service._worker.load

        async def load(bundle, loaded=None):
            return await loading(bundle, fake("two"))  # does not wait for the gate

        service._worker.load = load
        swap = asyncio.create_task(client.put("/v1/aliases/champion", json={"bundle": "two"}))
        await asyncio.sleep(0.05)
        recommender.gate.set()  # the worker is one, so the new one waits for its touch
        assert (await swap).json()["bundle"] == "two"
        for answer in (await old, await waiting):
            assert (answer.status_code, answer.json()["model"]["name"]) == (200, "one")
        await until(lambda: not service.state.models.retiring)


async def test_a_replaced_model_is_freed_without_a_collection(client, service, until, monkeypatch):
    await client.get("/v1/items")
    await answered_by(client)
    old = service.state.models.get().recommender
    parts = [weakref.ref(part) for part in (old, old.model, old.epoch.trie)]
    del old
    monkeypatch.setattr("gc.collect", lambda: 0)  # it would walk all there is, and hold up all
    gc.disable()
    try:
        await client.put("/v1/aliases/champion", json={"bundle": "two"})
        await until(lambda: all(part() is None for part in parts))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("flip", "target/model.safetensors"),
        ("missing", "catalog/items.parquet"),
        ("manifest", "manifest.json"),
    ],
)
async def test_a_damaged_bundle_is_refused_and_the_old_one_stays(client, models, damage, named):
    bad = models.bundle.parent / "two"
    weights = bad / "target" / "model.safetensors"
    content = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        (bad / "catalog" / "items.parquet").unlink()
    else:
        (bad / "manifest.json").write_text('{"kind": "bundle", "files"')
    response = await client.put("/v1/aliases/champion", json={"bundle": "two"})
    assert code(response) == (409, "bundle_refused")
    assert named in response.json()["detail"]
    assert str(bad.parent) not in response.text
    assert await answered_by(client) == "one"
    alias = await client.named("aliases", "champion")
    assert alias["bundle"] == "one"


@pytest.mark.parametrize(
    ("name", "status"),
    [("three", 404), ("..", 422), ("../one", 422), (".hidden", 422), ("a/b", 422), ("", 422)],
)
async def test_only_bundles_of_the_folder_can_be_loaded(client, name, status):
    response = await client.put("/v1/aliases/champion", json={"bundle": name})
    assert response.status_code == status


async def test_a_rollback_needs_a_previous_version(client):
    response = await client.post("/v1/aliases/champion/rollback")
    assert code(response) == (409, "alias_conflict")
    response = await client.post("/v1/aliases/nobody/rollback")
    assert code(response) == (404, "unknown_model")
    await client.put("/v1/aliases/champion", json={"bundle": "one"})  # as it is already
    response = await client.post("/v1/aliases/champion/rollback")
    assert code(response) == (409, "alias_conflict")


async def test_a_rollback_restores_the_exact_version_or_fails(client, models, make_bundle):
    first = (await client.named("aliases", "champion"))["version"]
    models.bundle.rename(models.bundle.parent / "kept")
    make_bundle(models.bundle, 5)  # of the same name, and another model
    put = (await client.put("/v1/aliases/champion", json={"bundle": "one"})).json()
    assert put["version"] != first
    assert (put["previous"], put["previous_version"]) == ("one", first)
    back = (await client.post("/v1/aliases/champion/rollback")).json()
    assert (back["bundle"], back["version"], back["previous"]) == ("kept", first, None)
    await client.put("/v1/aliases/champion", json={"bundle": "one"})
    shutil.rmtree(models.bundle.parent / "kept")
    response = await client.post("/v1/aliases/champion/rollback")
    assert code(response) == (409, "alias_conflict")
    assert first in response.json()["detail"]
    now = await client.named("aliases", "champion")
    assert (now["version"], now["previous_version"]) == (put["version"], first)
    assert await answered_by(client) == "one"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_hidden_layers", 10**6, " 1000000 does not fit"),
        ("intermediate_size", 10**9, " 1000000000 does not fit"),
        ("hidden_size", 10**9, " 1000000000 does not fit"),
        ("attn_implementation", "a/b@c", ": 'a/b@c' is not allowed"),
        ("quantization_config", {"load_in_4bit": True}, ": {'load_in_4bit': True} is not allowed"),
    ],
)
async def test_absurd_configs_are_refused_without_waiting(
    client, service, models, name, value, says, monkeypatch
):
    file = models.bundle.parent / "two" / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    monkeypatch.setattr(service._worker, "load", None)  # nothing is allocated
    async with service.state.aliases._changing:  # another change is under way
        response = await client.put("/v1/aliases/champion", json={"bundle": "two"})
    assert code(response) == (409, "bundle_refused")
    assert f"two/target: config.json: {name}{says}" in response.json()["detail"]
    alias = await client.named("aliases", "champion")
    assert alias["bundle"] == "one"
    assert await answered_by(client) == "one"


async def test_a_change_during_a_change_of_an_alias_reaches_the_new_model(
    client, service, until, monkeypatch
):
    aliases, changes = service.state.aliases, service.state.catalog_changes
    keep, removals = aliases._keep, []

    async def late(*arguments):  # the new model has the journal, and is not yet the champion
        removals.append(asyncio.create_task(client.delete("/v1/items/B0003")))
        await until(lambda: removals[0].done() or changes._changing._waiters)
        await keep(*arguments)

    monkeypatch.setattr(aliases, "_keep", late)
    answer = await client.put("/v1/aliases/champion", json={"bundle": "two"})
    assert answer.status_code == 200
    assert (await removals[0]).status_code == 204
    assert await answered_by(client) == "two"
    assert (await client.get("/v1/items/B0003")).status_code == 404


async def test_a_bundle_that_changes_during_its_rollback_is_refused(
    client, service, monkeypatch, until, make_bundle
):
    await client.put("/v1/aliases/champion", json={"bundle": "two"})
    load = service._worker.load

    async def late(path, loaded=None):
        shutil.rmtree(path)
        make_bundle(path, 5)
        return await load(path, loaded)

    monkeypatch.setattr(service._worker, "load", late)
    response = await client.post("/v1/aliases/champion/rollback")
    assert code(response) == (409, "alias_conflict")
    assert await answered_by(client) == "two"
    await until(lambda: not service.state.models.retiring)


async def test_a_change_that_the_store_cannot_take_changes_nothing(
    client, service, monkeypatch, until
):
    async def away(key, value):
        raise StoreError("away")

    await client.put("/v1/aliases/other", json={"bundle": "one"})
    before = (await client.get("/v1/models")).json()
    with monkeypatch.context() as patch:
        patch.setattr(service.store.state, "change", away)
        put = await client.put("/v1/aliases/champion", json={"bundle": "two"})
        removed = await client.delete("/v1/aliases/other")
    assert code(put) == code(removed) == (503, "store_unavailable")
    assert (await client.get("/v1/models")).json() == before
    assert await answered_by(client) == "one"
    await until(lambda: not service.state.models.retiring)
    put = await client.put("/v1/aliases/champion", json={"bundle": "two"})
    assert (put.json()["bundle"], put.json()["previous"]) == ("two", "one")


async def test_a_lost_version_becomes_a_previous_one_at_restart(
    models, running, caplog, make_bundle
):
    async with running(models) as (client, _):
        two = (await client.put("/v1/aliases/champion", json={"bundle": "two"})).json()
    shutil.rmtree(models.bundle.parent / "two")
    make_bundle(models.bundle.parent / "two", 5)
    async with running(models) as (client, _):
        now = await client.named("aliases", "champion")
        assert now["bundle"] == "two"
        assert now["version"] != two["version"]
        assert now["previous_version"] == two["version"]
    assert f"version {two['version']} of bundle two is gone" in caplog.text


async def test_aliases_survive_a_restart_and_a_lost_bundle_falls_back(models, running, caplog):
    async with running(models) as (client, _):
        await client.put("/v1/aliases/champion", json={"bundle": "two"})
        await client.put("/v1/aliases/third", json={"bundle": "one"})
    async with running(models) as (client, _):
        assert await answered_by(client) == "two"
        assert await answered_by(client, model="third") == "one"
    shutil.rmtree(models.bundle.parent / "two")
    async with running(models) as (client, service):
        assert service.phase is Phase.READY
        assert await answered_by(client) == "one"
    assert "alias champion is not restored" in caplog.text


async def test_an_alias_that_another_process_removed_stays_away(models, running):
    async with running(models) as (one, _), running(models) as (two, service):
        for client in (one, two):
            await client.put("/v1/aliases/third", json={"bundle": "one"})
        assert (await one.delete("/v1/aliases/third")).status_code == 204
        await two.put("/v1/aliases/other", json={"bundle": "one"})
        stored = await service.store.state.get("aliases")
    assert {*stored["aliases"]} == {"champion", "other"}


async def test_an_alias_whose_bundle_is_away_is_kept_until_it_is_changed(models, running):
    async with running(models) as (client, _):
        for alias in ("champion", "third", "other"):
            await client.put(f"/v1/aliases/{alias}", json={"bundle": "two"})
    two, away = models.bundle.parent / "two", models.bundle.parent.parent / "away"
    two.rename(away)  # such as a volume that is mounted late
    async with running(models) as (client, _):
        assert await answered_by(client) == "one"
        for alias in ("other", "new"):
            await client.put(f"/v1/aliases/{alias}", json={"bundle": "one"})
    away.rename(two)
    async with running(models) as (client, _):
        for alias, bundle in {"champion": "two", "third": "two", "other": "one"}.items():
            assert await answered_by(client, model=alias) == bundle
        back = await client.post("/v1/aliases/champion/rollback")
        assert back.json()["bundle"] == "one"
        await client.put("/v1/aliases/champion", json={"bundle": "two"})
    two.rename(away)
    async with running(models) as (client, _):
        await client.put("/v1/aliases/champion", json={"bundle": "one"})
    away.rename(two)
    async with running(models) as (client, _):
        assert await answered_by(client) == "one"
