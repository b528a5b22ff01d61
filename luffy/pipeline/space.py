"""The check before a stage starts that its disk has room for what it will write."""

from math import ceil

from luffy.config.execution import CheckpointConfig
from luffy.config.settings import BaseSettings, RLSettings, SFTSettings
from luffy.errors import WorkspaceError
from luffy.json_text import parse_json
from luffy.model_shape import architecture_of, from_model_config
from luffy.pipeline.disk import free_bytes, measure
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER
from luffy.pipeline.workspace import MIN_FREE_BYTES

_STATE_BYTES = 12
"""Bytes for each parameter in a checkpoint: float32 weight and Adam's two moments."""
_MODEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_space(plan: StagePlan, checkpoint: CheckpointConfig) -> None:
    """Raise WorkspaceError where the disk has less than the stage needs at least: better now than at its end."""
    (num_bytes, formula), free = _disk_need(plan, checkpoint), free_bytes(plan.directory)
    if free < num_bytes:
        raise WorkspaceError(
            f"workspace: {plan.node.name} needs {_gib(num_bytes)} or more{formula}, and {plan.directory.parent} "
            f"has {_gib(free)} left; free space (luffy gc lists what to delete), or give another with --workspace"
        )


def _disk_need(plan: StagePlan, checkpoint: CheckpointConfig) -> tuple[int, str]:
    """Lower bound in bytes of what `plan` has yet to write, with its formula: models, checkpoints, a small reserve.

    Data and rollouts do not count, so that no run is refused needlessly.
    """
    parameters, settings = _parameters(plan), plan.node.settings
    if parameters is None or not isinstance(settings, BaseSettings | SFTSettings | RLSettings):
        return MIN_FREE_BYTES, ""
    dtype = settings.model.dtype if isinstance(settings, BaseSettings) else settings.dtype
    model = parameters * _MODEL_BYTES[dtype]
    if not isinstance(settings, BaseSettings) and settings.lora is not None:
        # Checkpoints of an adapter are too small to count.
        return model + MIN_FREE_BYTES, f" ({parameters:,} parameters: a model in {dtype})"
    # What it writes at the least, and keeps: the new one is written before an old one goes.
    count = 1
    if isinstance(settings, RLSettings):
        count = ceil(settings.rl.steps / checkpoint.rl_every)
    elif isinstance(settings, BaseSettings):
        count = ceil(settings.base.steps / checkpoint.base_every) if settings.base is not None else 0
    count = min(count, checkpoint.keep + 1)
    there = measure(plan.directory / CHECKPOINTS_FOLDER)
    states = max(0, count * parameters * _STATE_BYTES - there)
    saved = f", {count} checkpoints of {_gib(parameters * _STATE_BYTES)}" if count else ""
    return model + states + MIN_FREE_BYTES, f" ({parameters:,} parameters: a model in {dtype}{saved})"


def _parameters(plan: StagePlan) -> int | None:
    """Parameters of the model that the stage makes; None if it makes none or their number is unknown."""
    settings = plan.node.settings
    if isinstance(settings, BaseSettings):
        known = architecture_of(settings.model)
        return known.num_parameters if known is not None else None
    if not isinstance(settings, SFTSettings | RLSettings):
        return None
    folder = plan.inputs["model"] / "model"
    try:
        known = from_model_config(parse_json((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # the stage itself reports the error
    if known is not None:
        return known.num_parameters
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) // max(_MODEL_BYTES.values())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
