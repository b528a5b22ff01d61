"""What metrics say of a step's groups, of its time, and of a whole run: curves, tokens, GPU-hours, and advice."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic.trajectories import row_of

from luffy.config import load_experiment
from luffy.report.cells import step_times_table
from luffy.tracking import metrics as module
from luffy.tracking.advice import advice_on_responses, advice_on_rl, advice_on_rollouts, advice_on_signal, had_signal
from luffy.tracking.metrics import GpuHours, MetricRow
from luffy.tracking.rollout_metrics import learned_metrics, rollout_metrics, staleness_metrics
from luffy.tracking.step_times import step_times
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory


def row(reward: float, own: int = 2, given: int = 0, begins: Source = Source.OFF_POLICY, **fields) -> Trajectory:
    """A response of `given` tokens from `begins`, which the policy went on with for `own` tokens."""
    return row_of(reward, (2,) * (given + own), (begins,) * given + (Source.ON_POLICY,) * own, **fields)


def trace(reward: float, length: int = 2) -> Trajectory:
    return row(reward, 0, length)


CRASHED = row(0.0, outcome=Outcome.CRASHED, finish_reason=FinishReason.ENVIRONMENT_ERROR)
FAILED = Group("b", (), failed=(CRASHED,) * 4)
REPLAYED = [Group("a", (row(0.0), row(1.0, 0, 2, Source.REPLAY))), Group("b", (row(0.0), row(0.0)))]
CUT = row(1.0, 4, finish_reason=FinishReason.LENGTH)
NO_POLICY = {"reward/mean": 0.0, "batch/replayed_share": 0.0}
GROUPS = {
    "demonstrations are no success of the policy": (
        [Group("a", (row(0.0), row(0.0), trace(1.0))), Group("b", (row(1.0), row(1.0), trace(1.0)))],
        {"reward/mean": 0.5, "batch/solve_none": 0.5, "batch/solve_all": 0.5, "batch/off_reward": 1.0},
    ),
    "failed rows are counted and have no reward": (
        [Group("a", (row(1.0), row(1.0)), failed=(CRASHED, CRASHED)), FAILED],
        {"reward/mean": 1.0, "batch/solve_all": 1.0, "batch/solve_none": 0.0, "reward/correct_share": 0.25,
         "reward/crashed_share": 0.75, "rollout/num_drawn": 8.0, "rollout/truncated_share": 0.0},
    ),
    "nothing but failed rows": ([FAILED], {"reward/crashed_share": 1.0}),
    "lengths and shares": (
        [Group("a", (CUT, row(0.0, 2), trace(1.0, 6)))],
        {"rollout/response_length_mean": 3.0, "rollout/off_policy_length_mean": 6.0, "rollout/truncated_share": 0.5,
         "batch/off_policy_token_share": 0.5, "reward/wrong_share": 0.5},
    ),
    "no demonstrations": (
        [Group("a", (row(1.0), row(0.0)))], {"batch/off_reward": None, "batch/off_policy_token_share": 0.0},
    ),
    "rows after a prefix count by token and do not judge the policy": (
        [Group("a", (row(0.0, 4), row(1.0, 1, 3), row(0.0, 3, 1), trace(1.0, 4)))],
        {"reward/mean": 0.0, "batch/prefix_share_mean": 0.5, "batch/off_policy_token_share": 0.5,
         "batch/off_reward": 2 / 3},
    ),
    "where every row is guided, those that the policy finished take their place": (
        [Group("a", (row(1.0, 1, 3), row(0.0, 1, 1), trace(1.0))), Group("b", (trace(1.0),))],
        {"reward/mean": 0.5, "rollout/response_length_mean": 3.0, "batch/solve_none": 0.0, "batch/solve_all": 0.0},
    ),
    "a group without rollouts beside others says nothing of the policy": (
        [Group("a", (row(1.0),)), Group("b", (row(0.0, 1, 1),))],
        {"reward/mean": 1.0, "batch/solve_all": 1.0, "batch/solve_none": 0.0},
    ),
    "equal rewards are counted with those of traces": (
        [Group("a", (row(1.0), trace(1.0))), Group("b", (row(0.0), trace(1.0)))],
        {"batch/zero_variance_share": 0.5},
    ),
    "replayed rows are neither rollouts nor guidance": (
        REPLAYED,
        {"batch/replayed_share": 0.5, "reward/mean": 0.0, "batch/off_policy_token_share": 0.25,
         "batch/off_reward": None},
    ),
    "none is replayed": (REPLAYED[1:], {"batch/replayed_share": 0.0}),
    "replay is off": (REPLAYED, {"batch/replayed_share": None}),
    "drawn are displaced and guided rows and no traces": (
        [Group("a", (row(0.0, 4), row(1.0, 2, 3), trace(1.0, 5)), (row(0.0, 3),))],
        {"rollout/num_drawn": 3.0, "rollout/tokens_drawn": 4.0 + 2.0 + 3.0},
    ),
    "of rows beside a group only the tokens are counted": (
        [Group("a", (row(0.0, 4), row(0.0, 2)), beside=(row(1.0, 3), row(0.0, 2)))],
        {"rollout/num_drawn": 2.0, "rollout/tokens_drawn": 6.0 + 5.0, "batch/zero_variance_share": 1.0,
         "reward/mean": 0.0, "batch/solve_none": 1.0, "batch/off_policy_token_share": 0.0},
    ),
    "no group": ([], NO_POLICY),
    "the policy said nothing": ([Group("a", (trace(1.0),))], NO_POLICY),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "expected"), GROUPS.values(), ids=GROUPS)
def test_groups_come_to_these_numbers(groups: list[Group], expected: dict[str, float | None]) -> None:
    found = rollout_metrics(groups, replays=expected.get("batch/replayed_share") is not None)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert all(map(math.isfinite, found.values()))


def test_staleness_is_counted_over_the_tokens_sampled_for_the_step() -> None:
    def drawn(*versions: int) -> Trajectory:
        return row_of(1.0, (3,) * len(versions), weight_version=versions)

    demonstration = replace(drawn(-1, -1), source=(Source.OFF_POLICY,) * 2)
    groups = [Group("a", (drawn(9, 9, 8), demonstration)), Group("b", (drawn(7, 5),))]
    assert staleness_metrics(groups, step=10, bound=2) == {
        "batch/stale_dropped_share": 0.5,
        "rollout/staleness_mean": (0 + 0 + 1 + 2 + 4) / 5,
        "rollout/staleness_max": 4.0,
        "rollout/staleness_0_share": 0.4,
        "rollout/staleness_1_share": 0.2,
        "rollout/staleness_2_share": 0.2,
    }
    assert staleness_metrics(groups, step=10, bound=0) == {}


def test_what_is_learned_from_counts_traces_and_no_displaced_rows() -> None:
    group = Group("a", (row(0.0, 4), trace(1.0, 5)), (row(0.0, 3),))
    for sft_rows, passes, rows, tokens in ((0, 1, 2.0, 9.0), (0, 3, 6.0, 27.0), (1, 2, 5.0, 23.0)):
        found = learned_metrics([group], [trace(1.0, 5)] * sft_rows, passes=passes)
        assert found == {"batch/num_rows": rows, "batch/response_tokens": tokens}
    assert learned_metrics([]) == {"batch/num_rows": 0.0, "batch/response_tokens": 0.0}


SFT = {"step": 1, "perf/step_s": 2.0, "perf/update_s": 1.5, "perf/tokens_per_s": 10.0}
RL = {
    **SFT, "perf/step_s": 10.0, "perf/trainer_idle_s": 6.0, "perf/weights_s": 0.5, "perf/generation_s": 5.0,
    "perf/grading_s": 2.0, "perf/batch_s": 0.25, "perf/reference_s": 0.75,
}  # fmt: skip
AHEAD = RL | {"perf/queue_depth": 1.0, "perf/generation_s": 9.0}
NOTHING = dict.fromkeys(("generation", "grading", "weights", "scoring", "update", "waiting", "other"), 0.0)
LEARNING = {"weights": 0.5, "scoring": 1.0, "update": 1.5}


TIMES = {
    "supervised": (SFT, {"update": 1.5, "other": 0.5}),
    "in turn": (RL, {**LEARNING, "generation": 3.0, "grading": 2.0, "waiting": 0.5, "other": 1.5}),
    "ahead": (AHEAD, {**LEARNING, "waiting": 5.5, "other": 1.5}),
    "from the journal": (RL | {"perf/trainer_idle_s": 0.5}, {**LEARNING, "other": 7.0}),
}


@pytest.mark.parametrize(("step", "parts"), TIMES.values(), ids=TIMES)
def test_the_parts_of_a_steps_time_add_up_to_it(step: MetricRow, parts: dict[str, float]) -> None:
    times = step_times([step])
    assert times is not None
    assert times.parts == pytest.approx(NOTHING | parts) and times.step_s == pytest.approx(step["perf/step_s"])


def test_rates_are_those_of_all_steps_together_and_the_start_is_that_of_all_attempts() -> None:
    slow = SFT | {"perf/step_s": 6.0, "perf/update_s": 4.5, "perf/tokens_per_s": 2.0, "perf/mfu": 0.1}
    fast = SFT | {"perf/mfu": 0.5}
    starts = [{"step": 0, "perf/start_s": 3.0}, {"step": 4, "perf/start_s": 4.0}]
    times = step_times([slow, fast], [*starts, slow, fast])
    assert times is not None
    assert (times.tokens_per_s, times.start_s) == (4.0, 7.0) and times.mfu == pytest.approx(0.2)
    assert ["MFU % of scoring and update", "20.0"] in step_times_table({"rl": times}).texts
    assert step_times([{"step": 0, "val/accuracy": 0.5}]) is None


@pytest.mark.parametrize(
    ("earlier_steps", "num_gpus", "seconds", "hours"), [(0, 8, 1800, 4.0), (3, 1, 3600, 2.5), (0, 0, 1, None)]
)
def test_gpu_hours_are_those_of_all_gpus_and_attempts_lost_steps_included(
    tmp_path: Path, monkeypatch, earlier_steps, num_gpus, seconds, hours
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    rows = [{"step": step, "perf/gpu_hours": 0.5 * step} for step in range(1, earlier_steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counted = GpuHours(tmp_path)  # before the tracker drops the steps after the checkpoint
    now[0] += seconds
    assert counted.metrics(num_gpus) == ({} if hours is None else {"perf/gpu_hours": pytest.approx(hours)})


# Advice: most steps taught the policy nothing, or most responses had no answer.

ZERO, ENTROPY, UPDATES = "batch/zero_advantage_share", "actor/entropy_on_policy", "batch/optimizer_steps"
SILENT = {ZERO: 1.0, ENTROPY: 2.0, "batch/solve_none": 1.0, "batch/solve_all": 0.0}
SOLVED = SILENT | {"batch/solve_none": 0.0, "batch/solve_all": 1.0}
MOSTLY_SILENT = [SILENT, {ZERO: 0.5, ENTROPY: 3.0}, {}, SILENT | {ENTROPY: 8.79}]


@pytest.mark.parametrize(
    ("steps", "regularised", "named", "absent"),
    [
        (MOSTLY_SILENT, True, ("2 of 3 steps", "entropy", "2.00", "8.79", "SFT"), ()),
        (MOSTLY_SILENT, False, ("2 of 3 steps",), ("entropy",)),
        ([SILENT, SOLVED, SOLVED], False, ("harder",), ("SFT",)),
        ([SILENT, {ZERO: 0.5}], True, None, ()),
        ([], True, None, ()),
    ],
)
def test_a_run_that_mostly_had_none_is_told_what_happened_and_what_to_do(steps, regularised, named, absent) -> None:
    signals = [had_signal(step) for step in (SILENT, {UPDATES: 0.0}, {ZERO: 0.9, UPDATES: 1.0}, {})]
    assert signals == [False, False, True, None]
    said = advice_on_signal(steps, has_regularising_terms=regularised)
    assert (said is None) == (named is None)
    assert all(word in str(said) for word in named or ()) and not any(word in str(said) for word in absent)


@pytest.mark.parametrize(
    ("method", "by_advantage", "regularised"),
    [
        ("on_policy", True, True), ("dapo", True, False), ("luffy", True, True), ("relift", False, False),
        ("srft", False, False), ("chord", False, False),
    ],
)  # fmt: skip
def test_a_method_that_also_learns_otherwise_is_left_alone(method: str, by_advantage: bool, regularised: bool) -> None:
    objective = load_experiment("exp_configs/smoke.yaml", ["chain=rl", f"method={method}"]).objective
    assert objective is not None
    assert (objective.learns_by_advantage, objective.has_regularising_terms) == (by_advantage, regularised)
    assert bool(advice_on_rl(objective, [SILENT])) == by_advantage


def step_of(*outcomes: Outcome) -> MetricRow:
    return rollout_metrics([Group("a", tuple(row_of(o is Outcome.CORRECT, outcome=o) for o in outcomes))])


def test_a_run_whose_rollouts_were_mostly_unreadable_is_advised_and_one_that_answers_is_not() -> None:
    silent = step_of(Outcome.NO_ANSWER, Outcome.UNPARSABLE, Outcome.NO_ANSWER, Outcome.WRONG)
    said = advice_on_rollouts([silent, silent, step_of(Outcome.NO_ANSWER, Outcome.CORRECT)])
    assert said is not None and said.startswith("rollouts: 67 %")
    wrong = step_of(Outcome.WRONG, Outcome.WRONG, Outcome.NO_ANSWER)
    assert advice_on_rollouts([wrong, {UPDATES: 0.0}]) is None and advice_on_rollouts([]) is None
    assert advice_on_responses("math", 0.5, 1.0, "the.limit") is None
    for truncated, named in ((0.1, ("math: 96 %",)), (0.9, ("math: 96 %", "90 %", "the.limit"))):
        assert all(word in str(advice_on_responses("math", 0.96, truncated, "the.limit")) for word in named)
