"""Steps in which an RL run had nothing to learn from, and what it is then told."""

import pytest

from luffy.config import load_experiment
from luffy.tracking.no_signal import advice_on_signal, had_signal

ZERO, TRACES, ENTROPY = "batch/zero_advantage_share", "batch/off_policy_token_share", "actor/entropy_on_policy"
SILENT = {ZERO: 1.0, TRACES: 0.0, ENTROPY: 2.0}


@pytest.mark.parametrize(
    ("step", "signal"),
    [(SILENT, False), ({ZERO: 0.9}, True), ({ZERO: 1.0, TRACES: 0.1}, True), ({"batch/optimizer_steps": 0.0}, None)],
)
def test_a_step_has_a_signal_by_an_advantage_or_a_demonstration(step: dict[str, float], signal: bool | None) -> None:
    assert had_signal(step) is signal


def test_a_run_that_mostly_had_none_is_told_what_happened_to_its_policy() -> None:
    said = advice_on_signal([SILENT, {ZERO: 0.5, ENTROPY: 3.0}, {}, SILENT | {ENTROPY: 8.79}])
    assert said is not None and said.startswith("in 2 of 3 steps every advantage was 0")
    assert "entropy per token went from 2.00 to 8.79 nats" in said


def test_a_run_with_a_signal_in_half_of_its_steps_is_told_nothing() -> None:
    assert advice_on_signal([SILENT, {ZERO: 0.5}]) is None
    assert advice_on_signal([]) is None


@pytest.mark.parametrize(
    ("method", "by_advantage"),
    [("on_policy", True), ("dapo", True), ("luffy", True), ("relift", False), ("srft", False), ("rl_sft_loss", False)],
)
def test_a_method_that_also_learns_otherwise_is_left_alone(method: str, by_advantage: bool) -> None:
    objective = load_experiment("exp_configs/smoke.yaml", ["chain=rl", f"method={method}"]).objective
    assert objective is not None and objective.learns_by_advantage == by_advantage
