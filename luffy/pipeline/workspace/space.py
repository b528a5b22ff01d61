"""A disk that is full, read-only or too small: reported in one line, before a stage starts where possible."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from luffy.config.execution import CheckpointConfig
from luffy.config.settings import BaseSettings, RLSettings, SFTSettings, StageSettings
from luffy.errors import WorkspaceError
from luffy.json_text import parse_json
from luffy.model_shape import architecture_of, from_model_config
from luffy.pipeline.chain.checkpoints import CHECKPOINTS_FOLDER
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.workspace import MIN_FREE_BYTES
from luffy.pipeline.workspace.disk import free_bytes, measure

READ_ONLY = "is read-only"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS,)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
# Messages of libraries that drop the error number: safetensors, and errors relayed from another process.
_FULL_WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122")
_READ_ONLY_WORDS = ("Read-only file system", "os error 30")
_STATE_BYTES = 12
"""Bytes for each parameter in a checkpoint: float32 weight and Adam's two moments."""
_MODEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Lower bound of what a stage will write."""

    num_bytes: int
    formula: str = ""


def check_space(plan: StagePlan, checkpoint: CheckpointConfig) -> None:
    """Raise WorkspaceError where the disk has less than the stage needs at least: better now than at its end."""
    need, free = disk_need(plan, checkpoint), free_bytes(plan.directory)
    if free < need.num_bytes:
        formula = f" ({need.formula})" if need.formula else ""
        raise WorkspaceError(
            f"workspace: {plan.node.name} needs {_gib(need.num_bytes)} or more{formula}, and {plan.directory.parent} "
            f"has {_gib(free)} left; free space (luffy gc lists what to delete), or give another with --workspace"
        )


def disk_need(plan: StagePlan, checkpoint: CheckpointConfig) -> DiskNeed:
    """Lower bound of what `plan` has yet to write: models, checkpoints, and a small reserve.

    Data and rollouts do not count, so that no run is refused needlessly.
    """
    parameters, settings = _parameters(plan), plan.node.settings
    if parameters is None or not isinstance(settings, BaseSettings | SFTSettings | RLSettings):
        return DiskNeed(MIN_FREE_BYTES)
    dtype = settings.model.dtype if isinstance(settings, BaseSettings) else settings.dtype
    model = parameters * _MODEL_BYTES[dtype]
    if not isinstance(settings, BaseSettings) and settings.lora is not None:
        # Checkpoints of an adapter are too small to count.
        return DiskNeed(model + MIN_FREE_BYTES, f"{parameters:,} parameters: a model in {dtype}")
    # The new one is written before an old one goes.
    count = min(_saves(settings, checkpoint), checkpoint.keep + 1)
    there = measure(plan.directory / CHECKPOINTS_FOLDER).num_bytes
    states = max(0, count * parameters * _STATE_BYTES - there)
    formula = f"{parameters:,} parameters: a model in {dtype}"
    formula += f", {count} checkpoints of {_gib(parameters * _STATE_BYTES)}" if count else ""
    return DiskNeed(model + states + MIN_FREE_BYTES, formula)


def lack_of_space(error: BaseException) -> str | None:
    """The problem with the disk that caused `error`, in words; None where it has another cause."""
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        words = str(cause)
        if number in _FULL or any(part in words for part in _FULL_WORDS):
            return "no space left"
        if number in _READ_ONLY or any(part in words for part in _READ_ONLY_WORDS):
            return READ_ONLY
    return None


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turns a full, read-only or forbidden disk into a WorkspaceError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*_FULL, *_READ_ONLY, *_FORBIDDEN):
            raise
        remedy = "free space (luffy gc lists what to delete), or " if error.errno in _FULL else ""
        raise WorkspaceError(
            f"workspace: {error.filename or path}: {error.strerror}; {remedy}give another with --workspace"
        ) from None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _parameters(plan: StagePlan) -> int | None:
    """Parameters of the model that the stage makes; None if it makes none or their number is unknown."""
    settings = plan.node.settings
    if isinstance(settings, BaseSettings):
        known = architecture_of(settings.model)
        return known.num_parameters if known is not None else None
    if isinstance(settings, SFTSettings | RLSettings):
        return _parameters_in(plan.inputs["model"] / "model")
    return None


def _parameters_in(folder: Path) -> int | None:
    try:
        known = from_model_config(parse_json((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # the stage itself reports the error
    if known is not None:
        return known.num_parameters
    return sum(file.stat().st_size for file in folder.glob(_WEIGHTS)) // max(_MODEL_BYTES.values())


def _saves(settings: StageSettings, checkpoint: CheckpointConfig) -> int:
    """How many checkpoints the stage writes, at the least."""
    if isinstance(settings, RLSettings):
        return ceil(settings.rl.steps / checkpoint.rl_every)
    if isinstance(settings, BaseSettings):
        return ceil(settings.base.steps / checkpoint.base_every) if settings.base is not None else 0
    return 1


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
