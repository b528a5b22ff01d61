"""The critic over two ranks: any split and ZeRO stage against the float64 reference."""

import pytest
from ranks import on_ranks


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_two_ranks_give_the_reference_gradient_and_step_of_the_critic(zero_stage: int) -> None:
    cases = on_ranks("critic_worker.py", {"zero_stage": zero_stage})
    assert len(cases) == 3
    for case, errors in cases.items():
        assert max(errors.values()) < 1e-5, (case, errors)
