"""Plain requests against h11, and heads of answers against h11's reading of them."""

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recsys.serving.plain import read_plain, write_head

MOST = 4096
HOST = b"Host: shop\r\n"
POST = b"POST /v1/recommendations?a=%20b HTTP/1.1\r\n"

NAMES = st.sampled_from(
    [
        *(b"Host", b"host", b"Content-Length", b"CONTENT-LENGTH", b"Content-Type", b"X-A", b"x!~|"),
        *(b"Connection", b"Transfer-Encoding", b"Expect", b"Upgrade", b"Trailer", b"Cookie"),
        *(b"", b"a b", b"a\tb", b"Content-Length ", b" Host", b"\xe4", b"a:b", b"n\x00"),
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                b"",
                b"0",
                b"3",
                b" 3",
                b"3\t",
                b"03",
                b"+3",
                b"3,3",
                b"3, 3",
                b"0x3",
                b"3_0",
                b"9" * 30,
            ),
            *(
                b"shop",
                b"keep-alive",
                b"Keep-Alive",
                b"close",
                b"chunked",
                b"identity",
                b"100-continue",
            ),
            *(
                b"websocket",
                b"a\tb",
                b"\x0b",
                b"\x7f",
                b"\xe4",
                b"a\rb",
                b"a\nb",
                b"a\r\n b",
                b"a\x00",
            ),
        ]
    ),
    st.binary(max_size=5),
)
LINES = st.lists(
    st.tuples(NAMES, st.sampled_from([b":", b": ", b" :", b":\t ", b""]), VALUES), max_size=5
)
STARTS = st.one_of(
    st.sampled_from(
        [
            *(
                POST,
                b"GET / HTTP/1.1\r\n",
                b"GET /%C3%A4%zz%2F HTTP/1.1\r\n",
                b"PUT / HTTP/1.1\r\n",
            ),
            *(
                b"GET / HTTP/1.0\r\n",
                b"GET  / HTTP/1.1\r\n",
                b"GET / HTTP/1.1\n",
                b"get / HTTP/1.1\r\n",
            ),
            *(
                b"GET * HTTP/1.1\r\n",
                b"GET http://a/b HTTP/1.1\r\n",
                b"\r\nGET / HTTP/1.1\r\n",
                b"",
            ),
            *(b"GET /\xe4 HTTP/1.1\r\n", b"GET /a b HTTP/1.1\r\n", b"GET /a#b HTTP/1.1\r\n"),
        ]
    ),
    st.binary(max_size=12),
)


@st.composite
def messages(draw):
    lines = b"".join(b"%b%b%b\r\n" % line for line in draw(LINES))
    host = draw(st.sampled_from([HOST, HOST, HOST, b""]))
    length = draw(st.sampled_from([b"", b"", b"Content-Length: 3\r\n"]))
    end = draw(st.sampled_from([b"\r\n", b"\r\n", b"\n", b""]))
    body = draw(st.sampled_from([b"", b"abc", b"abcd", b"ab", b"GET / HTTP/1.1\r\n\r\n"]))
    return draw(STARTS) + host + lines + length + end + body


def read_with_h11(data):
    """Target, method, headers and body of the one request that is the whole of `data`."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    request, body = connection.next_event(), b""
    while isinstance(event := connection.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert connection.trailing_data == (b"", False)
    assert connection.their_state is h11.DONE  # and not that the connection must end
    assert not connection.they_are_waiting_for_100_continue
    return request, body


@given(messages())
@example(POST + HOST + b"Content-Length: 3\r\n\r\nabc")
@example(POST + HOST + b"Connection: keep-alive\r\nX-A: \t a b \t\r\n\r\n")
def test_what_is_plain_is_read_as_h11_reads_it(data):
    head = read_plain(data, MOST)
    if head is None:
        return
    request, body = read_with_h11(data)
    assert head.method.encode() == request.method
    query = b"?" + head.query_string if b"?" in request.target else b""
    assert head.raw_path + query == request.target
    assert head.headers == [(name.lower(), value) for name, value in request.headers]
    assert head.body == body
    assert request.http_version == b"1.1"


@pytest.mark.parametrize(
    "headers",
    [
        [("Content-Type", "application/json"), ("Content-Length", "2"), ("Accept", "*/*")],
        [("Connection", "keep-alive"), ("Content-Length", "2"), ("User-Agent", "a (b; c) d/1.0")],
        [("content-length", "2"), ("authorization", "Bearer rk_a-b_c"), ("cookie", 'a="b"; c=d')],
    ],
)
def test_requests_of_usual_clients_are_plain(headers):
    lines = "".join(f"{name}: {value}\r\n" for name, value in [("Host", "a:80"), *headers])
    found = read_plain(f"POST /v1/x?a=b HTTP/1.1\r\n{lines}\r\n{{}}".encode(), MOST)
    assert found is not None
    assert (found.path, found.query_string, found.body) == ("/v1/x", b"a=b", b"{}")


def test_the_path_is_decoded_and_the_raw_one_is_not():
    found = read_plain(b"GET /a%2Fb%C3%A4 HTTP/1.1\r\n" + HOST + b"\r\n", MOST)
    assert (found.path, found.raw_path) == ("/a/b\xe4", b"/a%2Fb%C3%A4")


def test_a_head_over_the_limit_is_not_plain():
    request = b"GET / HTTP/1.1\r\n" + HOST + b"A: " + 100 * b"b" + b"\r\n\r\n"
    assert read_plain(request, len(request)) is not None
    assert read_plain(request, len(request) - 1) is None


def test_a_head_without_an_end_takes_linear_time():
    for line in (b"a: " + b" " * 100_000, b"a:" * 50_000, b"a: b\r\n" * 20_000, b"a" * 100_000):
        assert read_plain(b"GET / HTTP/1.1\r\n" + line, 200_000) is None


STATUSES = st.sampled_from([200, 201, 202, 204, 304, 400, 404, 422, 429, 500, 503])
OUR_NAMES = st.sampled_from([b"content-type", b"x-request-id", b"retry-after", b"date"])
TEXTS = st.text(st.characters(codec="latin-1"), max_size=8).map(lambda text: text.encode("latin-1"))
OURS = st.lists(st.tuples(OUR_NAMES, TEXTS), max_size=4)


@given(STATUSES, OURS, st.binary(max_size=20), st.booleans())
def test_answers_are_read_by_h11_as_they_are(status, headers, body, has_length):
    without_body = status in (204, 304)
    if has_length and status != 204:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    if without_body:
        body = b""
    if any(set(value) & {*range(32), 127} - {9} for _, value in headers):
        with pytest.raises(ValueError, match="control character"):
            write_head(status, headers)
        return
    head, length = write_head(status, headers)
    assert length == (0 if without_body else len(body) if has_length else None)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    client.send(h11.EndOfMessage())
    chunked = length is None
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked and body else body
    client.receive_data(head + (b"0\r\n\r\n" if chunked and not body else sent))
    answer = client.next_event()
    assert answer.status_code == status
    given_values = [(name, value.strip(b" \t")) for name, value in headers]
    framing = [(b"transfer-encoding", b"chunked")] if chunked else []
    assert [(name, value) for name, value in answer.headers] == given_values + framing
    received = b""
    while isinstance(event := client.next_event(), h11.Data):
        received += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert received == body
