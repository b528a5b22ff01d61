"""How much of a trace a row begins with: prefixes, and the branches of a search; and which traces the trainer takes."""

from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic.trajectories import row_of

from luffy.config.group import AnchorConfig, GroupConfig, PrefixConfig
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import Demonstration, RolloutTask, Visit
from luffy.rl.trace_choice import TraceChoice
from luffy.rl.trace_starts import Anchors, AnchorSearch, piece_ends, prefix_length
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, StopTexts
from luffy.tracking.rollout_metrics import anchor_metrics, rollout_metrics
from luffy.types import ANSWER_PROBABILITY, FinishReason, Group, Source, Trajectory

COSINE = {"kind": "cosine", "start": 0.95}
EVENLY = {"kind": "evenly_spaced"}
LENGTHS = (
    {"kind": "uniform", "low": 0.0, "high": 1.0},
    {"kind": "uniform", "low": {**COSINE, "end": 0.05}, "high": 0.95},
    {"kind": "uniform", "low": 0.4, "high": 0.4},
    {"kind": "binomial", "chunks": 5, "probability": {**COSINE, "end": 0.0, "over": 0.6}},
    EVENLY,
)


def _config(length: dict, shared: bool = False) -> PrefixConfig:
    return PrefixConfig.model_validate({"length": length, "shared": shared})


def _visit(step: int, uid: str = "p", repeat: int = 0) -> Visit:
    return Visit(RolloutTask(uid, (), "", ()), step, repeat)


def _lengths(length: dict, trace_tokens: int, step: int = 1, rows: int = 500) -> list[int]:
    return [prefix_length(_config(length), trace_tokens, _visit(step), i, rows, 101, 7) for i in range(rows)]


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


def test_binomial_prefixes_end_at_chunks_with_the_binomial_s_shares() -> None:
    length = {"kind": "binomial", "chunks": 4, "probability": 0.5}
    found = _lengths(length, 10, rows=4000)
    assert set(found) == {0, 2, 5, 7, 9}
    for tokens, probability in {0: 1 / 16, 2: 4 / 16, 5: 6 / 16, 7: 4 / 16, 9: 1 / 16}.items():
        error = (probability * (1 - probability) / 4000) ** 0.5
        assert found.count(tokens) / 4000 == pytest.approx(probability, abs=4 * error)


FALLING = {"kind": "linear", "start": 1.0, "end": 0.0}


@pytest.mark.parametrize(
    ("length", "trace_tokens", "step", "rows", "found"),
    [
        # A share of one leaves the stop token to write, and of zero everything.
        ({"kind": "uniform", "low": FALLING, "high": FALLING}, 37, 1, 500, {36}),
        ({"kind": "uniform", "low": FALLING, "high": FALLING}, 37, 101, 500, {0}),
        ({"kind": "uniform", "low": 0.29, "high": 0.29}, 100, 1, 500, {29}),
        # A trace shorter than its chunks is cut token by token.
        ({"kind": "binomial", "chunks": 5, "probability": 0.5}, 3, 1, 500, {0, 1, 2}),
        # Rows go from low to high, and a lone one stands between.
        (EVENLY, 100, 1, 5, [0, 25, 50, 75, 99]),
        ({**EVENLY, "low": 0.2, "high": 0.6}, 100, 1, 3, [20, 40, 60]),
        ({**EVENLY, "low": 0.2, "high": 0.6}, 100, 1, 1, [40]),
    ],
)
def test_lengths_by_hand(length, trace_tokens, step, rows, found):
    assert type(found)(_lengths(length, trace_tokens, step, rows)) == found


def test_shared_prefixes_are_equal_in_a_group_and_drawn_anew_for_every_visit_and_step() -> None:
    config = _config({"kind": "uniform", "low": 0.0, "high": 1.0}, shared=True)

    def tokens(index: int = 0, visit: int = 0, step: int = 1, uid: str = "p") -> int:
        return prefix_length(config, 10**6, _visit(step, uid, visit), index, 4, 10, 7)

    assert len({tokens(index=i) for i in range(4)}) == 1
    assert len({tokens(), tokens(visit=1), tokens(step=2), tokens(uid="q")}) == 4


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


