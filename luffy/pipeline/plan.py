"""The decision that a run would make for each stage, with its reason, and whether its disk has room; starts and writes
nothing."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from luffy.config.chain import StageNode
from luffy.config.execution import CheckpointConfig
from luffy.config.settings import BaseSettings, RLSettings, SFTSettings
from luffy.errors import WorkspaceError
from luffy.json_text import parse_json
from luffy.model_shape import architecture_of, from_model_config
from luffy.pipeline.disk import free_bytes, measure
from luffy.pipeline.identity import IDENTITY_FILE, REVISION, Identity, Json, read_identity
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER
from luffy.pipeline.workspace import MIN_FREE_BYTES

Action = Literal["reuse", "depends", "pull", "adopt", "resume", "continue", "run"]
_SHOWN = 3
_HASH_DIGITS = 8
_STATE_BYTES = 12
"""Bytes for each parameter in a checkpoint: float32 weight and Adam's two moments."""
_MODEL_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The decision for one stage."""

    node: StageNode
    identity: Identity
    directory: Path
    inputs: Mapping[str, Path]
    action: Action
    """`depends`: finished, and reused if its inputs turn out unchanged once they are made again. `pull`: finished in
    `execution.shared_cache`. `adopt`: finished by other code, taken over where that is asked for."""
    reason: str = ""
    step: int = 0
    """The step at which `resume` and `continue` start."""
    extends: Path | None = None
    """The shorter run that `continue` starts from."""

    @property
    def headline(self) -> str:
        """The decision in words, without the reason."""
        if self.action == "resume":
            return f"resume from step {self.step}"
        if self.action == "continue" and self.extends is not None:
            return f"continue {self.extends.name} from step {self.step}"
        return {"reuse": "reused", "depends": "reused or run", "pull": "pulled", "adopt": "adopted"}.get(
            self.action, "run"
        )


def several_to_make(plans: Iterable[StagePlan]) -> bool:
    """Whether at least two stages are to be made: with fewer, a process that stages share is not worth its start."""
    return sum(plan.action not in ("reuse", "depends", "pull") for plan in plans) > 1


def why_not_reused(
    siblings: Iterable[Path], experiment: str, node: str, identity: Identity, inputs: Mapping[str, str]
) -> str:
    """One line: "first run", or the differences from the most similar result of `node` among `siblings`."""
    for _, key, found in similar_results(siblings, experiment, node, identity, inputs):
        if key != identity.key:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            return f"{', '.join(found[:_SHOWN])}{more} (against {key})"
    return "first run"


def similar_results(
    siblings: Iterable[Path], experiment: str, node: str, identity: Identity, inputs: Mapping[str, str]
) -> list[tuple[Path, str, list[str]]]:
    """The results of `node` in `experiment`, finished or not, the most similar first; among equals the newest.

    Each with its key and its differences. `inputs`: input name to the node that provides it.
    """
    candidates = []
    for directory in siblings:
        record = read_identity(directory)
        if record is not None and (record.experiment, record.node) == (experiment, node):
            found = list(differences(record.identity, identity, inputs))
            age = -(directory / IDENTITY_FILE).stat().st_mtime_ns
            candidates.append((len(found), age, directory, record.key, found))
    return [(directory, key, found) for _, _, directory, key, found in sorted(candidates)]


def differences(before: Identity, after: Identity, inputs: Mapping[str, str]) -> Iterator[str]:
    """Each difference in words, settings first; `inputs`: input name to the node that provides it."""
    yield from dict.fromkeys(_of_settings(dict(flatten(before.settings)), dict(flatten(after.settings))))
    for name in _changed(before.files, after.files):
        old_hash, new_hash = (files.get(name, "none")[:_HASH_DIGITS] for files in (before.files, after.files))
        yield f"content of {name} {old_hash} -> {new_hash}"
    for name in _changed(before.upstream, after.upstream):
        old_key, new_key = before.upstream.get(name, "none"), after.upstream.get(name, "none")
        yield f"different result of {inputs.get(name, name)} ({old_key} -> {new_key})"
    if REVISION in before.code and before.code[REVISION] != after.code.get(REVISION):
        yield f"revision of {after.stage} {before.code[REVISION]} -> {after.code.get(REVISION, 'none')}"
    edited = (room for room in _changed(before.code, after.code) if room != REVISION)
    if rooms := ["modules at the top" if room == "*" else room for room in edited]:
        yield f"code changed ({', '.join(rooms[:_SHOWN])}{', ...' if len(rooms) > _SHOWN else ''})"


def _of_settings(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[str]:
    """Each leaf that differs; if only one side has a whole section, the section in place of its leaves."""
    old_sections, new_sections = ({above for path in leaves for above in _sections(path)} for leaves in (old, new))
    for path, value in new.items():
        if path in old and old[path] != value:
            yield f"{path} {_short(old[path])} -> {_short(value)}"
        elif path not in old and not (value is None and path in old_sections):
            whole = next((section for section in _sections(path) if section not in old_sections), None)
            yield f"{whole} added" if whole else f"{path} none -> {_short(value)}"
    for path, value in old.items():
        if path not in new and not (value is None and path in new_sections):
            whole = next((section for section in _sections(path) if section not in new_sections), None)
            yield f"{whole} removed" if whole else f"{path} {_short(value)} -> none"


def _sections(path: str) -> Iterator[str]:
    """The sections that contain a leaf, outermost first."""
    parts = path.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    return (name for name in sorted({*before, *after}) if before.get(name) != after.get(name))


def flatten(value: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """The leaves with their dotted paths; an entry of a list of mappings is labelled by its `name`, else its index."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from flatten(below, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and any(isinstance(below, dict) for below in value):
        for index, below in enumerate(value):
            label = below.get("name", index) if isinstance(below, dict) else index
            yield from flatten(below, f"{prefix}.{label}")
    else:
        yield prefix, value


def _short(value: Json) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
