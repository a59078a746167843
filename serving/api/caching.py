"""Answers that clients and proxies may keep: `Cache-Control`, `ETag` and 304 (RFC 9110, 9111).

What is about a user or a session is private, and checked with the service each time that it is
used. What is the same for everybody may be kept for `MAX_AGE_S` by shared caches, too. That is also
allowed if the request had a key, so a cache that ignores `Vary` gives these lists to anyone.
"""

import hashlib
from typing import Any

from fastapi import Request, Response

MAX_AGE_S = 60
PRIVATE = "private, no-cache"
SHARED = f"public, max-age={MAX_AGE_S}"
_HEADERS = {
    "ETag": {"schema": {"type": "string"}, "description": "For `If-None-Match`."},
    "Cache-Control": {"schema": {"type": "string"}, "description": "Who may keep it how long."},
}
CACHED: dict[int | str, dict[str, Any]] = {
    200: {"headers": _HEADERS},
    304: {
        "description": "What the client has (`If-None-Match`) is still right.",
        "headers": _HEADERS,
    },
}


def tag_of(text: str) -> str:
    """The entity tag of an answer; weak, since parts of it may not count."""
    return f'W/"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"'


def has(request: Request, tag: str) -> bool:
    """Whether the client has the answer with this tag."""
    opaque = tag.removeprefix("W/")
    given = ",".join(request.headers.getlist("if-none-match")).split(",")
    return any(one.strip().removeprefix("W/") in (opaque, "*") for one in given)


def cached(request: Request, text: str, tag: str, policy: str) -> Response:
    """The response with an answer, or 304 if the client has it."""
    headers = {"ETag": tag, "Cache-Control": policy, "Vary": "Authorization"}
    if has(request, tag):
        return Response(status_code=304, headers=headers)
    return Response(text, headers=headers, media_type="application/json")
