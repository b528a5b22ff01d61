"""The requests, groups and rows of every RL preset are those that are committed, so that code may move around them.

    PYTHONPATH=tests python tests/unit/rl/test_composition_digests.py

replaces the committed digests. Whoever changes them on purpose says so in the changelog.
"""

import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from reference.taught_presets import SUPERVISED
from synthetic.scripted_runs import CUTS, Run, scripted_run, settings_of

from luffy.config import available_presets
from luffy.grading.pool import GraderPool
from luffy.training.batching import Shard
from luffy.types import Trajectory

COMMITTED = Path(__file__).with_name("composition_digests.json")
METHODS = [name for name in available_presets("methods") if name not in SUPERVISED]
STEPS = 6
"""Enough for replay, memories of prompts and the second of two levels."""


def digests(run: Run) -> Mapping[str, str]:
    """What the engine was asked, what became of it, and what each rank learned, over all steps of a run."""
    asked = [
        [[each.prompt_ids, each.seed, each.prefix_ids, each.max_new_tokens] for each in call]
        for step in run.steps
        for call in step.requests
    ]
    groups = [
        [
            group.uid,
            *(
                [_row(row) for row in rows]
                for rows in ((*group.trajectories, *group.beside), group.replaced, group.failed)
            ),
        ]
        for group in run.groups
    ]
    shards = [_shard(shard) for step in run.steps for case in CUTS for shard in step.shards[case]]
    shards += [_shard(shard) for step in run.sft_steps for shard in step]
    return {"requests": _digest(asked), "groups": _digest(groups), "rows of ranks": _digest(shards)}


def _row(row: Trajectory) -> list[object]:
    logp = [None if math.isnan(value) else value for value in row.logp_behavior]
    tokens = [row.prompt_ids, row.response_ids, [int(source) for source in row.source], logp, row.weight_version]
    shown = None if row.start is None else row.start.shown
    return [*tokens, row.reward, row.outcome, row.finish_reason, dict(row.measures), shown]


def _shard(shard: Shard) -> list[object]:
    advantages, accuracies = ([round(value, 9) for value in values] for values in (shard.advantages, shard.accuracies))
    return [[_row(row) for row in shard.rows], list(shard.groups), advantages, accuracies, [*map(list, shard.updates)]]


def _digest(found: object) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@pytest.mark.parametrize("method", METHODS)
def test_a_preset_asks_and_learns_what_is_committed(method: str, run: Callable[..., Run]) -> None:
    assert digests(run(method, steps=STEPS)) == json.loads(COMMITTED.read_text())[method]


if __name__ == "__main__":
    with GraderPool(1, 60.0) as pool, tempfile.TemporaryDirectory() as folder:
        found = {
            name: digests(scripted_run(settings_of(name, steps=STEPS), pool, Path(folder, name))) for name in METHODS
        }
    COMMITTED.write_text(json.dumps(found, indent=1) + "\n")
