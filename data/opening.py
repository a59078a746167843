"""Opens a shop's files: delimited text, JSON lines and Parquet, plain or compressed.

Arrow does the reading. Delimited files are read as strings, so that an id such as `00123` stays as
it is. A damaged row is skipped and counted.
"""

from __future__ import annotations

import codecs
import io
import re
import shlex
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from recsys.data import dialect, json_lines
from recsys.data.advice import json_list, list_in_one_object, markup
from recsys.data.files import GZIP, Damage, NoRowsError, check_gzip
from recsys.data.report import sentence
from recsys.data.spreadsheets import is_spreadsheet, read_spreadsheet
from recsys.data.texts import as_text, with_plain_texts
from recsys.errors import DataError

Kind = Literal["delimited", "json", "parquet", "spreadsheet"]
BLOCK = 1 << 20  # bytes of text read at a time
BATCH = 1 << 18  # rows read at a time from a Parquet file
MOST_COLUMNS = 2000  # each is looked at for every role
HEAD = 1 << 18  # bytes at the start of a file that show its kind, delimiter and columns
DROPPED_S = 60  # Arrow's thread reads at most one more block
# ł, ą, ż, ź and ść of Windows-1250 in words, which neither 10m³x nor m³h are.
POLISH = re.compile(r"(?<!\w)(?![cdk]?m[³¹]\w?\b)[^\W\d]*[a-zà-öø-ÿ][³¹¿Ÿ][a-zà-öø-ÿ]|\bz³\b|œæ")
BETWEEN_WORDS = r"[\s\d,;|\"]+"
LONGEST_WORD = 40
# Code pages of texts with few and with many letters beyond ASCII.
LATIN, OTHERS = ("cp1250", "cp850"), ("cp1251", "koi8-r", "cp1253", "gbk", "shift_jis", "euc-kr")
MAX_NULS = 0.1  # a larger share of NUL bytes means that a file is no text
PARQUET = b"PAR1"
MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
PACKED = {
    b"PK\x03\x04": "zip",
    b"\xd0\xcf\x11\xe0": "office",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7z",
}
SUFFIXES = {".csv", ".tsv", ".txt", ".jsonl", ".ndjson", ".json", ".parquet", ".pq", ".xlsx"}


