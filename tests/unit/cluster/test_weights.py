import torch

from luffy.cluster.weights import buckets


def sizes(*counts, size):
    weights = [(str(i), torch.zeros(count)) for i, count in enumerate(counts)]
    return [[name for name, _ in bucket] for bucket in buckets(iter(weights), size)]


def test_buckets_hold_the_weights_in_order_up_to_their_size():
    assert sizes(2, 2, 2, 2, 2, size=16) == [["0", "1"], ["2", "3"], ["4"]]


def test_a_tensor_larger_than_a_bucket_makes_its_own():
    assert sizes(1, 100, 1, 1, size=16) == [["0"], ["1"], ["2", "3"]]


def test_no_weights_make_no_bucket():
    assert sizes(size=16) == []


def test_a_bucket_is_given_before_the_next_weight_is_asked_for():
    asked = []

    def weights():
        for i in range(4):
            asked.append(i)
            yield str(i), torch.zeros(2)

    first = next(buckets(weights(), 8))
    assert ([name for name, _ in first], asked) == (["0"], [0, 1])
