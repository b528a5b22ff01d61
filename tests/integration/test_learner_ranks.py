"""The learner over two ranks that share each step's rows by their tokens: every preset against its reference."""

import json

import pytest
from ranks import on_ranks
from reference.learner_case import METHODS, shard_of, trajectories, two_updates


@pytest.mark.slow
@pytest.mark.parametrize("zero", [{"zero_stage": 2, "packing": True}, {"zero_stage": 3}], ids=json.dumps)
def test_two_ranks_learn_what_the_reference_learns(zero: dict[str, object]) -> None:
    found = on_ranks("learner_worker.py", zero)
    assert set(found["errors"]) == {*METHODS, "one demonstration", "moving average"}
    for case, error in found["errors"].items():
        assert error < 3e-3, (case, error)
    # Groups are split over the ranks here, and still counted once.
    _, alone = two_updates("luffy")
    assert found["silent"]["luffy"] == alone["batch/zero_advantage_share"]
    rows, index = trajectories("luffy", num_groups=5)
    of_rank = [set(shard_of(rows, index, "luffy", 2, rank).groups) for rank in (0, 1)]
    assert of_rank[0] & of_rank[1]
