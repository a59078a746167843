"""No part of a password is in a message."""

import re

import pytest

from recsys.errors import ConfigError
from recsys.serving.stores.postgres import place_of


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql:///shop", "postgresql:///shop"),
        ("postgresql://u:p%2Fq@h:5432/shop?sslmode=require", "postgresql://h:5432/shop"),
        ("postgresql://u:p@h1:5432,h2:5433/shop", "postgresql://h1:5432,h2:5433/shop"),
        ("postgres://[::1]:5432/shop", "postgres://[::1]:5432/shop"),
        ("postgresql://h/shop?user=a@b", None),
    ],
)
def test_the_place_has_host_port_and_name(url, place):
    if place is None:
        with pytest.raises(ConfigError):
            place_of(url, "serve.store")
    else:
        assert place_of(url, "serve.store") == place


@pytest.mark.parametrize("password", ["SECRET/x", "SECRET?x", "SECRET#x", "12/SECRET", "9%SECRET"])
@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_password_that_ends_the_host_is_refused_without_it(scheme, password):
    with pytest.raises(ConfigError, match=r"serve\.store: .*write / as %2F") as error:
        place_of(f"{scheme}://u:{password}@127.0.0.1/x", "serve.store")
    shown = str(error.value) + str(error.value.__cause__)
    assert not {"SECRET", "12"} & set(re.findall("SECRET|12", shown))
