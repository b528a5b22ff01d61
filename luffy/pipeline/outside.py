"""Files outside the workspace that a stage's settings refer to; their contents are part of its identity.

They may change while a run waits for its turn, or works: a stage looks again when it starts and before its manifest.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from luffy.config.answers import TeacherConfig
from luffy.config.data import CustomSource, FileSource, HubSource
from luffy.config.environment import CustomEnvironment, EpisodeScoring, ToolsEnvironment
from luffy.config.grading import CustomGrader, RewardModelGrader
from luffy.config.group import CustomAdvantage
from luffy.config.model import ModelConfig, check_classifier, is_local, locate, model_files
from luffy.config.settings import PrepareDataSettings, ReportSettings, StageSettings
from luffy.config.shipped import expand_pattern, local_path, template_file
from luffy.config.strict import StrictModel
from luffy.config.terms import CustomLoss
from luffy.config.training import ModelTeacher
from luffy.errors import DataError
from luffy.files import refuse_special
from luffy.import_paths import module_file, own_imports
from luffy.pipeline.manifest import hash_file

Named = tuple[str, str, Path]
"""The field, its value, and the file or folder that it refers to."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 32, 2**18


def outside_files(settings: StageSettings, origin: str = "") -> dict[str, str]:
    """Each file or folder, as written in the settings, with the hash of its content; a data file by its name and field.
    `origin`: where a kind of the user's own is imported from; its module's files count, too.

    Raises DataError, naming the field, if one is missing. A model path that is not a local folder counts as a hub id,
    which has no content to hash.
    """
    named = _named(settings, (), isinstance(settings, PrepareDataSettings))
    return {name: _content(field, path) for field, name, path in (*named, *_own("kind", origin))}


def changed_files(settings: StageSettings, planned: Mapping[str, str], origin: str = "") -> list[str]:
    """The files of `outside_files` whose content is no longer what was `planned`; DataError where one is gone."""
    return sorted({name for name, _ in outside_files(settings, origin).items() ^ planned.items()})


def _named(value: object, field: tuple[str, ...], sources: bool) -> Iterator[Named]:
    """The files that a part of the settings names, and those of the modules that hold the user's own functions and
    classes; `sources`: also those of data, whose rows the stage itself reads."""
    where = ".".join(field)
    imports: Iterable[tuple[str, str]] = ()
    options: Collection[str] | None = None
    match value:
        case ReportSettings():  # what a report shows is that of earlier stages
            return
        case FileSource(path=path) if sources:
            yield f"{where}.path", f"{Path(path).name} ({where})", local_path(path)
        case HubSource(path=path) if sources and Path(path).is_dir():
            yield f"{where}.path", path, local_path(path)
        case PrepareDataSettings(model_path=path, chat_template=template):
            yield from _model(path, template)
        case ModelConfig(source=path, chat_template=template):
            yield from _model(path, template)
        case TeacherConfig(path=str(path)) | ModelTeacher(path=path) if is_local(path):
            setting = "difficulty.teacher" if where == "teacher" else f"{where}.path"
            yield setting, path, Path(locate(path))
        case RewardModelGrader(path=path):
            folder = Path(path).expanduser()
            check_classifier(folder, f"{where}.path")
            yield f"{where}.path", path, folder
        case CustomSource(factory=path) | CustomEnvironment(factory=path):
            imports = [("factory", path)]
        case CustomLoss(function=path, options=options) | CustomAdvantage(function=path, options=options):
            imports = [("function", path)]
        case CustomGrader(function=path):
            imports = [("function", path)]
        case ToolsEnvironment(tools=tools):
            imports = [("tools", tool) for tool in tools if ":" in tool]
        case EpisodeScoring(measures=measures):
            imports = [(name, path) for name, path in measures.items() if isinstance(path, str)]
    for key, path in imports:
        yield from _own(".".join((*field, key)), path, options)
    below: Iterable[tuple[object, object]] = ()
    if isinstance(value, StrictModel):
        below = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, Mapping):
        below = value.items()
    elif isinstance(value, list | tuple):
        below = ((getattr(each, "name", index), each) for index, each in enumerate(value))
    for name, each in below:
        yield from _named(each, (*field, str(name)), sources)


def _own(where: str, path: str, options: Collection[str] | None = None) -> Iterator[Named]:
    """The files of the module that `path` is imported from."""
    if path and (file := module_file(path, where, options)) is not None:
        yield where, path, file
        yield from ((where, f"{path} imports {name}", each) for name, each in own_imports(path).items())


def _model(path: str | None, chat_template: str | None) -> Iterator[Named]:
    if path is not None:
        here = locate(path)
        if is_local(here):
            yield "model.path", path, Path(here)
    if chat_template is not None:
        yield "model.chat_template", chat_template, template_file(chat_template)


def _content(field: str, path: Path) -> str:
    try:
        if (path / "config.json").is_file():  # refused before any stage runs
            lines = [f"{name}\0{_mark(name, file)}\n" for name, file in model_files(path, field).items()]
        elif "*" in str(path):
            lines = [f"{file.name}\0{_hashed(file)}\n" for file in expand_pattern(str(path))]
        elif path.is_dir():
            files = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
            lines = [f"{name}\0{_mark(name, file)}\n" for name, file in files.items()]
        else:
            return _hashed(path)
    except FileNotFoundError:
        raise DataError(
            f"{field}: {path}: no such file; relative paths start at {Path.cwd()}, or for data beside what names it"
        ) from None
    except OSError as error:
        raise DataError(f"{field}: {path}: cannot be read ({error.strerror})") from None
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _mark(name: str, file: Path) -> str:
    """Hash of the content; of large weights of the samples, with size and time, since reading a model takes minutes.

    The time alone would not tell: in archives and images all files may have the same.
    """
    stat = file.stat()
    if not name.endswith(_WEIGHTS) or stat.st_size <= _SAMPLES * _SAMPLE_BYTES:
        return _hashed(file)
    refuse_special(file)
    samples = hashlib.sha256()
    with file.open("rb") as opened:
        for index in range(_SAMPLES):  # from the first byte to the last
            opened.seek((stat.st_size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            samples.update(opened.read(_SAMPLE_BYTES))
    return f"{stat.st_size} {stat.st_mtime_ns} {samples.hexdigest()}"


def _hashed(file: Path) -> str:
    """SHA-256 of the content, read again only where the kernel's notes of the file have changed."""
    stat = file.stat()
    return _hash_of(file, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


@functools.lru_cache(maxsize=4096)
def _hash_of(file: Path, _as_of: tuple[int, ...]) -> str:
    return hash_file(file)
