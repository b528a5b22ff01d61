"""What is alarming in a running stage, and that each kind of alarm is raised once."""

import math

import pytest

from luffy.config import load_experiment
from luffy.tasks.alarm_watch import AlarmWatch, NewMetrics
from luffy.tasks.alarms import RewardHistory, SignalHistory, disk_alarm, gap_alarm, gap_bound
from luffy.tracking.metrics import MetricsWriter

GAP, REWARD = "rollout/logp_gap_mean", "reward/mean"
PLENTY = 1 << 40


def reward_alarms(rewards, num_steps):
    """Steps (from 1) after which there is an alarm."""
    history, found = RewardHistory(), []
    for step, reward in enumerate(rewards, 1):
        history = history.after({"step": step} if reward is None else {"step": step, REWARD: reward})
        if history.alarm(num_steps):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("rewards", "steps"),
    [
        ([0, 0, 0, 0], []),
        ([0.5, 0, 0, 0], [4]),
        ([0.5, 0, 0, 0.1, 0, 0], []),
        ([0.5, 0, None, 0, math.nan, 0], [6]),
        ([0.5, 0, 0, -1, 0, 0, 0], [7]),
        ([-1, 0, 0, 0], []),
    ],
)
def test_a_reward_has_fallen_to_0_only_if_it_was_above_and_stays_there(rewards, steps):
    assert reward_alarms(rewards, 3) == steps


@pytest.mark.parametrize(
    ("setting", "staleness", "dtype", "bound"),
    [
        (None, 0, "float32", 0.01),
        (None, 0, "bfloat16", 0.1),
        (None, 1, "float32", None),
        (0.2, 1, "float32", 0.2),
        (0.2, 0, "float32", 0.01),
        (0.001, 0, "bfloat16", 0.001),
    ],
)
def test_the_bound_of_the_gap_is_the_lowest_that_rl_itself_checks(setting, staleness, dtype, bound):
    assert gap_bound(setting, staleness, dtype) == bound


def test_a_gap_alarms_only_above_its_bound():
    rows = [{"step": 1.0}, {"step": 2.0, GAP: math.nan}, {"step": 3.0, GAP: 0.01}, {"step": 4.0, GAP: 0.02}]
    assert [gap_alarm(row, None) for row in rows] == [None] * 4
    *quiet, alarm = [gap_alarm(row, 0.01) for row in rows]
    assert quiet == [None] * 3
    assert alarm.text == "rollout/logp_gap_mean is 0.02 at step 4, above the bound of 0.01"


def test_a_run_without_any_advantage_alarms_until_there_is_one():
    silent, found = {"batch/zero_advantage_share": 1.0}, []
    history = SignalHistory()
    for row in (silent, {"val/accuracy": 0.5}, silent, silent, {"batch/zero_advantage_share": 0.5}, silent):
        history = history.after(row)
        found.append(history.alarm(2) is not None)
    assert found == [False, False, True, True, False, False]


@pytest.mark.parametrize(("method", "kinds"), [("on_policy", ["no-signal"]), ("srft", [])])
def test_a_silent_stage_alarms_only_where_it_learns_by_advantages(folders, method, kinds):
    stage, run = folders
    writer = MetricsWriter(stage / "metrics.jsonl")
    for step in (1, 2):
        writer.write(step, {"batch/zero_advantage_share": 1.0})
    look = watch(run, "chain=rl", f"method={method}", "execution.alarms.no_signal_steps=2").look(stage)
    assert [alarm.kind for alarm in look] == kinds


def test_a_disk_alarms_below_the_least_free_space():
    assert disk_alarm(100, 100, "/here") is None
    assert disk_alarm(99, 100, "/here").text == "the disk of /here is nearly full: 99 B free"


@pytest.fixture
def folders(tmp_path):
    """The directories of a stage and of a run."""
    stage, run = tmp_path / "stage", tmp_path / "run"
    stage.mkdir()
    run.mkdir()
    return stage, run


def watch(run, *overrides, free=PLENTY, clock=lambda: 0.0):
    config = load_experiment("exp_configs/smoke.yaml", ["execution.alarms.zero_reward_steps=2", *overrides])
    return AlarmWatch(config, run, free=lambda path: free, clock=clock)


def test_each_alarm_is_raised_once_also_by_a_run_that_resumes(folders):
    stage, run = folders
    writer, first = MetricsWriter(stage / "metrics.jsonl"), watch(run)
    kinds = []
    for step, (reward, gap) in enumerate([(0.5, 0.0), (0.0, 0.5), (0.0, 0.0), (0.0, 0.5), (0.4, 0.0)], 1):
        writer.write(step, {REWARD: reward, GAP: gap})
        kinds.append([alarm.kind for alarm in first.look(stage, at_once=True)])
    assert kinds == [[], ["logp-gap"], ["zero-reward"], [], []]
    writer.truncate(1)
    for step in (2, 3, 4):
        writer.write(step, {REWARD: 0.0, GAP: 0.5})
    assert first.look(stage, at_once=True) == watch(run).look(stage) == []


def test_a_resume_continues_the_count_of_the_steps_before_it(folders):
    stage, run = folders
    writer = MetricsWriter(stage / "metrics.jsonl")
    writer.write(1, {REWARD: 0.5})
    writer.write(2, {REWARD: 0.0})
    assert watch(run).look(stage) == []
    writer.write(3, {REWARD: 0.0})
    assert [alarm.kind for alarm in watch(run).look(stage)] == ["zero-reward"]


def test_a_full_disk_is_reported_once_in_a_run_by_whichever_stage_sees_it(folders):
    stage, run = folders
    first, second = watch(run, free=0), watch(run, free=0)
    assert [alarm.kind for look in (first, second, first) for alarm in look.look(stage, at_once=True)] == ["disk"]
    assert watch(run, "execution.alarms.free_gb=1", free=1 << 30).look(stage) == []


def test_files_are_looked_at_every_ten_seconds_and_at_the_end(folders):
    stage, run = folders
    times = iter([0.0, 9.0, 10.0, 11.0])
    looked = []
    own = AlarmWatch(
        load_experiment("exp_configs/smoke.yaml"), run, lambda path: looked.append(path) or PLENTY, lambda: next(times)
    )
    for at_once in (False, False, False, True):
        own.look(stage, at_once=at_once)
    assert len(looked) == 3


def test_each_row_of_a_long_run_is_read_once(tmp_path):
    """Otherwise the cost of watching would grow with the square of the steps."""
    path = tmp_path / "metrics.jsonl"
    writer, metrics, read = MetricsWriter(path), NewMetrics(path), []
    for step in range(1, 301):
        writer.write(step, {REWARD: 0.5})
        read += [row["step"] for row in metrics.read()[1]]
    assert read == list(range(1, 301))


def test_alarms_are_no_part_of_a_stages_identity():
    with_alarms = load_experiment("exp_configs/smoke.yaml", ["execution.alarms.free_gb=100"])
    without = load_experiment("exp_configs/smoke.yaml")
    fields = set(type(without).model_fields) - {"execution"}
    assert with_alarms.model_dump(include=fields) == without.model_dump(include=fields)
