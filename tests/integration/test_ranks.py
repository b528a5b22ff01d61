"""The proof over two ranks: every preset and the critic, and every ZeRO setting, against the float64 reference.

And over four, as two shards of two slices, or one shard of four.
"""

import pytest
from reference.gradient_case import PRESETS
from support.ranks import on_ranks

ZERO: tuple[dict[str, object], ...] = (
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
)
SHARED: dict[str, object] = {"zero_stage": 2, "sequence_parallel": 2}
"""The ranks share every sequence."""


@pytest.mark.slow
def test_two_ranks_give_the_reference_gradient_and_step(tmp_path):
    """Each preset with two settings, as no loss knows of ZeRO; `luffy`, which has three splits, with all."""
    of_preset = {preset: [ZERO[place // 2 % len(ZERO)], SHARED] for place, preset in enumerate(PRESETS)}
    of_preset["luffy"] = [*ZERO, SHARED]
    found = on_ranks("steps", of_preset, tmp_path)
    assert len(found) == 2 * (len(PRESETS) - 1) + 3 * (len(ZERO) + 1)
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


@pytest.mark.slow
def test_ranks_that_share_sequences_learn_what_the_references_learn():
    found = on_ranks("shared_sequences", ranks=4)
    assert len(found["errors"]) == 6
    for case, error in found["errors"].items():
        # The learner is compared by its movement, which is small beside the parameters.
        assert error < (3e-3 if case.startswith("learner") else 1e-5), (case, error)
    # Each rank alone would see a difference in its own slice only.
    refusal = "execution.sequence_parallel: the layers of FalconH1ForCausalLM need whole sequences; use 1"
    assert found["refusals"] == [refusal] * 4
