"""The folder that `luffy export-environment` writes: an installable package with one module, a task set of verifiers.

write_export(played, splits, folder, "guess_number")        # pyproject.toml and guess_number/
read_export(folder / "guess_number").environment            # what the process that plays it reads
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy import __version__
from luffy.config.environment import EnvironmentConfig, VerifiersEnvironment, single_environments
from luffy.config.grading import GradingConfig
from luffy.config.strict import StrictModel
from luffy.errors import ConfigError, DataError
from luffy.files import write_atomic
from luffy.types import Message, Prompt

_MODULE = Path(__file__).with_name("task_set_module.py")
_EXPORT_FILE = "export.json"
_NAME = re.compile("[a-z][a-z0-9_]*")
_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Problems of luffy with their environment, as a task set of verifiers"
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4.0"]

[tool.setuptools]
packages = ["{name}"]

[tool.setuptools.package-data]
{name} = ["*.json", "*.jsonl"]
"""


class PlayedAndGraded(StrictModel):
    """The sections of an experiment that decide how its problems are played and graded."""

    environment: EnvironmentConfig | None = None
    """None: a single turn."""
    grading: GradingConfig

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "PlayedAndGraded":
        """The sections of a resolved experiment; ValueError where this version cannot read them."""
        return cls.model_validate_json(json.dumps({name: config[name] for name in cls.model_fields if name in config}))


class Export(PlayedAndGraded):
    """Settings of the process that plays the problems."""

    luffy: str
    """Version that wrote it."""
    python: str
    directory: str
    """Directory from which the functions that the experiment names can be imported."""
    splits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExportedProblems:
    """Number of exported and of omitted problems."""

    counts: Mapping[str, int]
    """Number of problems by split."""
    num_hidden: int
    """Confidential problems, which were left out."""


def check_exportable(environment: EnvironmentConfig | None) -> None:
    """Raise ConfigError for an environment that cannot be a task set."""
    for single in single_environments(environment):
        if isinstance(single, VerifiersEnvironment):
            raise ConfigError(f"environment: {single.environment} is one of verifiers already; use it there")
    if environment is not None and environment.scoring.group_measures:
        raise ConfigError(
            "environment.scoring.group_measures: verifiers scores each episode by itself; remove them for the export"
        )


def write_export(
    played: PlayedAndGraded, splits: Mapping[str, Sequence[Prompt]], folder: Path, name: str
) -> ExportedProblems:
    """Write the package `name` into `folder`, which must be new or empty; the first split is the default one.

    Raises ConfigError where the environment cannot be exported or `name` is not a valid module name, DataError where
    there is nothing to write.
    """
    from luffy.confidential import may_show_prompt

    check_exportable(played.environment)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: must be the name of a module: lower-case letters, digits and _")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: is not empty; give a folder that is not there yet")
    shown = {split: [prompt for prompt in prompts if may_show_prompt(prompt)] for split, prompts in splits.items()}
    shown = {split: prompts for split, prompts in shown.items() if prompts}
    if not shown:
        raise DataError("none of the problems can be exported: they are confidential")
    module = folder / name
    module.mkdir(parents=True)
    for split, prompts in shown.items():
        write_atomic(module / f"{split}.jsonl", "".join(_line(prompt) for prompt in prompts))
    export = Export(
        luffy=__version__,
        python=sys.executable,
        directory=str(Path.cwd()),
        splits=tuple(shown),
        environment=played.environment,
        grading=played.grading,
    )
    write_atomic(module / _EXPORT_FILE, export.model_dump_json(indent=1) + "\n")
    write_atomic(module / "__init__.py", _MODULE.read_text(encoding="utf-8"))
    project = _PROJECT.format(name=name, version=__version__)
    write_atomic(folder / "pyproject.toml", project)
    counts = {split: len(prompts) for split, prompts in shown.items()}
    return ExportedProblems(counts, sum(map(len, splits.values())) - sum(counts.values()))


def read_export(module: Path) -> Export:
    """The settings in the folder of the module; DataError where they cannot be read."""
    file = module / _EXPORT_FILE
    try:
        return Export.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; luffy export-environment writes it") from None
    except ValueError as error:
        raise DataError(f"{file}: not written by this version of luffy ({str(error).splitlines()[0]})") from None


def read_problems(module: Path, split: str) -> list[Prompt]:
    """The problems of a split."""
    with (module / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [_prompt(json.loads(line)) for line in lines]


def _line(prompt: Prompt) -> str:
    fields = {
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
        "answer": prompt.ground_truth,
        "info": prompt.extra_info,
        "grader": prompt.grader,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _prompt(fields: dict[str, Any]) -> Prompt:
    return Prompt(
        uid=fields["uid"],
        data_source=fields["data_source"],
        messages=tuple(Message(**message) for message in fields["messages"]),
        ground_truth=fields["answer"],
        extra_info=fields["info"],
        grader=fields["grader"],
    )
