"""Objects of the user's own modules, by `package.module:name`."""

import ast
import difflib
import importlib
import importlib.util
import os
import sys
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


def module_file(path: str, where: str) -> Path | None:
    """The file of the module that the setting `where` names by `path`, found without running it.

    None where the module has no file, or was made while this process runs. Raises ConfigError where there is no such
    module, or where its file shows that it lacks the name.
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
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{where}: {path}: {file} has no {name!r}{hint}")
    return file


def _names_in(file: Path) -> set[str] | None:
    """Names that a module's source defines or imports at its top; None where it cannot say."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # no Python, or an error that its import tells better
        return None
    names = set[str]()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Expr():
                pass
            case _:  # a branch, a loop, a block: whatever it may define
                return None
    return None if names & {"*", "__getattr__"} else names


def imported_setting(path: str, where: str) -> object:
    """Return what the setting `where` names by `path`, or raise ConfigError."""
    try:
        return imported(path)
    except NotImported as error:
        raise ConfigError(f"{where}: {error}") from error.__cause__
