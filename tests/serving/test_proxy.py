"""The shipped proxy in front of the service.

Clients have addresses of their own, as the proxy has: 127.0.0.0/8 is all loopback.
"""

import re
import socket
import ssl
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial

import httpx
import proxy
import pytest
from oracles import PATIENCE_S
from proxy import HERE, PROXY

from recsys.serving.schemas.common import Problem
from recsys.serving.service import BATCHED
from recsys.serving.settings import ServingSettings

ANNA, BOB = "127.0.0.5", "127.0.0.6"
ASK = "/v1/recommendations"
SERVING = proxy.CONF.parents[1] / "docs" / "serving.md"

pytestmark = pytest.mark.skipif(
    not (proxy.NGINX and proxy.OPENSSL),
    reason="nginx or openssl is not installed (apt-get: nginx-light)",
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return proxy.make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def start_service(serving, settings, recommender):
    """Starts the service; yields its port, and a list of the paths of requests that reached it."""

    @contextmanager
    def start(**changes):
        changed, seen = settings.model_copy(update=changes), []
        with serving(changed, seen, recommender=recommender) as url:
            yield int(url.rpartition(":")[2]), seen

    return start


@pytest.fixture
def start_proxy(tmp_path, certificate):
    return partial(proxy.start_proxy, tmp_path, certificate)


@pytest.fixture
def browse(certificate):
    """A client from an address, which trusts the test's certificate."""

    def client(port, address=ANNA):
        trusted = ssl.create_default_context(cafile=certificate)
        return httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            transport=httpx.HTTPTransport(verify=trusted, local_address=address),
            timeout=PATIENCE_S,
        )

    return client


@pytest.fixture
def connect(certificate):
    """A TLS connection of which the test sends every byte."""

    def connection(port):
        trusted = ssl.create_default_context(cafile=certificate)
        plain = socket.create_connection((HERE, port), PATIENCE_S, (ANNA, 0))
        return trusted.wrap_socket(plain, server_hostname=HERE)

    return connection


def was_cut(connection):
    """Whether the other side ends the connection, with or without an answer."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except (ConnectionError, ssl.SSLError):
        pass
    return True


def test_the_proxy_speaks_tls_and_sends_plain_http_there(start_service, start_proxy, browse):
    with start_service() as (port, _), start_proxy(port) as (secure, plain):
        with browse(secure) as client:
            answer = client.post(ASK, json={"history": ["item-1"], "k": 3})
            session = answer.extensions["network_stream"].get_extra_info("ssl_object")
            assert session.version() == "TLSv1.3"
            assert len(answer.json()["items"]) == 3
            assert answer.headers["strict-transport-security"].startswith("max-age=")
        moved = httpx.get(f"http://127.0.0.1:{plain}/docs?a=1", trust_env=False)
        assert (moved.status_code, moved.headers["location"]) == (301, "https://127.0.0.1/docs?a=1")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_the_lowest_version_of_tls_is_1_2(start_proxy, certificate):
    """Without nginx's own line, 1.1 is spoken with those who accept its weak hashes, as here."""
    off = "off; ssl_ciphers DEFAULT:@SECLEVEL=0"
    with start_proxy(1, ssl_session_tickets=off) as (secure, _):
        refused = pytest.raises(ssl.SSLError, match="alert protocol version")
        for version, told in (("TLSv1_2", nullcontext()), ("TLSv1_1", refused)):
            trusted = ssl.create_default_context(cafile=certificate)
            trusted.set_ciphers("DEFAULT:@SECLEVEL=0")
            trusted.minimum_version = trusted.maximum_version = ssl.TLSVersion[version]
            with socket.create_connection((HERE, secure), PATIENCE_S) as plain, told:
                trusted.wrap_socket(plain, server_hostname=HERE).close()


def test_only_the_proxy_names_the_address_of_a_client(start_service, start_proxy, browse):
    limits = {"rate_limit": 0.001, "rate_burst": 2, "forwarded_allow_ips": PROXY}
    with start_service(**limits) as (port, _), start_proxy(port) as (secure, _):

        def statuses(client):
            """Of three requests that each claim to come from somewhere else."""
            with client:
                claims = [{"X-Forwarded-For": f"192.0.2.{n}"} for n in range(3)]
                return [client.get("/v1/models", headers=claim).status_code for claim in claims]

        assert statuses(browse(secure, ANNA)) == [200, 200, 429]
        assert statuses(browse(secure, BOB)) == [200, 200, 429]
        direct = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        assert statuses(direct) == [200, 200, 429]


