"""What RL draws next, and what it remembers of earlier groups: streams and pools, successes to replay, and prompts that
wait for a supervised step; planned ahead, and restored from checkpoints."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic.settings import rl_settings
from synthetic.trajectories import row_of

from luffy.config.group import ReplayConfig
from luffy.config.settings import RLSettings
from luffy.data.sources import MIXTURE
from luffy.errors import DataError
from luffy.grading.request import Problem
from luffy.rl.prompts import (
    NEVER_DRAWN,
    PromptHistory,
    PromptSampler,
    available_quotas,
    open_sampler,
    quotas,
    step_offset,
)
from luffy.rl.replay import FailedPrompts, ReplayBuffer
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.training.batching import stream_indices
from luffy.types import FinishReason, Group, Source, Trajectory

COUNT = 8
ROW, RIGHT = row_of(0.0), row_of(1.0)
TASKS = [RolloutTask(f"p{i}", (i,), "7", ()) for i in range(60)]
POOLS = "rl.sampling={kind: pools}"
POOL_NAMES = ("new", "hard", "normal", "easy")
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def _settings(*overrides: str, ahead: int = 0) -> RLSettings:
    given = ["chain=rl", "method=on_policy", f"rl.prompts_per_step={COUNT}", "rl.prompts_per_update=null", *overrides]
    settings = rl_settings(*given)
    return settings.model_copy(update={"rl": settings.rl.model_copy(update={"max_staleness": ahead, "steps": 40})})


def _mixed(sizes: dict[str, int]) -> list[RolloutTask]:
    marks = {name: Problem(extra_info={MIXTURE: {"part": name, "weights": WEIGHTS}}) for name in sizes}
    return [
        RolloutTask(f"{name}{i}", (i,), "7", (), problem=marks[name])
        for name, size in sizes.items()
        for i in range(size)
    ]


PARTS = _mixed({"a": 3, "b": 40, "c": 17})


def _group(uid: str, step: int) -> Group:
    """Four rollouts of a policy that solves every third prompt never, every third half of the time, the others always.

    A step's draw of a prompt is always the same.
    """
    rng = random.Random(f"{uid} {step}")
    difficulty = (0.0, 0.5, 1.0)[int(uid[1:]) % 3]
    return Group(uid, tuple(RIGHT if rng.random() < difficulty else ROW for _ in range(4)))


# ---- the same draws after any restart ----


class Prompts:
    """A sampler, as `Generation` plans its steps."""

    def __init__(self, sampler: PromptSampler) -> None:
        self.sampler = sampler
        self.state, self.restore = sampler.state, sampler.restore

    def draw(self, step: int) -> list[str]:
        uids = [task.uid for task in self.sampler.draw(step, COUNT)]
        self.sampler.plan(step, uids)
        return uids

    def observe(self, step: int, drawn: list[str]) -> None:
        self.sampler.observe(step, [_group(uid, step) for uid in drawn])


@cache
def _journalled(step: int) -> list[Group]:
    """Eight groups of up to twelve prompts, each row with a token of its own."""
    rng, groups = random.Random(step), []
    for place in range(8):
        num_right, first = rng.randrange(9), 100 * step + 10 * place
        rows = tuple(row_of(number < num_right, (first + number,)) for number in range(8))
        groups.append(Group(f"p{rng.randrange(12)}", rows))
    return groups


class Replays(ReplayBuffer):
    """Successes that are read from a journal, which outlives a kill."""

    def __init__(self, ahead: int) -> None:
        config = ReplayConfig(start_accuracy=0.0)
        super().__init__(config, 5, lambda step, index: _journalled(step)[index], ahead)

    def draw(self, step: int) -> list[tuple[str, list[Trajectory]]]:
        return list(self.sample(step, 3).items())

    def observe(self, step: int, drawn: object) -> None:
        super().observe(step, _journalled(step))


class Queue(FailedPrompts):
    """Three of the prompts that failed, of the eight that each step has."""

    def draw(self, step: int) -> list[str] | None:
        return self.take(3)

    def observe(self, step: int, drawn: object) -> None:
        groups = [_group(f"p{(5 * step + number) % 30}", step) for number in range(8)]
        super().observe(groups, lambda uid: uid != "p3")


OPENED: dict[str, Callable[[int], Any]] = {
    "uniform": lambda ahead: Prompts(open_sampler(_settings(ahead=ahead), TASKS)),
    "pools": lambda ahead: Prompts(open_sampler(_settings(POOLS, ahead=ahead), TASKS)),
    "parts": lambda ahead: Prompts(open_sampler(_settings(ahead=ahead), PARTS)),
    "replay": Replays,
    "queue": lambda ahead: Queue(),
}


def _run(memory: Any, first: int, last: int, ahead: int) -> Iterator[tuple[int, Any, str]]:
    """What each step draws, up to `ahead` steps before the trainer is done, and the state in its checkpoint."""
    drawn: dict[int, Any] = {}
    for step in range(first, last + 1):
        for later in range(step, min(step + ahead, last) + 1):
            if later not in drawn:
                drawn[later] = memory.draw(later)
        memory.observe(step, drawn[step])
        state = memory.state()
        assert json.loads(json.dumps(state)) == state, "a checkpoint holds nothing that JSON would change"
        yield step, drawn[step], json.dumps(state)


@pytest.mark.parametrize(
    ("name", "ahead"), [(name, ahead) for name in OPENED for ahead in ((0,) if name == "queue" else (0, 1, 3))]
)
def test_a_run_resumed_after_any_step_draws_the_same(name: str, ahead: int) -> None:
    whole = list(_run(OPENED[name](ahead), 1, 20, ahead))
    assert len({repr(drawn) for _, drawn, _ in whole}) > 3
    for stop in (1, 2, 7, 15):
        memory = OPENED[name](ahead)
        memory.restore(json.loads(whole[stop - 1][2]))
        assert list(_run(memory, stop + 1, 20, ahead)) == whole[stop:]


@pytest.mark.parametrize("ahead", [1, 3])
def test_what_is_replayed_is_known_from_the_steps_trained_on_when_it_is_planned(ahead: int) -> None:
    for step, drawn, _ in _run(Replays(ahead), 1, 20, ahead):
        lagging = Replays(0)
        for earlier in range(1, step - ahead):
            lagging.observe(earlier, None)
        assert drawn == lagging.draw(step)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_plan_knows_the_pass_rates_up_to_its_staleness_and_the_draws_of_all_steps_before(ahead: int) -> None:
    history = PromptHistory(0.0, ahead)  # the last rate counts alone
    known = []
    for step, right in enumerate((4, 3, 2, 1), start=1):
        known.append(history.as_known_to(step).get("p", NEVER_DRAWN))
        history.plan(step, ["p"])
        history.observe(step, [Group("p", tuple(RIGHT if i < right else ROW for i in range(4)))])
    assert [record.last_step for record in known] == [0, 1, 2, 3]
    assert [record.pass_rate for record in known] == [None, *[None] * ahead, 1.0, 0.75, 0.5][:4]


# ---- streams and pools ----


def test_uniform_is_the_stream_of_shuffled_epochs() -> None:
    drawn = [uid for _, uids, _ in _run(OPENED["uniform"](0), 1, 12, 0) for uid in uids]
    assert drawn == [TASKS[i].uid for i in stream_indices(len(TASKS), 0, 12 * COUNT, _settings().seed)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_on_their_way_do_not_draw_the_same_prompts(ahead: int) -> None:
    drawn = [uids for _, uids, _ in _run(OPENED["pools"](ahead), 1, 20, ahead)]
    for first in range(len(drawn) - ahead):
        together = [uid for uids in drawn[first : first + ahead + 1] for uid in uids]
        assert len(set(together)) == len(together)


@pytest.mark.parametrize("overrides", [(), (POOLS,)])
def test_later_rounds_of_a_step_go_on_where_the_earlier_ended(overrides: tuple[str, ...]) -> None:
    """As dynamic sampling draws them; when all prompts are used up, they come again."""
    sampler = open_sampler(_settings(*overrides), TASKS)
    drawn: list[str] = []
    for _ in range(9):
        drawn += [task.uid for task in sampler.draw(1, COUNT, drawn)]
    assert Counter(drawn[:60]) == Counter(task.uid for task in TASKS)
    assert len(drawn) == 72


def _pool_metrics(sampler: PromptSampler, step: int, kind: str, groups: Sequence[Group] = ()) -> list[float]:
    metrics = sampler.metrics(step, groups)
    return [metrics[f"batch/pool_{name}_{kind}"] for name in POOL_NAMES]


def _learn(sampler: PromptSampler, step: int, groups: Sequence[Group]) -> None:
    sampler.plan(step, [group.uid for group in groups])
    sampler.observe(step, groups)


def test_pools_keep_their_shares_once_they_are_filled() -> None:
    """Of eight prompts a step: one hard, five normal and two easy ones, whatever share new prompts had before."""
    sampler = open_sampler(_settings("rl.sampling={kind: pools, shares: {hard: 1, normal: 5, easy: 2}}"), TASKS)
    groups = {task.uid: Group(task.uid, (RIGHT,) * (i % 3) + (ROW,) * (2 - i % 3)) for i, task in enumerate(TASKS)}
    _learn(sampler, 1, [*groups.values()])
    for step in range(2, 10):
        drawn = [groups[task.uid] for task in sampler.draw(step, COUNT)]
        assert _pool_metrics(sampler, step, "share", drawn) == [0, 1 / 8, 5 / 8, 2 / 8]
        _learn(sampler, step, drawn)


def test_a_prompt_whose_group_is_open_is_drawn_and_has_a_pass_rate_once_it_is_complete() -> None:
    """Until then it is a normal one; with the reward of its interrupted row, or without that row, it would be hard."""
    sampler, sizes = open_sampler(_settings(POOLS), TASKS), []
    interrupted = row_of(math.nan, finish_reason=FinishReason.INTERRUPTED)
    for step, group in enumerate([Group("p0", (ROW, interrupted)), Group("p0", (ROW, ROW), is_carried=True)], start=1):
        is_drawn = sum(_pool_metrics(sampler, step, "share", [group]))
        assert is_drawn == (1.0 if step == 1 else 0.0), "a carried group is not drawn again"
        sampler.plan(step, [])
        sampler.observe(step, [group])
        sizes.append(_pool_metrics(sampler, step + 1, "size"))
    assert sizes == [[59, 0, 1, 0], [59, 1, 0, 0]]


def test_a_pool_is_gone_through_before_a_prompt_comes_again() -> None:
    sampler = open_sampler(_settings("rl.sampling={kind: pools, shares: {hard: 0, normal: 1, easy: 0}}"), TASKS)
    drawn: list[str] = []
    for step in range(1, 16):
        uids = [task.uid for task in sampler.draw(step, 12)]
        _learn(sampler, step, [Group(uid, (RIGHT, ROW)) for uid in uids])
        drawn += uids
    # Half of each step is new until all 60 are known after ten steps.
    assert set(drawn[:120]) == set(drawn[120:]) == {task.uid for task in TASKS}, "five steps are all prompts once"


def test_metrics_tell_the_pools_of_a_step_before_it_is_observed() -> None:
    sampler = open_sampler(_settings(POOLS), TASKS)
    groups = [_group(task.uid, 1) for task in sampler.draw(1, COUNT)]
    first = sampler.metrics(1, groups)
    assert (first["batch/pool_new_share"], first["batch/pool_new_size"]) == (1.0, 60.0)
    sampler.plan(1, [group.uid for group in groups])
    assert sampler.metrics(1, groups) == first
    sampler.observe(1, groups)
    sizes = _pool_metrics(sampler, 2, "size", groups)
    assert sizes[0] == 52.0 and sum(sizes) == 60.0


def test_a_replayed_group_counts_for_the_pass_rate_and_not_as_drawn() -> None:
    sampler = open_sampler(_settings(POOLS, "rl.sampling.memory=0"), TASKS)
    sampler.observe(1, [Group("p0", (RIGHT, RIGHT, replace(RIGHT, source=(Source.REPLAY,))))])
    assert _pool_metrics(sampler, 2, "size")[0] == 60.0
    assert sampler.state()["settled"].get("p0", [1.0, 0]) == [1.0, 0]


@pytest.mark.parametrize(("direction", "expected"), [("easy_first", [1, 3, 5]), ("hard_first", [5, 3, 1])])
def test_a_curriculum_sorts_by_the_shortest_trace_and_begins_again(direction: str, expected: list[int]) -> None:
    tasks = [
        RolloutTask(f"t{n}", (n,), "7", tuple(Demonstration("", (1,) * length, None) for length in lengths))
        for n, lengths in enumerate([(5,), (9, 1), (), (3, 4)])
    ]
    settings = _settings(f"rl.sampling={{kind: curriculum, by: trace_length, direction: {direction}}}")
    drawn = open_sampler(settings, tasks).draw(1, 6)
    lengths = [min((len(trace.token_ids) for trace in task.demonstrations), default=0) for task in drawn]
    assert lengths == [*expected, 0, *expected[:2]]


def test_a_curriculum_by_difficulty_takes_what_is_solved_often_first() -> None:
    settings = _settings("rl.sampling={kind: curriculum, by: difficulty}", "difficulty={max_pass_rate: 1.0}")
    tasks = [replace(task, pass_rate=rate) for task, rate in zip(TASKS, (0.2, 0.9, None, 0.5), strict=False)]
    assert [task.pass_rate for task in open_sampler(settings, tasks).draw(1, 4)] == [0.9, 0.5, 0.2, None]
    with pytest.raises(DataError, match="no training prompt has a measured pass rate"):
        open_sampler(settings, TASKS)


def test_equal_prompts_are_in_the_order_of_the_seed() -> None:
    """All have one trace of one token."""
    tasks = [replace(task, demonstrations=(Demonstration("", (1,), None),)) for task in TASKS]
    settings = _settings("rl.sampling={kind: curriculum, by: trace_length}")
    first, again, other = (
        [task.uid for task in open_sampler(settings.model_copy(update={"seed": seed}), tasks).draw(1, 60)]
        for seed in (settings.seed, settings.seed, settings.seed + 1)
    )
    assert first == again != other


@pytest.mark.parametrize("ahead", [0, 2])
def test_every_step_takes_the_share_of_every_part(ahead: int) -> None:
    """However few prompts a part has; over many steps the shares are exact."""
    memory, taken, of_b = OPENED["parts"](ahead), Counter[str](), []
    for step, uids, _ in _run(memory, 1, 30, ahead):
        counts = Counter(uid[0] for uid in uids)
        metrics = memory.sampler.metrics(step, [Group(uid, (ROW,)) for uid in uids])
        assert metrics["batch/source_b_share"] == counts["b"] / COUNT
        taken += counts
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - weight * COUNT) < 1
            assert abs(taken[name] - weight * COUNT * step) < 3
        of_b += [uid for uid in uids if uid[0] == "b"]
    assert len({*of_b[:40]}) == 40 and of_b[:40] != sorted(of_b[:40])
    with pytest.raises(DataError, match=r"data\.train\.parts\.c: none of its prompts are left"):
        open_sampler(_settings(), _mixed({"a": 3, "b": 4}))


def test_a_share_that_is_a_whole_number_is_that_in_every_step() -> None:
    assert {tuple(quotas([0.3, 0.6, 0.1], 30, step_offset(1, "test", step))) for step in range(500)} == {(9, 18, 3)}


@given(
    sizes=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    shares=st.lists(st.sampled_from([0.0, 0.2, 1.0, 3.0]), min_size=4, max_size=4),
    count=st.integers(0, 40),
    offset=st.floats(0, 0.999),
)
def test_what_a_part_lacks_comes_from_the_others(sizes, shares, count, offset):
    size, share = dict(zip("abcd", sizes, strict=True)), dict(zip("abcd", shares, strict=True))
    found = available_quotas(share, size, count, offset)
    assert sum(found.values()) == min(count, sum(sizes))
    assert all(found[name] <= size[name] for name in size)
    wanted = sum(size[name] for name in size if share[name] > 0)
    assert sum(found[name] for name in size if share[name] == 0) == max(0, min(count, sum(sizes)) - wanted)
