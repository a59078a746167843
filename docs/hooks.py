"""MkDocs hook: writes the reference pages from the program, and resolves links that leave docs/.

A mark such as `<!-- docs/hooks.py: commands -->` is replaced by what its function in `WRITERS`
returns: the commands' own help, the service's OpenAPI document, or the settings.
Documents that lie elsewhere in the repository (`PAGES`) become pages, and any other linked file is
copied into the site, so that the same links work in a checkout and in the site.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import posixpath
import re
import tempfile
import types
import typing
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from recsys.config import fields_of, subsection
from recsys.pipeline import SECTION_GROUP, SECTIONS

ROOT = Path(__file__).parent.parent
# Site page -> the repository's document that it shows.
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "data-formats.md": "data/README.md",
    "benchmark-results.md": "benchmarks/results/README.md",
    "benchmark-gpu-h200.md": "benchmarks/results/gpu-h200/README.md",
}
# What links of the repository to a document or folder mean in the site.
PLACES = {source: page for page, source in PAGES.items()} | {
    "README.md": "index.md",
    "benchmarks/results": "benchmark-results.md",
    "docs/decisions": "decisions/README.md",
}
# Sections of a configuration file that belong to no stage -> the class that holds their settings.
OF_SERVICE = {
    "serve": "recsys.serving.settings:ServingSettings",
}
_LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
_MARK = re.compile(r"<!-- docs/hooks\.py: (\w+) -->")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents that docs/ does not hold."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is written from the program, and resolve links that leave docs/."""
    here = page.file.src_uri
    source = PAGES.get(here, f"docs/{here}")

    def resolve(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if re.match(r"[a-z]+:", link):
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        uri = PLACES.get(path)
        if uri is None and path.startswith("docs/"):
            uri = path.removeprefix("docs/")
        elif uri is None and (ROOT / path).is_file():
            uri = f"source/{path}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        if uri is None:
            return match.group()
        return before + posixpath.relpath(uri, posixpath.dirname(here) or ".") + after

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(resolve, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    markdown = "".join([*parts, _LINK.sub(resolve, markdown[end:])])
    return _MARK.sub(lambda mark: WRITERS[mark.group(1)](), markdown)


def table(header: str, rows: list[tuple[str, ...]]) -> list[str]:
    """A Markdown table; `header` holds the columns' names with `|` between them."""
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|" + "---|" * columns]
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


# The command line


def commands() -> str:
    """Every command with its help and its options."""
    root = typer.main.get_command(importlib.import_module("recsys.cli").app)
    return "\n".join(_command(root, ["recsys"]))


def _command(command: Any, path: list[str]) -> list[str]:
    context = typer.Context(command, info_name=path[-1])
    lines = []
    if len(path) > 1:
        lines += [f"{'##' if len(path) == 2 else '###'} {' '.join(path)}", ""]
        lines += [_prose(command.help or ""), ""]
        options = [option.get_help_record(context) for option in command.get_params(context)]
        rows = [
            (f"`{name}`", _prose(text))
            for name, text in filter(None, options)
            if not name.startswith(("--help", "--install-", "--show-completion"))
        ]
        if rows:
            lines += table("option | meaning", rows)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            lines += _command(command.get_command(context, name), [*path, name])
    return lines


def _prose(text: str) -> str:
    """Help as Markdown: no console markup, its example as code."""
    text = re.sub(r"\[/?bold\]", "", inspect.cleandoc(text))
    text = text.replace("<", "&lt;").replace("[default", "\\[default")
    return re.sub(r"Example: (.+)\Z", lambda found: _example(found.group(1)), text, flags=re.S)


def _example(text: str) -> str:
    return f"```bash\n{' '.join(text.split())}\n```"


# The REST interface


def routes() -> str:
    """Every route and every schema of the service's OpenAPI document."""
    app = importlib.import_module("recsys.serving.app")
    settings = importlib.import_module("recsys.serving.settings")
    document = app.create_app(settings.ServingSettings()).openapi()
    lines = ["## Routes", ""]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    lines += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += [f"### {name}", "", schema.get("description", ""), ""]
        required = schema.get("required", ())
        rows = [
            (f"`{field}`", _type(part), _default(part, field in required), _description(part))
            for field, part in schema.get("properties", {}).items()
        ]
        lines += table("field | type | default | meaning", rows) if rows else []
        if "enum" in schema:
            lines += [", ".join(f"`{value}`" for value in schema["enum"]), ""]
    return "\n".join(lines)


def _operation(title: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### {title}", "", operation.get("description", operation.get("summary", "")), ""]
    if "x-scope" in operation:
        lines += [f"Scope: `{operation['x-scope']}`.", ""]
    parameters = [
        (f"`{part['name']}`", part["in"], _type(part["schema"]), _description(part))
        for part in operation.get("parameters", ())
    ]
    lines += table("parameter | in | type | meaning", parameters) if parameters else []
    rows = []
    if "requestBody" in operation:
        rows.append(("request", _body(operation["requestBody"]), ""))
    for status, answer in operation["responses"].items():
        rows.append((status, _body(answer), answer.get("description", "")))
    return lines + table("message | body | meaning", rows)


def _body(message: dict[str, Any]) -> str:
    content = message.get("content", {})
    return ", ".join(f"`{kind}` {_type(part.get('schema', {}))}" for kind, part in content.items())


def _type(schema: dict[str, Any]) -> str:
    """A schema in words, with links to the named ones."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    choices = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if choices:
        return " or ".join(_type(choice) for choice in choices)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _description(part: dict[str, Any]) -> str:
    return str(part.get("description", part.get("schema", {}).get("description", "")))


# The configuration


def settings() -> str:
    """Every setting of every section, with its type, default and meaning."""
    lines = []
    # The defaults of some settings depend on the environment and on what lies in var/.
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, RECSYS_HOME=home):
        of_stages = {point.name: point.load() for point in entry_points(group=SECTION_GROUP)}
        for name in SECTIONS:
            if name in of_stages:
                lines += _section(name, of_stages[name](), 2)
        for name, place in OF_SERVICE.items():
            module, _, cls = place.partition(":")
            lines += _section(name, getattr(importlib.import_module(module), cls)(), 2)
        return "\n".join(lines).replace(home, "var")


def _section(title: str, section: Any, level: int) -> list[str]:
    cls = type(section)
    rows, nested = [], []
    for name, field in fields_of(cls).items():
        if (inner := subsection(field)) is not None:
            nested.append((f"{title}.{name}", getattr(section, name) or inner()))
            shown = f"see `{title}.{name}`"
        else:
            shown = f"`{getattr(section, name)}`"
        rows.append((f"`{name}`", _annotation(field.annotation), shown, _meaning(cls, name)))
    summary = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    lines = ["#" * level + f" {title}", "", summary, ""]
    lines += table("setting | type | default | meaning", rows)
    for child, values in nested:
        lines += _section(child, values, level + 1)
    return lines


def _annotation(annotation: Any) -> str:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _annotation(inside[0])  # bounds are checked, not shown
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_annotation, inside))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (tuple, dict):
        return f"`{origin.__name__}` of " + ", ".join(
            _annotation(a) for a in inside if a is not ...
        )
    if annotation is type(None):
        return "`None`"
    return "any" if annotation is Any else f"`{annotation.__name__}`"


def _meaning(cls: type, name: str) -> str:
    """The docstring under a field, in the class or in the base that has it."""
    fields = (
        fields_of(base).get(name) for base in cls.__mro__ if is_dataclass(base) or base is cls
    )
    found = next((field.description for field in fields if field and field.description), "")
    return found.replace("\n", " ")


WRITERS = {"commands": commands, "routes": routes, "settings": settings}
