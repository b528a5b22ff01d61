"""What rows are given before the policy writes: prefixes of traces, tries of a search, hints and critiques."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from synthetic.scripted_runs import Parrot
from synthetic.trajectories import hinted_rows, row_of

from luffy.config.group import GroupConfig
from luffy.config.starts import StartConfig
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.rl.doses import StartRound
from luffy.rl.group_starts import GroupStart, Texts, hint_text, open_starts, piece_ends
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import Demonstration, RolloutTask, Visit
from luffy.rollout.engine import RolloutRequest, SamplingParams, StopTexts
from luffy.tracking.rollout_metrics import rollout_metrics, start_metrics
from luffy.types import FinishReason, Group, Message, Source, Start, Trajectory

RIGHT, WRONG, STOP, LINE = 1, 2, 3, 4
SIZE, STEPS = 4, 101
FAILED = {"accuracy_at_most": 0.0}


def begun_with(engine: Parrot) -> list[list[tuple[int, ...]]]:
    """What the groups of each call begin with."""
    return [[request.prefix_ids for request in call[::SIZE]] for call in engine.calls]


def decode(ids: Sequence[int]) -> str:
    texts = {LINE: "\n", RIGHT: r"\boxed{7}", WRONG: r"\boxed{8}", STOP: ""}
    return "".join(texts.get(token_id, "x") for token_id in ids)


def spelt(messages: Sequence[Message]) -> tuple[int, ...]:
    """The last message letter by letter, after the system's as it is."""
    assert messages[0] == Message("system", "Be brief.")
    return tuple(map(ord, messages[-1].content))


