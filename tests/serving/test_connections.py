"""What the HTTP server promises without a proxy: bounds on heads and idle connections."""

import asyncio
import contextlib
from types import SimpleNamespace

from oracles import PATIENCE_S

from recsys.serving import server
from recsys.serving.metrics import Metrics
from recsys.serving.middleware import Entrance, Guard
from recsys.serving.sockets import bind

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def echo(scope, receive, send):
    """Answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    body = f"{size}".encode()
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(settings, app=echo, **options):
    listener, _ = bind("127.0.0.1", 0)
    made = server.http_server(app, settings.model_copy(update=options), lifespan="off")
    with listener, made.capture_signals():
        port = listener.getsockname()[1]
        task = asyncio.create_task(made.serve(sockets=[listener]))
        while not made.started:
            await asyncio.sleep(0.001)
        found = SimpleNamespace(port=port, server=made, task=task, writers=[])
        yield found
        made.should_exit = True
        for writer in found.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await task


async def connect(found):
    reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
    found.writers.append(writer)
    return reader, writer


async def rest(reader):
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    return b""


async def answer(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    if headers.get("transfer-encoding") == "chunked":
        body = await reader.readuntil(b"0\r\n\r\n")
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head.split()[1]), headers, body


async def test_endless_headers_end_the_connection(settings):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and sent < 10_000_000:
                writer.write(b"x-name: value\r\n" * 1_000)
                await writer.drain()
                sent += 15_000
        assert sent < 10_000_000  # what the buffers of both sockets hold


async def test_idle_connections_are_closed(settings, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(LIVE)
        assert b"200 OK" in await rest(reader)  # idle after its answer


async def test_a_connection_goes_on_after_an_answer_to_head(settings):
    async def hello(scope, receive, send):
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    metrics = Metrics()
    app = Entrance(hello, Guard(settings, metrics), settings, metrics)
    async with listening(settings, app) as found:
        reader, writer = await connect(found)
        for _ in range(2):
            writer.write(LIVE.replace(b"GET", b"HEAD"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: 5" in head
        writer.write(LIVE)
        assert (await answer(reader))[2] == b"hello"
