"""Settings: what is read, what is converted, and how a mistake is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from recsys.config import (
    SHIPPED,
    Folder,
    Settings,
    fields_of,
    find_config,
    internal,
    section,
    subsection,
)
from recsys.errors import ConfigError

KNOWN = ("data", "target")


@section
class Inner:
    width: int = 4
    """Of a layer."""
    dropout: Annotated[float, Field(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width: must be at least 1, got {self.width}")


@section
class Section:
    epochs: int = 10
    learning_rate: float = 1e-3
    method: Literal["rq-vae", "rq-kmeans"] = "rq-vae"
    path: Folder | None = None
    patience: int | None = 3
    tied: bool = False
    ks: tuple[int, ...] = (1, 10)
    ratio: tuple[float, float] = (0.8, 0.1)
    sizes: int | tuple[int, ...] | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    inner: Inner = Field(default_factory=Inner)
    anything: Any = None
    made: int = internal("it is made", default=7)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return tmp_path / "run.yaml"

    return write


@pytest.mark.parametrize(("value", "read"), [("8", 8), ("[8, 4]", (8, 4)), ("null", None)])
def test_a_setting_can_be_one_value_or_a_list(value, read):
    settings = Settings().overridden([f"target.sizes={value}"])
    assert settings.section("target", Section).sizes == read
    with pytest.raises(ConfigError, match=r"target\.sizes\[1\]: .*valid integer.*'x'"):
        Settings().overridden(["target.sizes=[8, x]"]).section("target", Section)
    with pytest.raises(ConfigError, match=r"target\.sizes: .*valid integer.*'x'"):
        Settings().overridden(["target.sizes=x"]).section("target", Section)


def test_a_file_is_read_and_missing_keys_take_their_defaults(write):
    file = write("name: shop\nseed: 3\ntarget:\n  epochs: 2\n  ks: [5, 20]\n  inner: {width: 8}\n")
    settings = Settings.load(file, known=KNOWN)
    assert (settings.name, settings.seed) == ("shop", 3)
    assert settings.section("target", Section) == Section(2, ks=(5, 20), inner=Inner(8))
    assert settings.section("data", Section) == Section()


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


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["target.epochs"], r"expected key=value, for example target\.epochs=3"),
        (["serve.keys="], r"the value is empty; write serve\.keys=null for none"),
        (["target.epochs=3", "target.epochs.more=1"], "'epochs' is a value, not a section"),
        (["target.ks=[1, 2"], r"\[1, 2.*the value is not valid YAML"),
        (["target.epoch=3"], "unknown key in 'target': 'epoch'; did you mean 'epochs'"),
        (["target.inner.widht=3"], r"unknown key in 'target\.inner': 'widht'.*'width'"),
        (["target.made=3"], r"target\.made is no setting \(it is made\); remove it"),
        (["target=3"], "target: expected a mapping"),
        (["target.epochs=many"], r"target\.epochs: .*valid integer.*, found 'many'"),
        (["target.learning_rate=fast"], r"target\.learning_rate: .*valid number.*'fast'"),
        (["target.learning_rate=.nan"], r"target\.learning_rate: .*finite number, found nan"),
        (["target.method=rq"], r"target\.method: .*'rq-vae' or 'rq-kmeans', found 'rq'"),
        (["target.ks=[1, x]"], r"target\.ks\[1\]: .*valid integer.*, found 'x'"),
        (["target.ratio=[0.8, 0.1, 0.1]"], r"target\.ratio: .*at most 2 items.*, found \[0\.8, 0"),
        (["target.inner={width: x}"], r"target\.inner\.width: .*valid integer.*, found 'x'"),
        (["target.inner={width: 0}"], r"^target\.inner\.width: must be at least 1, got 0"),
    ],
)
def test_a_wrong_override_is_refused_by_key_and_value(overrides, says):
    with pytest.raises(ConfigError, match=says):
        Settings.load(None, overrides).section("target", Section)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: [1\n", r"run\.yaml: not valid YAML"),
        ("when: 2018-13-45\n", r"run\.yaml: not valid YAML"),
        ("name: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("- a\n- b\n", "expected sections, found list"),
        ("3\n", "expected sections, found int"),
        ("taget: {epochs: 2}\n", "unknown section: 'taget'; did you mean 'target'"),
        ("xyzzy: {}\n", "unknown section: 'xyzzy'; known: data, minutes, name, parent, seed"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_or_section(write, content, says):
    with pytest.raises(ConfigError, match=says):
        Settings.load(write(content), known=KNOWN)


def test_a_missing_file_or_a_folder_is_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        Settings.load(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: not valid YAML"):
        Settings.load(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        Settings.load(tmp_path)


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


def test_python_sets_what_a_configuration_may_not():
    assert Section(made=3).made == 3
    assert Settings({"target": {"made": 3}}).section("target", Section).made == 3
    assert "made" not in fields_of(Section)


def test_the_docstring_under_a_field_describes_it():
    inner = subsection(fields_of(Section)["inner"])
    assert inner is Inner
    assert fields_of(inner)["width"].description == "Of a layer."


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "''", "a b", "a\\b", "../../etc"])
def test_a_name_that_could_leave_its_folder_is_refused(name):
    with pytest.raises(ConfigError, match="is not a plain word"):
        _ = Settings.load(None, [f"name={name}"]).name
    assert Settings.load(None, ["name=beauty-2.1_x"]).name == "beauty-2.1_x"
    with pytest.raises(ConfigError, match="seed: expected a whole number"):
        _ = Settings.load(None, ["seed=dice"]).seed


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
