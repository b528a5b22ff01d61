"""What RL draws next: streams and pools, planned ahead, restored from checkpoints; and quotas of their shares."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic.settings import rl_settings
from synthetic.trajectories import row_of

from luffy.config.settings import RLSettings
from luffy.config.terms import LevelByHistory
from luffy.data.sources import MIXTURE
from luffy.errors import DataError
from luffy.grading.request import Problem
from luffy.rl.prompts import HintLevels, PromptSampler, available_quotas, open_sampler, quotas, step_offset
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.training.batching import stream_indices
from luffy.types import FinishReason, Group, Hint, Source

COUNT = 8
ROW, RIGHT = row_of(0.0), row_of(1.0)
TASKS = [RolloutTask(f"p{i}", (i,), "7", ()) for i in range(60)]
POOLS = "rl.sampling={kind: pools}"


def _settings(*overrides: str, ahead: int = 0) -> RLSettings:
    given = ["chain=rl", "method=on_policy", f"rl.prompts_per_step={COUNT}", "rl.prompts_per_update=null", *overrides]
    settings = rl_settings(*given)
    return settings.model_copy(update={"rl": settings.rl.model_copy(update={"max_staleness": ahead, "steps": 40})})


def _group(task: RolloutTask, step: int) -> Group:
    """Four rollouts of a policy that solves every third prompt never, every third half of the time, the others always.

    A step's draw of a prompt is always the same.
    """
    rng = random.Random(f"{task.uid} {step}")
    difficulty = (0.0, 0.5, 1.0)[task.prompt_ids[0] % 3]
    return Group(task.uid, tuple(RIGHT if rng.random() < difficulty else ROW for _ in range(4)))


def _run(sampler: PromptSampler, first: int, last: int, ahead: int) -> Iterator[tuple[int, list[str], PromptSampler]]:
    """Each step's prompts as `Generation` plans them: up to `ahead` steps before the trainer is done."""
    planned: dict[int, list[Group]] = {}
    for step in range(first, last + 1):
        for later in range(step, min(step + ahead, last) + 1):
            if later not in planned:
                tasks = sampler.draw(later, COUNT)
                planned[later] = [_group(task, later) for task in tasks]
                sampler.plan(later, [task.uid for task in tasks])
        sampler.observe(step, planned[step])
        yield step, [group.uid for group in planned[step]], sampler


def test_uniform_is_the_stream_of_shuffled_epochs() -> None:
    settings = _settings()
    drawn = [uid for _, uids, _ in _run(open_sampler(settings, TASKS), 1, 12, 0) for uid in uids]
    assert drawn == [TASKS[i].uid for i in stream_indices(len(TASKS), 0, 12 * COUNT, settings.seed)]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("overrides", [(), (POOLS,)], ids=["uniform", "pools"])
def test_a_run_resumed_after_any_step_draws_the_same(overrides: tuple[str, ...], ahead: int) -> None:
    settings = _settings(*overrides, ahead=ahead)
    states, drawn = {}, {}
    for step, uids, sampler in _run(open_sampler(settings, TASKS), 1, 20, ahead):
        states[step], drawn[step] = sampler.state(), uids
    for stop in (1, 2, 7, 15):
        sampler = open_sampler(settings, TASKS)
        sampler.restore(states[stop])
        again = {step: uids for step, uids, _ in _run(sampler, stop + 1, 20, ahead)}
        assert again == {step: drawn[step] for step in again}


@pytest.mark.parametrize("ahead", [0, 2])
def test_hint_levels_follow_what_a_step_may_know_and_are_the_same_after_a_kill(ahead: int) -> None:
    """Up after a group below half, down after one above three quarters, between levels 1 and 3."""
    config = LevelByHistory(kind="by_history", more_below=0.5, fewer_above=0.75)
    hint, right = Hint(1, "a"), (0, 0, 0, 2, 4, 4, 4, 0)
    groups = [Group("p", tuple(replace(RIGHT if i < n else ROW, hint=hint) for i in range(4))) for n in right]
    whole, known = HintLevels(config, 3, ahead), []
    for step, group in enumerate([*groups, Group("p", (ROW,))], start=1):
        known.append(whole.as_known_to(step).get("p", 1))
        again = HintLevels(config, 3, ahead)
        again.restore(json.loads(json.dumps(whole.state())))
        for later in range(step, step + 3):
            assert again.as_known_to(later) == whole.as_known_to(later)
        whole.observe(step, [group])
    assert known == [1] * ahead + [1, 2, 3, 3, 3, 2, 1, 1, 2][: 9 - ahead]


@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_on_their_way_do_not_draw_the_same_prompts(ahead: int) -> None:
    drawn = [uids for _, uids, _ in _run(open_sampler(_settings(POOLS, ahead=ahead), TASKS), 1, 20, ahead)]
    for first in range(len(drawn) - ahead):
        together = [uid for uids in drawn[first : first + ahead + 1] for uid in uids]
        assert len(set(together)) == len(together)


