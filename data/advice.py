"""Commands that write a copy of a file in a form that is read, and the refusals that show them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from recsys.data.report import sentence
from recsys.errors import DataError


def list_in_one_object(text: str) -> str | None:
    """The name of the list that holds all records, in an object that is not read as one.

    One line with a list of plain records is read.
    """
    start = re.match(r'\s*\{(?:\s*"[^"]*"\s*:\s*[^\[{]*?,)*\s*"([^"]+)"\s*:\s*\[\s*\{', text)
    if start is None or "\n{" in text:
        return None
    goes_on = "\n" in text.strip() or re.search(r":\s*\[\s*\{", text[start.end() :])
    return start[1] if goes_on else None


def json_list(path: Path, compression: str | None, name: str | None = None) -> DataError:
    """The refusal of a list of records, perhaps under a name in one object."""
    file = f"{'gzip.' * (compression == 'gzip')}open({str(path)!r}, 'rt', encoding='utf-8-sig')"
    # Numbers with a decimal point stay as they are written.
    rows, what = f"json.load({file}, parse_float=str)", "one JSON list"
    if name is not None:
        rows, what = f"{rows}[{name!r}]", f"one JSON object around the list {name!r}"
    program = f"import gzip, json; [print(json.dumps(row)) for row in {rows}]"
    command = command_of(program, path, "lines.jsonl")
    return DataError(sentence("one_json", path=path, what=what, command=command))


def markup(path: Path, text: str) -> DataError:
    """The refusal of XML and of HTML."""
    if re.match(r"\s*<(!doctype html|html|table)", text, re.IGNORECASE):
        return DataError(sentence("html", path=path))
    records = f"{str(path)!r}, xpath='./*', parser='etree', dtype=str"
    program = f"import pandas, sys; pandas.read_xml({records}).to_csv(sys.stdout, index=False)"
    return DataError(sentence("xml", path=path, command=command_of(program, path, "table.csv")))


def call_of(function: Callable[..., None], path: Path, end: str, *others: object) -> str:
    """A command that writes a copy of a file with what a function prints of it, and reads it."""
    arguments = ", ".join(json.dumps(str(text), ensure_ascii=False) for text in (path, *others))
    program = f"from {function.__module__} import {function.__name__} as make; make({arguments})"
    return command_of(program, path, end)


def command_of(program: str, path: Path, end: str) -> str:
    """A command that writes a copy of a file with a program, and reads it."""
    copy = shlex.quote(str(path.with_name(f"{path.name.partition('.')[0]}-{end}")))
    python = f"{shlex.quote(sys.executable)} -X utf8 -c {shlex.quote(program)}"
    return f"{python} > {copy} && recsys run {copy}"
