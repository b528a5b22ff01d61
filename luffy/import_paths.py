"""Objects of the user's own modules, by `package.module:name`."""

import importlib
import os
import sys

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
    except Exception as error:  # a user's module may raise anything
        raise NotImported(f"{module_name} fails on import: {type(error).__name__}: {error}") from error


def imported_setting(path: str, where: str) -> object:
    """Return what the setting `where` names by `path`, or raise ConfigError."""
    try:
        return imported(path)
    except NotImported as error:
        raise ConfigError(f"{where}: {error}") from error.__cause__
