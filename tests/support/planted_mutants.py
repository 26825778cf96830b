"""Chooses small faults to plant in the library's source, with a fixed seed.

Each fault replaces one expression or statement, and the result still compiles. All kinds of faults
are equally frequent as far as possible; within a kind, the probability of a file is proportional to
its lines of code. Statements that delete files or end processes are never changed, because such a
fault could affect more than the tests.
"""

import ast
import collections
import dataclasses
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("praxis_lite", "praxis_tools")
KINDS = {
    "sign": "+ and - exchanged, or a minus sign dropped",
    "comparison": "a comparison that is negated, or includes its bound and did not",
    "off_by_one": "an integer that is one larger, or a range that is one shorter",
    "axis": "two axes exchanged, or another axis; a transposition dropped",
    "arguments": "two arguments exchanged",
    "collective": "a collective, such as psum, replaced by its operand",
    "dtype": "a narrower dtype, or a cast dropped",
    "check": "a check that never fails",
    "condition": "a condition negated; `and` and `or` exchanged",
    "term": "a term of a sum, or a factor of a product, dropped",
    "call": "a call dropped whose result nobody uses",
    "flag": "True and False exchanged",
}
DANGEROUS = re.compile(r"kill|rmtree|unlink|rmdir|remove|terminate|shutil|truncate")
# The texts of log messages are not tested.
LOGS = re.compile(r"^(logging|logger|_logger|log|_log|warnings|print)\b")
COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "ppermute", "all_to_all"}
CHECKS = re.compile(r"^_?(require|check)")
NARROWER = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float8_e5m2",
    "int64": "int32",
    "int32": "int8",
    "uint32": "uint16",
    "uint64": "uint32",
}
AXIS_NAMES = {"replica", "data", "mdl", "expert", "stage", "context"}
OPPOSITE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SIGNS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
# Their arguments have different types, so exchanging them would only raise an error.
ORDERED = {
    "isinstance",
    "issubclass",
    "getattr",
    "setattr",
    "hasattr",
    "map",
    "filter",
    "partial",
    "zip",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: replaces `before`, at byte `start` of a file, by `after`.

    Attributes:
      line: Line number of the start of `before`.
      statement: Line number of the enclosing statement.
      is_in_function: Whether the statement runs in calls; otherwise it runs at import.
    """

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    statement: int
    is_in_function: bool

    @property
    def name(self) -> str:
        """A name that stays the same as long as the file before the fault does not change."""
        return f"{self.file}:{self.line}:{self.start}:{self.kind}:{self.after}"

    def applied(self, source: bytes) -> bytes:
        """Returns the source of the file with the fault."""
        before, start = self.before.encode(), self.start
        assert source[start:].startswith(before), f"{self.file} changed since {self.name}"
        return source[:start] + self.after.encode() + source[start + len(before) :]


def plant(
    root: Path, num: int = 300, seed: int = 53, packages: Sequence[str] = PACKAGES
) -> list[Mutant]:
    """Returns up to `num` different faults; the same faults for the same source."""
    places = collections.defaultdict(lambda: collections.defaultdict(list))
    sources, sizes = {}, {}
    for path in sorted(path for folder in packages for path in (root / folder).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        sources[file] = path.read_bytes()
        faults = _Faults(file, sources[file])
        sizes[file] = faults.num_lines
        for mutant in faults.found:
            places[mutant.kind][file].append(mutant)
    chance, chosen = random.Random(seed), []
    while len(chosen) < num and any(places.values()):
        kind = [*KINDS][len(chosen) % len(KINDS)]
        # Skip kinds without remaining locations.
        files = places[kind] or places[chance.choice([x for x in KINDS if places[x]])]
        file = chance.choices([*files], [sizes[x] for x in files])[0]
        mutant = files[file].pop(chance.randrange(len(files[file])))
        if not files[file]:
            del files[file]
        if _is_fault(mutant, sources[mutant.file]):
            chosen.append(mutant)
    return chosen


def _function_lines(tree: ast.Module) -> set[int]:
    """Returns the lines in bodies of functions, which run in calls."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line in range(node.body[0].lineno, node.end_lineno + 1)
    }


