"""What the docstring below a field says of it.

Read from the source when somebody asks: pydantic's `use_attribute_docstrings` reads the source of every configuration
class whenever it is imported, which takes almost as long as all the rest of the configuration.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Mapping

from pydantic import BaseModel


@functools.cache
def field_docs(model: type[BaseModel]) -> Mapping[str, str]:
    """Docstrings by the names of the fields that have one, those of base classes included.

    Empty for a class that is not at the top level of a module with a source file.
    """
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        found |= _docs_in(part.__module__).get(part.__qualname__, {})
    return {name: found[name] for name in model.model_fields if name in found}


@functools.cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """The docstrings of the fields of a module's classes, by the names of the classes."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made at run time, or built in
        return {}
    return {part.name: _docs_of(part) for part in ast.parse(source).body if isinstance(part, ast.ClassDef)}


def _docs_of(definition: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
