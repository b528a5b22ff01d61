"""Settings of earlier versions: files that have them are read, and no setting of this version has their names."""

import json
from pathlib import Path

import pytest
from synthetic.settings import rl_settings

from luffy.config.fields import all_fields
from luffy.config.group import GroupConfig
from luffy.config.removed import REMOVED, removed_field, without_removed
from luffy.config.starts import LevelsDose, When
from luffy.config.yaml_source import Value

PACKAGE = {"kind": "verifiers", "version": 1}
MERGED = {"data": {"filters": {"repeats": "merge"}}, "difficulty": {"engine": None}}
EASY = {"difficulty": "easy", "difficulty_boundary_tokens": 20}


def filters(**given: Value) -> Value:
    return {**MERGED, "data": {"filters": {"repeats": "merge", **given}}}


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
        (filters(**dict.fromkeys(EASY)), False, MERGED),
        (filters(**EASY), False, filters(**EASY)),
        (filters(**EASY), True, MERGED),
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


GROUPS = json.loads(Path(__file__).with_name("old_groups.json").read_text())
"""By preset, `objective.group` of a finished stage as it was written before `objective.group.starts`."""
MEANS_THE_SAME = {"guide": {"dose": LevelsDose(kind="levels", shares=(0.5,))}, "questa": {"when": When(share=1.0)}}


@pytest.mark.parametrize("preset", GROUPS)
def test_a_group_from_before_starts_is_read_as_the_starts_of_the_preset(preset: str) -> None:
    read = GroupConfig.read(without_removed(GROUPS[preset], finished=True, section="group"))
    today = rl_settings("chain=rl", f"method={preset}").objective.group
    starts = [start.model_copy(update=MEANS_THE_SAME.get(preset, {})) for start in today.starts.values()]
    assert (read.size, read.filter, [*read.starts.values()]) == (today.size, today.filter, starts)