@dataclass(frozen=True)
class TableFile:
    """A file with named columns.

    Attributes:
        path: the file.
        kind: how it is written.
        columns: names as they stand in the file.
        delimiter: of delimited text.
        encoding: of delimited text.
        compression: how Arrow opens it.
        explode: the list whose records are rows; None for none.
        fields: of JSON lines.
        records: the field of the list `explode` in JSON lines.
        values: names of the values of a row of delimited text, if the header has others.
        escaped: whether quotes in delimited text are written as a backslash and a quote.
        quote: encloses values of delimited text.
        renamed: names of the columns, if they are called otherwise than in the file.
        above: lines of text above the names of the columns, which are not read.
        has_header: whether the first line of delimited text names the columns.
    """

    path: Path
    kind: Kind
    columns: tuple[str, ...]
    delimiter: str = ","
    encoding: str = "utf-8"
    compression: str | None = None
    explode: str | None = None
    fields: tuple[json_lines.Field, ...] = ()
    records: json_lines.Field | None = None
    values: tuple[str, ...] = ()
    escaped: bool = False
    quote: str = '"'
    renamed: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    has_header: bool = True

    @property
    def names(self) -> list[str]:
        """The names of the columns without blanks around them."""
        return list(self.renamed) or [name.strip() for name in self.columns]

    def letters(self) -> tuple[str, dict[str, str]]:
        """A word with letters beyond ASCII as it is read, and as other code pages read it."""
        text = next(codecs.iterdecode(_blocks(self.path, self.compression), self.encoding))
        words = [word for word in re.split(BETWEEN_WORDS, text[:HEAD])
                 if not word.isascii() and 3 < len(word) <= LONGEST_WORD]  # fmt: skip
        for word in words:
            pages = LATIN if re.search("[A-Za-z]", word) else OTHERS
            raw = word.encode(self.encoding)
            texts = {page: raw.decode(page, errors="replace") for page in pages}
            if others := {p: t for p, t in texts.items() if t != word and t.isalpha()}:
                return word, others
        return "".join(words[:1]), {}

    def with_names(self, names: tuple[str, ...]) -> TableFile:
        """The file, whose first line is a row, with these names of the columns.

        Raises:
            DataError: a file of another kind, or with another number of columns.
        """
        if self.kind != "delimited" or len(names) != len(self.columns):
            said = {"own": len(self.columns), "shown": ", ".join(self.names)[:80]}
            described = {"path": self.path, "given": len(names), "kind": self.kind}
            raise DataError(sentence("column_names_do_not_fit", **described, **said))
        return replace(self, columns=names, values=names, has_header=False)

    def batches(
        self, used: Iterable[str] | None = None, damage: Damage | None = None
    ) -> Iterator[pa.Table]:
        """Read the used columns (None: all) some rows at a time, and count what cannot be read.

        Raises:
            NoRowsError: a file without rows.
            DataError: one that is damaged as a whole.
        """
        damage = Damage() if damage is None else damage
        names = dict(zip(self.columns, self.names, strict=True))
        chosen = [raw for raw, name in names.items() if used is None or name in set(used)]
        readers = {"delimited": self._text, "json": self._json, "parquet": self._parquet}
        reader = readers.get(self.kind, self._spreadsheet)
        rows = 0
        # A quote that is opened in the first line, and not closed, encloses rows.
        is_empty = self.has_header and not any("\n" in name for name in self.columns)
        with _readable(self.path, self.names if is_empty else ()):
            for batch in reader(chosen, damage):
                rows += batch.num_rows
                damage.good += batch.num_rows
                if batch.num_rows:
                    yield batch.rename_columns([names[name] for name in batch.column_names])
        if not rows and not damage.rows:
            raise NoRowsError(f"{self.path}: no rows in it", self.names)

    def read(self, damage: Damage) -> pa.Table:
        """Read the whole file; a column that changes its type between blocks becomes text.

        Raises:
            DataError: as `batches`, or a column that changes between plain values and lists.
        """
        return self._joined(list(self.batches(damage=damage)))

    def _joined(self, parts: list[pa.Table]) -> pa.Table:
        if all(part.schema.equals(parts[0].schema) for part in parts):
            return pa.concat_tables(parts)
        try:
            return pa.concat_tables(parts, promote_options="permissive")
        except pa.ArrowException:
            with _readable(self.path):
                return pa.concat_tables(map(_in_text, parts), promote_options="permissive")

    def sample(self, rows: int) -> pa.Table:
        """The first rows, with all columns."""
        parts: list[pa.Table] = []
        for batch in self.batches():
            parts.append(batch)
            if sum(part.num_rows for part in parts) >= rows:
                break
        if not parts:
            first = ", ".join(map(repr, self.names[:3]))
            raise DataError(sentence("no_rows_of_first_line", path=self.path, first=first))
        return self._joined(parts).slice(0, rows)

    def _open(self) -> Any:
        return pa.input_stream(str(self.path), compression=self.compression)

    def _text(self, chosen: list[str], damage: Damage) -> Iterator[pa.Table]:
        def skip(row: Any) -> str:
            damage.add(row.number, row.text)
            return "skip"

        # A thread of Arrow may be the last that holds the handler. If it dropped it while Python
        # shuts down, the process would abort; so the end of reading waits for it.
        dropped = threading.Event()
        watched = weakref.ref(skip, lambda _: dropped.set())
        stream = self._open()
        columns = list(self.values or self.columns)
        reader = pa.csv.open_csv(
            pa.PythonFile(io.BufferedReader(dialect.WithDoubledQuotes(stream)), "r")
            if self.escaped
            else stream,
            pa.csv.ReadOptions(
                use_threads=False,
                block_size=BLOCK,
                encoding=self.encoding,
                column_names=columns if self.values else None,
                skip_rows=len(self.above) + int(bool(self.values) and self.has_header),
            ),
            pa.csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote,
                newlines_in_values=True,
                invalid_row_handler=skip,
            ),
            pa.csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()), include_columns=columns
            ),
        )
        positions = [position for position, name in enumerate(self.columns) if name in chosen]
        try:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                table = _without_values_behind(table, damage)
                table = self._without_open_quotes(table, damage)
                yield table.select(positions)
        finally:
            del reader, skip
            if watched() is not None:
                dropped.wait(DROPPED_S)

    def _without_open_quotes(self, table: pa.Table, damage: Damage) -> pa.Table:
        """Drop rows with a value that contains a row, because a quote in it is not closed.

        A line of prose with as many commas has blanks behind them.
        """
        comma = re.escape(self.delimiter)
        others = f"(?:{comma}(?:[^ \\n{comma}][^\\n{comma}]*)?){{{len(self.columns) - 1}}}"
        rows = f"\\n[^\\n{comma}]*{others}\\n"
        for position in range(table.num_columns):
            texts = table.column(position)
            open_quote = pc.fill_null(pc.match_substring_regex(texts, rows), False)
            table = damage.drop(table, texts, open_quote)
        return table

    def _json(self, chosen: list[str], damage: Damage) -> Iterator[pa.Table]:
        fields = [field for field in self.fields if field.name in chosen]
        with duckdb.connect(":memory:") as connection:
            for block, first in json_lines.line_blocks(self._open(), BLOCK):
                yield json_lines.json_table(connection, block, first, fields, self.records, damage)

    def _spreadsheet(self, chosen: list[str], _: Damage) -> Iterator[pa.Table]:
        positions = [position for position, name in enumerate(self.columns) if name in chosen]
        yield read_spreadsheet(self.path).select(positions)

    def _parquet(self, chosen: list[str], _: Damage) -> Iterator[pa.Table]:
        with pq.ParquetFile(self.path) as file:
            schema = file.schema_arrow
            if not any(pa.types.is_nested(kind) for kind in schema.types):
                for batch in file.iter_batches(BATCH, columns=chosen, use_threads=False):
                    yield with_plain_texts(pa.Table.from_batches([batch]))
                return
            needed = [*chosen, self.explode or ""]
            stored = [n for n in schema.names if any(f"{w}.".startswith(f"{n}.") for w in needed)]
            for batch in file.iter_batches(BATCH // 16, columns=stored, use_threads=False):
                table = json_lines.flatten(pa.Table.from_batches([batch]))
                yield with_plain_texts(json_lines.exploded(table, self.explode).select(chosen))


def _without_values_behind(table: pa.Table, damage: Damage) -> pa.Table:
    """Rows without a value behind the last column, which has no name."""
    for name in [name for name in table.column_names if name.startswith(dialect.BEHIND)]:
        bad = pc.fill_null(pc.not_equal(table[name], ""), False)
        table = damage.drop(table, table[name], bad).drop_columns(name)
    return table


def open_table(path: Path, *, explode: bool = False) -> TableFile:
    """Find out how a file is written.

    With `explode`, each record of a list is a row, if the first lines have one list of records.

    Raises:
        DataError: an empty file, one that holds no table, one in an unknown encoding, or one with
            more than 2,000 columns.
    """
    table = _table_file(path, explode)
    if len(table.columns) > MOST_COLUMNS:
        count = len(table.columns)
        raise DataError(sentence("many_columns", path=path, count=count, most=MOST_COLUMNS))
    return table


def _table_file(path: Path, explode: bool) -> TableFile:
    if is_spreadsheet(path):
        return TableFile(path, "spreadsheet", tuple(read_spreadsheet(path).column_names))
    with _readable(path):
        compression = _compression(path)
        with pa.input_stream(str(path), compression=compression) as stream:
            head = bytes(stream.read(HEAD))
        if path.suffix in (".parquet", ".pq") or head.startswith(PARQUET):
            return _parquet_file(path, explode)
        for mark, kind in PACKED.items():
            if head.startswith(mark):
                raise DataError(sentence(f"file_of_{kind}", path=path))
        encoding = _encoding(path, head, compression)
        text = codecs.getincrementaldecoder(encoding)(errors="replace").decode(head)
        text = text.removeprefix("\ufeff")
        if text.strip() in ("", "[]"):
            raise NoRowsError(f"{path}: the file is empty")
        if text.lstrip().startswith("{"):
            if (name := list_in_one_object(text)) is not None:
                raise json_list(path, compression, name)
            return _json_file(path, encoding, compression, explode)
        if text.lstrip().startswith("["):
            raise json_list(path, compression)
        if text.lstrip().startswith("<"):
            raise markup(path, text)
        above = dialect.lines_above(text)
        text = text.split("\n", len(above))[-1].lstrip("\r\n")
        delimiter, columns = dialect.header(text)
        values = dialect.names_of_values(text, delimiter, columns)
        columns = list(values[: len(columns)] or columns)
        quote = "'" if all(re.fullmatch("\\s*'[^']*'\\s*", name) for name in columns) else '"'
        columns = [name.strip(f" {quote}") for name in columns] if quote == "'" else columns
        blocks = _blocks(path, compression)
        escaped = encoding != "utf-16" and dialect.has_escapes(
            blocks, text, delimiter, len(columns)
        )
    made = TableFile(path, "delimited", tuple(columns), delimiter, encoding, compression)
    return replace(made, values=values, escaped=escaped, quote=quote, above=above)


def is_table(file: Path) -> bool:
    """Whether a file has the name of a table, perhaps of a compressed one."""
    return not SUFFIXES.isdisjoint(suffix.lower() for suffix in file.suffixes)


def tables_in(folder: Path) -> list[Path]:
    """The tables of a folder, by name."""
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and is_table(file))
    return [file for file in files if not file.name.startswith((".", "_"))]


