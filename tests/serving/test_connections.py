"""Clients that are slow, idle, many or malformed, over real sockets."""

import asyncio
import contextlib
import json
import logging
import time
from types import SimpleNamespace

import pytest

from recsys.serving import connections, server
from recsys.serving.connections import PAUSE_S, Connections
from recsys.serving.metrics import Metrics
from recsys.serving.middleware import Deadline, RequestContext
from recsys.serving.sockets import bind
from recsys.serving.telemetry import Telemetry
from recsys.testing import PATIENCE_S

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
    body = f"{size} {scope['state']['arrived']:.3f}".encode()
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


async def problem(reader):
    status, headers, body = await answer(reader)
    assert headers["content-type"] == "application/problem+json"
    found = json.loads(body)
    assert found["status"] == status
    return status, found["code"]


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


async def test_a_head_that_arrives_as_a_whole_is_limited_too(settings):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n")
        assert await problem(reader) == (431, "headers_too_large")


async def test_two_host_headers_are_refused_before_the_application(settings):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert await problem(reader) == (400, "malformed_request")


@pytest.mark.parametrize(
    "request_",
    [
        b"no HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\nna me: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
async def test_what_is_not_http_is_refused_with_a_problem(settings, request_):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(request_)
        assert await problem(reader) == (400, "malformed_request")
        assert await rest(reader) == b""


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://shop.example:8000/a/b?c=d", ("/a/b", b"c=d")),
        (b"HTTPS://shop.example:8000", ("/", b"")),
        (b"http://shop.example:8000?c=/d", ("/", b"c=/d")),
        (b"/http://evil.example/", ("/http://evil.example/", b"")),
    ],
)
async def test_absolute_targets_are_those_of_their_host(settings, target, path):
    seen = []

    async def note(scope, receive, send):
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        seen.append((scope["path"], scope["query_string"], hosts))
        await refuse(scope, receive, send)

    async with listening(settings, note) as found:
        reader, writer = await connect(found)
        writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: other.example\r\n\r\n")
        assert (await answer(reader))[0] == 200
    host = b"other.example" if target.startswith(b"/") else b"shop.example:8000"
    assert seen == [(*path, [host])]


