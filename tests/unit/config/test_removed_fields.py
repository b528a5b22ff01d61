"""Settings by the names of earlier versions and of other systems: files are read, and who writes one is told more."""

import json
import re
from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE, rl_settings

from luffy.config import available_presets, load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import all_fields, models_at
from luffy.config.foreign_names import METHOD_OF, SETTING_OF
from luffy.config.group import GroupConfig
from luffy.config.removed import REMOVED, REMOVED_VALUES, removed_field, without_removed
from luffy.config.starts import LevelsDose, When
from luffy.config.yaml_source import Value
from luffy.errors import ConfigError

PACKAGE = {"kind": "verifiers", "version": 1}
EASY = {"difficulty": "easy", "difficulty_boundary_tokens": 20}
KEPT = {"evaluation": {"engine": "openai"}, "sample": {"budget": {"max_tokens": 9}}}


def filters(**given: Value) -> Value:
    return {"data": {"filters": {"repeats": "merge", **given}}, "difficulty": {"engine": None}}


@pytest.mark.parametrize(
    ("given", "finished", "left"),
    [
        ({"rl": {"max_tokens": None, "steps": 4}}, False, {"rl": {"steps": 4}}),
        ({"rl": {"max_tokens": 9}}, False, {"rl": {"max_tokens": 9}}),
        ({"rl": {"max_tokens": 9, "engine": "openai"}}, True, {"rl": {}}),
        ({"teachers": {"a": {"connect_timeout_s": 10.0}}}, False, {"teachers": {"a": {}}}),
        (KEPT, True, KEPT),
        (filters(**dict.fromkeys(EASY)), False, filters()),
        (filters(**EASY), False, filters(**EASY)),
        (filters(**EASY), True, filters()),
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


GONE = """
execution.attention=x execution.sequence_parallel=2 execution.offload_parameters=true execution.log_level=debug
execution.server.connect_timeout_s=1 execution.ray.dashboard=true execution.rl_teacher={} tracking.mlflow=x
data.filters.difficulty=easy data.replay_traces=keep difficulty.policy=sft synthesize={} synthesis={} rl.teacher={}
rl.max_tokens=9 sft.max_tokens=9 expert_iteration={} objective.group.off_policy=1 objective.group.choose=in_turn
objective.group.off_policy_when_accuracy_at_most=0.0 objective.group.prefix={} objective.group.guidance={}
objective.group.hint={} objective.group.retry={} objective.group.anchor={} environment.version=1 environment.max_calls=2
environment.scoring.version=1 environment.scoring.group_measures={} environment.sandbox.unsafe_local=true
environment.sandbox.limits.max_files=65 grading.named.e.ignore_case=false grading.named.c.version=1
grading.named.j.max_answer_chars=9
"""
GONE_VALUES = """
environment.calls=xml environment.sandbox.kind=unsafe_local difficulty.engine=openai rl.engine=openai sft.engine=openai
sample.engine=openai execution.ray.weight_transfer=broadcast stages.rl.kind=synthesize
"""
OLD = [
    "objective.terms.entropy.coefficient=0.1", "difficulty={}", "sample={}",
    "grading.named={e: {kind: exact}, c: {kind: custom, function: 'a:b'}, j: {kind: judge, url: 'http://h', model: m}}",
]  # fmt: skip


@pytest.mark.parametrize("override", [*GONE.split(), *GONE_VALUES.split()])
def test_who_gives_what_is_gone_is_told_what_to_do_now(override: str) -> None:
    field, _, value = override.partition("=")
    known = [*(each.instead for each in REMOVED.values()), *REMOVED_VALUES.values()]
    with pytest.raises(ConfigError) as caught:
        load_experiment(SMOKE.with_name("tools.yaml"), [*OLD, override])
    where, _, instead = str(caught.value).partition("is gone; ")
    assert where == f"command line: {field}: " + (f"{value} " if override in GONE_VALUES.split() else "")
    assert instead in known


GROUPS = json.loads(Path(__file__).with_name("old_groups.json").read_text())
"""By preset, `objective.group` of a finished stage as it was written before `objective.group.starts`."""
MEANS_THE_SAME = {"guide": {"dose": LevelsDose(kind="levels", shares=(0.5,))}, "questa": {"when": When(share=1.0)}}


@pytest.mark.parametrize("preset", GROUPS)
def test_a_group_from_before_starts_is_read_as_the_starts_of_the_preset(preset: str) -> None:
    read = GroupConfig.read(without_removed(GROUPS[preset], finished=True, section="group"))
    today = rl_settings("chain=rl", f"method={preset}").objective.group
    starts = [start.model_copy(update=MEANS_THE_SAME.get(preset, {})) for start in today.starts.values()]
    assert (read.size, read.filter, [*read.starts.values()]) == (today.size, today.filter, starts)


PAGE = (Path(__file__).parents[3] / "docs/coming_from.md").read_text()


@pytest.mark.parametrize(("name", "here"), SETTING_OF.items())
def test_a_setting_of_another_system_is_named_as_here(name: str, here: str) -> None:
    for place in ("rl", "objective", "data"):
        if not any(name in model.model_fields for model in models_at((place,), ExperimentConfig)):
            with refused(f"{place}.{name}", here, error=ConfigError):
                load_experiment(SMOKE, [f"{place}.{name}=1"])
    for path in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", here):
        *above, last = path.replace(".on_policy", ".x").split(".")
        assert any(last in model.model_fields for model in models_at(tuple(above), ExperimentConfig)), path
    row = next(line for line in PAGE.splitlines() if line.endswith(f"| {here} |"))
    assert f"`{name}`" in row


@pytest.mark.parametrize(("name", "here"), METHOD_OF.items())
def test_a_method_of_another_system_is_named_as_here(name: str, here: str) -> None:
    assert here in available_presets("methods") and f"| `method={name}` | `method={here}` |" in PAGE
    with refused(repr(name), repr(here), error=ConfigError):
        load_experiment(SMOKE, [f"method={name}"])
