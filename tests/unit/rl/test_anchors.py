"""Branches off a trace: where it is cut, how the search goes, and which rows a group is made of."""

from collections.abc import Callable, Sequence

import pytest
from patience import PATIENCE_S
from pydantic import ValidationError
from synthetic.trajectories import row_of

from luffy.config.group import AnchorConfig, GroupConfig
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.trace_starts import Anchors, AnchorSearch, piece_ends
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, StopTexts
from luffy.tracking.rollout_metrics import anchor_metrics, rollout_metrics
from luffy.types import FinishReason, Group, Source

RIGHT, WRONG, STOP, LINE = 1, 2, 3, 4
SIZE = 4
TRACE = (20, LINE, 21, LINE, 22, LINE, 23, LINE, RIGHT, STOP)
"""Five lines; the first four end after 2, 4, 6 and 8 tokens."""


# ---- where a trace is cut ----


@pytest.mark.parametrize(
    ("texts", "pieces", "ends"),
    [
        (["a", "\n", "b", "\n", "c", "<e>"], 10, (2, 4)),
        (["a", "\n", "b", "\n", "c", "\n", "<e>"], 10, (2, 4)),  # nothing but the stop token after the last line
        (["a\n", "b\n", "c\n", "d\n", "e", "<e>"], 2, (2,)),
        (["a\n", "b\n", "c\n", "d\n", "e", "<e>"], 3, (1, 3)),
        (["so", " it", " is", " 7", "<e>"], 10, (1, 2, 3)),
        (["so ", "it ", "is", "<e>"], 10, (1, 2)),
        (["a", "b", "c", "<e>"], 10, (1, 2)),  # no word is seen in the single tokens
        (["7", "<e>"], 10, ()),
        (["<e>"], 10, ()),
        ([], 10, ()),
    ],
)
def test_a_trace_is_cut_after_its_lines_else_words_else_tokens_and_never_before_its_stop_token(texts, pieces, ends):
    assert piece_ends(texts, pieces) == ends


@pytest.mark.parametrize("num_lines", range(2, 30))
@pytest.mark.parametrize("pieces", [2, 3, 10])
def test_pieces_have_as_equal_numbers_of_lines_as_they_can(num_lines: int, pieces: int) -> None:
    ends = piece_ends([*["x\n"] * (num_lines - 1), "x", "<e>"], pieces)
    lengths = [end - start for start, end in zip((0, *ends), (*ends, num_lines), strict=True)]
    assert len(lengths) == min(pieces, num_lines) and sum(lengths) == num_lines
    assert max(lengths) - min(lengths) <= 1


# ---- how the search goes ----


def searched(successes: dict[int, float], num_pieces: int = 10, **bounds: float) -> tuple[list[int], Group]:
    """The numbers of pieces tried, and the group, where `successes` gives the share of correct rows for each number."""
    search = AnchorSearch(AnchorConfig(**bounds), Demonstration("", TRACE, None), range(1, num_pieces))
    tried = []
    while (count := search.num_pieces) is not None:
        assert search.num_given == count
        tried.append(count)
        correct = round(SIZE * successes[count])
        search.observe([row_of(place < correct) for place in range(SIZE)])
    return tried, search.group(Group("p", tuple(row_of(False) for _ in range(SIZE))))


def rising(first: int) -> dict[int, float]:
    """Never right with fewer pieces, always with as many or more."""
    return {count: float(count >= first) for count in range(1, 10)}


def test_it_ends_with_the_first_number_within_the_bounds() -> None:
    assert searched({5: 0.5})[0] == [5]
    assert searched({5: 0.0, 7: 0.75})[0] == [5, 7]
    assert searched({5: 1.0, 2: 0.25})[0] == [5, 2]


@pytest.mark.parametrize("first", range(1, 10))
def test_without_a_number_within_the_bounds_the_shortest_start_that_succeeds_is_taken(first: int) -> None:
    tried, group = searched(rising(first))
    assert len(tried) <= 4 and len(set(tried)) == len(tried)
    assert first in tried, "the search ends between failure and success"
    assert all(each.is_correct for each in group.trajectories)
    assert len(group.replaced) == SIZE * len(tried)  # the bare rollouts, and every other try


def test_without_a_success_the_bare_rollouts_stay_and_every_sampled_row_is_kept() -> None:
    tried, group = searched(dict.fromkeys(range(1, 10), 0.0))
    assert tried == [5, 7, 8, 9]
    assert len(group.trajectories) == SIZE and len(group.replaced) == 4 * SIZE


def test_of_tries_outside_the_bounds_the_nearest_is_taken() -> None:
    successes = {5: 1.0, 2: 0.25, 3: 1.0, 4: 1.0}
    tried, group = searched(successes, success_at_least=0.5, success_at_most=0.5)
    assert tried == [5, 2, 3]
    assert sum(each.is_correct for each in group.trajectories) == 1  # 0.25 is nearer to 0.5 than 1.0


def test_a_trace_of_two_pieces_is_tried_once() -> None:
    assert searched({1: 0.0}, num_pieces=2)[0] == [1]


# ---- the rows of a group ----


class Engine:
    """Right with the probability that `success` gives for the number of given tokens, in turn over a call's rows."""

    def __init__(self, success: Callable[[int], float]) -> None:
        self.calls: list[list[RolloutRequest]] = []
        self._success = success

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.calls.append(list(requests))
        return [
            Completion(
                (RIGHT if place % SIZE < round(SIZE * self._success(len(request.prefix_ids))) else WRONG, STOP),
                (-0.5, -0.25), FinishReason.STOP, weight_versions=(6, 6),
            )
            for place, request in enumerate(requests)
        ]  # fmt: skip

    def close(self) -> None: ...