# ---- how the search goes ----

RIGHT, WRONG, STOP, LINE = 1, 2, 3, 4
SIZE = 4
TRACE = (20, LINE, 21, LINE, 22, LINE, 23, LINE, RIGHT, STOP)
"""Five lines; the first four end after 2, 4, 6 and 8 tokens."""
EXACTLY_HALF = {"success_at_least": 0.5, "success_at_most": 0.5}


@pytest.mark.parametrize(
    ("successes", "num_pieces", "bounds", "tried", "num_right"),
    [
        # It ends with the first number within the bounds.
        ({5: 0.5}, 10, {}, [5], 2),
        ({5: 0.0, 7: 0.75}, 10, {}, [5, 7], 3),
        ({5: 1.0, 2: 0.25}, 10, {}, [5, 2], 1),
        # Without one, the shortest start that succeeds is taken, and without a success the bare rollouts stay.
        *(
            ({count: float(count >= first) for count in range(1, 10)}, 10, {}, tried, SIZE)
            for first, tried in {
                1: [5, 2, 1], 2: [5, 2, 1], 3: [5, 2, 3], 4: [5, 2, 3, 4], 5: [5, 2, 3, 4], 6: [5, 7, 6],
                7: [5, 7, 6], 8: [5, 7, 8], 9: [5, 7, 8, 9],
            }.items()
        ),
        (dict.fromkeys(range(1, 10), 0.0), 10, {}, [5, 7, 8, 9], 0),
        # Of tries outside the bounds the nearest is taken: 0.25 is nearer to 0.5 than 1.0.
        ({5: 1.0, 2: 0.25, 3: 1.0, 4: 1.0}, 10, EXACTLY_HALF, [5, 2, 3], 1),
        ({1: 0.0}, 2, {}, [1], 0),
    ],
)  # fmt: skip
def test_the_search_for_the_number_of_pieces(successes, num_pieces, bounds, tried, num_right):
    """`successes`: the share of correct rows for each number."""
    search = AnchorSearch(AnchorConfig(**bounds), Demonstration("", TRACE, None), range(1, num_pieces))
    numbers = []
    while (count := search.num_pieces) is not None:
        assert search.num_given == count
        numbers.append(count)
        correct = round(SIZE * successes[count])
        search.observe([row_of(place < correct, (count,)) for place in range(SIZE)])
    assert numbers == tried
    group = search.group(Group("p", tuple(row_of(False, (0,)) for _ in range(SIZE))))
    assert sum(row.is_correct for row in group.trajectories) == num_right
    (taken,) = {row.response_ids[0] for row in group.trajectories}
    assert all(taken <= other for other, share in successes.items() if share * SIZE == num_right > 0 and other in tried)
    assert bool(taken) == (num_right > 0) and len(group.trajectories) == SIZE
    assert len(group.replaced) == SIZE * len(tried), "every sampled row is kept"


class Engine:
    """The first half of a group is right where at least so many tokens are given."""

    def __init__(self, least: int) -> None:
        self.calls: list[list[RolloutRequest]] = []
        self._least = least

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.calls.append(list(requests))
        is_right = [i % SIZE < SIZE / 2 and len(one.prefix_ids) >= self._least for i, one in enumerate(requests)]
        return [
            Completion((RIGHT if right else WRONG, STOP), (-0.5, -0.25), FinishReason.STOP, weight_versions=(6, 6))
            for right in is_right
        ]

    def close(self) -> None: ...

    @property
    def given(self) -> list[list[tuple[int, ...]]]:
        """What the groups of each call begin with."""
        return [[request.prefix_ids for request in call[::SIZE]] for call in self.calls]


