"""Where a syntax tree can be mutated, and into what: one small fault for each site.

Left alone: annotations, docstrings, log messages, error texts, assertions, and statements that measure time (`perf/`).
"""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

Changes = Iterator[tuple[str, ast.AST]]
MODULE = "<module>"
_BOUNDARIES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_COMPARISONS = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_BUILT_IN = {"min": "max", "max": "min", "any": "all", "all": "any"}
_PAIRS = (("sum", "mean"), ("amin", "amax"), ("minimum", "maximum"))
_NAMES = {**_BUILT_IN, **dict(_PAIRS), **{other: name for name, other in _PAIRS}}
_DELETED = (ast.Raise, ast.AugAssign, ast.Break, ast.Continue)
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params", "bases"}
_LOGS = {"logger", "logging", "warnings"}


@dataclass(frozen=True)
class Site:
    """One fault that a module can be given; `change` puts it into the tree that was searched."""

    function: str
    operator: str
    ordinal: int
    line: int
    """The first one of its statement."""
    span: tuple[int, int]
    """First and last line of the function, or of the statement outside of functions."""
    digest: str
    """Of the function's code, without comments and layout."""
    change: Callable[[], None]


def sites(tree: ast.Module) -> list[Site]:
    """All faults of a module, in the order of its code."""
    counts: Counter[tuple[str, str]] = Counter()
    digests: dict[ast.AST, str] = {}
    found = []
    for function, scope, statement, operator, change in _walk(tree, MODULE, tree, tree):
        counts[function, operator] += 1
        scope = statement if scope is tree else scope
        if scope not in digests:
            digests[scope] = sha256(ast.unparse(scope).encode()).hexdigest()[:8]
        span = (scope.lineno, scope.end_lineno or scope.lineno)
        ordinal = counts[function, operator]
        found.append(Site(function, operator, ordinal, statement.lineno, span, digests[scope], change))
    return found


def module_with_hits(source: str, first: int) -> ast.Module:
    """The module, whose statements within functions set `HITS[first + line]` as they are executed."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    noted: set[int] = set()
    for node in [node for function in functions for node in ast.walk(function)]:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list) or id(node) in noted:
                continue
            has_text = isinstance(block[0] if block else None, ast.Expr) and isinstance(block[0].value, ast.Constant)
            changed = block[:has_text]
            for statement in block[has_text:]:
                if isinstance(statement, ast.stmt):
                    note = ast.parse(f"HITS[{first + statement.lineno}] = 1").body[0]
                    for part in ast.walk(note):
                        ast.copy_location(part, statement)
                    changed.append(note)
                changed.append(statement)
            setattr(node, field, changed)
        noted.add(id(node))
    return tree


def _walk(parent: ast.AST, function: str, scope: ast.AST, statement: ast.AST) -> Iterator[tuple]:
    for field, value in ast.iter_fields(parent):
        if field in _SKIPPED_FIELDS:
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or _is_ignored(node):
                continue
            inner, inner_scope = function, scope
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = node.name if function == MODULE else f"{function}.{node.name}"
                inner_scope = scope if isinstance(node, ast.ClassDef) else node
            place = node if isinstance(node, ast.stmt) else statement
            for operator, changed in changes(node):
                put = partial(_put, parent, field, index if isinstance(value, list) else None, node, changed)
                yield inner, inner_scope, place, operator, put
            if not isinstance(node, ast.Raise):
                yield from _walk(node, inner, inner_scope, place)


def _put(parent: ast.AST, field: str, index: int | None, old: ast.AST, new: ast.AST) -> None:
    ast.fix_missing_locations(ast.copy_location(new, old))
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new


def _is_ignored(node: ast.AST) -> bool:
    match node.value if isinstance(node, ast.Expr) else node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.If(test=ast.Name("TYPE_CHECKING")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(name))) if name in _LOGS:
            return True
        case ast.Constant() if isinstance(node, ast.Expr):
            return True
    is_simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
    return is_simple and any(isinstance(part, ast.Constant) and "perf/" in str(part.value) for part in ast.walk(node))


def changes(node: ast.AST) -> Changes:
    """What this node may become, each with the name of the operator."""
    match node:
        case ast.Compare(ops=[op]):
            for name, table in (("boundary", _BOUNDARIES), ("comparison", _COMPARISONS)):
                if type(op) in table:
                    yield name, _with(node, ops=[table[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not _is_text(node):
            yield "arithmetic", _with(node, op=_ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "and/or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            yield "mask", operand
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", operand
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare):
            yield "not", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant +1", ast.Constant(value + 1)
            yield "constant -1", ast.Constant(value - 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield "return None", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "delete", ast.Pass()
        case ast.Slice(lower=lower, upper=upper):
            for side, bound in (("lower", lower), ("upper", upper)):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield "slice bound", _with(node, **{side: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
        case ast.Call():
            yield from _changed_calls(node)
    if isinstance(node, _DELETED):
        yield "delete", ast.Pass()


def _changed_calls(call: ast.Call) -> Changes:
    function, arguments = call.func, call.args
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    is_method = isinstance(function, ast.Attribute) and not (
        isinstance(function.value, ast.Name) and function.value.id in ("torch", "np", "F")
    )
    other = _NAMES.get(name)
    if isinstance(function, ast.Attribute) and other:
        yield f"{name}/{other}", _with(call, func=_with(function, attr=other))
    elif isinstance(function, ast.Name) and name in _BUILT_IN:
        yield f"{name}/{other}", _with(call, func=_with(function, id=other))
    if is_method and name in ("detach", "clamp", "clip"):
        yield name, function.value
    elif name in ("clamp", "clip") and arguments:
        yield name, arguments[0]
    if name in ("where", "masked_fill") and len(arguments) == 3 - is_method:
        mask = arguments[0] if name == "where" or is_method else arguments[1]
        inverted = ast.UnaryOp(ast.Invert(), mask)
        yield "mask", _with(call, args=[inverted if argument is mask else argument for argument in arguments])
    elif len(arguments) > 1:
        first, second, *rest = arguments
        is_open = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not is_open and ast.dump(first) != ast.dump(second):
            yield "swapped arguments", _with(call, args=[second, first, *rest])
    for keyword in call.keywords:
        others = [each for each in call.keywords if each is not keyword]
        if keyword.arg in ("key", "reverse") and name in ("sorted", "sort", "min", "max"):
            yield "sort key", _with(call, keywords=others)
        if keyword.arg == "dim" and isinstance(keyword.value, ast.UnaryOp | ast.Constant):
            is_zero = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            yield "dim", _with(call, keywords=[*others, ast.keyword("dim", ast.Constant(int(is_zero)))])


def _is_text(node: ast.BinOp) -> bool:
    """Whether it joins or formats text, or is a union of types."""
    sides = (node.left, node.right)
    values = [side.value for side in sides if isinstance(side, ast.Constant)]
    is_union = isinstance(node.op, ast.BitOr) and None in values
    return is_union or any(isinstance(each, ast.JoinedStr | str) for each in (*sides, *values))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