def decode(ids: Sequence[int]) -> str:
    texts = {LINE: "\n", RIGHT: r"\boxed{7}", WRONG: r"\boxed{8}", STOP: ""}
    return "".join(texts.get(token_id, "x") for token_id in ids)


def collected(
    success: Callable[[int], float], *tasks: RolloutTask, step: int = 1, stops: StopTexts | None = None
) -> tuple[Engine, list[Group]]:
    engine = Engine(success)
    anchor = AnchorConfig()
    config = GroupConfig(size=SIZE, off_policy=0, anchor=anchor)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(
            grader, decode, SamplingParams(1.0, 16, ()), config, seed=0, total_steps=10, stops=stops,
            anchors=Anchors(anchor, decode, seed=0),
        )  # fmt: skip
        return engine, collector.collect(engine, tasks, step)


def task(uid: str = "a", *traces: tuple[int, ...]) -> RolloutTask:
    return RolloutTask(uid, (5, 6), "7", tuple(Demonstration(decode(ids), ids, None) for ids in traces))


def test_a_group_that_fails_continues_the_start_of_the_trace_which_is_context() -> None:
    engine, (group,) = collected(lambda given: 0.5 if given >= 4 else 0.0, task("a", TRACE))
    assert [[request.prefix_ids for request in call] for call in engine.calls] == [[()] * SIZE, [TRACE[:4]] * SIZE]
    assert {request.prompt_ids for call in engine.calls for request in call} == {(5, 6)}
    assert len({request.seed for call in engine.calls for request in call}) == 2 * SIZE
    assert [each.is_correct for each in group.trajectories] == [True, True, False, False]
    for each in group.trajectories:
        assert each.response_ids[:4] == TRACE[:4] and len(each.response_ids) == 6
        assert each.source == (Source.OFF_POLICY,) * 4 + (Source.ON_POLICY,) * 2
        assert each.weight_version[4:] == (6, 6)
    assert group.accuracy == 0.0 and len(group.rollouts) == SIZE, "those of the bare prompt"


def test_what_the_search_sampled_is_counted_and_measured() -> None:
    _, (group,) = collected(lambda given: 0.5 if given >= 8 else 0.0, task("a", TRACE))  # tries 2, 3 and 4 pieces
    assert len(group.replaced) == 3 * SIZE
    metrics = rollout_metrics([group])
    assert (metrics["rollout/num_drawn"], metrics["rollout/tokens_drawn"]) == (4 * SIZE, 2 * 4 * SIZE)
    assert metrics["batch/on_reward"] == metrics["batch/off_policy_token_share"] - 0.8 == 0.0
    assert metrics["batch/prefix_share_mean"] == 0.8
    assert anchor_metrics([group]) == {
        "batch/anchor_searched_share": 1.0,
        "batch/anchor_solved_share": 1.0,
        "batch/anchor_rows_mean": 3.0 * SIZE,
    }


def test_groups_that_succeed_or_have_no_trace_to_cut_are_left_alone() -> None:
    engine, groups = collected(lambda given: 0.0, task("short", (RIGHT, STOP)), task("none"))
    assert len(engine.calls) == 1 and all(group.replaced == () for group in groups)
    engine, groups = collected(lambda given: 0.25, task("a", TRACE))
    assert len(engine.calls) == 1 and not any(each.is_off_policy for each in groups[0].trajectories)


def test_searches_of_a_step_run_together_and_do_not_depend_on_one_another() -> None:
    def success(given: int) -> float:
        return 0.5 if given >= 8 else 0.0

    engine, together = collected(success, task("a", TRACE), task("b", TRACE), task("none"))
    assert [len(call) for call in engine.calls] == [3 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE]
    for uid, group in zip("ab", together, strict=False):
        alone, (again,) = collected(success, task(uid, TRACE))
        for one, other in zip(
            (*again.trajectories, *again.replaced), (*group.trajectories, *group.replaced), strict=True
        ):
            assert (one.response_ids, one.source, one.reward) == (other.response_ids, other.source, other.reward)
        seeds = {request.seed for call in alone.calls for request in call}
        assert len(seeds) == 4 * SIZE
    later, _ = collected(success, task("a", TRACE), step=2)
    assert not {request.seed for request in later.calls[1]} & {request.seed for request in engine.calls[1]}


def test_several_traces_take_turns_over_the_steps() -> None:
    other = (30, *TRACE[1:])
    used = set()
    for step in range(1, 12):
        engine, _ = collected(lambda given: 0.5 if given else 0.0, task("a", TRACE, other, (RIGHT, STOP)), step=step)
        used.add(engine.calls[1][0].prefix_ids[0])
    assert used == {20, 30}


def test_a_start_ends_before_a_stop_text() -> None:
    stops = StopTexts(("x\nx\n",), decode)
    engine, _ = collected(lambda given: 0.5 if given else 0.0, task("a", TRACE), stops=stops)
    assert engine.calls[1][0].prefix_ids == TRACE[:3]


# ---- configuration ----

HINT = {"levels": (0.5,), "keep": "all", "learn": "hinted"}


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"anchor": {"success_at_least": 0.8, "success_at_most": 0.2}}, "must not be above"),
        ({"anchor": {"accuracy_at_most": 0.5}}, "must be below success_at_least"),
        ({"anchor": {"success_at_least": 0.3, "success_at_most": 0.4}}, "no number of correct rows among size 4"),
        ({"anchor": {}, "off_policy": 1}, "anchor and off_policy both use traces"),
        ({"anchor": {}, "hint": HINT}, "anchor and hint both use traces"),
        ({"anchor": {"pieces": 1}}, "greater than or equal to 2"),
    ],
)
def test_bad_settings_are_refused(group: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GroupConfig.model_validate({"size": 4, "off_policy": 0} | group)
