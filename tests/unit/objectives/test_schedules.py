"""Learning-rate multipliers."""

import pytest

from luffy.config.training import ScheduleConfig
from luffy.objectives.schedules import schedule_multiplier


def _curve(total: int = 11, **settings: object) -> list[float]:
    config = ScheduleConfig(**settings)
    return [schedule_multiplier(config, step, total) for step in range(total)]


def test_constant_is_one_everywhere() -> None:
    assert _curve() == [1.0] * 11


def test_warmup_climbs_to_one_and_never_starts_at_zero() -> None:
    curve = _curve(total=10, warmup_share=0.4)
    assert curve[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert curve[4:] == [1.0] * 6


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_ends_at_its_final_share_on_the_last_step(kind: str) -> None:
    curve = _curve(kind=kind, final_share=0.1)
    assert curve[0] == pytest.approx(1.0)
    assert curve[5] == pytest.approx(0.55)
    assert curve[-1] == pytest.approx(0.1)
    assert curve == sorted(curve, reverse=True)
