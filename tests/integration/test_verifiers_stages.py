"""An environment of verifiers through the stages' own programs; a small package takes the place of verifiers."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from support.stages import only, opened
from toy_run import Recorder

from luffy.errors import StageFailed
from luffy.evaluation.sample_files import read_samples_of
from luffy.pipeline.experiment import ExperimentRun
from luffy.tracking.metrics import METRICS_FILE, read_metrics

pytestmark = pytest.mark.slow
FAKES = Path(__file__).parents[1] / "synthetic" / "fake_verifiers"
PACKAGE = f"environment: fake-environments, arguments: {{which: countdowns, num_tasks: 24}}, python: {sys.executable}"
COUNTDOWNS = [
    "chain=rl",
    "method=on_policy",
    f"data.train={{kind: verifiers, {PACKAGE}}}",
    "data.corpus={kind: guess_number, num_prompts: 256, high: 7, player: random, max_turns: 3}",
    f"data.suites={{games: {{kind: verifiers, {PACKAGE}, split: eval, equal_prompts: true}}}}",
    "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 192}",
    "base.steps=60",
    "base.batch_size=32",
    "rl={steps: 2, prompts_per_step: 4, max_response_tokens: 96, optimizer: {lr: 1e-3}}",
    "evaluation={max_response_tokens: 96, decodings: {greedy: {temperature: 0.0}}}",
    f"environment={{kind: verifiers, {PACKAGE}, limits: {{max_turns: 3, max_turn_tokens: 8}}}}",
    "execution={num_threads: 1, retries: 0}",
]


def run(workspace: Path, *names: str) -> None:
    """Make these stages by their programs, with which the interpreters of their environments end."""
    experiment = opened(workspace, "guess_number.yaml", *COUNTDOWNS)
    started = ExperimentRun(experiment, experiment.workspace.new_run("test", {}))
    for name in names:
        started.execute(name, Recorder())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Iterator[Path]:
    """Of all workspaces. In `killed`, an environment dies once while the file `die_at` is there."""
    folder = tmp_path_factory.mktemp("workspaces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
        patch.setenv("LUFFY_WORKSPACE", str(folder / "killed"))
        patch.setenv("TEST_DIE_AT", str(folder / "die_at"))
        request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
        yield folder


@pytest.fixture(scope="module")
def stages(folder) -> Path:
    run(folder / "undisturbed", "prepare_data", "base", "rl", "evaluate_rl")
    return folder / "undisturbed" / "stages"


def test_reward_metrics_and_verdict_are_the_environments(stages):
    rows = [
        row for file in (only(stages, "rl") / "journal").glob("*.parquet") for row in pq.read_table(file).to_pylist()
    ]
    assert len(rows) == 2 * 4 * 8
    for row in rows:
        measures = dict(row["measures"])
        assert row["reward"] == measures["reward"] == measures["share"] == pytest.approx(measures["turns"] / 3)
        assert measures["num_turns"] == measures["turns"]
    assert {row["outcome"] for row in rows} <= {"correct", "wrong"}
    for row in read_metrics(only(stages, "rl") / METRICS_FILE):
        assert row["rollout/share_mean"] == pytest.approx(row["rollout/reward_mean"])
    records = list(read_samples_of(only(stages, "evaluate")))
    assert len(records) == 4
    assert all(record.correct == (record.measures["reward"] >= 1.0) for record in records)
    assert {record.grader for record in records} == {"measure"}


def hosts(folder: Path) -> list[psutil.Process]:
    """Foreign interpreters of the runs in the workspaces of a folder."""
    found = [each for each in psutil.process_iter(["cmdline"]) if "verifiers_host.py" in str(each.info["cmdline"])]
    return [each for each in found if str(folder) in str(each.environ())]


def test_a_kill_of_the_foreign_interpreter_in_the_middle_of_an_answer_costs_no_bit(folder, stages):
    assert hosts(folder) == []
    workspace, die_at = folder / "killed", folder / "die_at"
    shutil.copytree(stages.parent, workspace, symlinks=True, dirs_exist_ok=True)  # caches of libraries may be there
    shutil.rmtree(workspace / "stages" / "rl")
    die_at.touch()
    with pytest.raises(StageFailed, match="the environment fake-environments of verifiers"):
        run(workspace, "rl")
    assert not die_at.exists()
    assert [file.name for file in workspace.glob("stages/rl/*/journal/*.parquet")] == ["step_000001.parquet"]
    assert hosts(folder) == []
    run(workspace, "rl")
    ours, undisturbed = only(workspace / "stages", "rl"), only(stages, "rl")
    for name in ("journal/step_000001.parquet", "journal/step_000002.parquet", "model/model.safetensors"):
        assert (ours / name).read_bytes() == (undisturbed / name).read_bytes()
