"""URLs of stores, whose passwords no message may show."""

import re
from urllib.parse import urlsplit

from recsys.errors import ConfigError

HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")  # with its port
ODD_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")


def place_of(url: str, setting: str) -> str:
    """A URL without user, password and options, for messages.

    >>> place_of("postgresql://shop:secret@db.example.org:5433/shop?sslmode=require", "serve.store")
    'postgresql://db.example.org:5433/shop'

    Raises:
        ConfigError: the URL is malformed. The message names the setting, and nothing of the URL: in
            a password, a `/`, `?` or `#` ends what is read as the host.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _malformed(url, setting) from None
    login, _, hosts = parts.netloc.rpartition("@")
    rest = parts.path + parts.fragment + ("" if login else parts.query)
    if "@" in rest or ODD_PERCENT.search(url) or not all(map(HOST.fullmatch, hosts.split(","))):
        raise _malformed(url, setting)
    return f"{parts.scheme}://{hosts}{parts.path}"


def _malformed(url: str, setting: str) -> ConfigError:
    return ConfigError(
        f"{setting}: expected {url.partition(':')[0]}://USER:PASSWORD@HOST:PORT/NAME; in a "
        "password, write / as %2F, ? as %3F, # as %23, @ as %40 and % as %25"
    )
