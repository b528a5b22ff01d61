"""The points of a grid, and the draws from it."""

import pytest
from pydantic import TypeAdapter, ValidationError

from luffy.config.load import parse_overrides
from luffy.config.many_runs.grid import Grid, draw_points, grid_points, value_text

GRID = {"rl.optimizer.lr": (1e-5, 3e-4), "sft.num_traces": (64, None), "rl.optimizer.schedule": ({"kind": "constant"},)}


def test_every_combination_is_a_point_and_the_last_key_changes_fastest():
    assert [point.text for point in grid_points({"a": (1, 2), "b": (1e-5, True)})] == [
        "a=1, b=1e-05", "a=1, b=true", "a=2, b=1e-05", "a=2, b=true",
    ]  # fmt: skip
    assert [point.number for point in grid_points(GRID)] == [1, 2, 3, 4]


def test_a_point_as_overrides_is_read_back_as_the_same_values():
    for point in grid_points(GRID):
        read = {".".join(each.path): each.value for each in parse_overrides(point.overrides, "here")}
        assert read == dict(point.values)


def test_a_draw_is_a_function_of_the_seed_and_of_the_values_alone():
    points = grid_points({"lr": tuple(range(20))})
    drawn = draw_points(points, 5, seed=1)
    assert drawn == draw_points(points, 5, seed=1)
    assert [point.number for point in drawn] == sorted({point.number for point in drawn})
    assert drawn != draw_points(points, 5, seed=2)
    fewer = draw_points(points, 3, seed=1)
    assert set(fewer) < set(drawn)


@pytest.mark.parametrize(
    ("grid", "says"), [({}, "at least 1"), ({"lr": []}, "at least 1"), ({"lr": [1e-3, 0.001]}, "is listed twice")]
)
def test_a_grid_without_values_or_with_one_twice_is_refused(grid, says):
    with pytest.raises(ValidationError, match=says):
        TypeAdapter(Grid).validate_python(grid)


def test_values_are_written_as_people_write_them():
    assert [value_text(value) for value in (5e-5, 64, None, "cosine", {"kind": "constant"})] == [
        "5e-05", "64", "null", "cosine", "{kind: constant}",
    ]  # fmt: skip
