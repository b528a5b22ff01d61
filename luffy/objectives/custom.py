"""Calls functions of the user's own that are part of an objective, by import path."""

from collections.abc import Mapping

import torch
from torch import Tensor

from luffy.errors import ConfigError
from luffy.import_paths import imported_setting


def called(path: str, where: str, given: object, options: Mapping[str, object], shape: torch.Size) -> Tensor:
    """What `path(given, **options)` returns: a floating tensor of that shape.

    Raises ConfigError, which begins with `where`, for anything else, and where the function raises.
    """
    function = imported_setting(path, where)
    if not callable(function):
        raise ConfigError(f"{where}: {path} is a {type(function).__name__}, not a function")
    try:
        found = function(given, **options)
    except ConfigError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{where}: {path} fails: {type(error).__name__}: {error}") from error
    if isinstance(found, Tensor) and found.is_floating_point() and found.shape == shape:
        return found
    kind = f"{found.dtype} tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise ConfigError(f"{where}: {path} returns a {kind}; return a floating tensor of shape {tuple(shape)}")