def read(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def opened(seed: int = 0, size: int = SIZE, stops: StopTexts | None = None, **starts: object) -> list[GroupStart]:
    configs = {name: TypeAdapter(StartConfig).validate_python(start) for name, start in starts.items()}
    return open_starts(configs, Texts(spelt, decode, read, stops), seed, STEPS, size)


Collect = Callable[..., tuple[Parrot, list[Group]]]


@pytest.fixture(scope="module")
def collect(grader: GraderPool) -> Collect:
    """The groups of tasks, where prefixes of `least` tokens or more succeed half of the time, shorter ones never."""

    def collected(
        starts: Mapping[str, object],
        *tasks: RolloutTask,
        least: int = 10**9,
        step: int = 1,
        size: int = SIZE,
        seed: int = 0,
        stops: StopTexts | None = None,
    ) -> tuple[Parrot, list[Group]]:
        def says(place: int, request: RolloutRequest) -> tuple[int, int]:
            return RIGHT if place % SIZE < SIZE / 2 and len(request.prefix_ids) >= least else WRONG, STOP

        engine, config = Parrot(says), GroupConfig.model_validate({"size": size, "starts": starts})
        collector = GroupCollector(
            grader, decode, SamplingParams(1.0, 16, ()), config, seed, STEPS, opened(seed, size, stops, **starts),
            stops=stops,
        )  # fmt: skip
        return engine, collector.collect(engine, tasks, step)

    return collected


def task(uid: str = "a", *traces: tuple[int, ...]) -> RolloutTask:
    return RolloutTask(uid, (5, 6), "7", tuple(Demonstration(decode(ids), ids, None) for ids in traces))


def prefix(dose: object, rows: int | str = 1, **more: object) -> dict[str, object]:
    return {"show": {"kind": "prefix"}, "dose": dose, "rows": rows, **more}


def num_given(engine: Parrot) -> list[int]:
    return [len(request.prefix_ids) for call in engine.calls for request in call]


# ---- prefixes ----

COSINE, FALLING = {"kind": "cosine", "start": 0.95}, {"kind": "linear", "start": 1.0, "end": 0.0}
ANY, EVEN = {"kind": "uniform", "low": 0.0, "high": 1.0}, {"kind": "even"}
DOSES = (
    ANY,
    {"kind": "uniform", "low": {**COSINE, "end": 0.05}, "high": 0.95},
    0.4,
    1,
    {"kind": "binomial", "pieces": 5, "probability": {**COSINE, "end": 0.0, "over": 0.6}},
    EVEN,
    {"kind": "levels", "shares": [0.01, 0.99]},
    {"kind": "prompt_levels", "shares": [0.99], "more_below": 0.5},
    {"kind": "difficulty", "low": 0.1, "high": 1.0, "noise": 1.0},
)


@given(
    dose=st.sampled_from(DOSES),
    trace_tokens=st.integers(1, 900),
    step=st.integers(1, STEPS),
    seed=st.integers(0, 2**31),
)
def test_a_prefix_leaves_a_token_to_write_and_is_the_same_again(collect, dose, trace_tokens, step, seed):
    """Where nothing of it is given, the row is a rollout."""
    asked = {"prefix": prefix(dose, 2)}, task("a", tuple(range(10, 10 + trace_tokens)))
    engine, (group,) = collect(*asked, step=step, seed=seed)
    assert all(0 <= tokens < trace_tokens for tokens in num_given(engine))
    assert [row.source.count(Source.OFF_POLICY) for row in group.trajectories] == num_given(engine)
    learns = isinstance(dose, dict) and dose["kind"] == "prompt_levels"
    has_start = trace_tokens > 1 or not learns  # a controller would learn from bare rows
    assert [row.start is not None for row in group.trajectories] == [False, False, has_start, has_start]
    assert num_given(collect(*asked, step=step, seed=seed)[0]) == num_given(engine)


@pytest.mark.parametrize(
    ("dose", "trace_tokens", "step", "rows", "found"),
    [
        # A share of one leaves the stop token to write, and of zero everything.
        (FALLING, 37, 1, 4, {36}),
        (FALLING, 37, 101, 4, {0}),
        (0.29, 100, 1, 4, {29}),
        # Pieces end at the token before; a trace shorter than its pieces is cut token by token.
        ({"kind": "binomial", "pieces": 4, "probability": 0.5}, 10, 1, 100, {0, 2, 5, 7, 9}),
        ({"kind": "binomial", "pieces": 5, "probability": 0.5}, 3, 1, 100, {0, 1, 2}),
        (EVEN, 100, 1, 5, [0, 25, 50, 75, 99]),
    ],
)
def test_lengths_by_hand(collect, dose, trace_tokens, step, rows, found):
    trace = tuple(range(10, 10 + trace_tokens))
    engine, (group,) = collect({"prefix": prefix(dose, rows)}, task("a", trace), step=step, size=rows)
    assert type(found)(num_given(engine)) == found
    assert {request.prefix_ids for call in engine.calls for request in call} == {trace[:number] for number in found}
    assert len(group.trajectories) == rows


def test_shared_prefixes_are_equal_in_a_group_and_drawn_anew_for_every_visit_and_step(collect: Collect) -> None:
    trace = tuple(range(10, 10**4))

    def lengths(*uids: str, step: int = 1) -> list[int]:
        shared = {"prefix": prefix(ANY, "all", shared=True)}
        return num_given(collect(shared, *(task(uid, trace) for uid in uids), step=step, seed=7)[0])

    found = [*lengths("p", "p", "q"), *lengths("p", step=2)]
    assert found == [length for length in dict.fromkeys(found) for _ in range(SIZE)] and len(set(found)) == 4


def test_starts_of_a_group_stand_in_order_and_a_second_of_a_kind_has_random_numbers_of_its_own(collect) -> None:
    starts = {
        "one": prefix(ANY), "whole": {"show": {"kind": "trace"}}, "other": prefix(ANY, 2),
        "hint": {"show": {"kind": "hint"}, "dose": 0.5, "rows": "all", "learn": "shown"},
    }  # fmt: skip
    long = replace(task_with("a\nb\nc"), demonstrations=(Demonstration("a\nb\nc", tuple(range(10, 999)), None),))
    engine, (group,) = collect(starts, long, size=6)
    assert [row.start.name for row in group.trajectories if row.start] == [
        "one", "whole", "other", "other", "hint", "hint",
    ]  # fmt: skip
    assert len({*num_given(engine)}) == 4, "those of the hint have none"
    _, (group,) = collect({"one": prefix(0.5), "two": prefix(0.5, when={"share": 1e-9})}, long)
    assert [row.start and row.start.name for row in group.trajectories] == [None, None, None, "one"]


@pytest.mark.parametrize(
    ("dose", "rows", "calls"),
    [
        # The first two rows are right: two of three rollouts; both rollouts, which need no rung; both rows of a round.
        ({"kind": "difficulty", "low": 0.2, "high": 0.8}, 1, [[0, 0, 0], [40]]),
        (
            {"kind": "ladder", "rungs": [{"share": 0.5, "below": 0.6}, {"share": 0.9, "below": 0.5}]},
            2,
            [[0] * 2, [0], [0]],
        ),
        ({"kind": "fit", "rounds": 2}, "all", [[99, 99], [50, 50]]),
    ],
)
def test_doses_that_depend_on_rows_before_are_sampled_after_them(collect, dose, rows, calls):
    engine, (group,) = collect({"prefix": prefix(dose, rows)}, task("a", tuple(range(10, 110))), least=0)
    assert [[len(request.prefix_ids) for request in call] for call in engine.calls] == calls
    assert len(group.trajectories) == len({request.seed for call in engine.calls for request in call}) == SIZE


# ---- where a trace is cut ----

FIVE_LINES = ["a\n", "b\n", "c\n", "d\n", "e", "<e>"]


@pytest.mark.parametrize(
    ("texts", "pieces", "ends"),
    [
        (["a", "\n", "b", "\n", "c", "<e>"], 10, (2, 4)),
        (["a", "\n", "b", "\n", "c", "\n", "<e>"], 10, (2, 4)),  # nothing but the stop token after the last line
        (FIVE_LINES, 2, (2,)),
        (FIVE_LINES, 3, (1, 3)),
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


@given(st.integers(2, 29), st.sampled_from([2, 3, 10]))
def test_pieces_have_as_equal_numbers_of_lines_as_they_can(num_lines: int, pieces: int) -> None:
    ends = piece_ends([*["x\n"] * (num_lines - 1), "x", "<e>"], pieces)
    lengths = [end - start for start, end in zip((0, *ends), (*ends, num_lines), strict=True)]
    assert len(lengths) == min(pieces, num_lines) and sum(lengths) == num_lines
    assert max(lengths) - min(lengths) <= 1


# ---- the search for a prefix that helps ----

TRACE = (20, LINE, 21, LINE, 22, LINE, 23, LINE, RIGHT, STOP)
"""Five lines; the first four end after 2, 4, 6 and 8 tokens."""
ANCHOR = {
    "anchor": {
        "show": {"kind": "prefix", "pieces": 10},
        **{"dose": {"kind": "search"}, "rows": "all", "keep": "nearest", "when": FAILED},
    }
}


def test_a_group_that_fails_continues_the_start_of_the_trace_which_is_context(collect: Collect) -> None:
    """One that succeeds is left alone."""
    engine, (group,) = collect(ANCHOR, task("a", TRACE), least=0)
    assert len(engine.calls) == 1 and not group.replaced
    engine, (group,) = collect(ANCHOR, task("a", TRACE), least=8)  # tries 2, 3 and 4 pieces
    assert begun_with(engine) == [[()], [TRACE[:4]], [TRACE[:6]], [TRACE[:8]]]
    assert {request.prompt_ids for call in engine.calls for request in call} == {(5, 6)}
    assert [each.is_correct for each in group.trajectories] == [True, True, False, False]
    for each in group.trajectories:
        assert each.response_ids[:8] == TRACE[:8] and len(each.response_ids) == 10
        assert each.source == (Source.OFF_POLICY,) * 8 + (Source.ON_POLICY,) * 2
        assert each.weight_version[8:] == (6, 6) and each.start == Start("anchor", 0.8)
    assert group.accuracy == 0.0 and len(group.rollouts) == SIZE, "those of the bare prompt"
    assert len(group.replaced) == 3 * SIZE
    metrics = rollout_metrics([group])
    assert (metrics["rollout/num_drawn"], metrics["rollout/tokens_drawn"]) == (4 * SIZE, 2 * 4 * SIZE)
    assert metrics["batch/on_reward"] == metrics["batch/off_policy_token_share"] - 0.8 == 0.0
    assert metrics["batch/prefix_share_mean"] == 0.8
    of_batch = {"batch/share_anchor": 0.5, "batch/solved_anchor": 1.0}
    of_rows = {"rollout/success_anchor": 2 / 12, "rollout/dose_anchor": 0.6}
    assert start_metrics([group, Group("b", (row_of(),))], ["anchor"]) == pytest.approx(of_batch | of_rows)


def test_searches_of_a_step_run_together_and_do_not_depend_on_one_another(collect: Collect) -> None:
    engine, together = collect(ANCHOR, task("a", TRACE), task("b", TRACE), task("none"), least=8)
    assert [len(call) for call in engine.calls] == [3 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE]
    for uid, group in zip("ab", together, strict=False):
        alone, (again,) = collect(ANCHOR, task(uid, TRACE), least=8)
        one, other = (
            [(row.response_ids, row.source, row.reward) for row in (*found.trajectories, *found.replaced)]
            for found in (again, group)
        )
        assert one == other
        assert len({request.seed for call in alone.calls for request in call}) == 4 * SIZE
    later, _ = collect(ANCHOR, task("a", TRACE), least=8, step=2)
    assert not {request.seed for request in later.calls[1]} & {request.seed for request in engine.calls[1]}


def test_several_traces_take_turns_over_the_steps_and_a_start_ends_before_a_stop_text(collect: Collect) -> None:
    traces = (TRACE, (30, *TRACE[1:]), (RIGHT, STOP))
    engines = [collect(ANCHOR, task("a", *traces), least=1, step=step)[0] for step in range(1, 12)]
    assert {begun_with(engine)[1][0][0] for engine in engines} == {20, 30}
    engine, _ = collect(ANCHOR, task("a", TRACE), least=1, stops=StopTexts(("x\nx\n",), decode))
    assert begun_with(engine)[1] == [TRACE[:3]]


# ---- hints ----

REASONING = "<think>one\n two\n\nthree\nfour\n</think>\\boxed{7}"
LEVELS = {"kind": "levels", "shares": [0.25, 0.5, 0.9]}


def hint(dose: object = LEVELS, rows: int | str = 3, **more: object) -> dict[str, object]:
    """Hints for groups that fail, of which the first that helps stays."""
    show = {"kind": "hint", "template": "{prompt} | {hint}"}
    return {"show": show, "dose": dose, "rows": rows, "when": FAILED, "keep": "first_correct", **more}


def task_with(*replies: str, asked: str = "What is {hint}?") -> RolloutTask:
    messages = (Message("system", "Be brief."), Message("user", asked))
    return RolloutTask("p", (1,), "7", tuple(Demonstration(text, (2,), None) for text in replies), messages=messages)


@pytest.mark.parametrize(
    ("trace", "share", "shown"),
    [
        # Never the last step; words where the trace is one line.
        (REASONING, 0.0, ""),
        (REASONING, 0.01, "one"),
        (REASONING, 0.25, "one"),
        (REASONING, 0.5, "one\n two"),
        (REASONING, 0.75, "one\n two\nthree"),
        (REASONING, 0.99, "one\n two\nthree"),
        ("so it is \\boxed{7}", 0.5, "so it"),
        ("\\boxed{7}", 0.5, ""),
        ("", 0.5, ""),
        ("<think>", 0.5, ""),
    ],
)
def test_a_hint_is_the_first_steps_of_the_reasoning(trace: str, share: float, shown: str) -> None:
    assert hint_text(trace, share) == shown


@pytest.mark.parametrize("learn", ["bare", "shown"])
def test_the_hint_stands_in_the_last_message_of_a_prompt_of_its_own(collect: Collect, learn: str) -> None:
    engine, (group,) = collect({"hint": hint(rows=6, learn=learn)}, task_with(REASONING))
    bare, hinted = engine.calls
    assert {request.prompt_ids for request in bare} == {(1,)}
    texts = [read(request.prompt_ids).removeprefix("What is {hint}? | ") for request in hinted]
    shown = ["one", "one\n two", "one\n two\nthree"]
    assert texts == [text for text in shown for _ in range(2)]
    rows = group.of_start("hint")
    assert [row.start for row in rows] == [
        Start("hint", dose, text) for dose, text in zip((0.25, 0.5, 0.9), shown, strict=True) for _ in range(2)
    ]
    for row, request in zip(rows, hinted, strict=True):
        assert row.prompt_ids == ((1,) if learn == "bare" else request.prompt_ids)
        assert {*row.source} == {Source.HINTED if learn == "bare" else Source.ON_POLICY}


def test_tasks_without_a_trace_of_two_steps_have_no_hints_and_several_traces_take_turns(collect: Collect) -> None:
    half = {"hint": hint(0.5, 1)}
    engine, _ = collect(half, task_with(), task_with("\\boxed{7}"))
    assert len(engine.calls) == 1
    both = task_with("a\nb\n7", "\\boxed{7}", "c\nd\n7")
    first, again = (
        [hinted_rows(group)[0].start.shown for step in range(1, 30) for group in collect(half, both, step=step)[1]]
        for _ in range(2)
    )
    assert {*first} == {"a", "c"} and first == again


def test_a_hint_of_no_share_is_the_bare_prompt(collect: Collect) -> None:
    falling = hint(FALLING, "all", when=None, keep="all", learn="shown")
    for step, is_hinted in ((1, True), (STEPS, False)):
        engine, (group,) = collect({"hint": falling}, task_with(REASONING), step=step)
        assert [row.is_hinted for row in group.trajectories] == [is_hinted] * SIZE
        assert ({request.prompt_ids for request in engine.calls[0]} == {(1,)}) != is_hinted


def test_the_longest_prompt_is_that_of_the_highest_level_and_hints_begin_after_their_share_of_the_steps(collect):
    tasks = [task_with(), task_with("a\nb"), task_with(REASONING)]
    (start,) = opened(hint=hint())
    assert start.longest_prompt(tasks) == len("What is {hint}? | one\n two\nthree")
    assert start.longest_prompt(tasks[:1]) == 0
    (start,) = opened(prefix=prefix(0.5))
    assert start.longest_prompt(tasks) == 0
    later = {"hint": hint(when={**FAILED, "after": 0.29})}
    calls = [len(collect(later, tasks[2], step=step)[0].calls) for step in (1, 29, 30, 100)]
    assert calls == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("keep", "rollouts", "hinted", "learned", "replaced"),
    [
        ("all", [0, 0, 0], [1, 0], (3, 11, 12), (1, 2)),
        ("first_correct", [1, 0, 0, 0], [0, 1], (1, 3, 4, 12), (2, 11)),
        ("first_correct", [0, 0, 0, 0], [0], (1, 2, 3, 4), (11,)),
        ("first_correct", [1, 0], [0, 1, 1], (1, 12), (2, 11, 13)),
        ("all_correct", [1, 0], [0, 1, 1], (1, 12), (2, 11, 13)),
        ("all_correct", [0, 0, 0], [0, 1, 1], (3, 12, 13), (1, 2, 11)),
        ("best", [1, 0], [0, 1, 1], (2, 12), (1, 11, 13)),
        ("best", [1, 0], [0, 0], (2, 11), (1, 12)),
        ("beside", [0, 0], [0, 1, 1], (1, 2, 12, 13), ()),
    ],
)
def test_which_rows_of_a_second_round_stay_and_for_which_rollouts(keep, rollouts, hinted, learned, replaced):
    """Rollouts are 1, 2, ..., the others 11, 12, ...; hints change nothing of the prompt's accuracy."""
    group = Group("p", tuple(row_of(reward, (place,)) for place, reward in enumerate(rollouts, start=1)))
    shown = Start("hint", 0.5, "a")
    helped = tuple(row_of(reward, (place,), Source.HINTED, start=shown) for place, reward in enumerate(hinted, 11))
    (start,) = opened(hint=hint(0.5, keep=keep))
    found = start.changed(group, [StartRound(0.5, helped)])
    assert tuple(row.response_ids[0] for row in found.learned) == learned
    assert tuple(row.response_ids[0] for row in found.replaced) == replaced
    assert (found.accuracy, len(found.rollouts)) == (group.accuracy, len(rollouts))
    assert len(hinted_rows(found)) == len(hinted)
    assert keep != "beside" or (replace(found, beside=()), found.beside) == (group, helped)


# ---- a second round that shows the first ----

EACH = {
    "about": "each", "right": "Yes: {reference}.", "wrong": "No: {answers} is not {reference}.",
    "template": "{prompt} | {response} | {feedback}",
}  # fmt: skip
ALL = {"about": "all", "wrong": "Not {answers}.", "truncated": "Be brief.", "template": "{prompt} | {feedback}"}
ASKED = "How many {answers}?"
TASK = task_with(asked=ASKED)


def row(answer: str, *, right: bool = False, cut: bool = False) -> Trajectory:
    """A response whose text is `said ANSWER`."""
    ids = tuple(map(ord, f"said {answer}"))
    end = FinishReason.LENGTH if cut else FinishReason.STOP
    return replace(row_of(float(right)), response_ids=ids, answer=answer, finish_reason=end)


SEVEN = row("7", right=True)
EIGHT_AND_NINE = ["said 8 | No: 8 is not 7.", "said 9 | No: 9 is not 7."]


def critique(show: Mapping[str, object], rows: int = 3, context: int | None = None) -> GroupStart:
    config = {"show": {"kind": "critique", **show}, "rows": rows, "when": FAILED, "keep": "best"}
    return opened(critique=config)[0].with_room([TASK], 40, context)


@pytest.mark.parametrize(
    ("show", "num_rows", "rows", "shown"),
    [
        (EACH, 3, [row("8"), SEVEN], ["said 8 | No: 8 is not 7.", "said 7 | Yes: 7.", "said 8 | No: 8 is not 7."]),
        # Each in its turn; of three wrong ones, the first two.
        ({**EACH, "right": None}, 2, [row("8"), SEVEN, row("9"), row("3")], EIGHT_AND_NINE),
        ({**EACH, "right": None}, 3, [SEVEN], []),
        (EACH, 1, [row("{reference}")], ["said {reference} | No: {reference} is not 7."]),
        # One prompt is about all wrong responses, and names each answer once.
        (ALL, 2, [row("8"), row("9"), row("8"), SEVEN], ["Not 8, 9."] * 2),
        (ALL, 2, [row("8", cut=True), row("9")], ["Be brief. Not 9."] * 2),
        (ALL, 2, [row("8", cut=True), row("", cut=True)], ["Be brief."] * 2),
        (ALL, 2, [SEVEN], []),
        # Those that are too long are left out: by default, longer than the longest prompt and 40 tokens.
        (EACH, 3, [row("8"), row("8" * 60), row("9")], EIGHT_AND_NINE),
        ({**EACH, "max_prompt_tokens": 46}, 3, [row("8"), row("10"), row("9")], EIGHT_AND_NINE),
        ({**EACH, "max_prompt_tokens": 45}, 3, [row("8"), row("10"), row("9")], []),
    ],
)
def test_prompts_of_a_second_round_show_responses_and_their_verdicts(show, num_rows, rows, shown):
    found = critique(show, num_rows).critiques(Visit(TASK, 1, 0), rows)
    assert not any(prompt.is_learned_from for prompt in found)
    assert [read(prompt.prompt_ids) for prompt in found] == [f"{ASKED} | {text}" for text in shown]


@pytest.mark.parametrize(("changes", "longest"), [({}, 91), ({"max_prompt_tokens": 64}, 64)])
def test_a_model_without_room_for_the_second_round_is_refused_with_the_number(changes, longest):
    with pytest.raises(DataError, match=rf"have {longest} tokens, .* leave {longest - 1}; .* most {longest - 1}"):
        critique({**EACH, **changes}, context=longest + 39)
    assert critique({**EACH, **changes}, context=longest + 40).longest_prompt([TASK]) == longest


def test_a_critique_that_quotes_no_response_is_as_long_as_its_texts() -> None:
    answer = {"about": "all", "wrong": "It is {reference}.", "template": "{prompt} | {feedback}"}
    (prompt,) = critique(answer, rows=1).critiques(Visit(TASK, 1, 0), [row("8" * 60)])
    assert read(prompt.prompt_ids) == f"{ASKED} | It is 7."
    longest = len(prompt.prompt_ids)
    assert critique(answer, context=longest + 40).longest_prompt([TASK]) == longest
