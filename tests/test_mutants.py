"""Mutants for `benchmarks/mutation.py`: valid, different, and where they should be."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "benchmarks" / "mutants.py"

SOURCE = '''"""Words, 1 < 2."""
from __future__ import annotations

import logging

if TYPE_CHECKING:
    from x import y as z1
__all__ = ["f"]
log = logging.getLogger("1")
Number = int | None
SIZE = 3


@decorated(1)
def f(a: Literal[1], é: int = 7) -> tuple[int, 2]:
    """Not -1."""
    log.warning("size %d", 1 + 2)
    for x in a[é:]:
        if "ü" and not é:
            break
        a.b = x.clamp(min=é) if é else None
    a.sort(side="left")
    a += 0.5
    if a < é:
        raise ValueError(f"{a + 1}" + "of" + str(3))
    return [y for y in max(-1, é) if y(
        4
    )]


class C:
    def __repr__(self) -> str:
        return "1" + str(2)
'''
EXPECTED = {
    "SIZE = 4": "constant",
    "é: int = 6": "constant",
    "a[(é + 1):]": "slice",
    "a[(é - 1):]": "slice",
    "'ü' or not é": "boolean",
    '"ü" and (é)': "unary",
    "continue": "loop",
    "        pass\n    a.sort": "dropped",
    "    pass\n    a +=": "dropped",
    "x.clamp(max=é)": "call",
    "if (not é) else": "condition",
    "side='right'": "argument",
    "a -= 0.5": "arithmetic",
    "a += 1.0": "constant",
    "if a <= é": "comparison",
    "if a >= é": "comparison",
    "min(-1, é)": "call",
    "max((0), é)": "constant",
    "max(-2, é)": "constant",
    "if (not y(4))": "condition",
}


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("mutants", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_every_operator_makes_valid_and_different_source(module):
    found = module.mutants("f.py", SOURCE)
    sources = [mutant.apply(SOURCE) for mutant in found]
    plain = ast.dump(ast.parse(SOURCE))
    assert all(ast.dump(ast.parse(source)) != plain for source in sources)
    assert len(set(sources)) == len(sources)
    for text, operator in EXPECTED.items():
        at = [m.operator for m, source in zip(found, sources, strict=True) if text in source]
        assert operator in at, text
    assert {mutant.operator for mutant in found} == set(EXPECTED.values())


def test_words_types_messages_and_decorators_are_left_alone(module):
    lines = [line.strip() for line in SOURCE.splitlines()]
    found = {lines[mutant.line - 1] for mutant in module.mutants("f.py", SOURCE)}
    for start in ('"""', "__all__", "log", "Number", "@", "raise", 'return "1"'):
        assert not any(line.startswith(start) for line in found), start
    args = [m for m in module.mutants("f.py", SOURCE) if m.code.startswith("def")]
    assert {m.original for m in args} == {"7"}


def test_faults_are_reached_by_line_and_defaults_by_body(module):
    found = {m.original: m for m in module.mutants("f.py", SOURCE)}
    line = 1 + SOURCE.splitlines().index("        4")
    assert list(found["4"].lines) == [line]
    assert set(found["7"].lines) <= module.function_lines(SOURCE)
    assert line in found["7"].lines
    assert not found["3"].lines


def test_a_draw_stays_when_other_lines_change(module):
    def order(source):
        found = [m for m in module.mutants("f.py", source) if "SIZE" not in m.code]
        return [m.mutated for m in sorted(found, key=lambda m: m.rank(0))]

    assert order(SOURCE) == order(SOURCE.replace("SIZE = 3", "SIZE = 3\nSIZE = 4"))
