"""The metrics of a run that wandb's service holds, by its public API."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from luffy.errors import ConfigError, DataError
from luffy.tracking.metrics import NAMESPACES, MetricRow

WANDB_PREFIX = "wandb:"
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A run as the service shows it."""

    name: str
    state: str
    """`running`, `finished`, `crashed`, ... in wandb's words."""
    url: str
    config: Mapping[str, object]
    rows: list[MetricRow]
    """A row for each step, as in `metrics.jsonl`; of a step that was logged again after a restart the newer values."""


def read_wandb(text: str) -> RemoteRun:
    """The run `wandb:ENTITY/PROJECT/RUN`, RUN being its id. The key is wandb's own (`WANDB_API_KEY`, `wandb login`).

    Raises ConfigError for another form, and DataError where the service does not answer, refuses, or has no such run.
    """
    parts = text.removeprefix(WANDB_PREFIX).split("/")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"{text}: is not of the form wandb:ENTITY/PROJECT/RUN, where RUN is the id in the run's URL")
    import requests
    import wandb  # loads for a second

    rows: dict[int, MetricRow] = {}
    try:
        run = wandb.Api(timeout=_TIMEOUT_S).run("/".join(parts))
        for line in run.scan_history():
            if isinstance(step := line.get("step"), int | float):
                rows.setdefault(int(step), {"step": int(step)}).update(
                    (name, math.nan if value is None else float(value))
                    for name, value in line.items()
                    if name.partition("/")[0] in NAMESPACES and isinstance(value, int | float | None)
                )
        return RemoteRun(run.name or parts[-1], run.state, run.url, run.config, [rows[step] for step in sorted(rows)])
    except (wandb.Error, requests.RequestException, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{text}: cannot be read ({reason}); check name and key (WANDB_API_KEY, wandb login)") from None
