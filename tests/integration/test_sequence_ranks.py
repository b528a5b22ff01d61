"""Four ranks as two shards of two slices, or one shard of four: what they learn is what the references learn."""

import pytest
from ranks import on_ranks


@pytest.mark.slow
def test_ranks_that_share_sequences_learn_what_the_references_learn():
    found = on_ranks("shared_sequences", ranks=4)
    assert len(found["errors"]) == 6
    for case, error in found["errors"].items():
        # The learner is compared by its movement, which is small beside the parameters.
        assert error < (3e-3 if case.startswith("learner") else 1e-5), (case, error)
    # Each rank alone would see a difference in its own slice only.
    refusal = "execution.sequence_parallel: the layers of FalconH1ForCausalLM need whole sequences; use 1"
    assert found["refusals"] == [refusal] * 4
