"""The chain of smoke.yaml with the stage `difficulty`, by the stages' own programs: a base that has learned to reverse
two digits now and then, its pass rates, and RL on what they leave."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import real_run
from real_run import REVERSING, assert_a_kill_loses_no_finished_batch, execute

from luffy.data.parquet import read_prompts
from luffy.errors import StageFailed
from luffy.pipeline.experiment import Experiment
from luffy.pipeline.manifest import finished_manifest

pytestmark = pytest.mark.slow
CHANGES = [
    "chain=rl",
    "method=luffy",
    f"data.train={{{REVERSING}, num_prompts: 24}}",
    f"data.corpus={{{REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "base.steps=150",
    "rl={steps: 2, prompts_per_step: 2, prompts_per_update: 1}",
    "difficulty={num_samples: 8, max_response_tokens: 16, min_pass_rate: 0.1, max_pass_rate: 0.7}",
    "execution.rollout_batch_size=8",  # a prompt a batch
    "evaluation.only=[retention]",
    "evaluation.decodings.sampled=null",
]
HELD = ("difficulty", 32)
"""After four batches."""


@pytest.fixture(scope="module")
def finished(holding, tmp_path_factory) -> Path:
    """A workspace after one undisturbed run."""
    workspace = tmp_path_factory.mktemp("finished")
    experiment = opened(workspace)
    execute(experiment, *(plan.node.name for plan in experiment.plan()))
    return workspace


@pytest.fixture
def workspace(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "workspace", symlinks=True)
    return tmp_path / "workspace"


def opened(workspace: Path, *overrides: str) -> Experiment:
    return real_run.opened(workspace, "smoke.yaml", *CHANGES, *overrides)


def rates(directory: Path) -> list[dict]:
    return pq.read_table(directory / "pass_rates.parquet").to_pylist()


def test_rl_learns_only_from_prompts_within_the_bounds(finished):
    experiment = opened(finished)
    directory = experiment.plan_node("difficulty").directory
    measured = rates(directory)
    within = {row["uid"] for row in measured if 0.1 <= row["num_correct"] / 8 <= 0.7}
    assert len(measured) == 24
    assert 2 <= len(within) < 24
    assert {prompt.uid for prompt in read_prompts(directory / "train.parquet")} == within
    assert all(prompt.traces for prompt in read_prompts(directory / "train.parquet"))
    rl = experiment.plan_node("rl")
    assert rl.inputs["data"] == directory
    journal = [pq.read_table(file).to_pylist() for file in (rl.directory / "journal").glob("*.parquet")]
    assert {row["uid"] for rows in journal for row in rows} <= within
    report = (experiment.plan_node("report").directory / "report.md").read_text()
    assert f"{len(within)} of 24" in report
    assert {plan.action for plan in experiment.plan()} == {"reuse"}


def test_kill_9_loses_no_finished_batch_and_changes_nothing(workspace, holding, tmp_path):
    assert_a_kill_loses_no_finished_batch(opened(workspace), "difficulty", holding(), 8, tmp_path / "before", "rl")


def test_other_bounds_reuse_the_samples(workspace):
    before, wider = opened(workspace), opened(workspace, "difficulty.max_pass_rate=1.0")
    changed = {name for name in before.identities if before.identities[name].key != wider.identities[name].key}
    assert changed == {"difficulty", "rl", "evaluate_rl", "report"}
    execute(wider, "difficulty")
    directory = wider.plan_node("difficulty").directory
    assert finished_manifest(directory).resumed_from == 192
    counts = [[(row["uid"], row["num_correct"]) for row in rates(x.plan_node("difficulty").directory)]
              for x in (before, wider)]  # fmt: skip
    assert counts[0] == counts[1]


def test_a_range_without_prompts_is_one_line_and_exit_code_2(workspace):
    histogram = json.loads((opened(workspace).plan_node("difficulty").directory / "card.json").read_text())["rates"][
        "histogram"
    ]
    share = next(int(number) / 8 for number, count in histogram.items() if count == 0)
    empty = opened(workspace, f"difficulty={{min_pass_rate: {share}, max_pass_rate: {share}}}")
    with pytest.raises(StageFailed) as failure:
        execute(empty, "difficulty")
    assert failure.value.exit_code == 2
    assert str(failure.value).startswith("difficulty: no prompt is left of 24: ")
    assert len(str(failure.value).splitlines()) == 1
