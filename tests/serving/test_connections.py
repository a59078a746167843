"""What the HTTP server promises without a proxy: malformed requests, order, shutdown."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from oracles import PATIENCE_S

from recsys.serving import server
from recsys.serving.guard import Guard
from recsys.serving.metrics import Metrics
from recsys.serving.middleware import Entrance
from recsys.serving.sockets import bind

HEAD = b"POST /v1/recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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


async def test_two_host_headers_are_refused_before_the_application(settings):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"no HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\nna me: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
async def test_what_is_not_http_is_refused(settings, request_):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(request_)
        assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")


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


async def refuse(scope, receive, send):
    """Answers without reading the body."""
    status = 200 if scope["method"] == "GET" else 401
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


async def test_requests_behind_one_that_is_answered_wait(settings):
    gate, begun = asyncio.Event(), []

    async def slow(scope, receive, send):
        begun.append(scope["path"])
        await gate.wait()
        await echo(scope, receive, send)

    async with listening(settings, slow) as found:
        reader, writer = await connect(found)
        for place in range(5):
            writer.write(LIVE.replace(b"/health/live", b"/%d" % place) * (1 + place % 2))
            await asyncio.sleep(0.02)
        assert begun == ["/0"]
        gate.set()
        assert [(await answer(reader))[0] for _ in range(7)] == [200] * 7
        assert begun == ["/0", "/1", "/1", "/2", "/3", "/3", "/4"]


@pytest.mark.parametrize("size", [b"1", b"9"])
async def test_a_body_of_a_wrong_length_ends_the_connection(settings, size):
    async def wrong(scope, receive, send):
        headers = [(b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"four"})

    async with listening(settings, wrong) as found:
        reader, writer = await connect(found)
        writer.write(LIVE)
        await rest(reader)  # until the server closes the connection
