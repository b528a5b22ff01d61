from types import SimpleNamespace

import pytest
import torch

from luffy.cluster import weights as sending
from luffy.cluster.weights import buckets
from luffy.errors import ClusterError


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 2, 2, 2, 2), [["0", "1"], ["2", "3"], ["4"]]),
        ((1, 100, 1, 1), [["0"], ["1"], ["2", "3"]]),  # a tensor larger than a bucket makes its own
        ((), []),
    ],
)
def test_buckets_hold_the_weights_in_order_up_to_their_size(counts, expected):
    weights = [(str(i), torch.zeros(count)) for i, count in enumerate(counts)]
    assert [[name for name, _ in bucket] for bucket in buckets(iter(weights), 16)] == expected


def test_a_bucket_is_given_before_the_next_weight_is_asked_for():
    asked = []

    def weights():
        for i in range(4):
            asked.append(i)
            yield str(i), torch.zeros(2)

    first = next(buckets(weights(), 8))
    assert ([name for name, _ in first], asked) == (["0"], [0, 1])


def test_a_group_for_broadcasts_that_fails_once_is_tried_again_and_twice_is_an_error(monkeypatch, caplog):
    """Where all engines live: once may be a busy machine, and that update goes through the object store."""
    monkeypatch.setattr(sending.ray.util, "get_node_ip_address", lambda: "192.0.2.1")  # nobody's address
    monkeypatch.setattr(sending, "_all_answer", lambda engines, timeout_s: True)
    rank = SimpleNamespace(broadcast_group=None, broadcast_failures=0)
    assert sending._group(rank, [], num_receivers=1, timeout_s=4.0) is None
    assert "192.0.2.1 cannot be reached" in caplog.text and "the object store is used" in caplog.text
    with pytest.raises(ClusterError, match=r"weight_transfer: broadcast: .* twice .* use object_store"):
        sending._group(rank, [], num_receivers=1, timeout_s=4.0)
