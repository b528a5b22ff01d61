"""Files that ship with luffy and are named in configurations: experiments, presets, recipes, benchmarks, templates.

They are in `exp_configs/` and `data/` of the checkout. `luffy/shipped/` links to both, and a wheel has copies there.
"""

import re
from pathlib import Path
from typing import Literal

from luffy.config.yaml_source import nearest
from luffy.errors import ConfigError

PresetKind = Literal["chains", "methods"]
SHIPPED = Path(__file__).resolve().parents[1] / "shipped"
EXPERIMENTS = (SHIPPED / "exp_configs").resolve()
DATA = (SHIPPED / "data").resolve()
_FILE_OF_ORIGIN = re.compile(r"(.+?\.ya?ml):\d+(?::|$)")
_RECIPE_FOLDERS = ("recipes", "benchmarks")
_SAMPLES = "data/samples/"
_QUESTION = "did you mean {!r}? "


def experiment_names() -> list[str]:
    return sorted(file.stem for file in EXPERIMENTS.glob("*.yaml"))


def experiment_file(text: Path | str) -> Path:
    """The file at the path `text`, or the shipped experiment of that name; ConfigError where there is neither."""
    path = Path(text)
    if path.exists():
        return path
    shipped = EXPERIMENTS / f"{text}.yaml"
    if len(path.parts) == 1 and shipped.is_file():
        return shipped
    if "=" in str(text):
        raise ConfigError(f"{text}: no such file; the experiment comes first, then its overrides: CONFIG {text}")
    names = experiment_names()
    raise ConfigError(
        f"{text}: no such file; {nearest(str(text), names, _QUESTION)}give the path of a YAML file, or a shipped name: "
        f"{', '.join(names)}"
    )


def folder_of_origin(where: str | None, otherwise: Path = Path()) -> Path:
    """Where a relative path starts that was given at `where`, such as `FILE.yaml:3: key`: in the file's folder.
    `otherwise`, by default the working directory, where that is no place in a file."""
    found = _FILE_OF_ORIGIN.match(where or "")
    return Path(found[1]).parent if found else otherwise


def named_file(text: str, beside: Path, where: str) -> Path:
    """The file that is named at `where`: a path from the folder of the file there, or a shipped experiment's name. A
    path that was given elsewhere, on the command line, starts beside `beside`. Raises ConfigError, beginning with
    `where`, if there is neither."""
    folder = folder_of_origin(where, beside.parent)
    path, shipped = folder / text, EXPERIMENTS / f"{text}.yaml"
    if path.is_file():
        return path
    if len(Path(text).parts) == 1 and shipped.is_file():
        return shipped
    names = experiment_names()
    raise ConfigError(
        f"{where}: {text}: no such file; {nearest(Path(text).stem, names, _QUESTION)}give a path from "
        f"{folder.resolve()}, or a shipped name: {', '.join(names)}"
    )


def available_presets(kind: PresetKind) -> list[str]:
    return sorted(file.stem for file in (EXPERIMENTS / kind).glob("*.yaml"))


def preset_file(kind: PresetKind, name: str) -> Path | None:
    """The file of a shipped preset, if there is one of that name."""
    file = EXPERIMENTS / kind / f"{name}.yaml"
    return file if file.is_file() else None


def template_names() -> list[str]:
    return sorted(file.stem for file in (DATA / "templates").glob("*.jinja"))


def template_file(chat_template: str) -> Path:
    """The file of a chat template given by shipped name (`qwen`, `luffy`, `r1_zero`, `none`) or by path."""
    shipped = DATA / "templates" / f"{chat_template}.jinja"
    return shipped if shipped.is_file() else Path(chat_template)


def recipe_names() -> list[str]:
    return sorted(file.stem for folder in _RECIPE_FOLDERS for file in (DATA / folder).glob("*.yaml"))


def recipe_file(name: str) -> Path | None:
    """The shipped recipe or benchmark of that name, if there is one."""
    files = [DATA / folder / f"{name}.yaml" for folder in _RECIPE_FOLDERS]
    return next((file for file in files if file.is_file()), None)


def local_path(path: str) -> Path:
    """The path itself; for `data/samples/FILE` that is not in the working directory, the shipped sample."""
    plain, sample = Path(path).expanduser(), SHIPPED / path
    return sample.resolve() if path.startswith(_SAMPLES) and not plain.exists() and sample.is_file() else plain


def expand_pattern(path: str) -> list[Path]:
    """Files that match a pattern with `*`, sorted; a path without `*` is returned whether it exists or not."""
    plain = local_path(path)
    if "*" not in path:
        return [plain]
    fixed = next(parent for parent in plain.parents if "*" not in str(parent))
    return sorted(fixed.glob(str(plain.relative_to(fixed))))
