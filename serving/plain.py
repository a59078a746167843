"""Plain requests: HTTP/1.1 requests of the usual form, whole in one piece, and heads of answers.

A plain request is read by one regular expression. What is plain is a strict subset of HTTP:
whatever is optional, old or ambiguous is left to h11, which reads every plain request in the same
way.
"""

import re
from collections.abc import Sequence
from http import HTTPStatus
from itertools import chain
from typing import NamedTuple
from urllib.parse import unquote

Headers = Sequence[tuple[bytes, bytes]]

# The quantifiers are possessive, so the time is linear.
_PLAIN = re.compile(
    rb"(GET|POST) (/[!-~]*+) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[\t -~]*+\r\n)++)\r\n"
)
# Headers that change how a message is read or answered, and are left to h11.
_SPECIAL = {b"transfer-encoding", b"expect", b"upgrade", b"trailer"}
_LENGTH = re.compile(rb"[0-9]{1,9}")
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NO_BODY = (204, 304)  # statuses of answers without a body
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Head(NamedTuple):
    """A plain request; the path is decoded, and names of headers are in lower case."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


def read_plain(data: bytes, most: int) -> Head | None:
    """Read a request that is the whole of `data`; None if it is not plain.

    `most` is the limit of its head in bytes.
    """
    found = _PLAIN.match(data, 0, most)
    if found is None:
        return None
    method, target, lines = found.groups()
    headers = []
    hosts, length = 0, b""
    for line in lines[:-2].split(b"\r\n"):
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b"\t ")
        headers.append((name, value))
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if length or not _LENGTH.fullmatch(value):
                return None
            length = value
        elif name in _SPECIAL or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
    body = data[found.end() :]
    if hosts != 1 or len(body) != int(length or 0):
        return None
    raw_path, _, query = target.partition(b"?")
    return Head(method.decode(), unquote(raw_path.decode()), raw_path, query, headers, body)


def write_head(status: int, headers: Headers) -> tuple[bytes, int | None]:
    """The head of an answer, and the length of its body; None if that is sent in chunks.

    Raises:
        ValueError: a header has a control character.
    """
    length: int | None = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
    if status in _NO_BODY:  # a 304 may tell the length of what it leaves out
        length = 0
    if _CONTROLS.search(b"".join(chain.from_iterable(headers))):
        raise ValueError("a header of the answer has a control character")
    lines = [b"%b: %b" % pair for pair in headers]
    if length is None:
        lines.append(b"transfer-encoding: chunked")
    head = b"\r\n".join([b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"")), *lines, b"\r\n"])
    return head, length
