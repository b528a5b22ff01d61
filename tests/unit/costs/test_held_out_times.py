"""How often a validation is measured, as the stages do it, and which measurements of it take equally long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config import load_experiment
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.costs.held_out_times import measured_by, num_measurements, validation_of


@given(every=st.integers(1, 30), start=st.integers(0, 100), more=st.integers(1, 100))
def test_measurements_are_counted_as_a_stage_makes_them(every: int, start: int, more: int) -> None:
    last = start + more
    measured = [step for step in range(start, last + 1) if step % every == 0 or step == last]
    if start > 0 and start in measured:
        measured.remove(start)  # the run before has made it
    assert num_measurements(every, start, last) == len(measured)


def what(*overrides: str) -> str:
    given = ["data.validation_prompts=4", "rl.validation={every: 2, source: validation}", *overrides]
    configure = STAGE_KINDS["rl"].configure
    assert configure is not None
    return measured_by(validation_of(configure(load_experiment("smoke", given))))


@pytest.mark.parametrize("same", ["rl.validation.every=3", "rl.validation.keep_best={}", "rl.steps=60"])
def test_when_it_is_measured_does_not_change_how_long_it_takes(same: str) -> None:
    assert what(same) == what() != ""


@pytest.mark.parametrize("other", ["rl.validation.max_problems=2", "rl.validation.decoding={temperature: 1.0}"])
def test_what_is_sampled_does(other: str) -> None:
    assert what(other) != what()


def test_a_stage_without_validation_measures_nothing() -> None:
    assert what("rl.validation=null") == ""
