"""Overrides that name elements of lists, and the origin of every value."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.load import resolve_experiment
from luffy.errors import ConfigError

ROOT = Path(__file__).parents[3] / "exp_configs"
SMOKE = ROOT / "smoke.yaml"


def terms(*overrides):
    return {term.name: term for term in load_experiment(SMOKE, overrides).objective.terms}


def test_an_element_of_a_list_is_overridden_by_its_name():
    before, after = terms(), terms("objective.terms.off_policy.loss.shaping.gamma=0.3")
    assert (before["off_policy"].loss.shaping.gamma, after["off_policy"].loss.shaping.gamma) == (0.1, 0.3)
    assert list(after) == list(before)
    assert {**after, "off_policy": None} == {**before, "off_policy": None}


def test_an_element_is_overridden_by_its_index_too():
    assert terms("objective.terms.2.coefficient=0.5")["entropy"].coefficient.value == 0.5
    config = load_experiment(SMOKE, ["data.train.num_operations.0=1"])
    assert config.data.train.num_operations == (1, 3)


def test_another_kind_replaces_the_mapping_in_an_element():
    shaping = terms("objective.terms.off_policy.loss.shaping={kind: power, exponent: 0.5}")["off_policy"].loss.shaping
    assert (shaping.kind, shaping.exponent) == ("power", 0.5)


def test_later_overrides_of_one_element_win_and_leave_the_others():
    changed = terms("objective.terms.entropy.coefficient=0.5", "objective.terms.entropy.coefficient=0.25")
    assert changed["entropy"].coefficient.value == 0.25


def test_an_element_of_a_list_from_the_command_line_can_be_named():
    policy = "{name: policy, select: on_policy, loss: {kind: surrogate}, normaliser: {mode: token, population: own}}"
    bonus = "{name: bonus, select: response, loss: {kind: entropy}, normaliser: {mode: token, population: own}}"
    changes = [f"objective.terms=[{policy}, {bonus}]", "objective.terms.bonus.coefficient=0.5"]
    found = terms("method=on_policy", *changes)
    assert found["bonus"].coefficient.value == 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "objective.terms.off_polcy.coefficient=1",
            "command line: objective.terms: no element 'off_polcy' in this list; did you mean 'off_policy'? there are "
            "on_policy, off_policy, entropy",
        ),
        ("objective.terms.3.coefficient=1", "no element '3' in this list; there are on_policy, off_policy, entropy"),
        ("data.train.num_operations.9=1", "no element '9' in this list; there are 0, 1"),
        ("data.train.num_operations.0.x=1", "data.train.num_operations.0 is 2, which has no keys"),
        (
            "objective.terms.entropy.coefficent=1",
            "command line: objective.terms.entropy.coefficent: unknown key; did you mean 'coefficient'?",
        ),
        ("rl.steps=[1", "command line: rl.steps: '[1' is not valid YAML"),
    ],
)
def test_a_mistake_in_an_override_is_one_line(override, message):
    with pytest.raises(ConfigError) as caught:
        load_experiment(SMOKE, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_value_knows_where_it_was_given():
    changes = ["seed=3", "objective.terms.off_policy.loss.shaping.gamma=0.3"]
    resolved = resolve_experiment(SMOKE, changes)
    assert resolved.origin_of(("seed",)) == "command line"
    assert resolved.origin_of(("objective", "terms", "1", "loss", "shaping", "gamma")) == "command line"
    assert resolved.origin_of(("objective", "terms", "1", "loss", "kind")).startswith(f"{ROOT}/methods/luffy.yaml:")
    assert resolved.origin_of(("stages",)) == f"{ROOT}/chains/sft_then_luffy.yaml:2"
    assert resolved.origin_of(("rl", "steps")).startswith(f"{SMOKE}:")
    assert resolved.origin_of(("rl", "temperature")) is None


def test_what_a_mapping_on_the_command_line_holds_is_from_there():
    resolved = resolve_experiment(SMOKE, ["rl.optimizer={lr: 1e-4}"])
    assert resolved.origin_of(("rl", "optimizer", "lr")) == "command line"
    assert resolved.origin_of(("rl", "optimizer", "eps")) is None
