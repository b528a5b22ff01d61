"""Objects of the user's own modules, by `package.module:name`."""

import ast
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from luffy.errors import ConfigError


class NotImported(Exception):
    """There is no such object, or its module fails on import; the message says which."""


def imported(path: str) -> object:
    """Return what `path` names, or raise NotImported.

    The working directory is searched after everything that is installed.
    """
    module_name, _, name = path.partition(":")
    # Appended, so that nothing in the working directory shadows an installed package.
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - `sys.path` holds text
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise NotImported(f"{path} cannot be imported ({error}); is its folder on PYTHONPATH?") from None
    except SystemExit:
        raise NotImported(f"{module_name} ends Python on import; guard its main part") from None
    except Exception as error:  # a user's module may raise anything
        raise NotImported(f"{module_name} fails on import: {type(error).__name__}: {error}") from error


def module_file(path: str, where: str, options: Collection[str] | None = None) -> Path | None:
    """The file of the module that the setting `where` names by `path`, found without running it.

    None where the module has no file, or was made while this process runs. Raises ConfigError where there is no such
    module, or where its file shows that it lacks the name, or that the function has other arguments than one and
    `options`.
    """
    module, _, name = path.partition(":")
    top, *below = module.split(".")
    try:
        spec, place = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()]), top  # noqa: PTH109
        for part in below:  # without running the packages around it
            inside, place = None if spec is None else spec.submodule_search_locations, f"{place}.{part}"
            spec = PathFinder.find_spec(place, list(inside)) if inside is not None else None
    except ValueError:
        return None
    if spec is None:
        raise ConfigError(
            f"{where}: {path}: there is no module {module}; it is searched in {Path.cwd()} and where Python looks"
        )
    file = Path(spec.origin or "")
    if not file.is_file():
        return None
    names = _names_in(file)
    if names is not None and name not in names:
        raise ConfigError(f"{where}: {path}: {file} has no {name!r}{_meant(name, names)}")
    function = (names or {}).get(name)
    if options is not None and function is not None and not function.decorator_list:
        _check_arguments(function.args, options, f"{where}: {path}")
    return file


def _check_arguments(arguments: ast.arguments, options: Collection[str], what: str) -> None:
    """Raise ConfigError, beginning with `what`, where one value and keyword arguments `options` cannot be given."""
    plain, named = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1:], arguments.kwonlyargs
    taken = [*plain, *(each.arg for each in named)]
    for name in options:
        if name not in taken and arguments.kwarg is None:
            raise ConfigError(f"{what} takes no argument {name!r}, which options names{_meant(name, taken)}")
    needed = plain[: len(plain) - len(arguments.defaults)] if len(plain) > len(arguments.defaults) else []
    needed += [each.arg for each, value in zip(named, arguments.kw_defaults, strict=True) if value is None]
    if missing := [name for name in needed if name not in options]:
        raise ConfigError(f"{what} needs {', '.join(missing)}; give it as options: {{{missing[0]}: VALUE}}")


def _meant(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _names_in(file: Path) -> dict[str, ast.FunctionDef | None] | None:
    """Names that a module's source defines or imports at its top, with the functions; None where it cannot say."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # no Python, or an error that its import tells better
        return None
    names = dict[str, ast.FunctionDef | None]()
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                names[name] = node
            case ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = None
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= dict.fromkeys(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Assign(targets=targets):
                named = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                names |= dict.fromkeys(each.id for each in named)
            case ast.Expr():
                pass
            case _:  # a branch, a loop, a block: whatever it may define
                return None
    return None if names.keys() & {"*", "__getattr__"} else names


def imported_setting(path: str, where: str) -> object:
    """Return what the setting `where` names by `path`, or raise ConfigError."""
    try:
        return imported(path)
    except NotImported as error:
        raise ConfigError(f"{where}: {error}") from error.__cause__