def find_tables(path: Path) -> list[Path]:
    """The file at `path`, or all files of a folder, which must be of one kind, by name.

    Raises:
        DataError: a folder without tables, or with tables of several kinds.
    """
    if not path.is_dir():
        return [path]
    kinds: dict[str, list[Path]] = {}
    for file in tables_in(path):
        suffixes = [suffix.lower() for suffix in file.suffixes]
        kinds.setdefault([s for s in suffixes if s in SUFFIXES][-1], []).append(file)
    if len(kinds) != 1:
        contents = f"has files of several kinds ({', '.join(kinds)})" if kinds else "has no tables"
        raise DataError(sentence("folder_of_kinds", path=path, contents=contents))
    return next(iter(kinds.values()))


def _parquet_file(path: Path, explode: bool) -> TableFile:
    with pq.ParquetFile(path) as file:
        table = file.schema_arrow.empty_table()
    if not any(pa.types.is_nested(kind) for kind in table.schema.types):
        return TableFile(path, "parquet", tuple(table.column_names))
    table = json_lines.flatten(table)
    lists = {c.name: c.type.value_type for c in table.schema if json_lines.is_list(c.type)}
    records = {
        name: [f"{name}.{field.name}" for field in kind.fields]
        for name, kind in lists.items()
        if pa.types.is_struct(kind)
    }
    plain = {
        n: [n] for n in lists if json_lines.is_of_items(n) and not pa.types.is_nested(lists[n])
    }
    chosen = json_lines.list_of_items(records or plain) if explode else None
    names = json_lines.exploded(table, chosen).column_names
    return TableFile(path, "parquet", tuple(names), explode=chosen)


