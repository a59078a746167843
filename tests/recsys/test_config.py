"""Settings: what is read, what is converted, and how a mistake is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.config import SHIPPED, Settings, as_dict, build, find_config
from recsys.errors import ConfigError

KNOWN = ("data", "target")


@dataclass(frozen=True)
class Inner:
    width: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")


@dataclass(frozen=True)
class Section:
    epochs: int = 10
    learning_rate: float = 1e-3
    method: Literal["rq-vae", "rq-kmeans"] = "rq-vae"
    path: Path | None = None
    patience: int | None = 3
    tied: bool = False
    ks: tuple[int, ...] = (1, 10)
    ratio: tuple[float, float] = (0.8, 0.1)
    extra: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    anything: Any = None
    made: int = field(default=7, init=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return tmp_path / "run.yaml"

    return write


def test_a_file_is_read_and_missing_keys_take_their_defaults(write):
    file = write("name: shop\nseed: 3\ntarget:\n  epochs: 2\n  ks: [5, 20]\n  inner: {width: 8}\n")
    settings = Settings.load(file, known=KNOWN)
    assert (settings.name, settings.seed) == ("shop", 3)
    assert settings.section("target", Section) == Section(2, ks=(5, 20), inner=Inner(8))
    assert settings.section("data", Section) == Section()


def test_without_a_file_everything_is_default():
    settings = Settings.load()
    assert (settings.name, settings.seed) == ("demo", 0)
    assert settings.section("target", Section) == Section()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "target:\n"])
def test_an_empty_file_or_section_is_all_defaults(write, text):
    assert Settings.load(write(text), known=KNOWN).section("target", Section) == Section()


def test_overrides_create_missing_sections(write):
    settings = Settings.load(
        write("target: {epochs: 2, tied: true}\n"),
        ["target.epochs=5", "target.inner.width=8", "data.path=here", "target.ks=[3]"],
        known=KNOWN,
    )
    assert settings.values == {
        "target": {"epochs": 5, "tied": True, "inner": {"width": 8}, "ks": [3]},
        "data": {"path": "here"},
    }


def test_the_command_line_wins_over_the_last_override():
    settings = Settings.load(None, ["seed=1", "seed=2", "name=a"], name="b", seed=None)
    assert (settings.name, settings.seed) == ("b", 2)


def test_an_override_may_hold_an_equals_sign():
    assert Settings.load(None, ["data.path=a=b"]).values == {"data": {"path": "a=b"}}


@pytest.mark.parametrize("override", ["target.epochs", "=3", " =3", "epochs:3"])
def test_an_override_without_key_or_value_is_refused(override):
    with pytest.raises(ConfigError, match=r"expected key=value, for example target\.epochs=3"):
        Settings.load(None, [override])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match="'epochs' is a value, not a section"):
        Settings.load(None, ["target.epochs=3", "target.epochs.more=1"])


@pytest.mark.parametrize("value", ["[1, 2", "{", "2018-13-45"])
def test_an_override_that_is_not_yaml_is_refused_by_its_text(value):
    with pytest.raises(ConfigError, match="the value is not valid YAML") as caught:
        Settings.load(None, [f"target.ks={value}"])
    assert value in str(caught.value)


@pytest.mark.parametrize("text", ["a: [1\n", "a: b: c\n", "\ta: 1\n", "when: 2018-13-45\n"])
def test_a_file_that_is_not_yaml_is_refused_by_its_name(write, text):
    with pytest.raises(ConfigError, match=r"run\.yaml: not valid YAML"):
        Settings.load(write(text))


def test_a_file_in_another_encoding_is_refused_by_its_name(tmp_path):
    (tmp_path / "run.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.yaml: not valid YAML"):
        Settings.load(tmp_path / "run.yaml")


def test_a_file_that_could_run_code_is_refused(write):
    with pytest.raises(ConfigError, match="not valid YAML"):
        Settings.load(write("name: !!python/object/apply:os.getcwd []\n"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "3\n"])
def test_a_file_without_sections_is_refused(write, text):
    with pytest.raises(ConfigError, match=r"expected sections, found (list|str|int)"):
        Settings.load(write(text))


def test_a_missing_file_or_a_folder_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        Settings.load(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        Settings.load(tmp_path)


def test_an_unknown_section_is_told_its_neighbour(write):
    with pytest.raises(ConfigError, match="unknown section: 'taget'; did you mean 'target'"):
        Settings.load(write("taget: {epochs: 2}\n"), known=KNOWN)
    with pytest.raises(
        ConfigError, match="unknown section: 'xyzzy'; known: data, minutes, name, seed"
    ):
        Settings.load(write("xyzzy: {}\n"), known=KNOWN)
    with pytest.raises(ConfigError, match="unknown section: '3'"):
        Settings.load(write("3: {}\n"), known=KNOWN)


def test_an_unknown_key_is_told_its_neighbour():
    with pytest.raises(
        ConfigError, match="unknown key in 'target': 'epoch'; did you mean 'epochs'"
    ):
        Settings.load(None, ["target.epoch=3"]).section("target", Section)
    with pytest.raises(ConfigError, match=r"unknown key in 'target\.inner': 'widht'.*'width'"):
        Settings.load(None, ["target.inner.widht=3"]).section("target", Section)
    with pytest.raises(ConfigError, match="unknown key in 'target': '1'"):
        build(Section, {1: 2}, "target")


def test_a_field_that_is_not_set_from_outside_is_unknown():
    with pytest.raises(ConfigError, match="unknown key in 'target': 'made'"):
        build(Section, {"made": 3}, "target")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learning_rate", "3e-3", 0.003),  # YAML 1.1 wants a dot: 3.0e-3
        ("learning_rate", "3.0e-3", 0.003),
        ("learning_rate", "1", 1.0),
        ("patience", "null", None),
        ("path", "~/a", Path("~/a").expanduser()),
        ("path", "null", None),
        ("method", "rq-kmeans", "rq-kmeans"),
        ("ks", "[]", ()),
        ("extra", "{a: [1, b]}", {"a": [1, "b"]}),
        ("anything", "2018-01-31T00", "2018-01-31T00"),
        ("inner", "{dropout: 1e-1}", Inner(dropout=0.1)),
        ("inner", "null", Inner()),
    ],
)
def test_values_become_the_annotated_type(key, value, expected):
    section = Settings.load(None, [f"target.{key}={value}"]).section("target", Section)
    found = getattr(section, key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("epochs", "many", r"target\.epochs: expected int, found 'many' \(str\)"),
        ("epochs", "2.5", r"target\.epochs: expected int, found 2\.5 \(float\)"),
        ("epochs", "true", r"target\.epochs: expected int, found True \(bool\)"),
        ("epochs", "null", r"target\.epochs: expected int, found None"),
        ("patience", "soon", r"target\.patience: expected int, found 'soon'"),
        ("learning_rate", "fast", r"target\.learning_rate: expected float, found 'fast'"),
        ("learning_rate", "true", r"target\.learning_rate: expected float, found True"),
        ("tied", "1", r"target\.tied: expected bool, found 1"),
        ("path", "3", r"target\.path: expected Path, found 3"),
        ("method", "rq", r"target\.method: 'rq' is not one of 'rq-vae', 'rq-kmeans'"),
        ("ks", "3", r"target\.ks: expected a list, found 3"),
        ("ks", "[1, x]", r"target\.ks\[1\]: expected int, found 'x'"),
        (
            "ratio",
            "[0.8, 0.1, 0.1]",
            r"target\.ratio: expected 2 values, found \[0\.8, 0\.1, 0\.1\]",
        ),
        ("extra", "[1]", r"target\.extra: expected a mapping, found \[1\]"),
        ("inner", "3", r"target\.inner: expected a mapping, found 3"),
        ("inner", "[]", r"target\.inner: expected a mapping, found \[\]"),
        ("inner", "{width: x}", r"target\.inner\.width: expected int, found 'x'"),
        ("inner", "{width: 0}", r"target\.inner: width must be at least 1, got 0"),
    ],
)
def test_a_wrong_value_is_refused_by_key_and_value(key, value, message):
    settings = Settings.load(None, [f"target.{key}={value}"])
    with pytest.raises(ConfigError, match=message):
        settings.section("target", Section)


@pytest.mark.parametrize("value", ["3", "[]", "false", "''", "[epochs]"])
def test_a_section_that_is_not_a_mapping_is_refused(value):
    with pytest.raises(ConfigError, match="target: expected a mapping"):
        Settings.load(None, [f"target={value}"]).section("target", Section)


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "''", "a b", "a\\b", "../../etc"])
def test_a_name_that_could_leave_its_folder_is_refused(name):
    with pytest.raises(ConfigError, match="is not a plain word"):
        _ = Settings.load(None, [f"name={name}"]).name


def test_a_plain_name_and_a_number_are_names():
    assert Settings.load(None, ["name=beauty-2.1_x"]).name == "beauty-2.1_x"
    assert Settings.load(None, ["name=2014"]).name == "2014"


def test_a_seed_that_is_not_an_integer_is_refused():
    with pytest.raises(ConfigError, match="seed: expected int, found 'dice'"):
        _ = Settings.load(None, ["seed=dice"]).seed


def test_as_dict_is_plain_and_reads_back():
    section = Section(path=Path("a/b"), ks=(3,), inner=Inner(8), extra={"p": Path("c"), "t": (1,)})
    values = as_dict(section)
    assert values["path"] == "a/b"
    assert values["extra"] == {"p": "c", "t": [1]}
    assert values["ks"] == [3]
    assert values.pop("made") == 7
    assert build(Section, values).inner == Inner(8)


@given(
    st.builds(
        Section,
        epochs=st.integers(),
        learning_rate=st.floats(allow_nan=False),
        method=st.sampled_from(["rq-vae", "rq-kmeans"]),
        patience=st.none() | st.integers(),
        tied=st.booleans(),
        ks=st.lists(st.integers(), max_size=3).map(tuple),
        inner=st.builds(Inner, st.integers(1, 100), st.floats(0, 1)),
    )
)
def test_a_dataclass_written_plainly_is_read_back_equal(section):
    values = as_dict(section)
    del values["made"]
    assert build(Section, values) == section


@pytest.mark.parametrize("path", ["configs/beauty.yaml", "beauty.yaml", "beauty"])
def test_a_packaged_configuration_is_found_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(Path(path)) == SHIPPED / "beauty.yaml"
    (tmp_path / "beauty").mkdir()  # a folder is not a configuration
    assert find_config(Path(path)) == SHIPPED / "beauty.yaml"


@pytest.mark.parametrize(
    "path",
    ["/etc/shop/configs/serving.yaml", "../configs/serving.yaml", "configs/serving.json",
     "configs/serving", "serving.yml", "x/serving.yaml", "configs/unknown.yaml"],
)  # fmt: skip
def test_a_missing_file_elsewhere_is_not_replaced(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        Settings.load(Path(path))


def test_a_file_of_ones_own_wins_over_a_packaged_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beauty.yaml").write_text("name: mine\n")
    assert Settings.load(Path("beauty.yaml")).name == "mine"
