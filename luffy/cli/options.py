"""Arguments and options that several commands share, and their completion in the shell."""

import functools
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from luffy.config.fields import children_of, values_of
from luffy.config.shipped import available_presets, experiment_names


@functools.cache
def fields_help() -> str:
    """The sections of an experiment with their fields, a paragraph each."""
    top = children_of("")
    plain = " ".join(field.path for field in top if not field.is_section)
    sections = [
        f"{field.path}: {' '.join(below.path.rpartition('.')[2] for below in children_of(field.path))}"
        for field in top
        if field.is_section
    ]
    return "\n\n".join(["Fields (luffy config --fields SECTION describes each):", plain, *sections])


def complete_config(incomplete: str) -> list[str]:
    """Shipped experiments, YAML files and folders that begin with `incomplete`."""
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    found = folder.glob("*") if folder.is_dir() else iter(())
    files = [f"{path}/" if path.is_dir() else str(path) for path in found if path.is_dir() or path.suffix == ".yaml"]
    return sorted(text for text in [*experiment_names(), *files] if text.startswith(incomplete))


def complete_override(incomplete: str) -> list[str]:
    """Keys one level below what is typed already, or the values that a key allows."""
    key, assigned, _ = incomplete.partition("=")
    if not assigned:
        found = [field.path + ("." if field.is_section else "=") for field in children_of(key.rpartition(".")[0])]
    elif key in ("chain", "method"):
        found = [f"{key}={name}" for name in available_presets("chains" if key == "chain" else "methods")]
    else:
        found = [f"{key}={value}" for value in values_of(key)]
    return sorted(text for text in found if text.startswith(incomplete))


def config_argument(text: str, metavar: str = "CONFIG") -> Any:
    """An argument that is a file of a configuration, or a shipped name; `text` explains it."""
    return Argument(metavar=metavar, help=text, autocompletion=complete_config, show_default=False)


CONFIG_HELP = "YAML file of an experiment, or the name of a shipped one (arithmetic)"
Config = Annotated[str, config_argument(CONFIG_HELP)]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="KEY.PATH=VALUE",
        help="fields to override, the values in YAML: rl.steps=400 seed=1; further files (gpu.yaml) go over the first",
        autocompletion=complete_override,
        show_default=False,
    ),
]
WorkspaceFolder = Annotated[
    str | None, Option("--workspace", metavar="DIR", help="where results are kept [$LUFFY_WORKSPACE, else ./workspace]")
]
Debug = Annotated[bool, Option("--debug", help="show tracebacks")]
DryRun = Annotated[
    bool, Option("--dry-run", help="print the plan, its reasons, known times and the GPUs' memory; start nothing")
]
Verify = Annotated[bool, Option("--verify", help="compare full hashes of earlier results before they are reused")]
