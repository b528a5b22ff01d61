"""A gap between engine and trainer: told of, bounded."""

import logging

import pytest

from luffy.errors import NumericalError
from luffy.rl.loop import LogpGapCheck, suspicious_gap

GAP = "rollout/logp_gap_mean"


def test_a_gap_above_its_bound_ends_the_stage() -> None:
    check = LogpGapCheck(0.2, None)
    check.check({GAP: 0.2})
    with pytest.raises(NumericalError, match=r"is 0\.2100, above execution\.max_logp_gap 0\.2"):
        check.check({GAP: 0.21})


@pytest.mark.parametrize(
    ("metrics", "dtype", "max_staleness", "warned"),
    [
        ({GAP: 0.02}, "float32", 0, True),
        ({GAP: 0.002}, "float32", 0, False),
        ({GAP: 0.05}, "bfloat16", 0, False),
        ({GAP: 0.2}, "bfloat16", 0, True),
        ({GAP: 0.2}, "float32", 1, False),
        ({}, "float32", 0, False),
    ],
)
def test_a_gap_that_no_kernel_explains_is_told_of(metrics, dtype, max_staleness, warned, caplog):
    with caplog.at_level(logging.WARNING):
        LogpGapCheck(None, suspicious_gap(dtype, max_staleness)).check(metrics)
    assert bool(caplog.records) is warned


def test_the_same_gap_is_told_of_once_and_again_when_it_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    check = LogpGapCheck(None, 0.01)
    with caplog.at_level(logging.WARNING):
        for gap in (0.02, 0.03, 0.039, 0.041, 0.08, 0.005):
            check.check({GAP: gap})
    assert [record.args for record in caplog.records] == [(0.02,), (0.041,)]