def _json_file(path: Path, encoding: str, compression: str | None, explode: bool) -> TableFile:
    if encoding not in ("utf-8", "ascii"):
        command = command_to_utf8(path, compression, encoding.upper())
        raise DataError(sentence("json_not_in_utf8", path=path, command=command))
    with pa.input_stream(str(path), compression=compression) as stream:
        fields = json_lines.find_fields(json_lines.line_blocks(stream, BLOCK))
    lists = {name: names for name, (_, names) in json_lines.lists_of_records(fields).items()}
    records = None
    if chosen := json_lines.list_of_items(lists) if explode else None:
        records = json_lines.lists_of_records(fields)[chosen][0]
        with pa.input_stream(str(path), compression=compression) as stream:
            block, _ = next(json_lines.line_blocks(stream, BLOCK))
        fields = json_lines.explode_records(fields, records, block)
    names = tuple(field.name for field in fields)
    made = TableFile(path, "json", names, ",", "utf-8", compression, chosen)
    return replace(made, fields=tuple(fields), records=records)


def _in_text(table: pa.Table) -> pa.Table:
    columns = [c if pa.types.is_nested(c.type) else as_text(c) for c in table.columns]
    return pa.table(columns, table.column_names)


def _compression(path: Path) -> str | None:
    """Gzip is recognised by the first bytes, other formats by the name."""
    with path.open("rb") as stream:
        zipped = stream.read(2) == GZIP
    named = {".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
    return "gzip" if zipped else named.get(path.suffix)


def command_to_utf8(path: Path, compression: str | None, page: str) -> str:
    """The shell command that writes a copy of a file in UTF-8."""
    convert, name = f"iconv -f {page} -t UTF-8", shlex.quote(str(path))
    if compression is None:
        return f"{convert} {name} > COPY"
    unpack = {"gzip": "zcat", "bz2": "bzcat", "zstd": "zstdcat", "lz4": "lz4cat"}
    return f"{unpack[compression]} < {name} | {convert} > COPY"


def _encoding(path: Path, head: bytes, compression: str | None) -> str:
    """UTF-16 by its mark, UTF-8 if it is valid, Windows-1250 for Polish, else Windows-1252."""
    if head.startswith(MARKS):
        return "utf-16"
    if head.count(0) > MAX_NULS * len(head):
        command = command_to_utf8(path, compression, "UTF-16LE")
        raise DataError(sentence("many_zero_bytes", path=path, command=command))
    polish = 0
    for encoding in ("utf-8", "cp1252", "cp1250"):
        try:
            for text in codecs.iterdecode(_blocks(path, compression), encoding):
                polish += len(POLISH.findall(text)) if encoding == "cp1252" else 0
        except UnicodeDecodeError:
            continue
        if encoding == "cp1252" and polish > 1:
            continue
        if encoding != "utf-8":
            _check_mixed(path, compression)
        return encoding
    command = command_to_utf8(path, compression, "PAGE")
    raise DataError(sentence("unknown_encoding", path=path, command=command))


def _check_mixed(path: Path, compression: str | None) -> None:
    """Refuse a file of which most is UTF-8: read as Windows-1252, all its letters were wrong."""
    good, bad, first = 0, 0, 0
    with pa.input_stream(str(path), compression=compression) as stream:
        for number, line in enumerate(io.BufferedReader(stream, BLOCK), 1):
            if line.isascii():
                continue
            try:
                line.decode()
                good += 1
            except UnicodeDecodeError:
                bad += 1
                first = first or number
    if good > bad:
        raise DataError(sentence("mixed_encodings", path=path, good=good, bad=bad, first=first))


def _blocks(path: Path, compression: str | None) -> Iterator[bytes]:
    with pa.input_stream(str(path), compression=compression) as stream:
        while block := bytes(stream.read(BLOCK)):
            yield block


@contextmanager
def _readable(path: Path, names: Sequence[str] = ()) -> Iterator[None]:
    """Convert the errors of Arrow and of the system to a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, UnicodeError, EOFError) as error:
        if path.is_file():
            check_gzip(path)  # its error says where the file is cut off
        text = str(error).split("\n", 1)[0][:200]
        if "Empty CSV" in text:
            text = "no rows after the first line, or a quote that is opened and not closed"
            if names:
                raise NoRowsError(f"{path}: {text}", names) from error
        if path.suffix in (".parquet", ".pq"):
            raise DataError(f"{path}: not a parquet file: {text}") from error
        raise DataError(f"{path}: cannot be read: {text}") from error
