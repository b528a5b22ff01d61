"""How much of a trace is shown: the rule of every dose, and what controllers know of earlier steps."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from reference.doses import seele_dose
from synthetic.trajectories import row_of

from luffy.config.starts import Dose, StartConfig, TracePrefix
from luffy.rl.doses import Ask, Memory, StartRound, dose_of, fitted_dose, memory_of
from luffy.rl.group_starts import GroupStart, Texts, open_starts
from luffy.types import FinishReason, Group, Start

TOTAL = 101
FALLING = {"kind": "linear", "start": 1.0, "end": 0.0}
EVEN, SEARCH = {"kind": "even"}, {"kind": "search"}
LADDER = {"kind": "ladder", "rungs": [{"rows": 2, "share": 0.25, "below": 0.5}, {"share": 0.5, "below": 0.7}]}
DIFFICULTY = {"kind": "difficulty", "low": 0.2, "high": 0.8}
LEVELS = {"kind": "prompt_levels", "shares": [0.1, 0.2, 0.4], "more_below": 0.5, "fewer_above": 0.75}
BISECTION, FRONTIER = {"kind": "prompt_bisection"}, {"kind": "prompt_frontier"}
RATIO = {"kind": "batch_ratio", "first": 0.8}
ROOT = {"kind": "batch_root", "every": 2, "gain": 0.5, "envelope": 0.9}


DOSE: TypeAdapter[Dose] = TypeAdapter(Dose)


@cache
def _start(dose: str) -> GroupStart:
    config = StartConfig.model_construct(show=TracePrefix(kind="prefix"), dose=DOSE.validate_json(dose))
    (start,) = open_starts({"s": config}, Texts(lambda messages: (), str, str), seed=7, total_steps=TOTAL, size=4)
    return start


def start_of(dose: object) -> GroupStart:
    return _start(json.dumps(dose))


def asked(dose: object, *uniform: float, step: int = 1, index: int = 0, count: int = 1, length: int = 10, **more: Any):
    """The dose of one row whose random numbers are `uniform`."""
    ask = Ask(step, TOTAL, index, count, length, uniform.__getitem__, more.pop("known", {}), **more)
    return dose_of(start_of(dose).config.dose, ask)


# ---- the rules ----


@pytest.mark.parametrize(
    ("dose", "uniform", "ask", "expected"),
    [
        (0.29, (), {}, 0.29),
        (FALLING, (), {"step": 26}, 0.75),
        ({"kind": "uniform", "low": 0.2, "high": FALLING}, (0.25,), {"step": 1}, 0.4),
        ({"kind": "uniform", "low": FALLING, "high": 1.0}, (0.5,), {"step": 51}, 0.75),
        # Three of five pieces, or of as many as a short trace has tokens.
        ({"kind": "binomial", "probability": 0.5}, (0.1, 0.5, 0.4, 0.9, 0.0), {}, 0.6),
        ({"kind": "binomial", "probability": 0.5}, (0.1, 0.5, 0.4), {"length": 3}, 2 / 3),
        # Rows go from low to high, and a lone one stands between.
        *((EVEN, (), {"index": i, "count": 5}, i / 4) for i in range(5)),
        ({**EVEN, "low": 0.2, "high": 0.6}, (), {}, 0.4),
        *(({"kind": "levels", "shares": [0.25, 0.5]}, (), {"index": i, "count": 4}, (0.25, 0.25, 0.5, 0.5)[i])
          for i in range(4)),
        # A rung is for groups whose rows so far fail too often, of which there have to be some.
        (LADDER, (), {"so_far": 0.4}, 0.25),
        (LADDER, (), {"so_far": 0.5}, 0.0),
        (LADDER, (), {"so_far": None}, 0.0),
        (LADDER, (), {"so_far": 0.5, "round": 1}, 0.5),
        (DIFFICULTY, (0.9,), {"bare": 0.25}, 0.65),
        (DIFFICULTY, (0.9,), {"bare": None}, 0.2),
        ({**DIFFICULTY, "noise": 0.1}, (0.75,), {"bare": 1.0}, 0.25),
        ({**DIFFICULTY, "noise": 0.6}, (0.75,), {"bare": 0.0}, 1.0),
        (LEVELS, (), {}, 0.1),
        (LEVELS, (), {"known": {"level": 3}}, 0.4),
        (BISECTION, (0.3,), {}, 0.3),
        (BISECTION, (0.5,), {"known": {"interval": [0.2, 0.6]}}, 0.4),
        # At most as many steps as the frontier has, and never the last one.
        (FRONTIER, (0.99,), {}, 0.9),
        (FRONTIER, (0.99,), {"known": {"frontier": 0.3}}, 0.3),
        (FRONTIER, (0.0,), {"known": {"frontier": 0.3}}, 0.0),
        (RATIO, (), {}, 0.8),
        (RATIO, (), {"known": {"share": 0.6}}, 0.6),
        # Beside the share of all, what the prompt itself is away from the target, under the envelope.
        (ROOT, (), {}, 0.5),
        (ROOT, (), {"known": {"share": 0.4, "success": 0.1}}, 0.6),
        (ROOT, (), {"known": {"share": 0.1, "success": 1.0}}, 0.0),
        (ROOT, (), {"known": {"share": 0.8, "success": 0.0}}, 0.9),
        ({**ROOT, "envelope": FALLING}, (), {"step": 91}, 0.1),
        ({"kind": "fit", "first": 0.7}, (), {}, 0.7),
        ({"kind": "fit", "first": 0.7}, (), {"tried": (StartRound(0.7, ()),)}, 0.7),
    ],
)  # fmt: skip
def test_doses_by_hand(dose: object, uniform: tuple[float, ...], ask: dict[str, Any], expected: float) -> None:
    assert asked(dose, *uniform, **ask) == pytest.approx(expected)


# ---- several rounds in one group ----

SIZE = 4
EXACTLY_HALF = {"at_least": 0.5, "at_most": 0.5}


def _rows(dose: float, num_right: int, first: int = 0) -> tuple:
    start = Start("s", dose)
    return tuple(row_of(place < num_right, (first,), start=start) for place in range(SIZE))


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
    tries: list[StartRound] = []
    while (dose := asked({**SEARCH, **bounds}, length=num_pieces, tried=tuple(tries))) is not None:
        pieces = round(dose * num_pieces)
        tries.append(StartRound(dose, _rows(dose, round(SIZE * successes[pieces]), pieces)))
    assert [round(each.dose * num_pieces) for each in tries] == tried
    bare = Group("p", tuple(row_of(False, (0,)) for _ in range(SIZE)))
    group = start_of({**SEARCH, **bounds}).changed(bare, tries)
    assert sum(row.is_correct for row in group.trajectories) == num_right
    (taken,) = {row.response_ids[0] for row in group.trajectories}
    assert all(taken <= other for other, share in successes.items() if share * SIZE == num_right > 0 and other in tried)
    assert bool(taken) == (num_right > 0) and len(group.trajectories) == SIZE
    assert len(group.replaced) == SIZE * len(tried), "every sampled row is kept"


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ([(1.0, 1.0)], 0.5),
        ([(1.0, 0.5)], 1.0),
        ([(0.4, 0.0)], 0.7),
        # Half succeed without anything: nothing is given.
        ([(0.1, 0.75), (0.5, 0.75), (1.0, 1.0)], 0.0),
        # Success is at the target between a failure and a success, as exactly as a step shows.
        ([(0.2, 0.0), (0.8, 1.0)], 0.5),
    ],
)
def test_a_fitted_dose_by_hand(tried: list[tuple[float, float]], expected: float) -> None:
    assert fitted_dose(tuple(tried), 0.5) == pytest.approx(expected, abs=0.05)
    rounds = tuple(StartRound(dose, _rows(dose, round(success * SIZE))) for dose, success in tried)
    assert asked({"kind": "fit"}, tried=rounds) == fitted_dose(tuple(tried), 0.5)


@pytest.mark.parametrize(
    "rounds",
    [
        [(0.0, 0.25), (0.6, 0.375), (0.7, 0.75), (0.8, 0.75)],
        # Each bound of the fit: the slope's, the middle's and the least success's; success that falls with the dose.
        [(0.2, 0.6), (0.8, 0.5)],
        [(0.4, 0.0), (0.44, 0.25)],
        [(0.0, 0.625), (0.6, 0.25), (1.0, 0.5)],
        [(0.1, 0.5), (0.4, 0.625), (0.9, 1.0)],
    ],
)
def test_a_fitted_dose_is_on_the_best_of_all_curves(rounds: list[tuple[float, float]]) -> None:
    assert fitted_dose(tuple(rounds), 0.5) == pytest.approx(seele_dose(rounds), abs=0.01)


@given(middle=st.floats(0.2, 0.8), slope=st.floats(4, 20), least=st.floats(0, 0.3), num=st.integers(2, 4))
def test_a_fitted_dose_meets_the_target_on_the_curve_that_was_tried(middle, slope, least, num):
    least = least if num > 2 else 0.0  # two points do not show it

    def success(dose: float) -> float:
        return least + (1 - least) / (1 + math.exp(-slope * (dose - middle)))

    found = fitted_dose(tuple((dose, success(dose)) for dose in (middle + 0.2, middle - 0.15, middle, 0.0)[:num]), 0.5)
    assert 0 <= found <= 1 and success(found) == pytest.approx(0.5, abs=0.03)


# ---- what earlier steps have taught ----


def memory(dose: object, ahead: int = 0) -> Memory:
    found = memory_of("s", start_of(dose).config, ahead)
    assert found is not None
    return found


def group_of(uid: str, dose: float | None, success: float, num: int = 4) -> Group:
    """A group all of whose rows have the start; without a dose, none."""
    start = None if dose is None else Start("s", dose)
    return Group(uid, tuple(row_of(place < round(success * num), start=start) for place in range(num)))


@pytest.mark.parametrize(
    ("dose", "seen", "name", "known"),
    [
        # Up below half, down above three quarters, between levels 1 and 3.
        (LEVELS, [(0.1, x) for x in (0, 0, 0, 0.5, 1, 1, 1, 0)], "level", [2, 3, 3, 3, 2, 1, 1, 2]),
        ({**LEVELS, "fewer_above": None}, [(0.1, x) for x in (0, 1, 0)], "level", [2, 2, 3]),
        # A dose that lies above the interval has been overtaken by another group of the prompt.
        (BISECTION, [(0.6, 0.25), (0.8, 0.5), (0.4, 0), (0.9, 0)], "interval",
         [[0.6, 1], [0, 0.8], [0.4, 0.8], [0.9, 1]]),
        (FRONTIER, [(0.8, 0), (0.5, 1), (0.75, 1), (0.25, 0.25), (0.25, 0.5), (0.75, 0)], "frontier",
         [1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        # In every third step times the mean of the two before over its own; nothing where one of them is 0.
        (RATIO, [(1, 0.25), (1, 0.5), (1, 0.5), (1, 0.25), (1, 0.5), (1, 0.75)], "share",
         [None, None, 0.6, 0.6, 0.6, 0.3]),
        (RATIO, [(1, 0), (1, 0), (1, 0.5), (1, 0.5), (1, 0.5), (1, 0)], "share", [None] * 6),
        (RATIO, [(1, 1), (1, 1), (1, 0.25)], "share", [None, None, 1.0]),
        ({**RATIO, "every": 1}, [(1, 0.5), (1, 0.25), (1, 0.5)], "share", [None, None, 0.6]),
        # Two steps are one point: to the middle of what is not tried, then to the root between two points.
        (ROOT, [(0.5, 0), (0.5, 0.5), (0.75, 0.75), (0.75, 0.75)], "share", [None, 0.75, 0.75, 0.625]),
        (ROOT, [(0.5, 0), (0.5, 0), (0.9, 1), (0.9, 1), (0.4, 1), (0.4, 1)], "share",
         [None, 0.75, 0.75, 0.7, 0.7, 0.2]),
        # A root at an end of the bracket stays a tenth away from it; a failure above the bracket opens it.
        (ROOT, [(0.5, 0), (0.5, 0), (0.9, 0.5), (0.9, 0.5), (0.95, 0.25), (0.95, 0.25)], "share",
         [None, 0.75, 0.75, 0.86, 0.86, 0.975]),
        (ROOT, [(0.5, 0.5), (0.5, 0.5)], "share", [None, 0.25]),
        (ROOT, [(0.5, 0), (0.5, 1), (0.5, 1)], "success", [0, 0.5, 0.75]),
    ],
)  # fmt: skip
def test_what_a_prompts_groups_teach_by_hand(dose, seen, name, known):
    """One group a step, with this dose and share of correct rows."""
    taught, found = memory(dose), []
    for step, (shown, success) in enumerate(seen, start=1):
        taught.observe(step, [group_of("p", shown, success)])
        found.append(taught.known_to(step + 1)("p").get(name))
        other = taught.known_to(step + 1)("q")
        assert not other if taught.is_of_prompt else "success" not in other, "a prompt without a visit"
    assert found == [value if value is None else pytest.approx(value) for value in known]


@pytest.mark.parametrize("dose", [LEVELS, BISECTION, FRONTIER, ROOT, RATIO])
def test_a_group_without_the_start_teaches_accuracy_alone_and_an_open_one_nothing(dose: Mapping[str, object]) -> None:
    first, interrupted = group_of("p", 0.6, 0.25), row_of(math.nan, finish_reason=FinishReason.INTERRUPTED)
    silent = [Group("p", (*first.trajectories, interrupted)), Group("q", ())]
    one, other = memory(dose), memory(dose)
    one.observe(1, [first, *silent])
    other.observe(1, [first])
    assert one.fold.state() == other.fold.state()
    one.observe(2, [group_of("p", None, 0.5)])
    other.observe(2, [])
    same = one.known_to(3)("p") == other.known_to(3)("p")
    assert same == (dose is not RATIO)
    assert dose is not RATIO or one.known_to(3)("p")["accuracies"] == [0.25, 0.5]


@pytest.mark.parametrize("dose", [LEVELS, BISECTION, FRONTIER, ROOT, RATIO])
def test_rows_without_the_start_beside_those_with_it_count_in_the_accuracy_alone(dose: Mapping[str, object]) -> None:
    first, found = group_of("p", 0.6, 0.25), []
    for group in (first, replace(first, trajectories=(*first.trajectories, *[row_of(1.0)] * 4))):
        taught = memory(dose)
        taught.observe(1, [group])
        found.append(taught.known_to(2)("p"))
    assert (found[0] == found[1]) == (dose is not RATIO)
    assert dose is not RATIO or found[1]["accuracies"] == [0.625]


@pytest.mark.parametrize("dose", [0.5, FALLING, EVEN, SEARCH, DIFFICULTY, LADDER, {"kind": "fit"}])
def test_other_doses_look_at_no_earlier_step(dose: object) -> None:
    assert memory_of("s", start_of(dose).config, 0) is None


SUCCESS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
GROUPS = st.builds(group_of, st.sampled_from("pqr"), st.none() | st.floats(0, 1), SUCCESS)


@pytest.mark.parametrize(
    "dose", [LEVELS, BISECTION, FRONTIER, RATIO, {**RATIO, "every": 1}, ROOT, {**ROOT, "every": 1}]
)
@given(steps=st.lists(st.lists(GROUPS, max_size=4), min_size=4, max_size=9), ahead=st.integers(0, 3))
def test_no_controller_sees_its_future_and_a_restored_one_goes_on_alike(dose, steps, ahead):
    """The plan of a step knows what one without staleness knows that has seen the steps up to `1 + ahead` before."""
    memories = [memory(dose, ahead), memory(dose, ahead)]
    prompt = memories[0].known_to(1)("p")
    assert not prompt and not memories[0].known_to(1 + ahead)("p")
    for step, groups in enumerate(steps, start=1):
        for each in memories:
            each.observe(step, groups)
        state = memories[0].fold.state()
        assert json.loads(json.dumps(state)) == state == memories[1].fold.state()
        memories[1] = memory(dose, ahead)
        memories[1].fold.restore(json.loads(json.dumps(state)))
        for planned in range(step + 1, step + 2 + ahead):
            past = memory(dose)
            for earlier in range(1, planned - ahead):
                past.observe(earlier, steps[earlier - 1])
            for uid in "pqr":
                expected = past.known_to(planned)(uid)
                assert [each.known_to(planned)(uid) for each in memories] == [expected] * 2
