"""Episodes through the real flow: data, SFT, difficulty, RL and evaluation with an environment; and a kill of the RL
stage in the middle of an episode, of a tool call and of sandboxed code."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from real_run import execute, only, opened
from support.patience import ran, wait_until
from support.prefect_api import shared_api
from test_methods import assert_same_result

from luffy.errors import StageFailed
from luffy.evaluation.results import read_results
from luffy.evaluation.sample_files import read_samples_of
from luffy.tracking.metrics import METRICS_FILE, read_metrics, training_rows
from luffy.tracking.tracker import SAMPLES_FILE, read_samples
from luffy.types import Source

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFIG = "exp_configs/guess_number.yaml"
GAME = [
    "chain=sft_then_luffy",
    "data.train={kind: guess_number, num_prompts: 24, high: 7, max_turns: 3}",
    "data.corpus={kind: guess_number, num_prompts: 256, high: 7, player: random, max_turns: 3}",
    "data.suites={games: {kind: guess_number, num_prompts: 8, high: 7, max_turns: 3}}",
    "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 128}",
    "data.max_trace_tokens=64",
    "base.steps=60",
    "base.batch_size=32",
    "sft={epochs: 3, batch_size: 8, optimizer: {lr: 3e-3}}",
    "difficulty={num_samples: 2, max_pass_rate: 1.0}",
    "rl={steps: 3, prompts_per_step: 4, max_response_tokens: 64, optimizer: {lr: 1e-3}, "
    "validation: {every: 3, suites: [games]}}",
    "evaluation={max_response_tokens: 64, decodings: {greedy: {temperature: 0.0}}}",
    "environment={kind: custom, factory: 'dying_game:DyingGame', limits: {max_turns: 3, max_turn_tokens: 8}, "
    "scoring: {group_measures: {shortest: 'luffy.environments.relative:shortest_correct'}, "
    "weights: {answer: 1.0, shortest: 0.5}}}",
    "execution={num_threads: 1, retries: 0, checkpoint: {rl_every: 1}, parallel_stages: 1}",  # one warm server for all
    "tracking.samples_every=1",
]


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """The game can be imported, here and in all processes."""
    folder = str(Path(__file__).parent / "episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def finished(modules, tmp_path_factory) -> Path:
    """The stages of an undisturbed flow."""
    workspace = tmp_path_factory.mktemp("finished")
    env = {**os.environ, **shared_api(), "LUFFY_WORKSPACE": str(workspace)}
    flow = ran([sys.executable, "flows/full_pipeline.py", CONFIG, *GAME], cwd=ROOT, env=env)
    assert flow.returncode == 0, flow.stderr
    return workspace / "stages"


@pytest.fixture(scope="module")
def unlearned(finished, tmp_path_factory, request) -> Iterator[Path]:
    """A copy of the workspace without the RL stage, whose game dies once its file `die_at` says so."""
    workspace = tmp_path_factory.mktemp("unlearned") / "workspace"
    shutil.copytree(finished.parent, workspace, symlinks=True)
    shutil.rmtree(workspace / "stages" / "rl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LUFFY_WORKSPACE", str(workspace))
        patch.setenv("TEST_DIE_AT", str(workspace / "die_at"))
        request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
        yield workspace


def learn(workspace: Path) -> None:
    """Make the RL stage."""
    execute(opened(workspace, "guess_number.yaml", *GAME), "rl")


def journal(stages: Path) -> list[dict]:
    files = sorted((only(stages, "rl") / "journal").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_groups_hold_rollouts_and_demonstrations_of_many_turns(finished):
    rows = journal(finished)
    guided = [row for row in rows if Source.OFF_POLICY in row["source"]]
    assert len(rows) == 3 * 4 * 8 and len(guided) == 3 * 4
    assert any(Source.ENVIRONMENT in row["source"] for row in guided)
    for row in rows:
        assert row["source"][-1] != Source.ENVIRONMENT
        versions = dict(zip(row["source"], row["weight_version"], strict=True))
        assert versions.get(Source.ENVIRONMENT, -1) == -1
        assert Source.OFF_POLICY in row["source"] or 1 <= dict(row["measures"])["turns"] <= 3


def test_the_shortest_right_episodes_of_a_group_are_rewarded_more(finished):
    """Demonstrations are members of their groups like rollouts."""
    rows = journal(finished)
    for row in rows:
        shortest = dict(row["measures"])["shortest"]
        assert row["reward"] == (row["outcome"] == "correct") + 0.5 * shortest
    groups = [rows[place : place + 8] for place in range(0, len(rows), 8)]
    for group in groups:
        best = [dict(row["measures"])["shortest"] for row in group]
        assert bool(sum(best)) == any(row["outcome"] == "correct" for row in group)


def test_metrics_and_samples_tell_of_the_episodes(finished):
    metrics = training_rows(read_metrics(only(finished, "rl") / METRICS_FILE))
    assert all(1 <= row["rollout/turns_mean"] <= 3 and "rollout/shortest_mean" in row for row in metrics)
    written = [sum(who != Source.ENVIRONMENT for who in row["source"]) for row in journal(finished)]
    learned = [row["batch/response_tokens"] for row in metrics]
    assert learned == [sum(written[step * 32 : step * 32 + 32]) for step in range(3)]
    samples = [sample for _, sample in read_samples(only(finished, "rl") / SAMPLES_FILE)]
    assert any("--- environment ---" in sample.response for sample in samples)


def test_evaluation_grades_the_last_turn_and_counts_the_policys_tokens(finished):
    for directory in (path.parent for path in (finished / "evaluate").glob("*/manifest.json")):
        for record in read_samples_of(directory):
            assert record.reply is not None
            assert record.response.endswith(record.reply)
            assert 1 <= record.measures["turns"] <= 3
            assert record.correct == (record.reply.strip() == record.ground_truth)
            assert record.correct == bool(record.measures["found"])


def test_held_out_accuracy_is_what_the_evaluation_of_the_same_weights_finds(finished):
    found = [read_results(path) for path in (finished / "evaluate").glob("*/results.json")]
    accuracies = {results.checkpoint: results.rows[0].accuracy for results in found}
    measured = {row["step"]: row for row in read_metrics(only(finished, "rl") / METRICS_FILE)}
    assert measured[0]["val/games/accuracy"] == accuracies["sft"]
    assert measured[3]["val/games/accuracy"] == accuracies["rl"]


def test_a_kill_in_the_middle_of_an_episode_costs_no_bit(finished, unlearned):
    die_at = unlearned / "die_at"
    die_at.write_text("50")  # of about 20 in the first validation and 60 answers a step
    with pytest.raises(StageFailed, match="rl was ended by SIGKILL"):
        learn(unlearned)
    assert not die_at.exists()
    children = [line.split() for line in Path(f"{die_at}.children").read_text().splitlines()]
    assert children  # the interpreter of the tool's code, with bubblewrap around it where that is installed
    wait_until(lambda: not any(_is_alive(int(pid), float(started)) for pid, started in children))
    assert [path.name for path in (unlearned / "stages/rl").glob("*/journal/*.parquet")] == ["step_000001.parquet"]
    learn(unlearned)
    assert_same_result(only(finished, "rl"), only(unlearned / "stages", "rl"))


def _is_alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_difficulty_measures_episodes(finished):
    rows = pq.read_table(only(finished, "difficulty") / "pass_rates.parquet").to_pylist()
    assert len(rows) == 24
    assert any(row["num_correct"] for row in rows)
    assert any(row["mean_tokens"] > 8 for row in rows)  # which no single turn may have
    outcomes = json.loads((only(finished, "difficulty") / "card.json").read_text())["rates"]["outcomes"]
    assert outcomes["correct"] and not outcomes["crashed"]