def test_later_rounds_of_a_step_go_on_where_the_earlier_ended() -> None:
    """As dynamic sampling draws them; when all prompts are used up, they come again."""
    for overrides in ((), (POOLS,)):
        sampler = open_sampler(_settings(*overrides), TASKS)
        drawn: list[str] = []
        for _ in range(9):
            drawn += [task.uid for task in sampler.draw(1, COUNT, drawn)]
        assert Counter(drawn[:60]) == Counter(task.uid for task in TASKS)
        assert len(drawn) == 72


def test_pools_keep_their_shares_once_they_are_filled() -> None:
    """Of eight prompts a step: one hard, five normal and two easy ones, whatever share new prompts had before."""
    sampler = open_sampler(_settings("rl.sampling={kind: pools, shares: {hard: 1, normal: 5, easy: 2}}"), TASKS)
    groups = [Group(task.uid, (RIGHT,) * (i % 3) + (ROW,) * (2 - i % 3)) for i, task in enumerate(TASKS)]
    sampler.plan(1, [group.uid for group in groups])
    sampler.observe(1, groups)
    for step in range(2, 10):
        drawn = [group for task in sampler.draw(step, COUNT) for group in groups if group.uid == task.uid]
        metrics = sampler.metrics(step, drawn)
        shares = [metrics[f"batch/pool_{name}_share"] for name in ("new", "hard", "normal", "easy")]
        assert shares == [0, 1 / 8, 5 / 8, 2 / 8]
        sampler.plan(step, [group.uid for group in drawn])
        sampler.observe(step, drawn)


def test_a_prompt_whose_group_is_open_is_drawn_and_has_a_pass_rate_once_it_is_complete() -> None:
    """Until then it is a normal one; with the reward of its interrupted row, or without that row, it would be hard."""
    sampler, interrupted = open_sampler(_settings(POOLS), TASKS), row_of(nan, finish_reason=FinishReason.INTERRUPTED)
    sizes = []
    for step, group in enumerate([Group("p0", (ROW, interrupted)), Group("p0", (ROW, ROW), is_carried=True)], start=1):
        shares = [value for name, value in sampler.metrics(step, [group]).items() if name.endswith("_share")]
        assert sum(shares) == (1.0 if step == 1 else 0.0), "a carried group is not drawn again"
        sampler.plan(step, [])
        sampler.observe(step, [group])
        metrics = sampler.metrics(step + 1, [])
        sizes.append([metrics[f"batch/pool_{name}_size"] for name in ("new", "hard", "normal", "easy")])
    assert sizes == [[59, 0, 1, 0], [59, 1, 0, 0]]


def test_a_pool_is_gone_through_before_a_prompt_comes_again() -> None:
    sampler = open_sampler(_settings("rl.sampling={kind: pools, shares: {hard: 0, normal: 1, easy: 0}}"), TASKS)
    groups = {task.uid: Group(task.uid, (RIGHT, ROW)) for task in TASKS}
    drawn: list[str] = []
    for step in range(1, 16):
        uids = [task.uid for task in sampler.draw(step, 12)]
        sampler.plan(step, uids)
        sampler.observe(step, [groups[uid] for uid in uids])
        drawn += uids
    # Half of each step is new until all 60 are known after ten steps.
    assert set(drawn[:120]) == set(groups)
    assert set(drawn[120:]) == set(groups), "five steps of twelve are all prompts once"


def test_metrics_tell_the_pools_of_a_step_before_it_is_observed() -> None:
    sampler = open_sampler(_settings(POOLS), TASKS)
    tasks = sampler.draw(1, COUNT)
    groups = [_group(task, 1) for task in tasks]
    first = sampler.metrics(1, groups)
    assert (first["batch/pool_new_share"], first["batch/pool_new_size"]) == (1.0, 60.0)
    sampler.plan(1, [task.uid for task in tasks])
    assert sampler.metrics(1, groups) == first
    sampler.observe(1, groups)
    second = sampler.metrics(2, groups)
    assert second["batch/pool_new_size"] == 52.0
    assert sum(second[f"batch/pool_{name}_size"] for name in ("new", "hard", "normal", "easy")) == 60.0


def test_a_replayed_group_counts_for_the_pass_rate_and_not_as_drawn() -> None:
    sampler = open_sampler(_settings(POOLS, "rl.sampling.memory=0"), TASKS)
    replayed = Group("p0", (RIGHT, RIGHT, replace(RIGHT, source=(Source.REPLAY,))))
    sampler.observe(1, [replayed])
    assert sampler.metrics(2, [])["batch/pool_new_size"] == 60.0
    assert "p0" not in sampler.state()["settled"] or sampler.state()["settled"]["p0"] == [1.0, 0]


@pytest.mark.parametrize(("direction", "expected"), [("easy_first", [1, 3, 5]), ("hard_first", [5, 3, 1])])
def test_a_curriculum_sorts_by_the_shortest_trace_and_begins_again(direction: str, expected: list[int]) -> None:
    tasks = [
        RolloutTask(f"t{n}", (n,), "7", tuple(Demonstration("", (1,) * length, None) for length in lengths))
        for n, lengths in enumerate([(5,), (9, 1), (), (3, 4)])
    ]
    settings = _settings(f"rl.sampling={{kind: curriculum, by: trace_length, direction: {direction}}}")
    sampler = open_sampler(settings, tasks)
    drawn = sampler.draw(1, 6)
    lengths = [min((len(trace.token_ids) for trace in task.demonstrations), default=0) for task in drawn]
    assert lengths == [*expected, 0, *expected[:2]]


