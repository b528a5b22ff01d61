"""`luffy export STAGE FOLDER`: the policy of a training stage as a plain Hugging Face folder."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say
from luffy.cli.options import Debug
from luffy.config.foreign_folders import copy_model_files
from luffy.config.settings import RLSettings, SFTSettings
from luffy.errors import EXIT_OK, DataError
from luffy.pipeline.chain.checkpoints import complete_checkpoints
from luffy.pipeline.chain.job import inputs_of, read_job
from luffy.pipeline.chain.manifest import MANIFEST_FILE

_MODEL = "model"


def export(
    stage: Annotated[Path, Argument(metavar="STAGE", help="a stage's directory: workspace/runs/RUN/stages/rl")],
    folder: Annotated[Path, Argument(metavar="FOLDER", help="output folder; has to be new or empty")],
    step: Annotated[
        int | None, Option(metavar="N", help="a checkpoint's step [the final model, else the newest checkpoint]")
    ] = None,
    debug: Debug = False,
) -> int:
    """Write the policy of a training stage as a Hugging Face model folder."""
    what = export_stage(stage, folder, step)
    say(f"{what} of {stage} is in {folder}")
    return EXIT_OK


def export_stage(stage: Path, folder: Path, step: int | None) -> str:
    """Write the policy of the stage in the directory `stage` to `folder`; returns what it was.

    Without `step` this is its final model, or the newest checkpoint of an unfinished stage. Raises DataError when there
    is nothing to write, or the folder is not empty.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        found = "not empty" if folder.is_dir() else "a file"
        raise DataError(f"{folder}: is {found}; give a folder that is not there yet")
    if not (stage / "config.yaml").is_file():
        raise DataError(f"{stage}: is no stage directory; give workspace/stages/rl/KEY or workspace/runs/RUN/stages/rl")
    if step is None and (stage / MANIFEST_FILE).is_file() and (stage / _MODEL).is_dir():
        copy_model_files(stage / _MODEL, folder, str(stage))
        return "the final model"
    job = read_job(stage / "config.yaml")
    if not isinstance(job.settings, RLSettings | SFTSettings):
        raise DataError(f"{stage}: only checkpoints of sft and rl can be exported, this is {job.stage}")
    checkpoints = complete_checkpoints(stage)
    if not checkpoints or (step is not None and step not in checkpoints):
        there = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise DataError(f"{stage}: no checkpoint of step {step if step is not None else 'any'}; there are: {there}")
    chosen = max(checkpoints) if step is None else step
    from luffy.training.checkpoint import export_checkpoint  # torch: only when it is needed

    export_checkpoint(
        checkpoints[chosen],
        stage=stage,
        tokenizer=inputs_of(job, stage)["data"] / "tokenizer",
        dtype=job.settings.dtype,
        folder=folder,
    )
    return f"the checkpoint of step {chosen}"
