"""Objects of the user's own modules, by `package.module:name`, and the files of the user's own that they load."""

import ast
import difflib
import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from luffy.errors import ConfigError

_NOT_OWN = (*(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")), Path(__file__).parent)


_PARSING = threading.Lock()


class NotImported(Exception):
    """There is no such object, or its module fails on import; the message says which."""


def imported(path: str) -> object:
    """Return what `path` names, or raise NotImported.

    The working directory is searched after everything that is installed. Not imported is also what loads more of the
    user's own code than `own_imports` sees, since a result's key would not cover it.
    """
    module_name, _, name = path.partition(":")
    before = set(sys.modules)
    # Appended, so that nothing in the working directory shadows an installed package.
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - `sys.path` holds text
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise NotImported(f"{path} cannot be imported ({error}); is its folder on PYTHONPATH?") from None
    except SystemExit:
        raise NotImported(f"{module_name} ends Python on import; guard its main part") from None
    except Exception as error:  # a user's module may raise anything
        raise NotImported(f"{module_name} fails on import: {type(error).__name__}: {error}") from error
    loaded = [
        each for each in sorted(set(sys.modules) - before) if _is_own(getattr(sys.modules[each], "__file__", None))
    ]
    if unseen := sorted(set(loaded) - {module_name, *own_imports(path)}):
        raise NotImported(
            f"{path} loads {unseen[0]} ({sys.modules[unseen[0]].__file__}) otherwise than by an import statement, so "
            "edits of that file would not be seen; import it by a statement"
        )
    return found


def module_file(path: str, where: str, options: Collection[str] | None = None) -> Path | None:
    """The file of the module that the setting `where` names by `path`, found without running it.

    None where the module has no file, or was made while this process runs. Raises ConfigError where there is no such
    module, or where its file shows that it lacks the name, or that the function has other arguments than one and
    `options`.
    """
    module, _, name = path.partition(":")
    try:
        spec = _spec_of(module)
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


def own_imports(path: str) -> dict[str, Path]:
    """The modules of the user's own that `path` imports, by name, with their files; `path`'s own is not among them.

    Own is what lies neither in Python's library nor where packages are installed, nor in luffy. They are found by the
    import statements of the source, also within functions, and in those modules again, without running any.
    """
    module = path.partition(":")[0]
    found, seen, ahead = dict[str, Path](), set[str](), [module]
    while ahead:
        if (name := ahead.pop()) in seen:
            continue
        seen.add(name)
        package = name.rpartition(".")[0]
        ahead.append(package)  # Python runs it first
        try:
            spec = _spec_of(name)
        except ValueError:  # no name of a module, or one that was made while this process runs
            continue
        if spec is not None and _is_own(spec.origin):
            found[name] = Path(str(spec.origin))
            ahead += _imports_of(found[name], package if spec.submodule_search_locations is None else name)
    found.pop(module, None)
    return dict(sorted(found.items()))


def parsed(source: bytes) -> ast.Module:
    """The syntax tree of a module, from any thread; raises SyntaxError and ValueError as `ast.parse` does.

    In some versions of Python (python/cpython#106905) two that are made at the same time end in a SystemError.
    """
    with _PARSING:
        return ast.parse(source)


def _imports_of(file: Path, package: str) -> Iterator[str]:
    """Names of modules that the source of a module of `package` may import; some are names within modules."""
    try:
        nodes = list(ast.walk(parsed(file.read_bytes())))
    except (SyntaxError, ValueError):  # an extension in C, or an error that its import tells better
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            around = parts[: len(parts) + 1 - node.level] if node.level else []
            origin = ".".join([*around, *([node.module] if node.module else [])])
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


def _is_own(file: str | None) -> bool:
    if file is None or not Path(file).is_file():  # built in, or a folder without __init__.py
        return False
    around = Path(file).resolve().parents
    return not any(folder in _NOT_OWN or _holds_packages(folder) for folder in around)


@functools.cache
def _holds_packages(folder: Path) -> bool:
    """Whether packages are installed there: beside each lies what its installer noted."""
    return any(folder.glob("*.dist-info"))


def _spec_of(name: str) -> ModuleSpec | None:
    """Where a module is, found without running the packages around it; None where it is nowhere.

    Raises ValueError for a module that was made while this process runs.
    """
    top, *below = name.split(".")
    spec, place = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()]), top  # noqa: PTH109
    for part in below:
        inside, place = None if spec is None else spec.submodule_search_locations, f"{place}.{part}"
        spec = PathFinder.find_spec(place, list(inside)) if inside is not None else None
    return spec


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
        body = parsed(file.read_bytes()).body
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