def test_a_curriculum_by_difficulty_takes_what_is_solved_often_first() -> None:
    settings = _settings("rl.sampling={kind: curriculum, by: difficulty}", "difficulty={max_pass_rate: 1.0}")
    tasks = [replace(task, pass_rate=rate) for task, rate in zip(TASKS, (0.2, 0.9, None, 0.5), strict=False)]
    assert [task.pass_rate for task in open_sampler(settings, tasks).draw(1, 4)] == [0.9, 0.5, 0.2, None]
    with pytest.raises(DataError, match="no training prompt has a measured pass rate"):
        open_sampler(settings, TASKS)


def _uids(tasks: Sequence[RolloutTask]) -> list[str]:
    return [task.uid for task in tasks]


def test_equal_prompts_are_in_the_order_of_the_seed() -> None:
    """All have one trace of one token."""
    tasks = [replace(task, demonstrations=(Demonstration("", (1,), None),)) for task in TASKS]
    settings = _settings("rl.sampling={kind: curriculum, by: trace_length}")
    other = settings.model_copy(update={"seed": settings.seed + 1})
    first = _uids(open_sampler(settings, tasks).draw(1, 60))
    assert first == _uids(open_sampler(settings, tasks).draw(1, 60)) != _uids(open_sampler(other, tasks).draw(1, 60))


WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def _mixed(sizes: dict[str, int]) -> list[RolloutTask]:
    return [
        RolloutTask(
            f"{name}{i}", (i,), "7", (), problem=Problem(extra_info={MIXTURE: {"part": name, "weights": WEIGHTS}})
        )
        for name, size in sizes.items()
        for i in range(size)
    ]


@pytest.mark.parametrize("ahead", [0, 2])
def test_every_step_takes_the_share_of_every_part_and_a_resumed_run_the_same(ahead: int) -> None:
    """However few prompts a part has; over many steps the shares are exact."""
    tasks, settings = _mixed({"a": 3, "b": 40, "c": 17}), _settings(ahead=ahead)
    taken, drawn = Counter[str](), {}
    middle: dict[str, object] = {}
    for step, uids, sampler in _run(open_sampler(settings, tasks), 1, 30, ahead):
        drawn[step], counts = uids, Counter(uid[0] for uid in uids)
        metrics = sampler.metrics(step, [Group(uid, (ROW,)) for uid in uids])
        assert metrics["batch/source_b_share"] == counts["b"] / COUNT
        taken += counts
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - weight * COUNT) < 1
            assert abs(taken[name] - weight * COUNT * step) < 3
        middle = sampler.state() if step == 15 else middle
    of_b = [uid for step in drawn for uid in drawn[step] if uid[0] == "b"]
    assert len({*of_b[:40]}) == 40 and of_b[:40] != sorted(of_b[:40])
    again = open_sampler(settings, tasks)
    again.restore(middle)
    assert [uids for _, uids, _ in _run(again, 16, 30, ahead)] == [drawn[step] for step in range(16, 31)]


def test_a_part_without_prompts_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.train\.parts\.c: none of its prompts are left"):
        open_sampler(_settings(), _mixed({"a": 3, "b": 4}))


_WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6)


@given(weights=_WEIGHTS, count=st.integers(0, 200), step=st.integers(1, 1000), seed=st.integers(0, 99))
def test_every_part_is_within_one_of_its_share(weights: list[float], count: int, step: int, seed: int) -> None:
    found = quotas(weights, count, step_offset(seed, "test", step))
    assert sum(found) == count
    for part, weight in zip(found, weights, strict=True):
        assert abs(part - count * weight / sum(weights)) < 1 + 1e-6


def test_a_share_that_is_a_whole_number_is_that_in_every_step() -> None:
    assert {tuple(quotas([0.3, 0.6, 0.1], 30, step_offset(1, "test", step))) for step in range(500)} == {(9, 18, 3)}


@given(
    sizes=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    shares=st.lists(st.sampled_from([0.0, 0.2, 1.0, 3.0]), min_size=4, max_size=4),
    count=st.integers(0, 40),
    offset=st.floats(0, 0.999),
)
def test_what_a_part_lacks_comes_from_the_others(sizes, shares, count, offset):
    size = dict(zip("abcd", sizes, strict=True))
    share = dict(zip("abcd", shares, strict=True))
    found = available_quotas(share, size, count, offset)
    assert sum(found.values()) == min(count, sum(sizes))
    assert all(found[name] <= size[name] for name in size)
    wanted = sum(size[name] for name in size if share[name] > 0)
    assert sum(found[name] for name in size if share[name] == 0) == max(0, min(count, sum(sizes)) - wanted)
