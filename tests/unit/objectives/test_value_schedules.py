"""Scheduled values at points worked by hand, the coefficients of an objective at a step, and learning rates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from reference.token_cases import term

from luffy.config.terms import EntropyLoss, ScheduledValue, TermConfig, bounds
from luffy.config.training import ScheduleConfig
from luffy.objectives.schedules import objective_at, schedule_multiplier, value_at

LINEAR = {"kind": "linear", "start": 1.0, "end": 0.0}
COSINE = {"kind": "cosine", "start": 0.95, "end": 0.05}
CHORD = {"kind": "warmup_cosine", "start": 0.0, "peak": 0.9, "end": 0.1, "warmup": 0.2, "decay": 0.4}


def _curve(value: object, total: int = 11) -> list[float]:
    parsed: ScheduledValue = TypeAdapter(ScheduledValue).validate_python(value)
    return [value_at(parsed, step, total) for step in range(1, total + 1)]


QUARTER = 0.5 * (1 - math.cos(math.pi / 4))  # 0.1464


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.3, [0.3] * 11),
        (LINEAR, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
        (LINEAR | {"over": 0.5}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (LINEAR | {"levels": 3}, [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0]),
        # A level begins with the first step of its window: a tenth of 80 % of 25 moves is two of them.
        (LINEAR | {"over": 0.8, "levels": 10}, [1 - min(move // 2, 9) / 9 for move in range(26)]),
        (COSINE, [0.95, 0.95 - 0.9 * QUARTER, 0.5, 0.05 + 0.9 * QUARTER, 0.05]),
        (COSINE | {"over": 0.5}, [0.95, 0.95 - 0.9 * QUARTER, 0.5, 0.05 + 0.9 * QUARTER, *[0.05] * 5]),
        # Steps of a tenth: 0, peak at 0.2, half-way at 0.4, end from 0.6.
        (CHORD, [0.0, 0.45, 0.9, 0.9 - 0.8 * QUARTER, 0.5, 0.1 + 0.8 * QUARTER, *[0.1] * 5]),
        *((value, [value["start"]]) for value in (LINEAR, LINEAR | {"levels": 4}, COSINE, CHORD)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_by_hand(value: object, expected: list[float]) -> None:
    assert _curve(value, total=len(expected)) == pytest.approx(expected)


def test_luffys_linear_max_is_ten_windows_from_the_maximum_to_a_tenth_of_it() -> None:
    """Window i of ten draws from U(0, max (10 - i) / 10), of equal length."""
    curve = _curve({"kind": "linear", "start": 0.8, "end": 0.08, "levels": 10}, total=1001)
    windows = [curve[100 * i + 50] for i in range(10)]
    assert windows == pytest.approx([0.8 * (10 - i) / 10 for i in range(10)])
    assert all(len(set(curve[100 * i + 1 : 100 * i + 99])) == 1 for i in range(10))


@pytest.mark.parametrize("value", [LINEAR, LINEAR | {"levels": 4}, COSINE | {"over": 0.3}, CHORD], ids=str)
@given(total=st.integers(1, 500), step=st.integers(1, 500))
def test_values_stay_within_the_bounds_of_the_schedule(value: dict[str, object], total: int, step: int) -> None:
    parsed: ScheduledValue = TypeAdapter(ScheduledValue).validate_python(value)
    low, high = bounds(parsed)
    assert low - 1e-12 <= value_at(parsed, min(step, total), total) <= high + 1e-12


@pytest.mark.parametrize("value", [LINEAR, LINEAR | {"levels": 4}, COSINE | {"over": 0.3}, CHORD], ids=str)
def test_the_same_share_of_a_longer_stage_has_the_same_value(value: dict[str, object]) -> None:
    assert _curve(value, total=11) == pytest.approx(_curve(value, total=101)[::10])


def _entropy_term(name: str, coefficient: object) -> TermConfig:
    return term(EntropyLoss(kind="entropy"), "response", name, coefficient=coefficient)


def test_objective_takes_each_coefficient_at_its_step() -> None:
    terms = (_entropy_term("fixed", 0.25), _entropy_term("falling", LINEAR))
    assert objective_at(terms, 3, 5, 10).coefficients == pytest.approx((0.25, 0.5))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 5),
        ({"warmup_share": 0.4}, [0.25, 0.5, 0.75, *[1.0] * 7]),  # never 0
        ({"kind": "linear", "final_share": 0.1}, [1.0, 0.775, 0.55, 0.325, 0.1]),
        ({"kind": "cosine", "final_share": 0.1}, [1.0, 1 - 0.9 * QUARTER, 0.55, 0.1 + 0.9 * QUARTER, 0.1]),
    ],
    ids=str,
)
def test_learning_rates_by_hand(settings: dict[str, object], expected: list[float]) -> None:
    config, total = ScheduleConfig(**settings), len(expected)
    assert [schedule_multiplier(config, step, total) for step in range(total)] == pytest.approx(expected)
