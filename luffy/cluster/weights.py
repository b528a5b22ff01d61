"""Transfer of weights from the ranks of the trainer to the engines, in buckets.

A bucket goes into Ray's object store, from which every engine takes it, as a broadcast to the workers of all engines
(`luffy.broadcast_group`), or stays on the device that rank and engine share, and the engine copies from there
(`luffy.tensor_sharing`). In each way a rank sends the next bucket once all its engines have taken the last one, so that
neither side holds more than two besides the model itself. From shared devices every rank serves the engine beside it,
otherwise rank 0 serves all.
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
from ray.exceptions import RayActorError, RayError
from torch import Tensor

from luffy.broadcast_group import BroadcastFailed, BroadcastGroup, Meeting, TensorSpec, bytes_of
from luffy.config.execution import WeightTransfer
from luffy.errors import ClusterError
from luffy.tensor_sharing import SharedTensor, SharingFailed
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
    rank: TrainerRank, engines: Sequence[ActorHandle], version: int, timeout_s: float, way: WeightTransfer, workers: int
) -> Sent:
    """Send the trainer's weights from this rank to its engines, which have so many `workers` each; a collective call.

    The version sent is at least `version`: a step without any rows to train on never reaches the ranks. Every rank
    iterates over all parameters even when engines fail; one that stopped early would leave the others waiting in a
    collective.
    """
    if not engines:
        for _ in rank.policy.weights(torch.device("meta")):
            pass
        return Sent()
    group = _group(rank, engines, workers, timeout_s) if way == "broadcast" else None
    sender = WeightSender(engines, timeout_s, group, shares=way == "ipc")
    weights = rank.policy.weights(_CPU if way == "object_store" else device())
    failed = sender.send(weights, max(version, rank.version))
    if way == "ipc" and torch.cuda.is_available():
        torch.cuda.ipc_collect()
        rank.free_cache()
    return Sent(failed, sender.refusal)


def _group(
    rank: TrainerRank, engines: Sequence[ActorHandle], num_receivers: int, timeout_s: float
) -> BroadcastGroup | None:
    """The group of rank 0 and these engines, formed now if there is none.

    None when it did not form, or an engine does not answer: this update then goes through the object store. Raises
    ClusterError when a group of living engines fails at two updates in a row: once may be a busy machine.
    """
    members = tuple(engine._actor_id.hex() for engine in engines)
    group = rank.broadcast_group
    if group is not None and (not group.is_open or group.members != members):
        group.close()
        group = None
    rank.broadcast_group = group
    if group is not None:
        return group
    timeout_s /= 4
    if not _all_answer(engines, timeout_s):
        logger.warning(
            "an engine has not answered for %g s: no group for broadcasts, the object store is used", timeout_s
        )
        return None
    joining: list[Any] = []
    try:
        meeting = Meeting(ray.util.get_node_ip_address(), 1 + num_receivers * len(engines), timeout_s)
        joining += [
            engine.join_broadcasts.remote(meeting.invitation, 1 + place * num_receivers)
            for place, engine in enumerate(engines)
        ]
        group = meeting.lead(device(), members)
    except BroadcastFailed as failure:
        done, hanging = ray.wait(joining, num_returns=len(joining), timeout=timeout_s) if joining else ([], [])
        if not hanging and not any(isinstance(_outcome(answer), RayActorError) for answer in done):
            rank.broadcast_failures += 1
        if rank.broadcast_failures > 1:
            raise ClusterError(
                f"execution.ray.weight_transfer: broadcast: no group of rank 0 and the engines formed within "
                f"{timeout_s:g} s, twice ({failure}); let their machines reach each other on any port "
                "(GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the interface), or use object_store"
            ) from failure
        logger.warning("no group for broadcasts formed (%s); the object store is used", failure)
        return None
    rank.broadcast_failures, rank.broadcast_group = 0, group
    logger.info("weights are broadcast from %s to %d workers", device().type, len(engines) * num_receivers)
    return group


def _all_answer(engines: Sequence[ActorHandle], timeout_s: float) -> bool:
    answers: list[Any] = [engine.pid.remote() for engine in engines]
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
    return len(done) == len(answers) and not any(isinstance(_outcome(answer), RayError) for answer in done)


class WeightSender:
    """Sends weights to the engines; when one fails, the others still get theirs.

    A bucket that a failed broadcast did not deliver, or that an engine cannot copy from this process's memory, goes
    through the object store, and so do all later ones. The group is closed then.
    """

    def __init__(
        self,
        engines: Sequence[ActorHandle],
        timeout_s: float,
        group: BroadcastGroup | None = None,
        *,
        shares: bool = False,
    ) -> None:
        """`shares`: the engines copy from this process's memory."""
        self.refusal: str | None = None
        self._shares = shares
        self._engines = dict(enumerate(engines))
        self._deadline = time.monotonic() + timeout_s
        self._group = group
        self._failed: list[int] = []
        self._loading: dict[int, Any] = {}

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> list[int]:
        """Send all weights to every engine; returns the indices of the engines that failed."""
        self._loading = {place: engine.load_weights.remote(version) for place, engine in self._engines.items()}
        for bucket in buckets(weights, _BUCKET_BYTES):
            places = self._directly(bucket)
            # As arrays, which Ray neither copies nor pickles as it does tensors: ten times as fast.
            stored = [
                (TensorSpec.of(name, tensor), bytes_of(tensor.cpu()).numpy()) for name, tensor in bucket if places
            ]
            self._hand_out(stored, places)
        self._hand_out(None, list(self._engines))
        for place in list(self._engines):
            self._settle(place, self._loading[place])
        return sorted(self._failed)

    def _directly(self, bucket: list[tuple[str, Tensor]]) -> list[int]:
        """Deliver a bucket without the object store; returns the places of living engines that did not take it."""
        if self._group is not None:
            return self._broadcast(bucket, self._group)
        return self._share(bucket) if self._shares else list(self._engines)

    def _share(self, bucket: list[tuple[str, Tensor]]) -> list[int]:
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

    def _broadcast(self, bucket: list[tuple[str, Tensor]], group: BroadcastGroup) -> list[int]:
        """Broadcast a bucket; returns the places of living engines that did not receive it."""
        specs = [TensorSpec.of(name, tensor) for name, tensor in bucket]
        taking: dict[int, Any] = {
            place: engine.receive_broadcast.remote(specs) for place, engine in self._engines.items()
        }
        try:
            started = group.start([tensor.contiguous() for _, tensor in bucket])
            if self._all_receive(taking):
                group.finish(started)
                return []
            del started  # otherwise the connections would stay open
        except BroadcastFailed as failure:
            logger.warning("a broadcast of weights failed: %s", failure)
        logger.warning("the group for broadcasts is closed; the object store takes over until the next update")
        group.close()
        self._group = None
        return [place for place, answer in taking.items() if self._settle(place, answer) is not None]

    def _all_receive(self, taking: dict[int, Any]) -> bool:
        """Wait until every engine has received a broadcast; False as soon as one has not.

        It takes at most half of the remaining time and leaves the other half for sending to the living engines.
        """
        until = (time.monotonic() + self._deadline) / 2
        waiting, updates = set(taking.values()), {self._loading[place] for place in taking}
        while waiting:
            # An update that ends before its last bucket has failed.
            done, _ = ray.wait([*waiting, *updates], timeout=max(until - time.monotonic(), 0))
            if not done or any(answer in updates or _outcome(answer) is not None for answer in done):
                return False
            waiting.difference_update(done)
        return True

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


def _outcome(answer: Any) -> object:
    """The result of a finished call, or the error that ended it."""
    try:
        return ray.get(answer)
    except RayError as error:
        return error


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
