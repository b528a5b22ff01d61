"""`kill -9` in the middle of training: what the resumed stage repeats and makes, beside the one that was not disturbed.

The strikes are copies of the stage's folder (`support.kills`); the last test compares them with real kills.
"""

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file
from support.installed import needs_no_gpu, needs_vllm
from support.kills import before_answers, before_update, left_at, within_checkpoint
from support.methods import TWO_UPDATES, easy, experiment, run_rl
from support.stages import ROOT, WEIGHTS, assert_same_result, node_of, rows_of, run_stage, upstream_of
from vllm_subjects import WIDE

from luffy.api.runs import export_stage
from luffy.config import load_experiment
from luffy.data.parquet import read_prompts
from luffy.data.sources import mixed_in
from luffy.data.templates import decode, load_tokenizer
from luffy.evaluation.results import read_results
from luffy.pipeline.job import JOB_FILE, StageJob, write_job
from luffy.stages import held_out
from luffy.stages.held_out import OneVersionEngine
from luffy.stages.program import StageResult
from luffy.tracking.journal import RolloutJournal
from luffy.types import FinishReason, Group, Source

STOP = "}"
"""Every trace ends with it, and so does a right answer."""
MIXED = (
    "data.train={kind: mixture, parts: {"
    "one: {weight: 3, source: {kind: arithmetic, num_prompts: 12, num_operations: [1], operations: {reverse: 1}}}, "
    "two: {weight: 1, source: {kind: arithmetic, num_prompts: 20, num_operations: [2], operations: {reverse: 1}}}}}"
)
POOLS = "rl.sampling={kind: pools, hard_at_most: 0.0, easy_above: 0.6}"
LORA = ("model.lora={rank: 8, alpha: 16}", "rl.optimizer={lr: 0.01}")
ADAPTER = "model/adapter/adapter_model.safetensors"
OPEN_GROUPS = ("rl.partial_rollout_tokens=8", "rl.prompts_per_update=null")
STRUCK = {
    "replay": ("exgrpo", before_update(8), (), ()),
    "rollouts guided by hints": ("guide", before_update(8), (), ()),
    "open groups with tokens of steps before the checkpoint": (
        "luffy", before_update(4), OPEN_GROUPS, ("journal/step_000005.parquet", "journal/open_000005.parquet"),
    ),
    "between two passes over a mixture": (
        "luffy", before_update(11), (MIXED, f"rl.stop=['{STOP}']", "rl.passes=2"), (),
    ),
    "pools": ("luffy", before_update(8), (POOLS,), ()),
    "an adapter": ("luffy", within_checkpoint(4), LORA, (ADAPTER,)),
    "a KL term against the policy without its adapter": ("reinforce_pp", within_checkpoint(4), LORA, (ADAPTER,)),
}  # fmt: skip
"""Method, place, overrides, and further files that have to be equal: five steps of two updates, a checkpoint after
every second one."""


@pytest.fixture(scope="module")
def upstream(made) -> dict[str, Path]:
    return easy(made)


