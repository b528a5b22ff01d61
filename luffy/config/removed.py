"""Settings that earlier versions had: the line for who still gives one, and the reading of files that have one."""

from collections.abc import Mapping
from typing import NamedTuple

from luffy.config.yaml_source import Value


class Removed(NamedTuple):
    """A field that is gone."""

    default: Value
    """The value with which it had no effect."""
    instead: str
    """What to do now."""


REMOVED: Mapping[str, Removed] = {
    "attention": Removed(
        "sdpa", "it is torch's own: packing decides whether a GPU attends to all sequences in one call; remove it"
    ),
    "offload_parameters": Removed(
        False, "weights stay on the GPU, with zero_stage: 3 in shares: use more ranks, or offload_optimizer"
    ),
    "sequence_parallel": Removed(
        1, "every rank has whole sequences: use gradient_checkpointing, zero_stage: 3 or a lower micro_batch_tokens"
    ),
}
"""By the field's own name."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("weight_transfer", "broadcast"): "use object_store, or ipc with ray.placement: colocated",
}
"""By field and value."""


def without_removed(values: Value, *, finished: bool = False) -> Value:
    """The values of a file of an earlier version without removed fields that had no effect.

    `finished`: of a finished stage, which nothing will run again. There removed fields go with any value, and removed
    values, whose fields then have their defaults.
    """
    if isinstance(values, list):
        return [without_removed(value, finished=finished) for value in values]
    if not isinstance(values, dict):
        return values
    gone = {key for key in values.keys() & REMOVED.keys() if finished or values[key] == REMOVED[key].default}
    if finished:
        gone |= {key for key, value in REMOVED_VALUES if values.get(key) == value}
    return {key: without_removed(value, finished=finished) for key, value in values.items() if key not in gone}