def _is_fault(mutant: Mutant, source: bytes) -> bool:
    try:
        changed = ast.parse(mutant.applied(source))
        compile(changed, mutant.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


class _Faults:
    """Finds possible faults in a file; `num_lines` is its number of lines of code."""

    def __init__(self, file: str, source: bytes):
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.found: list[Mutant] = []
        tree, lines = ast.parse(source), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and not _is_docstring(node):
                lines.add(node.lineno)
        self.num_lines = len(lines)
        self._function_lines = _function_lines(tree)
        for statement in tree.body:
            self._visit(statement, statement)

    def _visit(self, node: ast.AST, statement: ast.stmt):
        if isinstance(node, ast.stmt):
            statement = node
            if _is_docstring(node) or isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom)):
                return
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                return
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call) and LOGS.match(ast.unparse(node.func)):
            return
        if not DANGEROUS.search(self._text_around(statement)):
            for kind, place, after in _replacements(node, self._text):
                self._add(kind, place, after, statement)
        for child in _parts(node):
            self._visit(child, statement)

    def _text_around(self, statement: ast.stmt) -> str:
        """Returns the text of a statement, including its body unless it is a function or class."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            start = self._at(statement.lineno, statement.col_offset)
            first = statement.body[0]
            return self._source[start : self._at(first.lineno, first.col_offset)].decode()
        return self._text(statement)

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _text(self, first: ast.AST, last: ast.AST | None = None, is_between: bool = False) -> str:
        """Returns the text of a node, from one node to another, or between them."""
        start, end = self._range(first, last or first, is_between)
        return self._source[start:end].decode()

    def _range(self, first: ast.AST, last: ast.AST, is_between: bool) -> tuple[int, int]:
        if is_between:
            return (
                self._at(first.end_lineno, first.end_col_offset),
                self._at(last.lineno, last.col_offset),
            )
        return (
            self._at(first.lineno, first.col_offset),
            self._at(last.end_lineno, last.end_col_offset),
        )

    def _add(self, kind: str, place: "_Place", after: str, statement: ast.stmt):
        start, end = self._range(*place)
        line = self._source[:start].count(b"\n") + 1
        before = self._source[start:end].decode()
        in_function = line in self._function_lines
        self.found.append(
            Mutant(self._file, line, kind, before, after, start, statement.lineno, in_function)
        )


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the children of a node in which a fault can change the computation."""
    if isinstance(node, ast.Call) and CHECKS.match(_called(node)):
        yield from node.args[:1]  # The other children are parts of the message.
        return
    if isinstance(node, ast.Assert):
        yield node.test
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


# From the first node to the second, or only the text between them if the third is True.
_Place = tuple[ast.AST, ast.AST, bool]


