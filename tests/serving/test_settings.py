from pathlib import Path

import pytest

from recsys.errors import ConfigError
from recsys.serving.settings import ServingSettings


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    return tmp_path


def test_defaults_serve_the_quickstart_bundle_on_loopback(home):
    settings = ServingSettings.load()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.bundle == home / "bundles" / "demo"
    assert settings.store == home / "serving" / "demo" / "histories.db"
    assert settings.histories is None  # there is no such data set


def test_histories_and_store_follow_the_bundles_name(home):
    (home / "datasets" / "beauty").mkdir(parents=True)
    for settings in (
        ServingSettings.load(name="beauty"),
        ServingSettings.load(bundle=Path("elsewhere/beauty")),
    ):
        assert settings.bundle.name == "beauty"
        assert settings.histories == home / "datasets" / "beauty"
        assert settings.store == home / "serving" / "beauty" / "histories.db"


def test_flags_over_set_over_environment_over_file(tmp_path, monkeypatch):
    file = tmp_path / "serving.yaml"
    file.write_text(
        "name: shop\ntarget: {epochs: 3}\n"
        "serve: {port: 1, max_batch: 1, queue_limit: 1, deadline_ms: 1}\n"
    )
    monkeypatch.setenv("RECSYS_SERVE_PORT", "2")
    monkeypatch.setenv("RECSYS_SERVE_MAX_BATCH", "2")
    monkeypatch.setenv("RECSYS_SERVE_QUEUE_LIMIT", "2")
    settings = ServingSettings.load(file, ["serve.port=3", "serve.max_batch=3"], port=4, host=None)
    assert (settings.port, settings.max_batch) == (4, 3)
    assert (settings.queue_limit, settings.deadline_ms) == (2, 1)
    assert settings.max_wait_ms == 40
    assert settings.bundle.name == "shop"


@pytest.mark.parametrize("name", ["KEYS", "STORE", "PORT"])
def test_an_empty_environment_variable_is_refused(name, monkeypatch):
    # An unset variable of a compose file must not mean "no keys" or a store in the current folder.
    monkeypatch.setenv(f"RECSYS_SERVE_{name}", "")
    with pytest.raises(ConfigError, match=f"RECSYS_SERVE_{name} is empty; give a value or unset"):
        ServingSettings.load()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "localhost.evil"])
def test_listening_on_the_network_needs_keys_or_a_flag(host):
    with pytest.raises(ConfigError, match=r"no keys; make one with .* or .* --insecure-listen"):
        ServingSettings.load(host=host)
    assert ServingSettings.load(host=host, insecure_listen=True).host == host


def test_unknown_keys_are_refused_in_every_source(tmp_path, monkeypatch):
    file = tmp_path / "serving.yaml"
    file.write_text("serve: {prot: 1}\n")
    with pytest.raises(ConfigError, match="unknown key in 'serve': 'prot'; did you mean 'port'"):
        ServingSettings.load(file)
    with pytest.raises(ConfigError, match="'max_bach'; did you mean 'max_batch'"):
        ServingSettings.load(None, ["serve.max_bach=1"])
    with pytest.raises(ConfigError, match=r"--set port: this command reads serve\.key=value"):
        ServingSettings.load(None, ["port=1"])
    monkeypatch.setenv("RECSYS_SERVE_PROT", "1")
    with pytest.raises(ConfigError, match="environment variable RECSYS_SERVE_PROT': 'prot'"):
        ServingSettings.load()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("serve.port=70000", r"serve\.port: .*65535, found 70000"),
        ("serve.max_batch=0", r"serve\.max_batch: .*greater than or equal to 1"),
        ("serve.deadline_ms=soon", r"serve\.deadline_ms: .*number.*found 'soon'"),
        ("serve.deadline_ms=.inf", r"serve\.deadline_ms: .*86400000, found inf"),
        ("serve.prefix_mb=100000000000", r"serve\.prefix_mb: .*1048576"),
        ("serve.threads=1000000000", r"serve\.threads: .*1024"),
        ("serve.rate_limit=0", r"serve\.rate_limit: .*equal to 0.001"),
        ("serve.dtype=int8", r"serve\.dtype: .*'float32'"),
        ("serve=3", r"serve: expected a mapping, found 3"),
        ("serve.bundle=[1]", r"serve\.bundle: "),
        (
            "serve.text_formats={a: {schema: {}}}",
            r"serve\.text_formats\.a: give exactly one of json_s",
        ),
        (
            "serve.text_formats={a: {regex: a, lark: a}}",
            r"serve\.text_formats\.a: give exactly one",
        ),
        ("serve.text_formats={a: {}}", r"serve\.text_formats\.a: give exactly one of json_schema"),
        ("serve.text_formats={a: {regex: null}}", r"serve\.text_formats\.a\.regex: .*string"),
        (
            "serve.text_formats={a: {json_schema: {enum: [2024-01-01]}}}",
            r"a\.json_schema\.enum.*JSON",
        ),
        ("serve.text_formats={a b: {regex: a}}", r"serve\.text_formats\.a b.*pattern"),
        ("serve.text_formats={a: {regex: a}}", "text_formats needs a text model .* explainer"),
    ],
)
def test_a_bad_value_is_named(override, text):
    with pytest.raises(ConfigError, match=text):
        ServingSettings.load(None, [override])


def test_formats_of_texts_come_from_the_file(tmp_path):
    file = tmp_path / "serving.yaml"
    file.write_text(
        "serve:\n  explainer: model\n  text_formats:\n"
        "    colour: {json_schema: {enum: [red, green]}}\n"
        "    date: {regex: '\\d{4}'}\n"
        '    pairs:\n      lark: |\n        start: "a" b\n        b: "b"\n'
    )
    formats = ServingSettings.load(file).text_formats
    assert formats["colour"].json_schema == {"enum": ["red", "green"]}
    assert formats["date"].regex == r"\d{4}"
    assert formats["pairs"].lark == 'start: "a" b\nb: "b"\n'
    assert [made.model_fields_set for made in formats.values()] == [
        {"json_schema"}, {"regex"}, {"lark"}
    ]  # fmt: skip


def test_a_name_that_leaves_its_folder_is_refused():
    with pytest.raises(ConfigError, match="not a plain word"):
        ServingSettings.load(name="../../etc")


def test_decodes_are_captured_on_a_gpu_only():
    assert ServingSettings.load().capture == "passes"
    for device in ("auto", "cuda"):
        assert ServingSettings.load(capture="decodes", device=device).capture == "decodes"
    with pytest.raises(ConfigError, match="capture 'decodes' needs a GPU, and device is 'cpu'"):
        ServingSettings.load(None, ["serve.capture=decodes", "serve.device=cpu"])
    with pytest.raises(ConfigError, match="mode 'exhaustive' cannot be captured"):
        ServingSettings.load(capture="decodes", device="cuda:0", mode="exhaustive")
