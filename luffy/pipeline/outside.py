"""Files outside the workspace that a stage's settings name; their contents are part of its identity."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from luffy.config.data import DataConfig, FileSource
from luffy.config.settings import BaseSettings, PrepareDataSettings, StageSettings
from luffy.errors import DataError
from luffy.pipeline.manifest import hash_file

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def outside_files(settings: StageSettings) -> dict[str, str]:
    """Each file or folder as the settings name it, with the hash of its content.

    Raises DataError, naming the field, when one is not there. A model that is no local folder is taken for a hub id,
    which stands for itself.
    """
    return {name: _content(field, Path(name)) for field, name in _named(settings)}


def _named(settings: StageSettings) -> Iterator[tuple[str, str]]:
    if isinstance(settings, PrepareDataSettings):
        yield from _sources(settings.data)
        yield from _model(settings.model_path, settings.chat_template)
    elif isinstance(settings, BaseSettings):
        yield from _model(settings.model.path, settings.model.chat_template)


def _sources(data: DataConfig) -> Iterator[tuple[str, str]]:
    sources = {"data.train": data.train, "data.corpus": data.corpus}
    sources |= {f"data.suites.{name}": source for name, source in data.suites.items()}
    for field, source in sources.items():
        if isinstance(source, FileSource):
            yield f"{field}.path", source.path


def _model(path: str | None, chat_template: str | None) -> Iterator[tuple[str, str]]:
    if path is not None and (Path(path).exists() or path.startswith((".", "/", "~"))):
        yield "model.path", path
    if chat_template is not None:
        yield "model.chat_template", chat_template


def _content(field: str, path: Path) -> str:
    if path.is_dir():
        lines = [f"{file.relative_to(path)}\0{_mark(file)}\n" for file in sorted(path.rglob("*")) if file.is_file()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    try:
        return hash_file(path)
    except FileNotFoundError:
        raise DataError(f"{field}: {path}: no such file; relative paths start at {Path.cwd()}") from None
    except OSError as error:
        raise DataError(f"{field}: {path}: cannot be read ({error.strerror})") from None


def _mark(file: Path) -> str:
    """The content's hash; of weights only size and time, since reading them takes minutes for a large model."""
    if file.suffix in _WEIGHTS:
        stat = file.stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"
    return hash_file(file)
