"""Mutants of a Python file: small faults, each in one place of its source.

`benchmarks/mutation.py` runs the tests on them. Some code is never mutated, since tests need not
find its faults: annotations, docstrings and messages, `raise`, logging, decorators, `__repr__`,
dunder assignments and `if TYPE_CHECKING`. A mutant replaces text, so it can be read and the lines
before it keep their numbers.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

Node = ast.expr | ast.stmt
Change = tuple[str, Node, Node]  # an operator's name, a node, and what takes its place

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
PAIRS = (
    ("min", "max"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("minimum", "maximum"),
    ("clamp_min", "clamp_max"),
    ("any", "all"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("new_zeros", "new_ones"),
    ("floor", "ceil"),
    ("log_softmax", "softmax"),
    ("logical_and", "logical_or"),
    ("union", "intersection"),
    ("startswith", "endswith"),
    ("bisect_left", "bisect_right"),
    ("popleft", "pop"),
    ("left", "right"),
)
SWAPPED = dict(PAIRS) | {b: a for a, b in PAIRS} | {"sorted": "list", "reversed": "list"}
SILENT = {"log", "logger", "logging", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        path: of the file, as the caller named it.
        line: of the fault, from 1.
        column: in bytes, from 0.
        operator: the kind of fault.
        original: code that is replaced, on one line.
        mutated: what replaces it.
        code: the line that the fault begins in.
        span: first and last byte of the code that is replaced, the last one excluded.
        lines: a test that runs one of these lines reaches the fault.
        around: lines of the whole statement, for code without a line event of its own. Both are
            empty for code that runs when the module is imported.
    """

    path: str
    line: int
    column: int
    operator: str
    original: str
    mutated: str
    code: str
    span: tuple[int, int]
    lines: range
    around: range

    def apply(self, source: str) -> str:
        """The source with the fault."""
        data, (start, stop) = source.encode(), self.span
        return (data[:start] + self.mutated.encode() + data[stop:]).decode()

    def rank(self, seed: int) -> str:
        """Sort key of the draw with this seed; it does not depend on other code."""
        key = f"{seed}\n{self.path}\n{self.code}\n{self.original}\n{self.mutated}"
        return hashlib.sha256(key.encode()).hexdigest()


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of a source, in its order."""
    code_lines = source.split("\n")
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = []
    for node, lines, around in _places(ast.parse(source), range(0), range(0), at_import=True):
        for operator, old, new in _changes(node):
            text = ast.unparse(new)
            if isinstance(new, ast.expr) and type(new) is not type(old):
                text = f"({text})"  # it may bind less tightly than what it replaces
            start = starts[old.lineno - 1] + old.col_offset
            stop = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
            place = (path, old.lineno, old.col_offset)
            codes = (ast.unparse(old), text, code_lines[old.lineno - 1].strip())
            found.append(Mutant(*place, operator, *codes, (start, stop), lines, around))
    return found


def function_lines(source: str) -> set[int]:
    """Lines that run when a function is called and not when the module is imported."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def _skipped(node: ast.AST) -> bool:
    """Whether nothing below this node is mutated."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True  # places within f-strings are wrong before Python 3.12, too
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in SILENT
    return False


def _children(node: ast.AST) -> Iterator[ast.AST]:
    unseen = {"annotation", "returns", "decorator_list", "msg"}
    if isinstance(node, ast.ClassDef):
        unseen |= {"bases", "keywords"}
    for name, value in ast.iter_fields(node):
        if name not in unseen:
            found = value if isinstance(value, list) else [value]
            yield from (child for child in found if isinstance(child, ast.AST))


def _places(
    node: ast.AST, lines: range, around: range, *, at_import: bool
) -> Iterator[tuple[Node, range, range]]:
    """Nodes that may be mutated, with the lines that reach them (`Mutant.lines`, `.around`)."""
    if _skipped(node):
        return
    if isinstance(node, ast.stmt) and not at_import:
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        lines = around = range(node.lineno, max(last, node.lineno) + 1)
    elif isinstance(node, ast.expr) and not at_import:
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    if isinstance(node, ast.expr | ast.stmt):
        yield node, lines, around
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return  # the number -1 is mutated as one number
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in _children(node):
            yield from _places(child, lines, around, at_import=at_import)
        return
    # Defaults are evaluated on import, but they matter to callers of the function only.
    inside = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    yield from _places(node.args, inside, inside, at_import=True)
    for child in node.body:
        yield from _places(child, inside, inside, at_import=False)


def _changes(node: Node) -> Iterator[Change]:
    yield from _operators(node)
    yield from _constants(node)
    yield from _calls(node)
    yield from _conditions(node)
    yield from _slices(node)
    yield from _statements(node)


def _operators(node: Node) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for kind in COMPARISONS[type(op)]:
                    ops = [*node.ops[:i], kind(), *node.ops[i + 1 :]]
                    yield "comparison", node, ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            if not any(_is_text(side) or _is_type(side) for side in (left, right)):
                yield "arithmetic", node, ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in ARITHMETIC:
            yield "arithmetic", node, ast.AugAssign(target, ARITHMETIC[type(op)](), value)
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", node, ast.BoolOp(other, values)
        case ast.UnaryOp(_, operand) if not isinstance(operand, ast.Constant):
            yield "unary", node, operand


def _is_text(node: ast.AST) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr)


def _is_type(node: ast.AST) -> bool:
    """Whether this is a part of a type such as `int | None`, which has no effect at run time."""
    named = isinstance(node, ast.Name) and node.id in {"int", "float", "str", "bool", "bytes"}
    return named or (isinstance(node, ast.Constant) and node.value is None)


def _constants(node: Node) -> Iterator[Change]:
    value: object = None
    match node:
        case ast.Constant(value):
            pass
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            value = -number
    new: tuple[object, ...] = ()
    if isinstance(value, bool):
        new = (not value,)
    elif isinstance(value, int):
        # Adding 1 to a large number rarely has an effect; doubling and halving may.
        new = (value + 1, value - 1) if abs(value) <= 16 else (value * 2, value // 2)
    elif isinstance(value, float):
        new = (value * 2 or 1.0,)
    for each in new:
        yield "constant", node, ast.parse(repr(each), mode="eval").body


def _calls(node: Node) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    match node.func:
        case ast.Name(name) if name in SWAPPED:
            # list() knows no key= and reverse=.
            words = [] if SWAPPED[name] == "list" else node.keywords
            yield "call", node, ast.Call(ast.Name(SWAPPED[name]), node.args, words)
        case ast.Attribute(value, name) if name in SWAPPED:
            func = ast.Attribute(value, SWAPPED[name])
            yield "call", node, ast.Call(func, node.args, node.keywords)
        case ast.Attribute(_, "clamp" | "clamp_") if len(node.keywords) == 1:
            (word,) = node.keywords
            words = [ast.keyword(SWAPPED[word.arg or ""], word.value)]
            yield "call", node, ast.Call(node.func, node.args, words)
    for word in node.keywords:
        if isinstance(word.value, ast.Constant) and word.value.value in SWAPPED:
            yield "argument", word.value, ast.Constant(SWAPPED[word.value.value])


def _conditions(node: Node) -> Iterator[Change]:
    """Negated conditions, except those that another operator negates."""
    tests: list[ast.expr] = []
    match node:
        case ast.If(test) | ast.IfExp(test):
            tests = [test]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            tests = [test for loop in node.generators for test in loop.ifs]
    for test in tests:
        match test:
            case ast.UnaryOp(ast.Not()):
                pass
            case ast.Compare(ops=[op]) if len(COMPARISONS[type(op)]) == 1:
                pass
            case _:
                yield "condition", test, ast.UnaryOp(ast.Not(), test)


def _slices(node: Node) -> Iterator[Change]:
    """Bounds one higher and one lower, except numbers, which `_constants` mutates."""
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None and not any(True for _ in _constants(bound)):
                for op in (ast.Add(), ast.Sub()):
                    yield "slice", bound, ast.BinOp(bound, op, ast.Constant(1))


def _statements(node: Node) -> Iterator[Change]:
    match node:
        case ast.Expr(ast.Call()):
            yield "dropped", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped", node, ast.Pass()
        case ast.Break():
            yield "loop", node, ast.Continue()
        case ast.Continue():
            yield "loop", node, ast.Break()
