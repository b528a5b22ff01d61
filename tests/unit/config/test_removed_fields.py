"""Settings of earlier versions: files that have them are read, and no setting of this version has their names."""

import pytest

from luffy.config.fields import all_fields
from luffy.config.removed import REMOVED, removed_field, without_removed
from luffy.config.yaml_source import Value

PACKAGE = {"kind": "verifiers", "version": 1}
KEPT = {"evaluation": {"engine": "openai"}, "sample": {"budget": {"max_tokens": 9}}}


@pytest.mark.parametrize(
    ("given", "finished", "left"),
    [
        ({"rl": {"max_tokens": None, "steps": 4}}, False, {"rl": {"steps": 4}}),
        ({"rl": {"max_tokens": 9}}, False, {"rl": {"max_tokens": 9}}),
        ({"rl": {"max_tokens": 9, "engine": "openai"}}, True, {"rl": {}}),
        (
            {"execution": {"teachers": {"a": {"connect_timeout_s": 10.0}}}},
            False,
            {"execution": {"teachers": {"a": {}}}},
        ),
        (KEPT, True, KEPT),
        ({"synthesize": None, "seed": 1}, False, {"seed": 1}),
        ({"synthesize": {"teachers": {}}, "stages": ["base", "synthesize"]}, True, {"stages": ["base"]}),
        ([{"log_level": "debug"}, 3], True, [{}, 3]),
        ({"environment": {"kind": "custom", "version": 1}}, True, {"environment": {"kind": "custom"}}),
        ({"environment": PACKAGE}, True, {"environment": PACKAGE}),
        ({"terms": [{"name": "h", "coefficient": {"kind": "adaptive", "start": 1}}]}, True, {"terms": [{"name": "h"}]}),
    ],
)
def test_what_had_no_effect_is_left_out_and_of_a_finished_stage_all_that_is_gone(
    given: Value, finished: bool, left: Value
) -> None:
    assert without_removed(given, finished=finished) == left


def test_no_field_has_the_name_of_one_that_is_gone() -> None:
    assert [field.path for field in all_fields() if removed_field(tuple(field.path.split(".")))] == []
    assert removed_field(("environment", "version"), "verifiers") is None
    assert removed_field(("environment", "version"), "tools") == REMOVED["tools.version"].instead
    assert removed_field(("rl", "max_tokens")) == REMOVED["rl.max_tokens"].instead