@pytest.fixture(scope="module")
def struck(upstream, tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """Returns the folders of an undisturbed stage of STRUCK, and of the one that was struck and resumed."""

    @cache
    def run(name: str) -> tuple[Path, Path]:
        method, place, overrides, _ = STRUCK[name]
        folder = tmp_path_factory.mktemp("struck")
        config, inputs = experiment(method, *TWO_UPDATES, *overrides), dict(upstream)
        if MIXED in overrides:
            run_stage(config, "prepare_data", folder / "data", {})
            inputs["data"] = inputs["held_out"] = folder / "data"
        with left_at(place, folder / "rl") as left:
            run_rl(config, folder / "rl", inputs)
        assert run_rl(config, left, inputs).resumed_from == 2
        return folder / "rl", left

    return run


@pytest.mark.parametrize("name", STRUCK)
def test_a_struck_stage_resumes_to_the_same_bits(name, struck):
    undisturbed, resumed = struck(name)
    assert_same_result(undisturbed, resumed, *STRUCK[name][3])
    assert [row["step"] for row in rows_of(undisturbed)] == [1, 2, 3, 4, 5]


def groups_of(out: Path) -> list[list[Group]]:
    journal = RolloutJournal(out / "journal")
    return [journal.read(step) or [] for step in range(1, 6)]


def test_successes_are_replayed_once_there_are_enough(struck):
    *before, third, fourth, fifth = (row["batch/replayed_share"] for row in rows_of(struck("replay")[0]))
    # How many successes the first two steps have to replay depends on how the machine rounds.
    assert before == [0, 0] and 0 < third <= fourth <= fifth == 0.5


def test_open_groups_have_tokens_of_several_steps(struck):
    rows = rows_of(struck("open groups with tokens of steps before the checkpoint")[0])
    assert all(row["rollout/interrupted_rows"] > 0 for row in rows)
    assert rows[0]["rollout/staleness_max"] == 0 < max(row["rollout/staleness_max"] for row in rows)


def test_a_mixture_is_sampled_by_its_shares_and_measured_by_its_parts(struck):
    out, _ = struck("between two passes over a mixture")
    prompts = read_prompts(out.with_name("data") / "train.parquet")
    part_of = {prompt.uid: mixed_in(prompt.extra_info).part for prompt in prompts}
    for row, groups in zip(rows_of(out), groups_of(out), strict=True):
        assert row["batch/optimizer_steps"] == 4
        tokens = sum(found.num_learnable for group in groups for found in group.trajectories)
        assert row["batch/response_tokens"] == 2 * tokens
        assert Counter(part_of[group.uid] for group in groups) == {"one": 3, "two": 1}
        assert row["batch/source_one_share"] == 0.75
        rollouts = [found for group in groups for found in group.rollouts if part_of[group.uid] == "two"]
        assert row["reward/source_two_mean"] == fmean(found.reward for found in rollouts)
        assert row["rollout/source_two_length_mean"] == fmean(found.num_learnable for found in rollouts)


def test_rollouts_end_with_the_stop_text(struck, upstream):
    tokenizer = load_tokenizer(upstream["model"] / "model")
    out, _ = struck("between two passes over a mixture")
    rows = [row for groups in groups_of(out) for group in groups for row in group.trajectories]
    ended = 0
    for row in (row for row in rows if not row.is_off_policy):
        text, is_last = decode(tokenizer, row.response_ids), row.response_ids[-1] == tokenizer.eos_token_id
        assert (row.finish_reason is FinishReason.STOP) == (STOP in text or is_last)
        assert STOP not in text or text.index(STOP) == len(text) - 1  # nothing is sampled after it
        ended += STOP in text
    traces = [row for row in rows if Source.OFF_POLICY in row.source]
    assert ended and traces and all(row.response_ids[-1] == tokenizer.eos_token_id for row in traces)


def test_pools_hold_what_the_journal_tells(struck, upstream):
    out, _ = struck("pools")
    rows = rows_of(out)
    assert rows[0]["batch/pool_new_share"] == 1.0
    assert all(0 < row["batch/pool_new_share"] < 1 for row in rows[1:])
    known = {uid for groups in groups_of(out)[:-1] for uid in (group.uid for group in groups)}
    assert rows[-1]["batch/pool_new_size"] == len(read_prompts(upstream["data"] / "train.parquet")) - len(known)


def test_an_adapter_starts_as_the_policy_that_its_kl_term_compares_with(struck):
    kl = [row["actor/kl_loss"] for row in rows_of(struck("a KL term against the policy without its adapter")[0])]
    assert 0 <= kl[0] < kl[2]


def assert_samples_with_the_adapter_that_it_trains(stage: Path, base: Path) -> None:
    for row in rows_of(stage):
        assert row["rollout/logp_gap_mean"] < 1e-5 and row["actor/grad_norm"] > 0
    before, after = load_file(base / WEIGHTS), load_file(stage / WEIGHTS)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert (after[query] - before[query]).abs().max() > 1e-3  # or the gap would prove nothing
    assert after["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])


def test_every_step_samples_with_the_adapter_that_it_trains(struck, upstream, tmp_path):
    """And a checkpoint is exported like the final model, with its adapter."""
    out, _ = struck("an adapter")
    assert_samples_with_the_adapter_that_it_trains(out, upstream["model"])
    config, stage = experiment("luffy", *TWO_UPDATES, *LORA), shutil.copytree(out, tmp_path / "rl")
    inputs = {name: str(path) for name, path in upstream.items()}
    job = StageJob(
        node="rl", stage="rl", key="key", settings=node_of(config, "rl").settings, inputs=inputs, upstream={},
        execution=config.execution, tracking=config.tracking,
    )  # fmt: skip
    write_job(stage / JOB_FILE, job)
    assert export_stage(stage, tmp_path / "exported", step=5) == "the checkpoint of step 5"
    for file in (WEIGHTS, ADAPTER):
        assert (stage / file).read_bytes() == (tmp_path / "exported" / Path(file).relative_to("model")).read_bytes()


@pytest.mark.slow
@needs_vllm
@needs_no_gpu
def test_a_struck_stage_with_an_adapter_in_vllm_resumes_to_the_same_bits(tmp_path):
    """Steps 4 and 5 are generated by an engine that has had no adapter before."""
    config = experiment("luffy", *TWO_UPDATES, WIDE, *LORA, "rl.engine=vllm", "execution.vllm.max_num_seqs=16")
    inputs = upstream_of(config, tmp_path)
    with left_at(before_update(6), tmp_path / "rl") as left:
        run_rl(config, tmp_path / "rl", inputs)
    assert_samples_with_the_adapter_that_it_trains(tmp_path / "rl", inputs["model"])
    assert run_rl(config, left, inputs).resumed_from == 2
    assert_same_result(tmp_path / "rl", left, ADAPTER)


COMMON = (
    "data.validation_prompts=6",
    "objective.group={size: 4, starts: {trace: {show: {kind: trace}}}}",
    "rl={steps: 5, prompts_per_step: 2, prompts_per_update: 1, max_response_tokens: 64, optimizer: {lr: 1e-3}}",
    "sft.epochs=null",
    "sft.steps=5",
    "base={steps: 60, batch_size: 32, optimizer: {lr: 6e-3}}",
    "execution.rollout_batch_size=8",
)
VALIDATED = (
    "rl.validation={every: 2, suites: [longer, retention], decoding: {temperature: 1.0, num_samples: 2}}",
    "sft.validation={every: 2, source: validation, decoding: {temperature: 0.7, top_p: 0.9, num_samples: 2}}",
)


def run_measured(
    stage: str, out: Path, inputs: dict[str, Path], *more: str, extends: Path | None = None
) -> StageResult:
    config = load_experiment(ROOT / "exp_configs/smoke.yaml", [*COMMON, *more])
    return run_stage(config, stage, out, inputs, extends=extends)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> dict[str, Path]:
    """Data with a validation split, and a policy that answers some problems."""
    return upstream_of(load_experiment(ROOT / "exp_configs/smoke.yaml", COMMON), tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module", params=["rl", "sft"])
def measured(request, split, tmp_path_factory) -> tuple[str, Path, Path]:
    """A stage with validation, and what a kill after half of the batches of step 4 leaves of it."""
    out = tmp_path_factory.mktemp("measured") / "stage"
    with left_at(before_answers(11 if request.param == "rl" else 6), out) as left:
        run_measured(request.param, out, split, *VALIDATED)
    return request.param, out, left


def test_training_is_the_same_bits_with_and_without_validation(measured, split, tmp_path):
    stage, on, _ = measured
    run_measured(stage, tmp_path, split)
    assert (tmp_path / WEIGHTS).read_bytes() == (on / WEIGHTS).read_bytes()
    rows = rows_of(on)
    trained = [{name: row[name] for name in row if not name.startswith("val/")} for row in rows if row["step"]]
    assert trained == rows_of(tmp_path)
    # Before training, every second step, and after the last one.
    found = [row for row in rows if "val/accuracy" in row]
    assert [(row["step"], row["val/weight_version"]) for row in found] == [(step, step) for step in (0, 2, 4, 5)]
    names = ("longer", "retention") if stage == "rl" else ("validation",)
    for row in found:
        assert row["val/accuracy"] == pytest.approx(sum(row[f"val/{name}/accuracy"] for name in names) / len(names))
        for name in names:
            low, value, high = (row[f"val/{name}/{part}"] for part in ("accuracy_low", "accuracy", "accuracy_high"))
            assert 0 <= low <= value <= high <= 1
            assert row[f"val/{name}/num_problems"] == (8 if stage == "rl" else 6)


def test_a_kill_in_a_validation_samples_no_finished_batch_again(measured, split, monkeypatch):
    stage, undisturbed, left = measured
    drawn, generate = [], OneVersionEngine.generate

    def counted(engine, requests, params):
        drawn.append(len(requests))
        return generate(engine, requests, params)

    monkeypatch.setattr(OneVersionEngine, "generate", counted)
    assert run_measured(stage, left, split, *VALIDATED).resumed_from == 2
    left_over, per_step = (16, 32) if stage == "rl" else (4, 12)
    assert sum(drawn) == left_over + per_step  # the rest of step 4, and step 5
    assert_same_result(undisturbed, left)


@pytest.fixture(scope="module")
def shorter(split, tmp_path_factory) -> Callable[[str], Path]:
    """Returns a stage with validation that ends after two steps. Not to be changed."""

    @cache
    def run(stage: str) -> Path:
        out, two_steps = tmp_path_factory.mktemp("shorter"), (f"{stage}.steps=2", "execution.checkpoint.sft_last=true")
        run_measured(stage, out, split, *VALIDATED, *two_steps)
        return out

    return run


def test_a_longer_run_continues_a_shorter_one_to_the_same_result(measured, shorter, split, tmp_path):
    stage, undisturbed, _ = measured
    assert run_measured(stage, tmp_path, split, *VALIDATED, extends=shorter(stage)).resumed_from == 2
    assert_same_result(undisturbed, tmp_path)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_the_best_weights_are_handed_on_and_patience_ends_the_stage(stage, shorter, split, tmp_path, monkeypatch):
    """The measurements are the stage's own; what they are said to be worth falls after step 2."""
    worth, ended = {0: 0.2, 1: 0.3, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.1}, shorter(stage)
    real = held_out.validation_metrics
    monkeypatch.setattr(
        held_out, "validation_metrics", lambda rows, step: real(rows, step) | {"val/accuracy": worth[step]}
    )
    validation = f"{stage}.validation={{every: 1, suites: [retention], keep_best: {{}}, patience: 2}}"
    for _ in range(2):  # a second attempt of the finished training finds the same best step in its metrics
        run_measured(stage, tmp_path, split, validation)
        assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]
        assert [folder.name for folder in (tmp_path / "best").iterdir()] == ["step_000002"]
        assert (tmp_path / WEIGHTS).read_bytes() == (ended / WEIGHTS).read_bytes()
    assert read_results(tmp_path / "validation/step_000002.json").rows[0].num_problems == 8


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from support import kills
from support.methods import TWO_UPDATES, experiment, run_rl
from support.stages import Path

with kills.before_update(8)(lambda: os.kill(os.getpid(), signal.SIGKILL)):
    inputs = {{name: Path(path) for name, path in {inputs!r}.items()}}
    run_rl(experiment("exgrpo", *TWO_UPDATES), Path({out!r}), inputs)
"""


@pytest.mark.slow
def test_a_real_kill_leaves_what_a_strike_copies(upstream, tmp_path):
    """But for times: events and those of the metrics."""
    with left_at(before_update(8), tmp_path / "whole") as left:
        run_rl(experiment("exgrpo", *TWO_UPDATES), tmp_path / "whole", upstream)
    inputs = {name: str(path) for name, path in upstream.items()}
    script = KILLED.format(path=[str(ROOT / "tests"), str(ROOT)], out=str(tmp_path / "killed"), inputs=inputs)
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    one, other = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (left, tmp_path / "killed")
    )
    assert one.keys() == other.keys()
    same = [name for name in one if name.suffix == ".safetensors" or name.parts[0] == "journal"]
    assert len(same) > 4 and all(one[name] == other[name] for name in same)
    assert rows_of(left) == rows_of(tmp_path / "killed")
