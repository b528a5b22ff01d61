"""The fields of a configuration, with their defaults."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import PydanticUndefined

from luffy.config.strict import StrictModel

_SECTION = "(section)"
_MAX_TEXT = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration."""

    path: str
    """Dotted, as an override names it; an entry of a list by its name, else by its number."""
    value: str
    default: str | None
    """None: it has none, and had to be given."""

    @property
    def is_default(self) -> bool:
        return self.value == self.default


def settings_of(model: StrictModel) -> list[Setting]:
    """Every field of `model`, in its order."""
    return list(_fields(model, None, ""))


def _fields(model: StrictModel, base: StrictModel | None, prefix: str) -> Iterator[Setting]:
    """`base`: what the field that holds `model` has by default, where that is of the same class."""
    for name, info in type(model).model_fields.items():
        default = info.get_default(call_default_factory=True) if base is None else getattr(base, name)
        yield from _setting(f"{prefix}{name}", getattr(model, name), default)


def _setting(path: str, value: object, default: object) -> Iterator[Setting]:
    if isinstance(value, StrictModel):
        found = list(_fields(value, default if type(default) is type(value) else None, f"{path}."))
        if not isinstance(default, StrictModel) and all(setting.is_default for setting in found):
            yield Setting(path, _SECTION, _default_text(default))
        yield from found
    elif isinstance(value, Mapping) and any(isinstance(below, StrictModel) for below in value.values()):
        for key, below in value.items():
            yield from _setting(f"{path}.{key}", below, PydanticUndefined)
    elif isinstance(value, tuple) and any(isinstance(below, StrictModel) for below in value):
        for index, below in enumerate(value):
            yield from _setting(f"{path}.{getattr(below, 'name', index)}", below, PydanticUndefined)
    else:
        yield Setting(path, _text(value), _default_text(default))


def _default_text(default: object) -> str | None:
    return None if default is PydanticUndefined else _text(default)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=_plain, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _plain(value: object) -> object:
    if isinstance(value, StrictModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, Sequence | set | frozenset) else str(value)
