"""Shipped files that configurations name: experiments, presets, recipes, benchmarks, templates. They are in
`exp_configs/` and `data/` of the checkout, to which `luffy/shipped/` links; a wheel has copies there."""

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
    advice = f"{nearest(str(text), names, _QUESTION)}give the path of a YAML file, or a shipped name"
    raise ConfigError(f"{text}: no such file; {advice}: {', '.join(names)}")


def folder_of_origin(where: str | None, otherwise: Path = Path()) -> Path:
    """Where a relative path starts that was given at `where`, such as `FILE.yaml:3: key`: in the file's folder.
    `otherwise`, by default the working directory, where that is no place in a file."""
    found = _FILE_OF_ORIGIN.match(where or "")
    return Path(found[1]).parent if found else otherwise


def named_file(text: str, beside: Path, where: str, kind: PresetKind | None = None) -> Path:
    """The file named at `where`: a path from that file's folder (`beside`'s for the command line), or the name of a
    shipped experiment, or preset of that kind. Raises ConfigError, beginning with `where`, if there is neither."""
    folder = folder_of_origin(where, beside.parent)
    path, shipped = folder / text, EXPERIMENTS / (kind or "") / f"{text}.yaml"
    if path.is_file():
        return path
    if len(Path(text).parts) == 1 and shipped.is_file():
        return shipped
    if kind is None and text in available_presets("methods"):
        how = "to run a method of your own: luffy run EXPERIMENT method=FILE.yaml"
        raise ConfigError(f"{where}: {text} is a method, not an experiment; {how}")
    names = experiment_names() if kind is None else available_presets(kind)
    raise ConfigError(
        f"{where}: {text}: no such file; {nearest(Path(text).stem, names, _QUESTION)}give a path from "
        f"{folder.resolve()}, or a shipped name: {', '.join(names)}"
    )


def available_presets(kind: PresetKind) -> list[str]:
    return sorted(file.stem for file in (EXPERIMENTS / kind).glob("*.yaml"))


def template_names() -> list[str]:
    return sorted(file.stem for file in (DATA / "templates").glob("*.jinja"))


def template_file(chat_template: str) -> Path:
    """The file of a chat template given by shipped name (`qwen`, `luffy`, `r1_zero`, `none`) or by path."""
    shipped = DATA / "templates" / f"{chat_template}.jinja"
    return shipped if shipped.is_file() else Path(chat_template)


def recipe_files() -> dict[str, Path]:
    """The shipped recipes and benchmarks, sorted by name."""
    files = [file for folder in ("benchmarks", "recipes") for file in (DATA / folder).glob("*.yaml")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


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
