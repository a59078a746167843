"""`benchmarks/serve.py`: loops over HTTP, requests, errors, and lists that are compared."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest
import serve
from load_client import Client
from servers import Server


@pytest.fixture
def talking():
    @asynccontextmanager
    async def talk(status):
        """A client of a server that answers with what `status` returns; None hangs up."""
        talks = []

        async def answer(reader, writer):
            talks.append(asyncio.current_task())
            with suppress(asyncio.IncompleteReadError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    length = head.partition("content-length: ")[2].split("\r\n")[0]
                    await reader.readexactly(int(length or 0))
                    if (code := status()) is None:
                        break
                    writer.write(f"HTTP/1.1 {code} OK\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = Server(*server.sockets[0].getsockname())
            async with Client(address, "/v1/x", key="rk_x") as client:
                yield client
            await asyncio.gather(*talks)

    return talk


async def test_a_broken_connection_counts_as_an_error(talking):
    async with talking(lambda: None) as client:
        assert (await client.send(b"1")).status == 0
        run = await client.closed(iter([b"1"] * 3), 1)
    assert (run.statuses, run.errors, run.latency_ms) == ({0: 3}, 3, [])


async def test_bad_answers_are_counted_by_status_and_not_timed(talking):
    codes = iter([200, 429, 500, 200])
    async with talking(lambda: next(codes)) as client:
        run = await client.closed(iter([b"1"] * 4), 1)
    assert run.statuses == {200: 2, 429: 1, 500: 1}
    assert (run.errors, len(run.latency_ms), run.replies) == (2, 2, [])


async def test_an_open_loop_counts_latency_from_the_due_time(talking):
    async with talking(lambda: 200) as client:
        run = await client.open([b"1"] * 9, [0.0, 0.01, -1.0])
    assert len(run.latency_ms) == 3
    assert max(run.latency_ms) >= 1000, "the request that was due a second ago"


def test_lists_are_the_same_tied_or_different():
    alone = [[("a", 3.0), ("b", 2.0), ("c", 2.0)]]
    assert serve.compare(alone, alone)["same"] == 1
    assert serve.compare(alone, [[("a", 3.0005), ("c", 2.0004), ("b", 2.0)]])["tied"] == 1
    for other in (
        [("a", 3.0), ("b", 2.1), ("c", 2.0)], [("b", 3.0), ("a", 2.0), ("c", 2.0)], alone[0][:2],
    ):  # fmt: skip
        assert serve.compare(alone, [other])["different"] == 1


def test_a_service_is_started_and_measured(random_bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "WARM_S", 0.1)
    monkeypatch.setattr(serve, "COMPARED", 20)
    bundle = random_bundle(tmp_path / "bundle", 60)
    serve.main(["--bundle", str(bundle), "--quick", "--seconds", "0.2", "--concurrency", "1", "4"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["clients"] for row in document["closed"]] == [1, 4]
    assert document["lists"]["same"] + document["lists"]["tied"] == 20
