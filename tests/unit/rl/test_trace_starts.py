"""What a row is given of a trace: prefixes, hints, and the branches of a search; and which rows a group is made of."""

from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.patience import PATIENCE_S
from synthetic.trajectories import row_of

from luffy.config.group import AnchorConfig, GroupConfig, HintConfig, PrefixConfig
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import Demonstration, RolloutTask, Visit
from luffy.rl.trace_starts import (
    Anchors,
    AnchorSearch,
    HintedPrompts,
    hint_text,
    piece_ends,
    prefix_length,
    with_hinted_rows,
)
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, StopTexts
from luffy.tracking.rollout_metrics import anchor_metrics, rollout_metrics
from luffy.types import FinishReason, Group, Hint, Message, Source, Trajectory

LENGTHS = (
    {"kind": "uniform", "low": 0.0, "high": 1.0},
    {"kind": "uniform", "low": {"kind": "cosine", "start": 0.95, "end": 0.05}, "high": 0.95},
    {"kind": "uniform", "low": 0.4, "high": 0.4},
    {"kind": "binomial", "chunks": 5, "probability": {"kind": "cosine", "start": 0.95, "end": 0.0, "over": 0.6}},
    {"kind": "evenly_spaced"},
)


def _config(length: dict, shared: bool = False) -> PrefixConfig:
    return PrefixConfig.model_validate({"length": length, "shared": shared})


def _lengths(length: dict, trace_tokens: int, step: int = 1, total: int = 101, rows: int = 500) -> list[int]:
    config = _config(length)
    visit = _visit(step)
    return [prefix_length(config, trace_tokens, visit, i, rows, total, 7) for i in range(rows)]


def _visit(step: int, uid: str = "p", repeat: int = 0) -> Visit:
    return Visit(RolloutTask(uid, (), "", ()), step, repeat)


@given(
    length=st.sampled_from(LENGTHS),
    trace_tokens=st.integers(1, 9000),
    index=st.integers(0, 7),
    step=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_a_prefix_leaves_a_token_to_write_and_is_the_same_again(length, trace_tokens, index, step, seed):
    arguments = (_config(length), trace_tokens, _visit(step), index, 8, 50, seed)
    tokens = prefix_length(*arguments)
    assert 0 <= tokens < trace_tokens
    assert tokens == prefix_length(*arguments)


def test_uniform_shares_fill_their_moving_interval() -> None:
    moving = {"kind": "uniform", "low": {"kind": "linear", "start": 0.9, "end": 0.1}, "high": 0.9}
    assert set(_lengths(moving, 1000, step=1)) == {900}
    last = _lengths(moving, 1000, step=101)
    assert 100 <= min(last) < 120 and 880 < max(last) < 900
    assert fmean(last) == pytest.approx(500, abs=4 * 231 / 500**0.5)


def test_a_share_of_one_leaves_the_stop_token_to_write_and_of_zero_everything() -> None:
    falling = {"kind": "linear", "start": 1.0, "end": 0.0}
    length = {"kind": "uniform", "low": falling, "high": falling}
    assert set(_lengths(length, 37, step=1)) == {36}
    assert set(_lengths(length, 37, step=101)) == {0}
    assert set(_lengths({"kind": "uniform", "low": 0.29, "high": 0.29}, 100)) == {29}


def test_binomial_prefixes_end_at_chunks_with_the_binomial_s_shares() -> None:
    length = {"kind": "binomial", "chunks": 4, "probability": 0.5}
    found = _lengths(length, 10, rows=4000)
    assert set(found) == {0, 2, 5, 7, 9}
    for tokens, probability in {0: 1 / 16, 2: 4 / 16, 5: 6 / 16, 7: 4 / 16, 9: 1 / 16}.items():
        error = (probability * (1 - probability) / 4000) ** 0.5
        assert found.count(tokens) / 4000 == pytest.approx(probability, abs=4 * error)
    # A trace shorter than its chunks is cut token by token.
    assert set(_lengths({"kind": "binomial", "chunks": 5, "probability": 0.5}, 3)) == {0, 1, 2}


def test_evenly_spaced_rows_go_from_low_to_high_and_a_lone_one_stands_between() -> None:
    assert _lengths({"kind": "evenly_spaced"}, 100, rows=5) == [0, 25, 50, 75, 99]
    assert _lengths({"kind": "evenly_spaced", "low": 0.2, "high": 0.6}, 100, rows=3) == [20, 40, 60]
    assert _lengths({"kind": "evenly_spaced", "low": 0.2, "high": 0.6}, 100, rows=1) == [40]


def test_shared_prefixes_are_equal_in_a_group_and_drawn_anew_for_every_visit_and_step() -> None:
    config = _config({"kind": "uniform", "low": 0.0, "high": 1.0}, shared=True)

    def tokens(index: int = 0, visit: int = 0, step: int = 1, uid: str = "p") -> int:
        return prefix_length(config, 10**6, _visit(step, uid, visit), index, 4, 10, 7)

    assert len({tokens(index=i) for i in range(4)}) == 1
    assert len({tokens(), tokens(visit=1), tokens(step=2), tokens(uid="q")}) == 4


REASONING = "<think>one\n two\n\nthree\nfour\n</think>\\boxed{7}"


def hint_config(**changes: object) -> HintConfig:
    values = {"levels": (0.25, 0.5, 0.9), "keep": "first_correct", "learn": "bare", "template": "{prompt} | {hint}"}
    return HintConfig.model_validate({**values, **changes})


def task_with(*replies: str) -> RolloutTask:
    messages = (Message("system", "Be brief."), Message("user", "What is {hint}?"))
    return RolloutTask("p", (1,), "7", tuple(Demonstration(text, (2,), None) for text in replies), messages=messages)


def hints(settings: HintConfig, seed: int = 7, total_steps: int = 100) -> HintedPrompts:
    def encode(messages: object) -> tuple[int, ...]:
        encoded.append(messages)
        return (len(encoded),)

    encoded: list[object] = []
    prompts = HintedPrompts(settings, encode, seed, total_steps)
    prompts.encoded = encoded  # type: ignore[attr-defined]
    return prompts


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.01, "one"), (0.25, "one"), (0.5, "one\n two"), (0.75, "one\n two\nthree"), (0.99, "one\n two\nthree")],
)
def test_a_hint_is_the_first_steps_of_the_reasoning_and_never_the_last(share: float, shown: str) -> None:
    assert hint_text(REASONING, share) == shown


