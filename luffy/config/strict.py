"""The base of every configuration class: strict types, unknown keys refused, immutable."""

import ast
import functools
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
ShareBelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
_LONGEST_NAME = 100
"""A file system takes 255 bytes, with what is put before and after."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=_LONGEST_NAME)]
RunName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=_LONGEST_NAME)]
_MOST = 2**63 - 1
"""What files, libraries and counters hold."""


def run_name(text: str) -> str:
    """A `RunName` that resembles `text`."""
    return re.sub(r"[^a-z0-9_.-]+", "-", text.lower()).strip("-._")[:_LONGEST_NAME] or "model"


ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`package.module:name`."""
FOR_IDENTITY: Mapping[str, object] = {"for_identity": True}
"""Context of a dump of what changes a result: without the fields that are marked as `NOT_IDENTITY`."""
FOR_REPORT: Mapping[str, object] = {"for_report": True}
"""Context of a dump of all that a report shows: everything but the groups that its stages were written out from."""
OF_ONE_MACHINE = {**FOR_IDENTITY, "files": "paths"}
"""The same with whole paths of files, whose contents nobody looks at."""


def for_key(left_out: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Context of a dump that a key is made of: fields by name, without those at the value that `left_out` has for them.

    `left_out`: class to field to value, as this dump writes it.
    """
    return {**FOR_IDENTITY, "left_out": left_out}


NOT_IDENTITY = object()
"""Marks a field that changes no result: `Annotated[str, NOT_IDENTITY]`."""
FILE_IDENTITY = object()
"""Marks the path of a file that is the same wherever it lies: its name and its content count
(`luffy.pipeline.outside`)."""


class StrictModel(BaseModel):
    """Configuration is validated once, at load time, and never changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    def _complaints(self) -> Iterator[str]:
        """What is wrong between the fields of such a section; the first is reported."""
        yield from ()

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        """The section that was dumped as `values`; ValidationError."""
        return cls.model_validate_json(json.dumps(values))

    def changed(self, *names: str) -> list[str]:
        """Those of the fields that are not at their defaults; a stage's own file gives every field a value."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), int) and abs(value) > _MOST:
                raise ValueError(f"{name} {value:.0e} is beyond {_MOST:.0e}, the largest number that is possible")
        for complaint in self._complaints():
            raise ValueError(complaint)
        return self

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        values: dict[str, object] = dump(self)
        context = info.context or {}
        if "for_identity" not in context:
            return values
        for name, field in type(self).model_fields.items():
            if NOT_IDENTITY in field.metadata:
                values.pop(name, None)
            elif FILE_IDENTITY in field.metadata and "files" not in context:
                values[name] = Path(str(values[name])).name
        if "left_out" not in context:
            return values
        known = context["left_out"].get(type(self).__name__, {})
        # As text, in which 1 is not true and the order of a user's mapping counts.
        counts = {name for name in values if name not in known or json.dumps(values[name]) != json.dumps(known[name])}
        return {name: values[name] for name in sorted(counts)}


@functools.cache
def field_docs(model: type[BaseModel]) -> Mapping[str, str]:
    """What the docstrings below a class's fields say, by the fields' names, those of base classes included. Empty for a
    class that is not at the top level of a module with a source file. Read when somebody asks: pydantic's
    `use_attribute_docstrings` reads every class whenever it is imported, which takes half as long as all the rest."""
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
    return {
        part.name: {
            field.target.id: inspect.cleandoc(below.value.value)
            for field, below in itertools.pairwise(part.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr)
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        }
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef)
    }
