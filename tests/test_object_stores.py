"""Object stores, against doubles of their protocols that serve on the loopback.

What was written is read back over plain HTTP, without the code under test.
"""

import importlib.util
import json
import os
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from recsys.commands import NewsOptions, SourceOptions
from recsys.data.sources import Tables, find_tables, name_of
from recsys.errors import ConfigError, DataError
from recsys.object_stores import fetch, is_object, reading, shown, writing
from recsys.options import RunOptions
from recsys.serving.store_commands import app

spec = importlib.util.spec_from_file_location(
    "object_store_double", Path(__file__).parent / "object_store_double.py"
)
double = importlib.util.module_from_spec(spec)
spec.loader.exec_module(double)

SECRET = "hunter2/hunter2"
PART = 10 << 20  # bytes; Arrow sends larger files in parts of this size
EVENTS = b"customer,sku,bought_at\na,x,1\na,y,2\nb,x,3\n"


@pytest.fixture
def store(monkeypatch):
    with double.serve("shop") as served:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        yield served


@pytest.fixture
def google():
    """A double of Google's store, and a function that makes URLs of its bucket `shop`."""
    with double.serve("shop", kind=double.google) as served:
        options = f"scheme=http&endpoint_override={served.url.removeprefix('http://')}"

        def url(key):
            return f"gs://anonymous@shop/{key}?{options}&retry_limit_seconds=1"

        yield served, url


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    return tmp_path / "var"


def over_http(store, place):
    with urllib.request.urlopen(f"{store.url}/{place}") as answer:
        return answer.read()


def gets(store):
    return [path for method, path, query in store.requests if method == "GET" and not query]


def test_an_object_is_copied_once(store, tmp_path):
    store.put("shop", "exports/events.csv", EVENTS)
    for _ in range(2):
        path = fetch("s3://shop/exports/events.csv", tmp_path)
        assert path == tmp_path / "events.csv"
        assert path.read_bytes() == over_http(store, "shop/exports/events.csv") == EVENTS
    assert len(gets(store)) == 3  # two of them are of this test
    store.put("shop", "exports/events.csv", EVENTS.replace(b"x", b"z"))
    assert b"z" in fetch("s3://shop/exports/events.csv", tmp_path).read_bytes()


@pytest.mark.parametrize("url", ["s3://shop/day", "s3://shop/day/"])
def test_a_prefix_is_a_folder(store, tmp_path, url):
    for key in ("day/a.csv", "day/b.csv", "day/old/c.csv", "days.csv"):
        store.put("shop", key, key.encode())
    folder = fetch(url, tmp_path)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {
        "a.csv": "day/a.csv",
        "b.csv": "day/b.csv",
    }
    del store.objects["shop", "day/a.csv"]
    assert [p.name for p in fetch(url, tmp_path).iterdir()] == ["b.csv"]


@pytest.mark.parametrize("url", ["s3://shop/none.csv", "s3://nothing/a.csv", "s3://shop/none/"])
def test_what_is_not_there_is_named(store, tmp_path, url):
    with pytest.raises(DataError, match="there is no such object"):
        fetch(url, tmp_path)


def test_a_prefix_with_objects_further_below_alone_is_refused(store, tmp_path):
    store.put("shop", "day/old/c.csv", b"1")
    with pytest.raises(DataError, match="no objects directly below"):
        fetch("s3://shop/day/", tmp_path)


def test_a_url_with_a_space_is_refused_with_the_way_out(store, tmp_path):
    with pytest.raises(ConfigError, match="a space as %20"):
        fetch("s3://shop/my events.csv", tmp_path)


def test_a_scheme_in_capitals_shows_no_password():
    assert shown("S3://key:secret@shop/a.csv") == "S3://shop/a.csv"