def decode(ids: Sequence[int]) -> str:
    texts = {LINE: "\n", RIGHT: r"\boxed{7}", WRONG: r"\boxed{8}", STOP: ""}
    return "".join(texts.get(token_id, "x") for token_id in ids)


Collect = Callable[..., tuple[Engine, list[Group]]]


@pytest.fixture
def collect(grader: GraderPool) -> Collect:
    """The groups of tasks, where starts of this many tokens or more succeed half of the time, shorter ones never."""

    def collected(
        least: int, *tasks: RolloutTask, step: int = 1, stops: StopTexts | None = None
    ) -> tuple[Engine, list[Group]]:
        engine, anchor = Engine(least), AnchorConfig()
        collector = GroupCollector(
            grader, decode, SamplingParams(1.0, 16, ()), GroupConfig(size=SIZE, off_policy=0, anchor=anchor), seed=0,
            total_steps=10, stops=stops, anchors=Anchors(anchor, decode, seed=0),
        )  # fmt: skip
        return engine, collector.collect(engine, tasks, step)

    return collected


def task(uid: str = "a", *traces: tuple[int, ...]) -> RolloutTask:
    return RolloutTask(uid, (5, 6), "7", tuple(Demonstration(decode(ids), ids, None) for ids in traces))


def test_a_group_that_fails_continues_the_start_of_the_trace_which_is_context(collect: Collect) -> None:
    """That groups which succeed, or have no trace to cut, are left alone is shown by `test_composition.py`."""
    engine, (group,) = collect(8, task("a", TRACE))  # tries 2, 3 and 4 pieces
    assert engine.given == [[()], [TRACE[:4]], [TRACE[:6]], [TRACE[:8]]]
    assert {request.prompt_ids for call in engine.calls for request in call} == {(5, 6)}
    assert [each.is_correct for each in group.trajectories] == [True, True, False, False]
    for each in group.trajectories:
        assert each.response_ids[:8] == TRACE[:8] and len(each.response_ids) == 10
        assert each.source == (Source.OFF_POLICY,) * 8 + (Source.ON_POLICY,) * 2
        assert each.weight_version[8:] == (6, 6)
    assert group.accuracy == 0.0 and len(group.rollouts) == SIZE, "those of the bare prompt"
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


def test_searches_of_a_step_run_together_and_do_not_depend_on_one_another(collect: Collect) -> None:
    engine, together = collect(8, task("a", TRACE), task("b", TRACE), task("none"))
    assert [len(call) for call in engine.calls] == [3 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE]
    for uid, group in zip("ab", together, strict=False):
        alone, (again,) = collect(8, task(uid, TRACE))
        one, other = (
            [(row.response_ids, row.source, row.reward) for row in (*found.trajectories, *found.replaced)]
            for found in (again, group)
        )
        assert one == other
        assert len({request.seed for call in alone.calls for request in call}) == 4 * SIZE
    later, _ = collect(8, task("a", TRACE), step=2)
    assert not {request.seed for request in later.calls[1]} & {request.seed for request in engine.calls[1]}


def test_several_traces_take_turns_over_the_steps_and_a_start_ends_before_a_stop_text(collect: Collect) -> None:
    traces = (TRACE, (30, *TRACE[1:]), (RIGHT, STOP))
    given = [collect(1, task("a", *traces), step=step)[0].given[1][0] for step in range(1, 12)]
    assert {ids[0] for ids in given} == {20, 30}
    engine, _ = collect(1, task("a", TRACE), stops=StopTexts(("x\nx\n",), decode))
    assert engine.given[1] == [TRACE[:3]]


# ---- the trainer's choice among traces ----

PIECES = ("", "so ", "{5", "5", "6", "}", "\n", "56", "x")
"""The text of each token; `encode` takes the longest that fits."""
CHOICE = TraceChoice(lambda ids: "".join(PIECES[token] for token in ids), lambda text: _encoded(text), longest=20)
SO = 1


