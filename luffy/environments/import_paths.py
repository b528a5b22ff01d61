"""Objects of the user's own modules, by `package.module:name`."""

import importlib
import os
import sys

from luffy.errors import ConfigError


def imported(path: str, where: str) -> object:
    """Return what `path` names; ConfigError, which begins with `where`, when there is no such thing.

    The working directory is searched after everything that is installed.
    """
    module_name, _, name = path.partition(":")
    # Appended, so that nothing in the working directory shadows an installed package.
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - `sys.path` holds text
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {path} cannot be imported ({error}); is its folder on PYTHONPATH?") from None
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{where}: {module_name} fails on import: {type(error).__name__}: {error}") from error
