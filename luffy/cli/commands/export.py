"""`python -m luffy export STAGE FOLDER`: the policy of a training stage as a plain Hugging Face folder."""

import argparse
from pathlib import Path
from shutil import copytree

from luffy.cli.console import say
from luffy.config.settings import RLSettings, SFTSettings
from luffy.errors import EXIT_OK, DataError
from luffy.pipeline.checkpoints import complete_checkpoints
from luffy.pipeline.job import read_job
from luffy.pipeline.manifest import MANIFEST_FILE

HELP = "the policy of a training stage as a model folder"
_MODEL = "model"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", help="a stage's directory, e.g. workspace/runs/arithmetic-1/stages/rl")
    parser.add_argument("folder", help="where to write; not there yet, or empty")
    parser.add_argument(
        "--step", type=int, help="of a checkpoint; default: the final model, else the newest checkpoint"
    )


def run(options: argparse.Namespace) -> int:
    what = export_stage(Path(options.stage), Path(options.folder), options.step)
    say(f"{what} of {options.stage} is in {options.folder}")
    return EXIT_OK


def export_stage(stage: Path, folder: Path, step: int | None) -> str:
    """Write the policy of the stage in the directory `stage` to `folder`; returns what it was.

    Without `step` its final model, or, of a stage that is not finished, the newest checkpoint. Raises DataError when
    there is nothing to write, or something in the way.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty; give a folder that is not there yet")
    if not (stage / "config.yaml").is_file():
        raise DataError(f"{stage}: is no stage directory; give workspace/stages/rl/KEY or workspace/runs/RUN/stages/rl")
    if step is None and (stage / MANIFEST_FILE).is_file() and (stage / _MODEL).is_dir():
        copytree(stage / _MODEL, folder, dirs_exist_ok=True)
        return "the final model"
    job = read_job(stage / "config.yaml")
    if not isinstance(job.settings, RLSettings | SFTSettings):
        raise DataError(f"{stage}: only checkpoints of sft and rl can be exported, this is {job.stage}")
    checkpoints = complete_checkpoints(stage)
    if not checkpoints or (step is not None and step not in checkpoints):
        there = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise DataError(f"{stage}: no checkpoint of step {step if step is not None else 'any'}; there are: {there}")
    chosen = max(checkpoints) if step is None else step
    from luffy.training.export import export_checkpoint  # torch: only when it is needed

    export_checkpoint(
        checkpoints[chosen],
        start=Path(job.inputs["model"]) / _MODEL,
        tokenizer=Path(job.inputs["data"]) / "tokenizer",
        dtype=job.settings.dtype,
        folder=folder,
    )
    return f"the checkpoint of step {chosen}"
