"""The learner over two ranks that share each step's rows by their tokens: every preset against its reference."""

import json
from typing import Any

import pytest
from reference.learner_case import METHODS, shard_of, trajectories, two_updates
from support.ranks import on_ranks

pytestmark = pytest.mark.slow
ZERO: tuple[tuple[dict[str, object], list[str]], ...] = (
    ({"zero_stage": 2, "packing": True}, ["luffy", "opd", "reinforce_pp", "uft"]),
    ({"zero_stage": 3}, [*METHODS]),
)
"""With the presets that learn so: all with sharded models, one of each kind in packed rows."""


@pytest.fixture(scope="module")
def learned() -> list[dict[str, Any]]:
    """What two ranks learn with each setting, all against the same references."""
    return on_ranks("learner", ZERO)


@pytest.mark.parametrize("setting", range(len(ZERO)), ids=[json.dumps(zero) for zero, _ in ZERO])
def test_two_ranks_learn_what_the_reference_learns(learned, setting):
    found, (_, presets) = learned[setting], ZERO[setting]
    assert set(found["errors"]) == {*presets, "one demonstration", "moving average"}
    for case, error in found["errors"].items():
        assert error < 1e-4, (case, error)


def test_groups_that_are_split_over_the_ranks_are_counted_once(learned):
    _, alone = two_updates("luffy")
    assert [found["silent"]["luffy"] for found in learned] == [alone["batch/zero_advantage_share"]] * len(ZERO)
    rows, index = trajectories("luffy", num_groups=5)
    of_rank = [set(shard_of(rows, index, "luffy", 2, rank).groups) for rank in (0, 1)]
    assert of_rank[0] & of_rank[1]
