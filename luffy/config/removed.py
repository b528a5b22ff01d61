"""Settings that earlier versions had: the line for who still gives one, and how files that have one are read."""

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
    "unsafe_local": Removed(False, "model-written code runs under bubblewrap alone (apt-get install bubblewrap)"),
    "group_measures": Removed(
        {},
        "nor is there luffy.environments.relative:shortest_correct; weigh what a single episode has (measures, tokens, "
        "turns), for example weights: {answer: 1.0, tokens: -0.001}",
    ),
    "mlflow": Removed(None, "tracking.wandb and tracking.tensorboard show a run, and metrics.jsonl has its numbers"),
    "replay_traces": Removed("off", "training traces of many turns are taken as recorded; remove it"),
}
"""By the field's own name."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("kind", "unsafe_local"): REMOVED["unsafe_local"].instead,
    ("calls", "xml"): "choose hermes or llama3, whichever format the model was trained on",
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