def _encoded(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    best = max((piece for piece in PIECES if piece and text.startswith(piece)), key=len)
    return (PIECES.index(best), *_encoded(text[len(best) :]))


def _trace(*ids: int, answer: str = "56") -> Trajectory:
    unknown = {"logp_behavior": (float("nan"),) * len(ids), "weight_version": (-1,) * len(ids)}
    return row_of(1.0, ids, Source.OFF_POLICY, prompt_ids=(1, 2), answer=answer, **unknown)


@pytest.mark.parametrize(
    ("ids", "answer", "reference", "given", "scored"),
    [
        ((SO, 7, 6, SO, 7, 5, 0), "56", "65", (SO, 7, 6, SO), (4, 3)),  # the last place of the answer
        ((SO, 3, 4, 5), "56", "56", (SO,), (7,)),  # encoded as the reference would be
        ((SO, 2, 4, 5), "56", "56", (SO,), (2, 4)),  # the answer begins within a token
        ((7,), "56", "56", (), (7,)),
        ((*[SO] * 17, 7), "56", "56", (SO,) * 17, (7,)),
        ((*[SO] * 18, 7), "56", "56", None, None),  # 2 + 18 + 1 tokens are more than 20
        ((SO, 8), "56", "56", None, None),  # the answer is not in the text
        ((SO, 7), "", "56", None, None),
        ((SO, 7), "56", "", None, None),
    ],
)
def test_the_reference_answer_is_scored_in_the_place_of_the_traces_own(ids, answer, reference, given, scored):
    probe = CHOICE.probe(_trace(*ids, answer=answer), reference)
    if given is None:
        assert probe is None
        return
    assert probe.prompt_ids == (1, 2) and probe.response_ids == given + scored
    assert probe.source == (Source.ENVIRONMENT,) * len(given) + (Source.OFF_POLICY,) * len(scored)
    assert probe.num_learnable == len(scored) == sum(source is Source.OFF_POLICY for source in probe.source)


@pytest.mark.parametrize(
    ("traces", "scores", "chosen"),
    [
        # The highest scores stay, and ties go to those whose turn it is; a trace that cannot be scored comes last.
        ([(7,), (SO, 7), (SO, SO, 7), (SO, SO, SO, 7)], [0.1, 0.4, 0.2, 0.3], (1, 3)),
        ([(7,), (SO, 7), (SO, SO, 7), (SO, SO, SO, 7)], [0.5] * 4, (0, 1)),
        ([(7,), (SO, 7), (SO, SO, 7), (SO, SO, SO, 7)], [0.1, 0.2, 0.2, 0.1], (1, 2)),
        ([(8,), (SO, 7), (7,)], [0.0, 0.1, 0.2], (2, 1)),
    ],
)
def test_a_failed_group_learns_from_the_traces_of_the_highest_scores(traces, scores, chosen):
    """Of a group of four with two of these traces; groups without a choice are untouched, and not scored."""
    rows, wrong, scorable = [_trace(*ids) for ids in traces], row_of(0.0), [score for score in scores if score]
    others = [Group("p", (row_of(1.0), *[wrong] * 3)), Group("p", (wrong, *rows[:2]), (wrong, wrong))]
    group = Group("p", (wrong, wrong, *rows[:2]), (wrong, wrong, *rows[2:]))

    def score(asked: Sequence[Trajectory]) -> list[float]:
        assert len(asked) == len(scorable)
        return scorable

    *untouched, found = CHOICE.made([*others, group], {"p": RolloutTask("p", (1, 2), "56", ())}, score)
    assert untouched == others
    assert found.rollouts == [wrong] * 4 and len(found.trajectories) == 4
    measured = [(row.response_ids, row.measures[ANSWER_PROBABILITY]) for row in found.trajectories[2:]]
    assert measured == [(traces[place], scores[place]) for place in chosen]
    left = [place for place in range(len(traces)) if place not in chosen]
    assert sorted(row.measures[ANSWER_PROBABILITY] for row in found.replaced[2:]) == sorted(scores[i] for i in left)
