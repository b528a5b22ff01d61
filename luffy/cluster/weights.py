"""Transfer of weights from the ranks of the trainer to the engines, in buckets.

A bucket goes into Ray's object store, from which every engine takes it, or stays on the device that rank and engine
share, and the engine copies from there (`luffy.tensor_sharing`). Either way a rank sends the next bucket once all its
engines have taken the last one, so that neither side holds more than two besides the model itself. From shared devices
every rank serves the engine beside it, otherwise rank 0 serves all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from torch import Tensor

from luffy.config.execution import WeightTransfer
from luffy.tensor_sharing import SharedTensor, SharingFailed, TensorSpec, bytes_of
from luffy.training.ranks import device

if TYPE_CHECKING:
    from luffy.training.learner import TrainerRank

logger = logging.getLogger(__name__)
_BUCKET_BYTES = 256 * 2**20
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of sending the weights to some engines."""

    failed: Sequence[int] = ()
    """Indices of the engines that did not take them."""
    refusal: str | None = None
    """Why engines could not copy from the rank's memory and were sent copies instead; None where they could."""


def send_weights(
    rank: TrainerRank, engines: Sequence[ActorHandle], version: int, timeout_s: float, way: WeightTransfer
) -> Sent:
    """Send the trainer's weights from this rank to its engines; a collective call.

    The version sent is at least `version`: a step without any rows to train on never reaches the ranks. Every rank
    iterates over all parameters even when engines fail; one that stopped early would leave the others waiting in a
    collective.
    """
    if not engines:
        for _ in rank.policy.published(torch.device("meta")):
            pass
        return Sent()
    sender = WeightSender(engines, timeout_s, shares=way == "ipc")
    weights = rank.policy.published(device() if way == "ipc" else _CPU)
    failed = sender.send(weights, max(version, rank.version))
    if way == "ipc" and torch.cuda.is_available():
        torch.cuda.ipc_collect()
        rank.free_cache()
    return Sent(failed, sender.refusal)


class WeightSender:
    """Sends weights to the engines; when one fails, the others still get theirs.

    A bucket that an engine cannot copy from this process's memory goes through the object store, and so do all later
    ones.
    """

    def __init__(self, engines: Sequence[ActorHandle], timeout_s: float, *, shares: bool) -> None:
        """`shares`: the engines copy from this process's memory."""
        self.refusal: str | None = None
        self._shares = shares
        self._engines = dict(enumerate(engines))
        self._deadline = time.monotonic() + timeout_s
        self._failed: list[int] = []
        self._loading: dict[int, Any] = {}

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> list[int]:
        """Send all weights to every engine; returns the indices of the engines that failed."""
        self._loading = {place: engine.load_weights.remote(version) for place, engine in self._engines.items()}
        for bucket in buckets(weights, _BUCKET_BYTES):
            places = self._share(bucket) if self._shares else list(self._engines)
            # As arrays, which Ray neither copies nor pickles as it does tensors: ten times as fast.
            stored = [
                (TensorSpec.of(name, tensor), bytes_of(tensor.cpu()).numpy()) for name, tensor in bucket if places
            ]
            self._hand_out(stored, places)
        self._hand_out(None, list(self._engines))
        for place in list(self._engines):
            self._settle(place, self._loading[place])
        return sorted(self._failed)

    def _share(self, bucket: list[tuple[str, Tensor]]) -> list[int]:
        """Let the engines copy a bucket; returns the places of living ones that could not."""
        specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
        parts = [bytes_of(tensor) for _, tensor in bucket]
        data = torch.cat(parts) if len(parts) > 1 else parts[0]
        refused: dict[int, object] = {}
        try:
            shared = SharedTensor.of(data)
        except SharingFailed as failure:
            refused = dict.fromkeys(self._engines, failure)
        else:
            taking: dict[int, Any] = {
                p: engine.receive_shared.remote(specs, shared) for p, engine in self._engines.items()
            }
            answers = {place: self._settle(place, answer) for place, answer in taking.items()}
            refused = {place: answer for place, answer in answers.items() if answer is not None}
        for refusal in refused.values():
            self.refusal, self._shares = str(refusal), False
        return list(refused)

    def _hand_out(self, bucket: list[tuple[TensorSpec, NDArray[np.uint8]]] | None, places: Sequence[int]) -> None:
        if not places:
            return
        shared = ray.put(bucket)
        taking: dict[int, Any] = {place: self._engines[place].receive.remote(shared) for place in places}
        for place, answer in taking.items():
            self._settle(place, answer)

    def _settle(self, place: int, answer: Any) -> object:
        """Wait for an engine's answer and return it; an engine that fails takes no further part."""
        # An engine whose load_weights has failed takes no more buckets, so that call is watched too.
        awaited = list(dict.fromkeys([answer, self._loading[place]]))
        try:
            done, _ = ray.wait(awaited, timeout=max(self._deadline - time.monotonic(), 0.1))
            if not done:
                raise TimeoutError("timed out")
            return ray.get(done[0])
        except (RayError, TimeoutError) as error:
            logger.warning("engine %d did not take its weights: %s", place, error)
            self._failed.append(place)
            del self._engines[place]
            return None


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
