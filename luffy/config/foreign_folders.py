"""Checks of model folders made by strangers: they may hold numbers and JSON, never code that runs when opened."""

import json
from pathlib import Path

from luffy.errors import DataError

CODE_FILES = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
"""Python, and pickles of weights, which run code when they are opened. Never read, and never copied."""


def refuse_code(folder: Path, setting: str) -> None:
    """Raise DataError, naming `setting`, for a folder whose model exists only as code or whose weights only as pickle.

    A model folder with custom code is loaded without that code if transformers supports its model type.
    """
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in CODE_FILES[1:] for path in folder.glob(pattern))
        if pickled:
            raise DataError(
                f"{setting}: {folder}: its weights are pickled ({pickled[0]}), and opening a pickle can run code; "
                "have whoever made it save them as safetensors (save_pretrained of transformers does)"
            )
    kind = _kind_with_code(folder / "config.json")
    if kind is not None and not _is_built_in(kind):
        raise DataError(
            f"{setting}: {folder}: its model_type {kind!r} is defined by Python code in the folder (auto_map), which "
            "is never run; give a model that transformers supports"
        )


def _kind_with_code(config_file: Path) -> str | None:
    """The model type of a folder with custom code; None for other folders, and unreadable ones."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reported where the file is needed
    has_code = isinstance(config, dict) and bool(config.get("auto_map"))
    return str(config.get("model_type")) if has_code else None


def _is_built_in(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes seconds, and few folders need it

    return model_type in CONFIG_MAPPING
