"""What every kind of change promises that processes over one store share.

A kind of change gets these tests by a subclass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from oracles import PATIENCE_S

from recsys.serving.stores.records import StoreError


class SharedChangesSuite:
    """Tests of one kind of change; a subclass says how one thing is put, taken away and read.

    Attributes:
        table: attribute of the store with the table of the changes.
        reads, writes: methods of the table.
    """

    table, reads, writes = "journal", "read", "append"

    async def put(self, client: Any, number: int) -> httpx.Response:
        """Put the thing in a state of this number."""
        raise NotImplementedError

    async def take_away(self, client: Any) -> httpx.Response:
        """Take it away."""
        raise NotImplementedError

    async def state(self, client: Any) -> Any:
        """Its state; None if it is not there."""
        raise NotImplementedError

    async def stored(self, store: Any) -> Any:
        """Its state in the store, where it is."""
        raise NotImplementedError

    @pytest.fixture
    async def neighbours(
        self, settings: Any, fake: Any, running: Any, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Any]:
        """Two processes over one store, which look into it often; the service of the second."""
        monkeypatch.setattr("recsys.serving.shared_changes.LOOK_S", 0.02)
        async with (
            running(settings, recommender=fake()) as (one, _),
            running(settings, recommender=fake()) as (two, service),
        ):
            yield one, two, service

    async def agree(self, state: Any, *clients: Any) -> None:
        """Wait until all have a state."""
        async with asyncio.timeout(PATIENCE_S):
            while [await self.state(client) for client in clients] != [state] * len(clients):
                await asyncio.sleep(0.01)

    async def test_changes_are_kept_over_a_restart(
        self, settings: Any, fake: Any, running: Any
    ) -> None:
        async with running(settings, recommender=fake()) as (client, _):
            for number in (1, 2):
                assert (await self.put(client, number)).status_code == 200
            state = await self.state(client)
        async with running(settings, recommender=fake()) as (client, _):
            assert await self.state(client) == state is not None
            assert (await self.take_away(client)).status_code == 204
            assert (await self.take_away(client)).status_code == 404
        async with running(settings, recommender=fake()) as (client, _):
            assert await self.state(client) is None

    async def test_processes_over_one_store_make_each_others_changes(self, neighbours: Any) -> None:
        one, two, service = neighbours
        assert (await self.put(one, 1)).status_code == 200
        await self.agree(await self.state(one), two)
        # what the other one put can be taken away at once
        assert (await self.put(one, 2)).status_code == 200
        assert (await self.take_away(two)).status_code == 204
        await self.agree(None, one, two)
        # of changes at once, the one that was kept last holds everywhere
        pairs = zip([one, two] * 4, range(8), strict=True)
        done = await asyncio.gather(*(self.put(client, number) for client, number in pairs))
        assert {response.status_code for response in done} == {200}
        await self.agree(await self.stored(service.store), one, two)

    async def test_a_change_that_is_not_stored_is_not_acknowledged(
        self, settings: Any, fake: Any, running: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def full(*change: Any) -> None:
            raise StoreError("disk full")

        async with running(settings, recommender=fake()) as (client, service):
            with monkeypatch.context() as broken:
                broken.setattr(getattr(service.store, self.table), self.writes, full)
                response = await self.put(client, 1)
                assert (response.status_code, response.json()["code"]) == (
                    503, "store_unavailable",
                )  # fmt: skip
            assert (await self.put(client, 1)).status_code == 200
            assert await self.state(client) is not None

    async def test_changes_of_others_are_made_after_an_outage_of_the_store(
        self, neighbours: Any, until: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two, service = neighbours
        looks = []

        async def away(*place: Any) -> None:
            looks.append(place)
            raise StoreError("away")

        with monkeypatch.context() as broken:
            broken.setattr(getattr(service.store, self.table), self.reads, away)
            assert (await self.put(one, 1)).status_code == 200
            await until(lambda: len(looks) > 4)
        await self.agree(await self.state(one), two)
