"""Arguments and options that several commands share, and the fields at the end of their help."""

import functools
from typing import Annotated, Any

from typer import Argument, Option

from luffy.config import ExperimentConfig
from luffy.config.fields import models_at


@functools.cache
def fields_help() -> str:
    """The sections of an experiment with their fields, a paragraph each."""
    below = {
        name: dict.fromkeys(field for model in models_at((name,), ExperimentConfig) for field in model.model_fields)
        for name in ExperimentConfig.model_fields
    }
    plain = " ".join(name for name, fields in below.items() if not fields)
    sections = [f"{name}: {' '.join(fields)}" for name, fields in below.items() if fields]
    return "\n\n".join(["Fields (luffy config --fields SECTION describes each):", plain, *sections])


def config_argument(text: str, metavar: str = "CONFIG") -> Any:
    """An argument that is a file of a configuration, or a shipped name; `text` explains it."""
    return Argument(metavar=metavar, help=text, show_default=False)


CONFIG_HELP = "YAML file of an experiment, or the name of a shipped one (arithmetic)"
Config = Annotated[str, config_argument(CONFIG_HELP)]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="KEY.PATH=VALUE",
        help="fields to override, the values in YAML: rl.steps=400 seed=1; further files (gpu.yaml) go over the first",
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