async def test_idle_connections_are_closed(settings, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    async with listening(settings) as found:
        reader, writer = await connect(found)
        writer.write(LIVE)
        assert b"200 OK" in await rest(reader)  # idle after its answer
        reader, _ = await connect(found)
        assert await rest(reader) == b""


@pytest.mark.parametrize("part", [b"POST /v1/re", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
async def test_a_request_that_arrives_slowly_is_a_408(settings, part):
    async with listening(settings, deadline_ms=100.0) as found:
        reader, writer = await connect(found)
        writer.write(part)
        head, body = (await rest(reader)).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["code"] == "request_timeout"


async def test_a_connection_goes_on_after_an_answer_to_head(settings):
    async def hello(scope, receive, send):
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    app = RequestContext(hello, Metrics(), Telemetry())
    async with listening(settings, app) as found:
        reader, writer = await connect(found)
        for _ in range(2):
            writer.write(LIVE.replace(b"GET", b"HEAD"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"content-length: 5" in head
        writer.write(LIVE)
        assert (await answer(reader))[2] == b"hello"


async def test_a_slow_body_is_logged_and_counted_as_408(settings, caplog):
    caplog.set_level(logging.INFO)
    app = RequestContext(echo, Metrics(), Telemetry())
    async with listening(settings, app, deadline_ms=100.0) as found:
        reader, writer = await connect(found)
        writer.write(HEAD + b"Content-Length: 9\r\n\r\n{")
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
    logged = [record.fields["status"] for record in caplog.records if hasattr(record, "fields")]
    assert logged == [408]


async def test_bytes_now_and_then_do_not_prolong_a_request(settings):
    async with listening(settings, deadline_ms=200.0) as found:
        reader, writer = await connect(found)
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        closed = asyncio.create_task(rest(reader))
        with contextlib.suppress(ConnectionError):
            while not closed.done():
                writer.write(b" ")
                await asyncio.sleep(0.01)
        # What is still sent to a closed socket resets it, and that may overtake the answer.
        assert (await closed)[:13] in (b"HTTP/1.1 408 ", b"")


async def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(settings):
    async def refuse(scope, receive, send):
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async with listening(settings, refuse, deadline_ms=100.0) as found:
        reader, writer = await connect(found)
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n{")
        assert (await rest(reader)).count(b"HTTP/1.1") == 1


async def test_the_application_learns_when_the_first_byte_arrived(settings):
    async with listening(settings) as found:
        reader, writer = await connect(found)
        loop = asyncio.get_running_loop()
        for _ in range(2):  # of each request of a connection
            writer.write(HEAD[:20])
            await asyncio.sleep(0.05)
            before = loop.time()
            writer.write(HEAD[20:] + b"Content-Length: 2\r\n\r\n{}")
            status, _, body = await answer(reader)
            assert status == 200
            assert float(body.split()[-1].split(b"\r\n")[0]) < before


async def test_a_body_in_very_many_pieces_is_refused(settings):
    async with listening(settings) as found:
        for size, pieces, status in ((1, 3_000, 400), (100, 3_000, 200), (1, 90, 200)):
            reader, writer = await connect(found)
            piece = b"%x\r\n%s\r\n" % (size, b" " * size)
            end = b"0\r\n\r\n"
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + piece * pieces + end)
            assert int((await reader.readline()).split()[1]) == status, (size, pieces)


async def test_after_a_malformed_request_an_address_waits():
    limits = Connections(8, trusted="10.0.0.1")
    for address in ("10.0.0.1", "10.0.0.2"):
        limits.is_malformed(address, now=5.0)
    assert [limits.pause("10.0.0.2", now) for now in (5.5, 6.1)] == [PAUSE_S, 0.0]
    assert [limits.pause(other, 5.5) for other in ("10.0.0.1", "10.0.0.3")] == [0.0, 0.0]
    limits.is_malformed("10.0.0.3", now=9.0)
    assert list(limits._malformed) == ["10.0.0.3"]


async def test_connections_after_a_malformed_request_are_answered(settings):
    async with listening(settings, forwarded_allow_ips="::1") as found:
        reader, writer = await connect(found)
        writer.write(b"no HTTP\r\n\r\n")
        assert int((await reader.readline()).split()[1]) == 400
        start = time.monotonic()
        for _ in range(2):
            reader, writer = await connect(found)
            writer.write(LIVE)
            assert (await answer(reader))[0] == 200
        assert time.monotonic() - start >= PAUSE_S


async def refuse(scope, receive, send):
    """Answers without reading the body."""
    status = 200 if scope["method"] == "GET" else 401
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"]
)
async def test_a_body_after_the_answer_leaves_an_idle_connection(settings, monkeypatch, body):
    last = b"hello" if b"Length" in body else b"0\r\n\r\n"
    async with listening(settings, refuse, max_connections=8) as found:
        for _ in range(20):  # each makes room for the next
            reader, writer = await connect(found)
            writer.write(HEAD + body)
            assert (await answer(reader))[0] == 401
            writer.write(last)
            await asyncio.sleep(0.01)
        writer.write(LIVE)
        assert (await answer(reader))[0] == 200
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    async with listening(settings, refuse) as found:
        reader, writer = await connect(found)
        writer.write(HEAD + body)
        assert (await answer(reader))[0] == 401
        writer.write(last)
        assert await rest(reader) == b""


async def test_what_is_malformed_behind_a_head_ends_the_connection_quietly(settings, caplog):
    async with listening(settings, refuse) as found:
        reader, writer = await connect(found)
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        assert (await answer(reader))[0] == 401
        writer.write(b"no chunk\r\n")
        assert await rest(reader) == b""
        reader, writer = await connect(found)  # the same before the application knows the request
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.exc_info]


async def test_idle_connections_make_room_for_a_new_one(settings):
    async with listening(settings, max_connections=8) as found:
        for _ in range(40):
            await connect(found)
        reader, writer = await connect(found)
        writer.write(LIVE)
        assert (await answer(reader))[0] == 200
        assert len(found.server.server_state.connections) <= 8


async def test_keep_alive_clients_are_told_at_shutdown(settings):
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        if scope["path"] == "/slow":
            await gate.wait()
        await echo(scope, receive, send)

    async with listening(settings, slow) as found:
        idle, under_way = [await connect(found) for _ in range(2)]
        idle[1].write(LIVE)
        assert "connection" not in (await answer(idle[0]))[1]
        under_way[1].write(LIVE.replace(b"/health/live", b"/slow"))
        await asyncio.sleep(0.05)
        found.server.should_exit = True
        await asyncio.sleep(0.2)  # uvicorn looks every 0.1 s
        gate.set()
        idle[1].write(LIVE)
        for reader, _ in (idle, under_way):
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (200, "close")
        await found.task


class Fake:
    def __init__(self, address):
        self.address, self.aborted = address, False
        self.transport = self

    def abort(self):
        self.aborted = True


def test_the_address_with_most_connections_gives_way():
    limits = Connections(8, trusted="proxy")
    crowd = [Fake("proxy") for _ in range(7)]
    other = Fake("other")
    assert all(limits.add(one) for one in [other, *crowd])
    limits.waits(crowd[0], False)
    new = Fake("new")
    assert limits.add(new)
    assert [one.aborted for one in crowd] == [False, True, *[False] * 5]
    assert not other.aborted
    assert len(limits) == 8


def test_an_address_has_a_quarter_of_the_connections():
    limits = Connections(8, trusted="proxy")
    mine = [Fake("a") for _ in range(3)]
    assert [limits.add(one) for one in mine] == [True] * 3
    assert [one.aborted for one in mine] == [True, False, False]
    for one in mine[1:]:
        limits.waits(one, False)  # both are being answered
    assert not limits.add(Fake("a"))
    assert all(limits.add(Fake("proxy")) for _ in range(6))
    limits.remove(mine[1])
    limits.remove(mine[1])
    assert limits.add(Fake("a"))


def test_a_full_server_refuses_a_connection_if_all_are_answered():
    limits = Connections(2, trusted="*")
    for one in (busy := [Fake("a"), Fake("b")]):
        assert limits.add(one)
        limits.waits(one, False)
    assert not limits.add(Fake("c"))
    limits.waits(busy[0], True)
    assert limits.add(Fake("c"))
    assert busy[0].aborted


def test_the_limit_of_open_files_bounds_the_connections(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (300, 300))
    assert Connections(1000, "").most == (300 - connections.OWN_FILES) // 2


async def test_an_answer_that_is_not_read_ends_quietly(settings, caplog, until, monkeypatch):
    """The client is disconnected at the deadline, and the log has one line."""

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    for name in ("uvicorn.error", "recsys.serving.access", "recsys.serving.failures"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger="recsys.serving.access")
    app = RequestContext(Deadline(endless, 0.1), Metrics(), Telemetry())
    async with listening(settings, app) as found:
        _, writer = await connect(found)
        writer.write(LIVE * 10)
        await until(lambda: found.server.server_state.connections)
        await until(lambda: not found.server.server_state.connections)
    records = [record for record in caplog.records if record.levelno > logging.INFO]
    assert records == []
    lines = [record for record in caplog.records if record.name == "recsys.serving.access"]
    assert [line.fields["status"] for line in lines] == [499]


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


async def test_what_a_connection_takes_on_the_event_loop_is_measured(settings):
    found = []

    async def busy(scope, receive, send):
        found.append(scope["state"]["meter"].take())
        if len(found) == 1:
            await asyncio.sleep(0)
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
        await echo(scope, receive, send)

    async with listening(settings, busy) as to:
        reader, writer = await connect(to)
        for _ in range(2):
            writer.write(LIVE)
            await answer(reader)
    assert found[0] > 0  # the head was read
    assert found[1] > 0.05
