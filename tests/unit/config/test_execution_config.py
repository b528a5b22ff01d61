"""Settings of the machine that have no effect together are refused in one line."""

import pytest

from luffy.config import load_experiment
from luffy.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["execution.offload_optimizer=true"], "offload_optimizer has no effect with zero_stage: 0; use 1, 2 or 3"),
        (
            ["execution.offload_parameters=true", "execution.zero_stage=2"],
            "offload_parameters has no effect with zero_stage: 2, which keeps whole weights on each rank; use 3",
        ),
    ],
)
def test_an_offload_that_the_zero_stage_does_not_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load_experiment("smoke", overrides)
    assert len(str(refusal.value).splitlines()) == 1
