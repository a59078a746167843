"""A service on an empty machine continues from the backup of one that is under load."""

import asyncio
import shutil

from recsys.serving import auth
from recsys.serving.stores import open_store


def copy(source, target, keys):
    """As the command, which opens a store of its own, and a copy of the keys."""
    store = open_store(source)
    try:
        store.database.back_up(target)
    finally:
        store.close()
    shutil.copy(keys[source], keys[target])


async def test_a_restored_service_continues_from_the_backup(settings, fake, running, tmp_path):
    old, new = tmp_path / "old" / "store.db", tmp_path / "new" / "store.db"
    keys = {place: place.with_name("keys.json") for place in (old, new)}
    headers = {"authorization": f"Bearer {auth.create(keys[old], 'ops', 'admin')}"}
    here = settings.model_copy(update={"store": old, "keys": keys[old]})
    there = settings.model_copy(update={"store": new, "keys": keys[new]})
    sent, stop = [], asyncio.Event()
    async with running(here, recommender=fake()) as (client, _):
        client.headers.update(headers)
        lamp = {"title": "Lamp", "like": "item-1"}
        assert (await client.put_item("lamp", lamp)).status_code == 200
        assert (await client.put("/v1/rules/new", json={"pin": ["lamp"]})).status_code == 200
        assert (await client.delete("/v1/users/bob")).status_code == 204

        async def write(writer):
            while not stop.is_set():
                name = f"{writer}-{len(sent)}"
                events = [{"event_id": f"{name}-{i}", "user": name, "item": "x"} for i in range(3)]
                response = await client.post("/v1/events", json={"events": events})
                assert response.status_code == 200
                sent.append(name)

        writers = [asyncio.create_task(write(number)) for number in range(4)]
        while len(sent) < 20:
            await asyncio.sleep(0)
        before = list(sent)
        await asyncio.to_thread(copy, old, new, keys)
        stop.set()
        await asyncio.gather(*writers)
        rule = await client.rule("new")
        histories = [(await client.get(f"/v1/users/{name}/history")).json() for name in before]
    async with running(there, recommender=fake()) as (client, service):
        assert (await client.get("/v1/rules")).status_code == 401
        client.headers.update(headers)
        assert (await client.rule("new")) == rule
        assert (await client.get("/v1/items/lamp")).json()["title"] == "Lamp"
        for name, history in zip(before, histories, strict=True):
            assert (await client.get(f"/v1/users/{name}/history")).json() == history
        late = {"event_id": "l", "user": "bob", "item": "x", "timestamp": 5}
        await client.post("/v1/events", json={"events": [late]})
        assert (await client.get("/v1/users/bob/history")).status_code == 404
        counts = {}
        for name in {event.user for event in service.store.history.export()}:
            history = (await client.get(f"/v1/users/{name}/history")).json()
            counts[name] = len(history["events"])
        assert counts.pop("ada") == 2
        assert set(counts.values()) == {3}
