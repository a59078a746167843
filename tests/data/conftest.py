from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.artifacts import Workspace, read_manifest
from recsys.config import Settings
from recsys.data.prepare import stage
from recsys.data.raw import ReaderConfig
from recsys.data.readers import READERS
from recsys.dataset import Dataset
from recsys.pipeline import Context
from recsys.retraining.news import _read_files


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $RECSYS_HOME; data is found under `raw`, beside it."""
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RECSYS_DATASETS", str(tmp_path / "raw"))
    (tmp_path / "raw").mkdir()
    return tmp_path / "home"


@pytest.fixture
def raw(home: Path) -> Path:
    """Where the raw files of a test go."""
    return home.parent / "raw"


@pytest.fixture
def prepare(home: Path) -> Callable[..., Dataset]:
    """Run the stage on a `data` section and load what it wrote."""

    def run(*, force: bool = False, **section: Any) -> Dataset:
        settings = Settings({"name": "t", "data": section})
        return Dataset.load(stage(Context.of(settings, force=force)))

    return run


@pytest.fixture(scope="session")
def datasets() -> Path:
    """The folder of public data sets."""
    folder = Path(os.environ.get("RECSYS_DATASETS", "var/raw")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no public data sets at {folder} (set RECSYS_DATASETS)")
    return folder


@pytest.fixture(scope="session")
def follow() -> Callable[[str], str]:
    """Write the copy of a file as the command in a refusal does; what is said after `recsys run`.

    A process of its own would import for longer than it works.
    """

    def run(refusal: str) -> str:
        command = refusal[refusal.index(shlex.quote(sys.executable)) :]
        write, _, rest = command.partition(" && recsys run ")
        _, *options, program, into, copy = shlex.split(write)
        assert (options, into) == (["-X", "utf8", "-c"], ">")
        with warnings.catch_warnings(), Path(copy).open("w", encoding="utf-8") as out:
            warnings.simplefilter("ignore", ResourceWarning)  # the process would end
            with redirect_stdout(out):
                exec(program, {})
        return rest

    return run


class Shop(NamedTuple):
    """A data set that was prepared from written files.

    Attributes:
        data: the data set.
        info: of its manifest.
    """

    data: Dataset
    info: dict[str, Any]

    @property
    def histories(self) -> dict[str, list[str]]:
        """The items of each user, in order."""
        rows = self.data.interactions
        items = self.data.item_ids[rows.item].tolist()
        found: dict[str, list[str]] = {}
        for user, item in zip(rows.user_ids[rows.user].tolist(), items, strict=True):
            found.setdefault(user, []).append(item)
        return found

    @property
    def counts(self) -> dict[str, int]:
        """The cases of each rule of the cleaning report."""
        return {row["rule"]: row["count"] for row in self.info["cleaning"]["findings"]}

    @property
    def roles(self) -> dict[str, str]:
        """Role -> column of the cleaning report."""
        return {row["role"]: row["column"] for row in self.info["cleaning"]["columns"]}

    @property
    def notes(self) -> str:
        """The notes of the cleaning report."""
        return "\n".join(self.info["cleaning"]["notes"])

    def night(self, path: Path, **form: Any) -> pa.Table:
        """The events of a newer file, read in the form of these data."""
        schema, mapping = self.data.items.schema, self.info["cleaning"]["mapping"]
        known = (Workspace.of("t"), schema.remove_metadata(), mapping)
        return _read_files(path, None, form.pop("named", {}), *known, **form)[0]

    def values(self, name: str) -> list[Any]:
        """One column of the items, in the order of the items file."""
        return self.data.items[name].to_pylist()


@pytest.fixture
def shop(home: Path, raw: Path) -> Callable[..., Shop]:
    """Write files, prepare them as the export of a shop, and load what was stored.

    Without items, there are events of two users on the items `p0`, `p1`, ... of the items file.
    """

    def run(
        events: str | bytes | pa.Table | None = None,
        items: str | bytes | pa.Table | None = None,
        *,
        file: str = "events.csv",
        items_file: str = "items.csv",
        **section: Any,
    ) -> Shop:
        if events is None:
            events = "user,item,timestamp\n" + "".join(
                f"u{n % 2},p{n % 4},{1_700_000_000 + 4000 * n}\n" for n in range(12)
            )
        for name, content in ((file, events), (items_file, items)):
            if content is None:
                continue
            (raw / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, pa.Table):
                pq.write_table(content, raw / name)
            else:
                given = content.encode() if isinstance(content, str) else content
                (raw / name).write_bytes(given)
        path = file.partition("/")[0]
        described = {} if items is None else {"items": items_file}
        values = {"source": "table", "path": path, **described, **section}
        settings = Settings({"name": "t", "data": values})
        data = Dataset.load(stage(Context.of(settings, force=True)))
        return Shop(data, read_manifest(home / "datasets/t", "dataset").info)

    return run


@pytest.fixture
def roles(raw: Path) -> Callable[[str], dict[str, str]]:
    """Role -> column of a file of events, of which only the first rows are read."""

    def read(events: str) -> dict[str, str]:
        (raw / "events.csv").write_text(events, encoding="utf-8")
        config = ReaderConfig(raw / "events.csv")
        return READERS["table"].read(config).report.mapping["events"]

    return read
