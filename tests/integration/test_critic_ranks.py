"""The critic over two ranks: any split and ZeRO stage against the float64 reference."""

import pytest
from ranks import on_ranks

ZERO_STAGES = (0, 2, 3)
NUM_SPLITS = 3


@pytest.mark.slow
def test_two_ranks_give_the_reference_gradient_and_step_of_the_critic():
    cases = on_ranks("critic_worker.py", ZERO_STAGES)
    assert len(cases) == len(ZERO_STAGES) * NUM_SPLITS
    for case, errors in cases.items():
        assert max(errors.values()) < 1e-5, (case, errors)
