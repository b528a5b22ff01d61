"""Pass rates on disk, the bounds, and the card."""

import json

import pyarrow.parquet as pq
import pytest

from luffy.config.answers import DifficultyConfig
from luffy.data.pass_rates import (
    DifficultyCard,
    Fit,
    PassRate,
    card_json,
    difficulty_card,
    fit_of,
    read_card,
    write_pass_rates,
)

CONFIG = DifficultyConfig(
    num_samples=4, temperature=1.0, max_response_tokens=8, min_pass_rate=0.25, max_pass_rate=0.75, engine="transformers"
)
RATES = [
    PassRate("a", {"wrong": 3, "no_answer": 1}, num_tokens=20, num_truncated=2),
    PassRate("b", {"correct": 1, "wrong": 3}, num_tokens=12, num_truncated=0),
    PassRate("c", {"correct": 3, "unparsable": 1}, num_tokens=10, num_truncated=0),
    PassRate("d", {"correct": 4}, num_tokens=6, num_truncated=0),
]
FITS = [Fit.TOO_HARD, Fit.KEPT, Fit.KEPT, Fit.TOO_EASY]


def card():
    return difficulty_card(CONFIG, RATES, FITS, ["sums", "sums", "", "sums"])


def test_the_bounds_are_inclusive():
    assert [fit_of(rate, CONFIG) for rate in RATES] == FITS


@pytest.mark.parametrize("num_samples", [3, 7, 10, 64])
def test_a_pass_rate_equal_to_both_bounds_is_kept(num_samples):
    for correct in range(num_samples + 1):
        share = correct / num_samples
        bounds = DifficultyConfig(num_samples=num_samples, min_pass_rate=share, max_pass_rate=share)
        outcomes = {"correct": correct, "wrong": num_samples - correct}
        assert fit_of(PassRate("a", outcomes, 0, 0), bounds) is Fit.KEPT


def test_pass_rates_have_one_row_per_prompt(tmp_path):
    write_pass_rates(tmp_path / "rates.parquet", RATES, FITS)
    rows = pq.read_table(tmp_path / "rates.parquet").to_pylist()
    assert rows[0] == {
        "uid": "a", "num_samples": 4, "num_correct": 0, "mean_tokens": 5.0, "num_truncated": 2, "fit": "too_hard",
    }  # fmt: skip
    others = [("b", 1, "kept"), ("c", 3, "kept"), ("d", 4, "too_easy")]
    assert [(row["uid"], row["num_correct"], row["fit"]) for row in rows[1:]] == others


def test_the_card_counts_everything_once(tmp_path):
    found = card()
    assert found.fits == {"kept": 2, "too_hard": 1, "too_easy": 1}
    assert found.rates.histogram == {"0": 1, "1": 1, "2": 0, "3": 1, "4": 1}
    assert (found.rates.mean_pass_rate, found.rates.ever_solved_share) == (0.5, 0.75)
    assert (found.rates.mean_tokens, found.rates.truncated_share) == (3.0, 0.125)
    assert {name: count for name, count in found.rates.outcomes.items() if count} == {
        "correct": 8, "wrong": 6, "no_answer": 1, "unparsable": 1,
    }  # fmt: skip
    assert found.sources["sums"] == {"prompts": 3, "kept": 1, "mean_pass_rate": pytest.approx(5 / 12)}
    (tmp_path / "card.json").write_text(card_json(found))
    assert read_card(tmp_path / "card.json", DifficultyCard) == found
    assert json.loads(card_json(found))["policy"] == "base"
