"""What every reader promises: it reads its files, or says in words what is wrong with them.

A reader gets these tests by a subclass.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data.engine import Prepared
from recsys.data.prepare import DataConfig, build
from recsys.errors import DataError, RecsysError

# What parsers of numbers, JSON and tables stumble over.
ODD = [
    b"", b" ", b",", b"-1", b"1.5", b"1e400", b"NaN", b"null", b"true", b"9" * 19, b"9" * 400,
    b"9" * 5000, b"[" * 5000, b"[]", b"{}", b'"', b"'", b'"\\ud800"', b"'\\ud800'", b'"\\u0000"',
    b"\0", b"\xff", b"\n", b"\r", b"\t", b"|", "²".encode(),
]  # fmt: skip
TOKENS = re.compile(rb"[A-Za-z0-9_.<>]+|\"[^\"]*\"|'[^']*'|\[[^\[\]]*\]|\s|[,:|]")
damage = st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3))


def table(head: str, rows: Iterable[Iterable[object]], mark: str = ",") -> str:
    """The text of a table: its line of names, and a line for each row."""
    return "\n".join([head, *(mark.join(map(str, row)) for row in rows)]) + "\n"


def write_xlsx(path: Path, sheets: dict[str, list[list[object]]]) -> Path:
    """A minimal workbook; numbers above 40,000 with a fraction are times, and bytes show zeros."""
    ns = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    rel = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"

    def cell(value: object) -> str:
        if isinstance(value, str):
            return f'<c t="inlineStr"><is><t>{value}</t></is></c>'
        style = ' s="1"' if isinstance(value, float) and value > 40_000 else ""
        if isinstance(value, bytes):  # a number with the format 00000
            style, value = ' s="2" t="n"', value.decode()
        return f"<c{style}><v>{value}</v></c>"

    parts = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/'
        'content-types"><Default Extension="xml" ContentType="application/xml"/><Default '
        'Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        "</Types>",
        "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/'
        f'relationships"><Relationship Id="r1" Type="{rel}/officeDocument" Target="xl/workbook.xml"'
        "/></Relationships>",
        "xl/workbook.xml": f'<workbook {ns} xmlns:r="{rel}"><sheets>'
        + "".join(f'<sheet name="{n}" sheetId="{k}" r:id="r{k}"/>' for k, n in enumerate(sheets, 1))
        + "</sheets></workbook>",
        "xl/_rels/workbook.xml.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/'
        'package/2006/relationships">'
        + "".join(
            f'<Relationship Id="r{k}" Type="{rel}/worksheet" Target="worksheets/sheet{k}.xml"/>'
            for k in range(1, len(sheets) + 1)
        )
        + f'<Relationship Id="rs" Type="{rel}/styles" Target="styles.xml"/></Relationships>',
        "xl/styles.xml": f'<styleSheet {ns}><numFmts><numFmt formatCode="00000" numFmtId="170"/>'
        '</numFmts><cellXfs><xf/><xf numFmtId="22"/><xf numFmtId="170"/></cellXfs>'
        "</styleSheet>",
    }
    for k, rows in enumerate(sheets.values(), 1):
        lines = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
        parts[f"xl/worksheets/sheet{k}.xml"] = (
            f"<worksheet {ns}><sheetData>{lines}</sheetData></worksheet>"
        )
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return path


class ReaderSuite:
    """Tests of one reader.

    A subclass has `source`, its name; `path`, what it is given; `files`, a small data set as pairs
    of a file and its text, that of the events first; `events`, its (user, item) pairs in order;
    `malformed`, a file, another content of it, and the words of the error; `items`, the option.
    """

    source: str
    path: str
    files: tuple[tuple[str, str], ...]
    events: tuple[tuple[str, str], ...]
    malformed: tuple[tuple[str, str | bytes, str], ...]
    items: str | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "fault" in metafunc.fixturenames:
            names = [says for *_, says in self.malformed]
            metafunc.parametrize("fault", self.malformed, ids=names)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder for the files; the tests write all of them anew."""
        return tmp_path_factory.mktemp(cls.source)

    def read(self, folder: Path, changed: str = "", content: str | bytes = "") -> Prepared:
        """The data set, of which one file has another content."""
        changes = {changed: content} if changed else {}
        for name, text in (dict(self.files) | changes).items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        items = None if self.items is None else str(folder / self.items)
        return build(DataConfig(source=self.source, path=str(folder / self.path), items=items))

    def test_the_events_are_those_of_the_files(self, folder: Path) -> None:
        events = self.read(folder).dataset.interactions
        pairs = zip(events.user_ids[events.user], events.item_ids[events.item], strict=True)
        assert tuple((str(user), str(item)) for user, item in pairs) == self.events

    def test_files_that_are_malformed_are_refused_in_words(
        self, folder: Path, fault: tuple[str, str | bytes, str]
    ) -> None:
        name, content, says = fault
        with pytest.raises(DataError, match=f"(?s){says}"):
            self.read(folder, name, content)

    def test_an_empty_file_of_events_is_refused_by_its_name(self, folder: Path) -> None:
        name = self.files[0][0]
        with pytest.raises(DataError, match=re.escape(name)):
            self.read(folder, name, "")

    @given(data=st.data())
    @settings(max_examples=40, deadline=None)
    def test_damaged_files_are_read_or_refused_with_words(
        self, folder: Path, data: st.DataObject
    ) -> None:
        """Files with pieces cut out or put in, with odd values, or cut off."""
        name = data.draw(st.sampled_from(sorted(dict(self.files))))
        content = dict(self.files)[name].encode()
        for _ in range(data.draw(st.integers(0, 2))):
            tokens = [match.span() for match in TOKENS.finditer(content)]
            start, end = data.draw(st.sampled_from(tokens or [(0, 0)]))
            content = content[:start] + data.draw(st.sampled_from(ODD)) + content[end:]
        for place, cut, filling in data.draw(st.lists(damage, max_size=2)):
            at = int(place * len(content))
            content = content[:at] + filling + content[at + cut :]
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content)))]
        self.read_or_refuse(folder, name, content)

    def read_or_refuse(self, folder: Path, name: str, content: bytes) -> None:
        with suppress(RecsysError):
            self.read(folder, name, content)
