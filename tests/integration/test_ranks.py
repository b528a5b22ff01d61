"""The proof over two ranks: every preset and the critic, for each ZeRO setting, against the float64 reference."""

import pytest
from ranks import on_ranks
from reference.gradient_case import PRESETS

ZERO: tuple[dict[str, object], ...] = (
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
    {"zero_stage": 2, "sequence_parallel": 2},
)
"""In the last the ranks share every sequence."""
NUM_PARTS = 4
"""No start of the ranks has all presets, so that none takes too long; `luffy` has three splits, the others one."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_two_ranks_give_the_reference_gradient_and_step_with_every_zero_setting(part, tmp_path):
    presets = PRESETS[part::NUM_PARTS]
    found = on_ranks("steps", ZERO, presets, tmp_path)
    assert len(found) == len(ZERO) * (len(presets) + 2 * ("luffy" in presets))
    for case, errors in found.items():
        assert errors["gradient"] < 1e-5, (case, errors)
        assert errors["parameters"] < 1e-5, (case, errors)
        # The movement is 1e-3 of the parameters, so float32 rounding of the parameters shows in its fourth digit.
        assert errors["movement"] < 1e-3, (case, errors)


@pytest.mark.slow
def test_two_ranks_give_the_reference_gradient_and_step_of_the_critic():
    cases = on_ranks("critic", zero_stages := (0, 2, 3))
    assert len(cases) == len(zero_stages) * 3
    for case, errors in cases.items():
        assert max(errors.values()) < 1e-5, (case, errors)
