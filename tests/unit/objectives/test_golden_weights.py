"""What presets weigh against the runs they are named after; `exp_configs/README.md` shows the terms that differ."""

from pathlib import Path

import pytest
from reference.weights import Weight, table, weights

README = Path(__file__).parents[3] / "exp_configs" / "README.md"
KEPT_APART = {("rl_sft_loss", "sft"): 3.2, ("hpt", "sft"): 6.1, ("srft", "sft"): 0.46, ("chord", "sft"): 1.75}
"""Terms that keep a published coefficient although it weighs otherwise here, as their headers say."""


def test_the_readme_shows_the_terms_that_weigh_otherwise() -> None:
    expected = table([weight for weight in weights() if (weight.preset, weight.term) in KEPT_APART])
    assert expected in README.read_text(), f"paste into {README}:\n{expected}"


@pytest.mark.parametrize("weight", weights(), ids=lambda weight: f"{weight.preset}-{weight.term}")
def test_a_converted_coefficient_weighs_what_the_authors_does(weight: Weight) -> None:
    apart = KEPT_APART.get((weight.preset, weight.term))
    expected, within = (1.0, 0.15) if apart is None else (apart, 0.02)
    assert weight.ours / weight.authors == pytest.approx(expected, rel=within)
