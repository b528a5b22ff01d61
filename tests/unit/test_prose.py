"""The prose of the code: every docstring and comment reads as the field writes, and nothing public goes without one."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("luffy", "tasks", "flows") for path in (ROOT / folder).rglob("*.py"))
HABITS = {
    r"(?:^|(?<=[.:;] )|(?<=\n))Of (?!course\b)": "a sentence that begins with 'Of'",
    r"\bbehind (?:it|them|this|that|which|the (?:first|last|newest|one|step|batch|finished))\b": "'behind' for 'after'",
    r"\bmust in the end\b": "'must in the end' for 'has to'",
    r"\basked of\b": "'asked of' for 'requested from'",
    r"\bhearken|\bheed(?:s|ing|ed)?\b": "'heed' for 'watch' or 'follow'",
}
Place = tuple[str, int, str]


def docstrings(path: Path) -> Iterator[Place]:
    """Every string that stands alone as a statement: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield str(path.relative_to(ROOT)), node.lineno, node.value.value


def comments(path: Path) -> Iterator[Place]:
    """Comments, each line by itself."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield str(path.relative_to(ROOT)), token.start[0], token.string.lstrip("# ")


def offences(text: str) -> list[str]:
    """The habits that `text` shows."""
    flat = " ".join(text.split())
    return [name for pattern, name in HABITS.items() if re.search(pattern, flat)]


def test_no_docstring_or_comment_has_the_old_habits():
    found = [
        f"{file}:{line}: {offence}: {' '.join(text.split())[:80]}"
        for path in SOURCES
        for file, line, text in (*docstrings(path), *comments(path))
        for offence in offences(text)
    ]
    assert not found, "\n".join(found)


def public_without_docstring(path: Path) -> Iterator[str]:
    """Public functions and classes of a module, and public methods of its public classes, that say nothing.

    Properties, overrides of a protocol and functions of one line say by their name what they return.
    """
    tree = ast.parse(path.read_text())
    if not ast.get_docstring(tree) and tree.body:
        yield f"{path.relative_to(ROOT)}: module"
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        one_line = not isinstance(node, ast.ClassDef) and len(node.body) == 1
        if not ast.get_docstring(node) and not one_line:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"


def test_public_functions_and_classes_have_docstrings():
    found = [place for path in SOURCES for place in public_without_docstring(path)]
    assert not found, "\n".join(found)
