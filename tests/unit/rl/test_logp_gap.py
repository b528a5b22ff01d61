"""A gap between engine and trainer: told of, bounded."""

import logging

import pytest

from luffy.errors import NumericalError
from luffy.rl.logp_gap import check_logp_gap

GAP = "rollout/logp_gap_mean"


def test_a_gap_above_its_bound_ends_the_stage() -> None:
    check_logp_gap({GAP: 0.2}, bound=0.2, max_staleness=0)
    with pytest.raises(NumericalError, match=r"is 0\.2100, above execution\.max_logp_gap 0\.2"):
        check_logp_gap({GAP: 0.21}, bound=0.2, max_staleness=3)


@pytest.mark.parametrize(
    ("metrics", "max_staleness", "warned"),
    [({GAP: 0.02}, 0, True), ({GAP: 0.002}, 0, False), ({GAP: 0.02}, 1, False), ({}, 0, False)],
)
def test_a_gap_that_no_kernel_explains_is_told_of(
    metrics: dict[str, float], max_staleness: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_logp_gap(metrics, bound=None, max_staleness=max_staleness)
    assert bool(caplog.records) is warned
