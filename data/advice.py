"""Commands that write a copy of a file in a form that is read, and the refusals that show them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from recsys.data.report import sentence
from recsys.errors import DataError

HISTORIES, FEW_USERS = "one JSON object with a list of items for each user", 5


def list_in_one_object(text: str) -> str | None:
    """The name of the list that holds all records, in an object that is not read as one.

    One line with a list of plain records is read.
    """
    values = re.findall(r'"\s*:\s*(\[\s*[^\[{\s]|\S)', text)
    if len(values) >= FEW_USERS and all(len(value) > 1 for value in values):
        return HISTORIES
    start = re.match(r'\s*\{(?:\s*"[^"]*"\s*:\s*[^\[{]*?,)*\s*"([^"]+)"\s*:\s*\[\s*\{', text)
    if start is None or "\n{" in text:
        return None
    return (
        start[1] if "\n" in text.strip() or re.search(r":\s*\[\s*\{", text[start.end() :]) else None
    )


def json_list(path: Path, compression: str | None, name: str | None = None) -> DataError:
    """The refusal of a list of records, perhaps under a name in one object."""
    # Numbers with a decimal point stay as they are written.
    program = (
        f"import gzip, json; file = {'gzip.' * (compression == 'gzip')}open({str(path)!r}, 'rt', "
        "encoding='utf-8-sig'); [print(json.dumps(row)) for row in "
        f"json.load(file, parse_float=str){'' if name is None else json.dumps([name])}]"
    )
    if name == HISTORIES:
        program = (
            f"import json; [print(json.dumps(dict(user=user, item=item))) for user, items in "
            f"json.load(open({str(path)!r}), parse_int=str).items() for item in items]"
        )
        command = command_of(program, path, "lines.jsonl") + " --column timestamp=file-order"
        return DataError(sentence("one_json", path=path, what=name, command=command))
    description = "one JSON list" if name is None else f"one JSON object around the list {name!r}"
    command = command_of(program, path, "lines.jsonl")
    return DataError(sentence("one_json", path=path, what=description, command=command))


def markup(path: Path, text: str) -> DataError:
    """The refusal of XML and of HTML."""
    if re.match(r"\s*<(!doctype html|html|table)", text, re.IGNORECASE):
        return DataError(sentence("html", path=path))
    records = f"{str(path)!r}, xpath='./*', parser='etree', dtype=str"
    program = f"import pandas, sys; pandas.read_xml({records}).to_csv(sys.stdout, index=False)"
    return DataError(sentence("xml", path=path, command=command_of(program, path, "table.csv")))


def command_of(program: str, path: Path, end: str) -> str:
    """A command that writes a copy of a file with a program, and reads it."""
    copy = shlex.quote(str(path.with_name(f"{path.name.partition('.')[0]}-{end}")))
    python = f"{shlex.quote(sys.executable)} -X utf8 -c {shlex.quote(program)}"
    return f"{python} > {copy} && recsys run {copy}"