def test_a_trace_of_one_line_is_cut_at_words_and_one_of_a_single_step_gives_no_hint() -> None:
    assert hint_text("so it is \\boxed{7}", 0.5) == "so it"
    assert hint_text("\\boxed{7}", 0.5) == hint_text("", 0.5) == hint_text("<think>", 0.5) == ""


def test_the_hint_stands_in_the_last_message_of_a_prompt_of_its_own() -> None:
    prompts = hints(hint_config(rows_per_level=2))
    found = prompts.of(task_with(REASONING), step=1)
    assert [prompt.hint.level for prompt in found] == [1, 1, 2, 2, 3, 3]
    assert found[2].hint == Hint(2, "one\n two") and not found[2].is_learned_from
    assert found[2].prompt_ids == (2,) == found[3].prompt_ids
    system, question = prompts.encoded[1]  # type: ignore[attr-defined]
    assert (system.content, question.content) == ("Be brief.", "What is {hint}? | one\n two")


def test_tasks_without_a_trace_of_two_steps_have_no_hints_and_several_traces_take_turns() -> None:
    prompts = hints(hint_config(levels=(0.5,)))
    assert prompts.of(task_with(), step=1) == prompts.of(task_with("\\boxed{7}"), step=1) == []
    both = task_with("a\nb\n7", "\\boxed{7}", "c\nd\n7")
    shown = [prompts.of(both, step)[0].hint.text for step in range(1, 30)]
    assert set(shown) == {"a", "c"}
    assert shown == [hints(hint_config(levels=(0.5,))).of(both, step)[0].hint.text for step in range(1, 30)]


def test_the_longest_prompt_is_that_of_the_highest_level() -> None:
    prompts = HintedPrompts(hint_config(), lambda messages: tuple(range(len(messages[-1].content))), 7, 10)
    assert prompts.longest([task_with(), task_with("a\nb"), task_with(REASONING)]) == len(
        "What is {hint}? | one\n two\nthree"
    )
    assert prompts.longest([task_with()]) == 0


def test_hints_begin_after_their_share_of_the_steps() -> None:
    late = hints(hint_config(after=0.29), total_steps=100)
    assert [late.are_due(step) for step in (1, 29, 30, 100)] == [False, False, True, True]
    assert hints(hint_config()).are_due(1)


def hinted_row(reward: float, hint: Hint) -> Trajectory:
    return row_of(reward, source=Source.HINTED, hint=hint)


def test_the_accuracy_of_a_group_is_that_of_bare_rollouts_whatever_hints_achieve() -> None:
    hinted = [hinted_row(1.0, Hint(1, "a")), hinted_row(0.0, Hint(1, "a"))]
    bare = Group("p", (row_of(0.0), row_of(0.0), row_of(0.0)))
    found = with_hinted_rows(bare, hinted, "all")
    assert [each.hint is not None for each in found.trajectories] == [False, True, True]
    assert found.accuracy == 0.0 and len(found.rollouts) == 3 and list(found.hinted) == hinted


def test_right_rollouts_stay_and_hinted_rows_that_are_all_wrong_change_nothing() -> None:
    right, wrong = row_of(1.0), [row_of(0.0) for _ in range(3)]
    hinted = [hinted_row(0.0, Hint(1, "a")), hinted_row(1.0, Hint(2, "ab"))]
    helped = with_hinted_rows(Group("p", (right, *wrong)), hinted, "first_correct")
    assert [each.reward for each in helped.trajectories] == [1.0, 0.0, 0.0, 1.0]
    assert len(helped.replaced) == 2 and helped.accuracy == 0.25
    unhelped = with_hinted_rows(Group("p", tuple(wrong)), hinted[:1], "first_correct")
    assert unhelped.trajectories == tuple(wrong) and len(unhelped.replaced) == 1


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
        ({"anchor": {}, "hint": HINT}, "hint and anchor both sample again where rollouts fail"),
        ({"anchor": {"pieces": 1}}, "greater than or equal to 2"),
    ],
)
def test_bad_settings_are_refused(group: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GroupConfig.model_validate({"size": 4, "off_policy": 0} | group)
