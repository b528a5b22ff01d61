"""How long a stage takes, as a formula in its number of steps; kept in the workspace for later plans.

<workspace>/benches/<name>-<key>.json      the newest measurement of a workload (`luffy.costs.workloads`, `record_name`)
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace

_FOLDER = "benches"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """`fixed_s` + units x `unit_s` + further checkpoints x `save_s` + measurements x `validation_s`, in seconds."""

    fixed_s: float
    """Start of the process, imports, loading, the excess of the first step, the last checkpoint, export, hashes."""
    unit_s: float
    """A step of training, or a response of an evaluation."""
    save_s: float
    """A checkpoint that is not the last one."""
    num_units: int | None
    """Units of the whole stage where the settings do not say; None: unknown."""
    source: str
    """Where the figures come from, in words."""
    validation_s: float | None = None
    """One measurement of held-out accuracy while the stage trains; None: none was made."""
    validation: str = ""
    """What it measured (`luffy.costs.held_out_times.measured_by`)."""

    def seconds(self, units: int, saves: int) -> float:
        """Predicted time for that many units and further checkpoints."""
        return self.fixed_s + units * self.unit_s + saves * self.save_s


def bench_folder(workspace: Workspace) -> Path:
    """Where measurements are kept."""
    return workspace.root / _FOLDER


def write_times(workspace: Workspace, name: str, key: str, times: StageTimes) -> None:
    """Keep a measurement, in place of an earlier one of the same workload."""
    folder = bench_folder(workspace)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(_file(workspace, name, key), json.dumps(asdict(times), indent=1) + "\n")


def read_times(workspace: Workspace, name: str, key: str) -> StageTimes | None:
    """The measurement of a workload; None if there is none, or it is unreadable."""
    try:
        return StageTimes(**json.loads(_file(workspace, name, key).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _file(workspace: Workspace, name: str, key: str) -> Path:
    return bench_folder(workspace) / f"{name}-{key}.json"
