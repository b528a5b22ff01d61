"""Transfer of weights from the trainer to the engines, in buckets through Ray's object store.

Rank 0 puts each bucket once for all engines, and the next one when all have taken it. So neither side holds more than
two buckets besides the model itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from torch import Tensor

if TYPE_CHECKING:
    from luffy.training.trainer import TrainerRank

logger = logging.getLogger(__name__)
_BUCKET_BYTES = 256 * 2**20


def send_weights(rank: TrainerRank, engines: Sequence[ActorHandle], version: int, timeout_s: float) -> list[int]:
    """Send the trainer's weights to the engines; a collective call. Returns the indices of engines that failed.

    The version sent is at least `version`: a step without any rows to train on never reaches the ranks. Every rank
    iterates over all parameters even when engines fail; one that stopped early would leave the others waiting in a
    collective.
    """
    weights = rank.policy.weights()
    if rank.policy.engine.global_rank != 0:
        for _ in weights:
            pass
        return []
    return WeightSender(engines, timeout_s).send(weights, max(version, rank.version))


class WeightSender:
    """Sends weights to the engines; when one fails, the others still get theirs."""

    def __init__(self, engines: Sequence[ActorHandle], timeout_s: float) -> None:
        self._engines = dict(enumerate(engines))
        self._deadline = time.monotonic() + timeout_s
        self._failed: list[int] = []
        self._loading: dict[int, Any] = {}

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> list[int]:
        """Send all weights to every engine; returns the indices of the engines that failed."""
        self._loading = {place: engine.load_weights.remote(version) for place, engine in self._engines.items()}
        for bucket in buckets(weights, _BUCKET_BYTES):
            self._hand_out(bucket)
        self._hand_out(None)
        for place in list(self._engines):
            self._settle(place, self._loading[place])
        return sorted(self._failed)

    def _hand_out(self, bucket: list[tuple[str, Tensor]] | None) -> None:
        shared = ray.put(bucket)
        taking: dict[int, Any] = {place: engine.receive.remote(shared) for place, engine in self._engines.items()}
        for place, answer in taking.items():
            self._settle(place, answer)

    def _settle(self, place: int, answer: Any) -> None:
        # An engine whose load_weights has failed takes no more buckets, so that call is watched too.
        awaited = list(dict.fromkeys([answer, self._loading[place]]))
        try:
            done, _ = ray.wait(awaited, timeout=max(self._deadline - time.monotonic(), 0.1))
            if not done:
                raise TimeoutError("timed out")
            ray.get(done[0])
        except (RayError, TimeoutError) as error:
            logger.warning("engine %d did not take its weights: %s", place, error)
            self._failed.append(place)
            del self._engines[place]


def buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Split the weights, in order, into lists of at most `size` bytes; a larger tensor gets its own list."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