@pytest.mark.parametrize(
    ("sent", "timeout", "pace"),
    [
        (f"POST {ASK} HTTP/1.1\r\nHost: {HERE}\r\nX-Slow: ", "client_header_timeout", b"a"),
        (f"POST {ASK} HTTP/1.1\r\nHost: {HERE}\r\nContent-Length: 9\r\n\r\n{{",
         "client_body_timeout", b""),
    ],
    ids=["a head that never ends", "a body that stops"],
)  # fmt: skip
def test_slow_clients_are_cut_by_the_proxy(
    start_service, start_proxy, connect, sent, timeout, pace
):
    with (
        start_service() as (port, seen),
        start_proxy(port, **{timeout: "3s"}) as (secure, _),
        connect(secure) as connection,
    ):
        connection.sendall(sent.encode())
        connection.settimeout(0.2)  # the pace: a byte, then a look whether it is over
        for _ in range(5 * PATIENCE_S):
            with suppress(ConnectionError, ssl.SSLError):
                connection.sendall(pace)
            if was_cut(connection):
                break
        else:
            pytest.fail("the connection is still open")
        assert ASK not in seen


def begin(connection, length):
    """Send the head of a request; on return, nginx has taken it and reads the body."""
    head = f"POST {ASK} HTTP/1.1\r\nHost: {HERE}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n".encode())
    assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")


def test_a_slow_body_reaches_the_service_when_complete(start_service, start_proxy, connect, browse):
    body = b'{"history": ["item-1"], "k": 3}'
    with (
        start_service() as (port, seen),
        start_proxy(port) as (secure, _),
        connect(secure) as connection,
        browse(secure) as client,
    ):
        begin(connection, len(body))
        connection.sendall(body[:9])
        assert client.get("/health/ready").status_code == 200
        assert ASK not in seen
        connection.sendall(body[9:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert seen.count(ASK) == 1


def test_slow_requests_of_an_address_are_limited(start_service, start_proxy, connect, browse):
    with (
        start_service() as (port, _),
        start_proxy(port, client_body_timeout=f"{PATIENCE_S}s") as (secure, _),
        ExitStack() as connections,
        browse(secure, ANNA) as anna,
        browse(secure, BOB) as bob,
    ):
        for _ in range(128):
            assert anna.get("/health/ready").status_code == 200
            begin(connections.enter_context(connect(secure)), 1000)
        refused = anna.get("/health/ready")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert Problem.model_validate_json(refused.content).code == "rate_limited"
        assert bob.get("/health/ready").status_code == 200


def test_the_limits_of_the_shipped_file_are_the_documented_ones_and_fit_the_queue():
    text, docs = (file.read_text(encoding="utf-8") for file in (proxy.CONF, SERVING))
    names = ("client_header_timeout", "client_body_timeout", "limit_conn addresses")
    head, pause, most = (re.findall(rf"{name} (\d+)s?;", text)[0] for name in names)
    for words in (f"after {head} s ends", f"pauses for {pause} s", f"at most {most} requests"):
        assert words in docs
    queue = ServingSettings().queue_limit
    assert int(most) + BATCHED * queue < queue


def test_a_large_body_is_refused_by_the_proxy(start_service, start_proxy, browse, settings):
    too_large = b" " * (settings.max_body_bytes + 1)
    with (
        start_service() as (port, seen),
        start_proxy(port) as (secure, _),
        browse(secure) as client,
    ):
        for content in (too_large, iter([too_large])):  # with a length, and in chunks
            answer = client.post(ASK, content=content)
            assert answer.status_code == 413
            assert answer.headers["content-type"] == "application/problem+json"
            problem = Problem.model_validate_json(answer.content)
            assert (problem.code, problem.status) == ("body_too_large", 413)
            assert "proxy" in problem.detail
        assert ASK not in seen


@pytest.mark.parametrize(
    "first",
    [
        b"GET /health/live HTTP/1.1\nHost: 127.0.0.1\n\n",  # bare LF
        b"POST /health/live HTTP/1.1\r\nHost: 127.0.0.1\nContent-Length: 4\n\nGET ",
        b"POST /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding:\r\n chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n"
        b"Content-Length: 4\r\n\r\nGET ",
        b"POST /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n"
        b"Content-Length: 0\r\n\r\nGET ",
        b"POST /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\n\n",
    ],
)
def test_the_proxy_and_the_service_see_the_same_requests(
    start_service, start_proxy, connect, first
):
    """The proxy writes each request anew, so a client gets as many answers as the service gives."""
    smuggled = b"GET /health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with start_service() as (port, seen), start_proxy(port) as (secure, _):
        with connect(secure) as connection:
            connection.sendall(first + smuggled)
            received = b""
            with suppress(ConnectionError, ssl.SSLError):
                while piece := connection.recv(65536):
                    received += piece
        statuses = re.findall(rb"HTTP/1\.1 (\d+)", received)
        assert statuses
        assert len(seen) == len([status for status in statuses if status != b"400"])
        assert seen == ["/health/live", "/health/ready"][: len(seen)]
