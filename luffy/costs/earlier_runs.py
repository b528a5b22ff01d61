"""Times and response lengths of finished stages in the workspace, for a stage of the same workload."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

from luffy.costs.held_out_times import mean_seconds, recorded_as, total_seconds
from luffy.costs.stage_times import StageTimes
from luffy.costs.workloads import Workload, finished_workload
from luffy.pipeline.chain.manifest import Manifest, read_manifest
from luffy.pipeline.workspace import Workspace
from luffy.tracking.metrics import METRICS_FILE, read_metrics

_RESULTS_FILE = "results.json"
_STEP = "perf/step_s"
_LENGTH = "rollout/response_length_mean"
_LAST_STEPS = 10
_LOOKED_AT = 50
"""Finished stages that are read, the newest first."""


def earlier_times(workspace: Workspace, workload: Workload, node: str) -> StageTimes | None:
    """Times of the newest finished stage with this workload, if possible of the same `node`; None without any."""
    found = [
        (directory, manifest)
        for directory, manifest in _newest(workspace, workload.stage)
        if finished_workload(workspace, directory, manifest) == workload
    ]
    # The evaluations of a chain have one workload, but the policies differ in the lengths of their responses.
    found.sort(key=lambda pair: pair[1].node != node)
    return _times(*found[0]) if found else None


def earlier_length(workspace: Workspace, workload: Workload, node: str) -> tuple[float, str] | None:
    """Mean tokens of a response in a finished stage with the same model, data and limit, and its directory's name.

    Only from the same `node`: evaluations differ in their policies.

    The layout and the machine may differ. For RL it is the mean over the last steps.
    """
    for directory, manifest in _newest(workspace, workload.stage):
        found = finished_workload(workspace, directory, manifest) if manifest.node == node else None
        if found is None or (found.model, found.data) != (workload.model, workload.data):
            continue
        same = _limit(found) == _limit(workload)
        mean = _mean_length(directory) if same else None
        if mean is not None:
            return mean, f"{workload.stage}/{directory.name}"
    return None


def _newest(workspace: Workspace, stage: str) -> Iterator[tuple[Path, Manifest]]:
    manifests = ((directory, read_manifest(directory)) for directory in workspace.siblings(stage))
    finished = [(directory, manifest) for directory, manifest in manifests if manifest is not None]
    yield from islice(sorted(finished, key=lambda pair: pair[1].ended, reverse=True), _LOOKED_AT)


def _times(directory: Path, manifest: Manifest) -> StageTimes:
    source = f"{manifest.stage} {directory.name}"
    rows = read_metrics(directory / METRICS_FILE)
    validated_s = total_seconds(rows)  # another run of the same workload may have no validation
    steps = [row[_STEP] for row in rows if _STEP in row]
    if not steps:
        return StageTimes(manifest.total_s - validated_s, 0.0, 0.0, None, source)
    unit_s = fmean(steps[1:] or steps)
    at_once = not manifest.resumed_from and manifest.extended is None
    fixed_s = max(0.0, manifest.attempt_s - validated_s - unit_s * len(steps)) if at_once else 0.0
    validation = manifest.settings.get("validation")
    measured = recorded_as(validation if isinstance(validation, dict) else None)
    return StageTimes(fixed_s, unit_s, 0.0, len(steps), source, mean_seconds(rows), measured)


def _limit(workload: Workload) -> object:
    section = workload.settings.get("evaluation" if workload.stage == "evaluate" else workload.stage)
    return section.get("max_response_tokens") if isinstance(section, dict) else None


def _mean_length(directory: Path) -> float | None:
    if (directory / _RESULTS_FILE).exists():
        rows = json.loads((directory / _RESULTS_FILE).read_text(encoding="utf-8"))["rows"]
        return fmean(row["mean_tokens"] for row in rows) if rows else None
    lengths = [row[_LENGTH] for row in read_metrics(directory / METRICS_FILE) if _LENGTH in row]
    return fmean(lengths[-_LAST_STEPS:]) if lengths else None
