"""Doubles of S3 and of Google's store: small parts of their protocols, from their documentation.

S3: GET, HEAD and PUT of objects, ListObjectsV2 with a delimiter, and multipart uploads. Google: the
JSON interface for objects and lists, and resumable uploads. They check no signature. An upload
becomes an object when it is completed.
"""

import itertools
import json
import re
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Store:
    """What the double holds.

    Attributes:
        objects: (bucket, key) -> content and time (Unix seconds).
        uploads: id -> what has arrived of an upload that is not complete.
        requests: method, path and query of each request.
        fail: (method, path, query) -> an HTTP status to refuse a request with, or None.
    """

    def __init__(self, *buckets):
        self.buckets = set(buckets)
        self.objects, self.uploads, self.requests = {}, {}, []
        self.fail = lambda method, path, query: None
        self.numbers = itertools.count(1)
        self.now = 1_700_000_000
        self.url = ""

    def put(self, bucket, key, content):
        self.now += 1
        self.objects[bucket, key] = content, self.now


class Handler(BaseHTTPRequestHandler):
    """What both have in common."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", headers=None):
        self.send_response(status)
        for name, value in ({"Content-Length": len(content)} | (headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


def amazon(store):
    class Amazon(Handler):
        def xml(self, name, inner, status=200):
            text = f'<?xml version="1.0" encoding="UTF-8"?><{name} {XMLNS}>{inner}</{name}>'
            self.answer(status, text.encode(), {"Content-Type": "application/xml"})

        def error(self, status, code):
            if self.command == "HEAD":
                self.answer(status)
            else:
                text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
                self.answer(status, text.encode(), {"Content-Type": "application/xml"})

        def content(self):
            body = self.body()
            if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
                return body
            parts = []
            while body:  # SIZE in hexadecimal [;extension] CRLF, bytes, CRLF; the last one has none
                line, _, body = body.partition(b"\r\n")
                size = int(line.partition(b";")[0], 16)
                if not size:
                    break
                parts.append(body[:size])
                body = body[size + 2 :]
            return b"".join(parts)

        def do(self):
            parsed = urlsplit(self.path)
            query = {k: v[0] for k, v in parse_qs(parsed.query, keep_blank_values=True).items()}
            bucket, _, key = unquote(parsed.path).lstrip("/").partition("/")
            body = self.content()
            store.requests.append((self.command, parsed.path, query))
            if status := store.fail(self.command, parsed.path, query):
                return self.error(status, "AccessDenied")
            if bucket not in store.buckets:
                return self.error(404, "NoSuchBucket")
            if self.command in ("GET", "HEAD"):
                return self.read(bucket, key, query)
            if self.command == "PUT":
                return self.write(bucket, key, query, body)
            if self.command == "POST":
                return self.upload(bucket, key, query)
            store.uploads.pop(query.get("uploadId"), None)
            return self.answer(204)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do  # noqa: N815

        def read(self, bucket, key, query):
            if not key:
                return self.list(bucket, query) if "list-type" in query else self.answer(200)
            if (bucket, key) not in store.objects:
                return self.error(404, "NoSuchKey")
            content, time = store.objects[bucket, key]
            headers = {
                "Last-Modified": formatdate(time, usegmt=True),
                "ETag": f'"{md5(content).hexdigest()}"',
                "Accept-Ranges": "bytes",
            }
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(found[1]), min(int(found[2]), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                return self.answer(206, content[first : last + 1], headers)
            if self.command == "HEAD":
                headers["Content-Length"] = len(content)
            return self.answer(200, content, headers)

        def list(self, bucket, query):
            prefix, limit = query.get("prefix", ""), int(query.get("max-keys", 1000))
            rows, common = [], set()
            for (owner, key), (content, time) in sorted(store.objects.items()):
                if owner != bucket or not key.startswith(prefix):
                    continue
                head, slash, _ = key[len(prefix) :].partition("/")
                if slash and query.get("delimiter"):
                    common.add(prefix + head + "/")
                    continue
                modified = f"2023-11-14T22:{(time - 1_700_000_000) // 60 + 13}:{time % 60:02}.000Z"
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size>"
                    f"<LastModified>{modified}</LastModified></Contents>"
                )
            rows = rows[:limit]
            prefixes = [
                f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                for name in sorted(common)
            ]
            count = len(rows) + len(prefixes)
            self.xml(
                "ListBucketResult",
                f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{count}</KeyCount>"
                f"<MaxKeys>{limit}</MaxKeys><IsTruncated>false</IsTruncated>"
                + "".join(rows + prefixes),
            )

        def write(self, bucket, key, query, body):
            if "uploadId" in query:
                store.uploads[query["uploadId"]][int(query["partNumber"])] = body
            else:
                store.put(bucket, key, body)
            self.answer(200, b"", {"ETag": f'"{md5(body).hexdigest()}"'})

        def upload(self, bucket, key, query):
            if "uploads" in query:
                name = f"upload-{next(store.numbers)}"
                store.uploads[name] = {}
                return self.xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
            parts = store.uploads.pop(query["uploadId"])
            store.put(bucket, key, b"".join(parts[number] for number in sorted(parts)))
            return self.xml("CompleteMultipartUploadResult", '<ETag>"whole"</ETag>')

    return Amazon


def google(store):
    class Google(Handler):
        def json(self, found, status=200):
            self.answer(status, json.dumps(found).encode(), {"Content-Type": "application/json"})

        def describe(self, place):
            content, time = store.objects[place]
            date = datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")
            return {
                "kind": "storage#object", "bucket": place[0], "name": place[1],
                "size": str(len(content)), "generation": "1", "metageneration": "1",
                "updated": date, "timeCreated": date,
            }  # fmt: skip

        def do(self):
            parsed = urlsplit(self.path)
            query = dict(parse_qsl(parsed.query, keep_blank_values=True))
            body = self.body()
            store.requests.append((self.command, parsed.path, query))
            if status := store.fail(self.command, parsed.path, query):
                return self.json({"error": {"code": status, "message": "no"}}, status)
            found = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", parsed.path)
            if self.command == "PUT":
                return self.add(query["upload_id"], body)
            bucket, key = found[1], unquote(found[2] or "")
            if self.command == "POST":
                name = str(next(store.numbers))
                store.uploads[name] = (bucket, query["name"]), []
                return self.answer(200, b"", {"Location": f"{store.url}/parts?upload_id={name}"})
            if not key:
                prefix = query.get("prefix", "")
                places = [p for p in store.objects if p[0] == bucket and p[1].startswith(prefix)]
                if query.get("delimiter"):
                    places = [p for p in places if "/" not in p[1][len(prefix) :]]
                items = [self.describe(place) for place in sorted(places)]
                return self.json({"kind": "storage#objects", "items": items})
            if (bucket, key) not in store.objects:
                return self.json({"error": {"code": 404, "message": "Not Found"}}, 404)
            if query.get("alt") == "media":
                return self.answer(200, store.objects[bucket, key][0])
            return self.json(self.describe((bucket, key)))

        do_GET = do_PUT = do_POST = do_DELETE = do  # noqa: N815

        def add(self, name, body):
            place, parts = store.uploads[name]
            parts.append(body)
            if self.headers.get("Content-Range", "").endswith("/*"):
                size = sum(map(len, parts))
                return self.answer(308, b"", {"Range": f"bytes=0-{size - 1}"})
            del store.uploads[name]
            store.put(*place, b"".join(parts))
            return self.json(self.describe(place))

    return Google


@contextmanager
def serve(*buckets, kind=amazon):
    """Serve an empty store with these buckets on the loopback; yields the `Store`."""
    store = Store(*buckets)
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind(store))
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
