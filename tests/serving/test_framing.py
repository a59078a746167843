"""The HTTP server over real sockets: ambiguous ends, endless heads, idle connections, HEAD."""

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import uvicorn
from oracles import PATIENCE_S

from recsys.serving import server
from recsys.serving.metrics import Metrics
from recsys.serving.middleware import MAX_HEADERS, MAX_TARGET, Entrance, Guard

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
CHUNKED = b"Transfer-Encoding: chunked\r\n"
END = b"\r\n0\r\n\r\n"
AMBIGUOUS = [
    (b"1.1", b"Content-Length: 4\r\n" + CHUNKED + END),
    (b"1.1", CHUNKED + b"Content-Length: 5\r\n" + END),
    (b"1.1", b"Content-Length: 4\r\nTRANSFER-ENCODING: CHUNKED\r\n" + END),
    (b"1.1", b"Content-Length: 4\r\nTransfer-Encoding:\r\n chunked\r\n" + END),
    (b"1.1", b"Content-Length: 0\nTransfer-Encoding: chunked\r\n" + END),
    (b"1.1", b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n"),
    (b"1.1", b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n"),
    (b"1.1", b"Content-Length: 0, 5\r\n\r\n"),
    (b"1.1", b"Content-Length: +0\r\n\r\n"),
    (b"1.1", b"Content-Length: 0x0\r\n\r\n"),
    (b"1.1", CHUNKED + b"Transfer-Encoding: identity\r\n" + END),
    (b"1.1", b"Transfer-Encoding: identity\r\n\r\n"),
    (b"1.1", b"Transfer-Encoding: gzip, chunked\r\n" + END),
    (b"1.1", b"Transfer-Encoding: xchunked\r\n" + END),
    (b"1.1", b"Transfer-Encoding : chunked\r\n" + END),
    (b"1.1", b"Transfer-Encoding: \x0bchunked\r\n" + END),
    (b"1.0", CHUNKED + END),
]
CLEAR = [b"Content-Length: 0\r\n\r\n", CHUNKED + END, b"\r\n"]


@contextmanager
def listening(settings, http):
    """A server with this implementation of HTTP; yields its address and the paths it was asked."""
    asked = []

    async def answer(scope, receive, send):
        more, largest = True, 0
        while more:
            message = await receive()
            more, largest = message.get("more_body"), max(largest, len(message.get("body", b"")))
        for _ in range(3):  # what is sent meanwhile is read
            await asyncio.sleep(0)
        asked.append(largest if scope["path"] == "/largest" else scope["path"])
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"})

    metrics = Metrics()
    app = Entrance(answer, Guard(settings, metrics), settings, metrics)
    if http == "ours":
        made = server.http_server(app, settings)
        made.config.lifespan = "off"
    else:
        made = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not made.started:
                time.sleep(0.001)
            yield listener.getsockname(), asked
        finally:
            made.should_exit = True
            thread.join()


def talk(address, sent):
    """All bytes of the answers, until the server closes the connection."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        received = b""
        with suppress(ConnectionError):
            connection.sendall(sent)
            while piece := connection.recv(65536):
                received += piece
        return received


@pytest.mark.parametrize("http", ["ours", "h11", "httptools"])
def test_an_ambiguous_end_is_a_400_and_the_last_request(settings, http):
    if http == "httptools":
        pytest.importorskip("httptools")
    with listening(settings, http) as (address, asked):
        for version, rest in AMBIGUOUS:
            head = b"POST /first HTTP/%s\r\nHost: localhost\r\n" % version
            received = talk(address, head + rest + SMUGGLED)
            assert received.startswith(b"HTTP/1.1 400 "), (http, rest, received)
            assert b" 200 " not in received, (http, rest)
        problem = received.partition(b"\r\n\r\n")[2]  # of the last, which h11 accepts
        assert json.loads(problem)["code"] == "ambiguous_length"
        assert "/smuggled" not in asked
        for rest in CLEAR:
            asked.clear()
            received = talk(address, b"POST /first HTTP/1.1\r\nHost: localhost\r\n" + rest + LAST)
            assert received.count(b"HTTP/1.1 200 ") == 2
            assert asked == ["/first", "/smuggled"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (b"/" + MAX_TARGET * b"x", b""),
        (b"/first", (MAX_HEADERS + 1) * b"More: x\r\n"),
        (b"/first", b"More: " + 20_000 * b"x" + b"\r\n"),
    ],
)
def test_a_request_that_is_also_too_large_is_the_last_one(settings, path, more):
    with listening(settings, "ours") as (address, asked):
        for version, rest in AMBIGUOUS:
            head = b"POST %s HTTP/%s\r\nHost: localhost\r\n" % (path, version)
            received = talk(address, head + more + rest + SMUGGLED)
            assert received.startswith(b"HTTP/1.1 400 "), (rest, received)
            assert received.count(b"HTTP/1.1 ") == 1, (rest, received)
        assert asked == []


@pytest.mark.parametrize("before", [b"", CHUNKED + b"\r\n0\r\n"])
def test_very_many_lines_end_the_connection(settings, before):
    with listening(settings, "ours") as (address, asked):
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + before
        assert b" 200 " in talk(address, head + b"a:\r\n" * 60 + b"\r\n")
        received = talk(address, head + b"a:\r\n" * 7_000 + b"\r\n")
        assert received.startswith(b"" if before else b"HTTP/1.1 400 ")
        assert b" 200 " not in received
        # A request may have begun when the lines behind its body come.
        assert set(asked) == {"/"}
        assert before or len(asked) == 1


def test_a_malformed_chunk_ends_the_connection_without_a_traceback(settings, caplog):
    head = b"POST /first HTTP/1.1\r\nHost: localhost\r\n" + CHUNKED
    with listening(settings, "ours") as (address, asked):
        for more in (b"", b"Content-Length: 5\r\n"):
            received = talk(address, head + more + b"\r\n-1\r\nhello" + SMUGGLED)
            assert received.startswith(b"HTTP/1.1 400 ")
            assert received.count(b"HTTP/1.1 ") == 1
        with socket.create_connection(address, timeout=PATIENCE_S) as connection:
            connection.sendall(head.replace(b"first", MAX_TARGET * b"x") + b"\r\n")
            assert connection.recv(12) == b"HTTP/1.1 414"  # before its body
            connection.sendall(b"-1\r\n")
            with suppress(ConnectionError):
                while connection.recv(65536):
                    pass
        assert "/smuggled" not in asked
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


def test_idle_connections_are_closed(settings, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    with listening(settings, "ours") as (address, _):
        assert b"200 OK" in talk(address, SMUGGLED)  # it is idle after its answer


def test_a_connection_goes_on_after_an_answer_to_head(settings):
    with listening(settings, "ours") as (address, asked):
        received = talk(address, SMUGGLED.replace(b"GET", b"HEAD") * 2 + LAST)
        assert received.count(b"HTTP/1.1 200 ") == received.count(b"content-length: 5") == 3
        assert received.count(b"hello") == 1
        assert len(asked) == 3


def test_a_body_behind_head_or_get_is_no_request(settings):
    with listening(settings, "ours") as (address, asked):
        length = f"\r\nContent-Length: {len(SMUGGLED)}\r\n\r\n".encode()
        for method in (b"HEAD", b"GET"):
            first = SMUGGLED.replace(b"GET /smuggled", method + b" /first")
            talk(address, first.replace(b"\r\n\r\n", length) + SMUGGLED + LAST)
        assert asked == ["/first", "/smuggled"] * 2


def test_a_turn_of_the_event_loop_reads_little_of_a_body(settings):
    with listening(settings, "ours") as (address, asked):
        head = b"POST /largest HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        assert b" 200 " in talk(address, head + CHUNKED + b"\r\n1\r\n " * 50_000 + END)
        assert 0 < asked.pop() <= server.MAX_READ
        whole = head + b"Content-Length: 500000\r\n\r\n" + bytes(500_000)
        assert b" 200 " in talk(address, whole)
        assert 0 < asked.pop() <= server.MAX_BODY_READ
        with ExitStack() as idle:
            for _ in range(server.MAX_READ // server.LEAST_READ + 5):
                idle.enter_context(socket.create_connection(address))
            assert b" 200 " in talk(address, head + CHUNKED + b"\r\n1\r\n " * 5_000 + END)
            assert 0 < asked.pop() <= server.LEAST_READ


def test_a_connection_on_which_too_many_requests_wait_is_closed_behind_an_answer(settings):
    request = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"
    few = server.MAX_WAITING // len(request)
    with listening(settings, "ours") as (address, asked):
        talk(address, request * 20 * few)
        assert 0 < len(asked) < few
        asked.clear()
        assert talk(address, request * (few - 1) + LAST).count(b" 200 ") == len(asked) == few