def _replacements(node: ast.AST, text) -> Iterator[tuple[str, _Place, str]]:
    """Yields the kind, location and new text of each possible fault at a node."""
    itself = (node, node, False)
    match node:
        case ast.BinOp(left=left, op=op, right=right) if not (_is_text(left) or _is_text(right)):
            if type(op) in SIGNS:
                old, new = SIGNS[type(op)]
                yield "sign", (left, right, True), text(left, right, True).replace(old, new, 1)
            if isinstance(op, (ast.Add, ast.Sub, ast.Mult)):
                yield "term", itself, _operand(left, text)
            if isinstance(op, (ast.Add, ast.Mult)):
                yield "term", itself, _operand(right, text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", itself, _operand(operand, text)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in SIGNS:
            old, new = SIGNS[type(op)]
            if not _is_text(value):
                yield "sign", (target, value, True), text(target, value, True).replace(old, new, 1)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            old, new = OPPOSITE[type(op)]
            between = text(left, right, True)
            pattern = r"\s+".join(map(re.escape, old.split()))
            yield "comparison", (left, right, True), re.sub(pattern, new, between, count=1)
        case ast.BoolOp(op=op, values=[left, right]):
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield "condition", (left, right, True), text(left, right, True).replace(old, new, 1)
        case ast.Constant(value=bool(value)):
            yield "flag", itself, str(not value)
        case ast.Constant(value=int(value)) if value < 2**16:
            yield "off_by_one", itself, str(value + 1)
        case ast.Constant(value=str(value)) if value in NARROWER:
            yield "dtype", itself, repr(NARROWER[value])
        case ast.Attribute(value=ast.Name(id=("jnp" | "np")), attr=attr) if attr in NARROWER:
            # NumPy itself has no bfloat16.
            new = NARROWER[attr].replace("bfloat16", "float16").replace("float8_e5m2", "float16")
            new = new if node.value.id == "np" else NARROWER[attr]
            yield "dtype", itself, f"{node.value.id}.{new}"
        case ast.Tuple(elts=[first, second, *_]) | ast.List(elts=[first, second, *_]):
            values = {getattr(x, "value", None) for x in (first, second)}
            if values & AXIS_NAMES:
                yield "axis", *_exchanged(first, second, text)
        case ast.If(test=test, body=[ast.Raise()], orelse=[]):
            yield "check", (test, test, False), "False"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "condition", (test, test, False), f"not ({text(test)})"
        case ast.comprehension(ifs=[test]):
            yield "condition", (test, test, False), f"not ({text(test)})"
        case ast.Expr(value=ast.Call() as call) if not LOGS.match(ast.unparse(call.func)):
            yield "check" if CHECKS.match(_called(call)) else "call", itself, "pass"
        case ast.Call():
            yield from _call_replacements(node, text)


def _call_replacements(node: ast.Call, text) -> Iterator[tuple[str, _Place, str]]:
    itself, name = (node, node, False), _called(node)
    for keyword in node.keywords:
        if keyword.arg in ("axis", "dim", "scatter_dimension", "split_axis", "concat_axis"):
            new = {"0": "1", "1": "0", "-1": "-2", "-2": "-1"}.get(text(keyword.value))
            if new is not None:
                yield "axis", (keyword.value, keyword.value, False), new
    match node:
        case ast.Call(args=[operand, _, *_]) if name in COLLECTIVES:
            yield "collective", itself, text(operand)
        case ast.Call(func=ast.Attribute(value=array), args=[_]) if name == "astype":
            yield "dtype", itself, text(array)
        case ast.Call(func=ast.Attribute(value=owner), args=[array, *_]) if name in (
            "swapaxes",
            "moveaxis",
            "transpose",
        ):
            is_method = not text(node.func).startswith(("jnp.", "np.", "jax."))
            yield "axis", itself, text(owner if is_method else array)
        case ast.Call(args=[ast.Constant(value=str(equation)) as place, *_]) if name == "einsum":
            swapped = re.sub(r"->(.*)(\w)(\w)$", r"->\1\3\2", equation)
            yield "axis", (place, place, False), repr(swapped)
        case ast.Call(args=[first, second, *_]) if name in ("P", "PartitionSpec"):
            yield "axis", *_exchanged(first, second, text)
        case ast.Call(args=[argument]) if name == "range" and not _is_number(argument):
            yield "off_by_one", (argument, argument, False), f"({text(argument)}) - 1"
        case ast.Call(args=[first, second, *_]) if name not in ORDERED and not CHECKS.match(name):
            if all(
                isinstance(x, (ast.Name, ast.Attribute, ast.Subscript)) for x in (first, second)
            ):
                yield "arguments", *_exchanged(first, second, text)


def _exchanged(first: ast.AST, second: ast.AST, text) -> tuple[_Place, str]:
    between = text(first, second, True)
    return (first, second, False), f"{text(second)}{between}{text(first)}"


def _called(node: ast.Call) -> str:
    """Returns the last component of the name of the called function."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _operand(node: ast.AST, text) -> str:
    plain = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript)
    return text(node) if isinstance(node, plain) else f"({text(node)})"


def _is_text(node: ast.AST) -> bool:
    """Returns whether a `+` next to the node concatenates strings or lists."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    is_str = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_str or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)