def test_no_object_leaves_the_folder(store, tmp_path):
    store.put("shop", "day/..", b"1")
    with pytest.raises(DataError, match="cannot be a file"):
        fetch("s3://shop/day/", tmp_path / "own")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_store_that_refuses_is_shown_without_secrets(store, tmp_path):
    store.put("shop", "a.csv", EVENTS)
    store.fail = lambda *_: 403
    for use in (reading, writing):
        refused = pytest.raises(DataError, match=r"^s3://shop/a\.csv: .*ACCESS_DENIED")
        with refused as caught, use("s3://shop/a.csv") as path:
            path.write_bytes(b"1")
        assert SECRET not in str(caught.value)
    assert store.objects["shop", "a.csv"][0] == EVENTS


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("user", ["key:hunter2@", "hunter2@", ":hunter2@", "anonymous:hunter2@"])
def test_credentials_in_a_url_are_refused_and_not_shown(scheme, user, tmp_path, home):
    url = f"{scheme}://{user}shop/a.csv"
    for use in (
        lambda: fetch(url, tmp_path),
        lambda: writing(url).__enter__(),
        lambda: find_tables(url),
        lambda: SourceOptions(events=url, query="SELECT 1").context(RunOptions(name="shop")),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        assert "hunter2" not in str(caught.value)
        assert "shop/a.csv" in str(caught.value)
    result = CliRunner().invoke(app, ["export", f"{url}.ndjson"])
    assert isinstance(result.exception, ConfigError)
    assert "hunter2" not in result.output + str(result.exception)


@given(st.text(st.characters(exclude_characters="/?"), min_size=1))
def test_what_stands_before_the_bucket_is_not_shown(text):
    assert shown(f"s3://{text}@shop/key?region=x") == "s3://shop/key"


@pytest.mark.parametrize("size", [0, 10, PART + 1])
def test_a_file_becomes_an_object(store, size):
    content = os.urandom(size)
    with writing("s3://shop/out/a.bin") as path:
        path.write_bytes(content)
        assert not store.objects
    assert over_http(store, "shop/out/a.bin") == content
    assert not store.uploads
    assert not path.exists()
    with reading("s3://shop/out/a.bin") as path:
        assert path.read_bytes() == content
    assert not path.exists()


@pytest.mark.parametrize("number", ["1", "2"])
def test_a_part_that_fails_leaves_the_old_object(store, number):
    store.put("shop", "a.bin", b"old")
    store.fail = lambda method, path, query: 403 if query.get("partNumber") == number else None
    with pytest.raises(DataError, match="ACCESS_DENIED"), writing("s3://shop/a.bin") as path:
        path.write_bytes(bytes(PART + 1))
    assert over_http(store, "shop/a.bin") == b"old"


def test_objects_at_google(google, tmp_path):
    store, url = google
    for key in ("day/a.csv", "day/b.csv", "day/old/c.csv", "days.csv"):
        store.put("shop", key, key.encode())
    assert fetch(url("days.csv"), tmp_path).read_text() == "days.csv"
    folder = fetch(url("day"), tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["a.csv", "b.csv"]
    with pytest.raises(DataError, match=r"^gs://shop/none: there is no such object$"):
        fetch(url("none"), tmp_path)
    for content in (b"", b"few", os.urandom(PART + 1)):
        with writing(url("out/a.bin")) as path:
            path.write_bytes(content)
        assert over_http(store, "storage/v1/b/shop/o/out%2Fa.bin?alt=media") == content
    store.fail = lambda method, path, query: 403 if method == "PUT" else None
    with (
        pytest.raises(DataError, match=r"^gs://shop/out/a\.bin: "),
        writing(url("out/a.bin")) as path,
    ):
        path.write_bytes(b"new")
    assert store.objects["shop", "out/a.bin"][0] == content


@pytest.mark.parametrize("way", [reading, writing])
def test_errors_name_the_object_and_not_its_copy(store, way):
    store.put("shop", "events.csv", b"user,item")
    message = r"^s3://shop/events\.csv: no rows in it$"
    with pytest.raises(DataError, match=message), way("s3://shop/events.csv") as file:
        raise DataError(f"{file}: no rows in it")


def test_a_writer_that_fails_uploads_nothing(store):
    def write():
        with writing("s3://shop/a.bin") as path:
            path.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert not [method for method, *_ in store.requests if method != "GET"]


@pytest.mark.parametrize("url", ["s3://", "s3://shop", "s3://shop/", "s3:///a", "s3://shop/a/"])
def test_a_url_without_an_object_is_refused(store, url):
    with pytest.raises(ConfigError), writing(url):
        pytest.fail("it was opened")


def test_paths_stay_paths(tmp_path):
    for use in (reading, writing):
        with use(tmp_path / "a.csv") as path:
            assert path == tmp_path / "a.csv"
    assert not is_object(str(tmp_path))
    assert shown("some/a?.csv") == "some/a?.csv"


def test_events_and_items_of_a_run(store, home):
    store.put("shop", "day/orders.csv", EVENTS)
    store.put("shop", "day/products.csv", b"sku,name\nx,X\ny,Y\n")
    raw = home / "raw" / "shop" / "objects"
    folder = raw / "events" / "day"
    assert find_tables("s3://shop/day/", name="shop") == Tables(
        folder / "orders.csv", folder / "products.csv"
    )
    source = SourceOptions(events="s3://shop/day/orders.csv", items="s3://shop/day/products.csv")
    settings = source.context(RunOptions()).settings
    assert settings.name == name_of("s3://shop/day/orders.csv") == "orders"
    data = settings.values["data"]
    objects = home / "raw" / "orders" / "objects"
    assert Path(str(data["path"])) == objects / "events" / "orders.csv"
    assert Path(str(data["items"])).read_bytes() == b"sku,name\nx,X\ny,Y\n"
    news = NewsOptions(events="s3://shop/day/orders.csv", store="none")
    sources = news.sources(RunOptions(name="shop"))
    assert sources.events == (raw / "events" / "orders.csv").absolute()
    assert sources.events.read_bytes() == EVENTS


def test_a_store_is_exported_and_backed_up_through_objects(store, home, tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    lines = tmp_path / "events.ndjson"
    events = [{"event_id": f"e{n}", "user": "a", "item": "x", "timestamp": n} for n in range(50)]
    lines.write_text("".join(json.dumps(event) + "\n" for event in events))
    store.put("shop", "in.ndjson", lines.read_bytes())
    first, second, third = (f"sqlite:///{tmp_path}/{n}.db" for n in (1, 2, 3))
    assert "50 events imported" in run("import", "s3://shop/in.ndjson", "--store", first)
    assert "s3://shop/out.ndjson" in run("export", "s3://shop/out.ndjson", "--store", first)
    lines = over_http(store, "shop/out.ndjson").splitlines()
    assert [json.loads(line)["event_id"] for line in lines] == [e["event_id"] for e in events]
    assert "50 events imported" in run("import", "s3://shop/out.ndjson", "--store", second)
    assert "50 events" in run("backup", "s3://shop/backup.db", "--store", second)
    (tmp_path / "3.db").write_bytes(over_http(store, "shop/backup.db"))
    run("export", str(tmp_path / "a.ndjson"), "--store", first)
    run("export", str(tmp_path / "b.ndjson"), "--store", third)
    assert (tmp_path / "a.ndjson").read_bytes() == (tmp_path / "b.ndjson").read_bytes()


@pytest.mark.parametrize("password", ["se/cret", "se?cret", "se#cret", "se@cret"])
def test_a_password_with_any_character_is_refused_and_not_shown(store, tmp_path, password):
    with pytest.raises(ConfigError, match="credentials") as refused:
        fetch(f"s3://someone:{password}@shop/events.csv", tmp_path)
    assert "cret" not in str(refused.value)


def test_a_number_sign_is_refused_because_it_would_name_another_object(store, tmp_path):
    store.put("shop", "week", b"kept")
    with (
        pytest.raises(ConfigError, match="%23"),
        writing("s3://shop/week#2.csv") as file,
    ):
        file.write_bytes(b"new")
    with pytest.raises(ConfigError, match="%23"):
        fetch("s3://shop/week#2.csv", tmp_path)
    assert store.objects["shop", "week"][0] == b"kept"


@pytest.mark.parametrize("name", [".", ".."])
def test_an_object_whose_name_cannot_be_a_file_is_not_written(store, name):
    with pytest.raises(ConfigError, match="another name"), writing(f"s3://shop/backups/{name}"):
        pytest.fail("the body must not run")
