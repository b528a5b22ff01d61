"""Files of earlier versions are read although they give every field, those that are gone included."""

import pytest

from luffy.config.removed import without_removed

REPEATS, NULL = {"repeats": "merge"}, {"difficulty": None, "difficulty_boundary_tokens": None}
EASY = {"difficulty": "easy", "difficulty_boundary_tokens": 20}


@pytest.mark.parametrize(
    ("given", "finished", "left"),
    [(NULL, False, {}), (EASY, False, EASY), (EASY, True, {})],
)
def test_a_removed_field_goes_where_it_had_no_effect_and_in_finished_stages(given, finished, left):
    values = {
        "data": {"filters": {**REPEATS, **given}},
        "difficulty": {"engine": None},
        "seeds": [1, {"a": None}],
    }
    expected = {**values, "data": {"filters": {**REPEATS, **left}}}
    assert without_removed(values, finished=finished) == expected
