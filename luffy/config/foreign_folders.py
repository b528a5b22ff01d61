"""Checks of model folders made by strangers: they may hold numbers and JSON, never code that runs when opened, and
nothing of them leads out of the folder."""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from luffy.errors import DataError
from luffy.files import clone_or_copy, kind_of_file
from luffy.json_text import parse_json

CODE_FILES = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
"""Python, and pickles of weights, which run code when they are opened. Never read, and never copied."""
_NAMES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")
"""Files of a model folder that are read or copied; any other is left alone."""
_FOLDERS = ("adapter", "additional_chat_templates")
"""Folders in a model folder of which the same holds."""
_WEIGHTS = ".safetensors"
_MAX_TEXT_BYTES = 1 << 28
"""Largest file that is not weights; the largest tokenizers have some 30 MB."""


def model_files(folder: Path, setting: str) -> dict[str, Path]:
    """The files of a model folder that may be read and copied: their paths in the folder, and where they are.

    A link may lead to another place in the folder or, from a snapshot of the hub's cache, to a blob of the same model.
    Raises DataError, naming `setting`, for any other link, for devices, pipes and sockets, and for texts over 256 MiB.
    """
    here = Path(os.path.realpath(folder))
    roots = [here]
    if here.parent.name == "snapshots":
        roots.append(here.parents[1] / "blobs")
    found: dict[str, Path] = {}
    for place in (folder, *(folder / name for name in _FOLDERS)):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if any(fnmatchcase(path.name, pattern) for pattern in _NAMES) and not path.is_dir():
                    found[str(path.relative_to(folder))] = _allowed(path, roots, setting)
    return found


def copy_model_files(folder: Path, out: Path, setting: str) -> None:
    """Copy the `model_files` of a folder to `out`, which may exist; raises as `model_files` does, before it copies."""
    for name, file in model_files(folder, setting).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        clone_or_copy(str(file), str(out / name))


def _allowed(path: Path, roots: Sequence[Path], setting: str) -> Path:
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in roots):
        raise DataError(
            f"{setting}: {path} is a link out of the folder, to {real}; only links within it, and of the hub's cache "
            "to the same model's blobs, are followed: put the file in its place, or remove it"
        )
    if not real.is_file():
        raise DataError(f"{setting}: {path} is {kind_of_file(real)}, and a model folder has regular files; remove it")
    size = real.stat().st_size
    if real.suffix != _WEIGHTS and path.suffix != _WEIGHTS and size > _MAX_TEXT_BYTES:
        raise DataError(
            f"{setting}: {path} has {size} bytes, and a file that is not weights at most {_MAX_TEXT_BYTES}; remove it"
        )
    return real


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
        config = parse_json(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reported where the file is needed
    has_code = isinstance(config, dict) and bool(config.get("auto_map"))
    return str(config.get("model_type")) if has_code else None


def _is_built_in(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes seconds, and few folders need it

    return model_type in CONFIG_MAPPING
