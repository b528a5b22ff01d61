"""The engines of a cluster as one: requests are shared among them, and one that dies is replaced."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from luffy.cluster.supervision import Member, MemberDied, Supervisor
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams

logger = logging.getLogger(__name__)
MAX_RESTARTS = 3
"""Of engines, in one `generate`: one that dies again and again has a reason that a restart does not mend."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one engine was asked for."""

    place: int
    member: Member
    requests: Sequence[int]
    """Their places."""


class RayEngine:
    """Generates with several engine actors. Threads may call `generate` at the same time.

    `replace(place, member)` must start an engine in the place of a dead one, give it the current weights and return it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        replace: Callable[[int, Member], Member],
        supervisor: Supervisor,
        timeout_s: float,
    ) -> None:
        self.members = list(members)
        self.num_restarts = 0
        self._replace = replace
        self._supervisor = supervisor
        self._timeout_s = timeout_s
        self._replacing = threading.Lock()

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests.

        What a dead engine was asked for is asked again, of the one in its place: each request has its own seed, and
        no answer of a dead engine was taken. Raises ClusterError when engines keep dying.
        """
        completions: dict[int, Completion] = {}
        asked: dict[Any, _Share] = {}
        for place, part in shares(requests, len(self.members)).items():
            asked |= self._ask(place, part, requests, params)
        num_deaths = 0
        while asked:
            try:
                reference, found = self._supervisor.first_answer(
                    {reference: share.member for reference, share in asked.items()}, self._timeout_s
                )
                completions.update(zip(asked.pop(reference).requests, found, strict=True))
            except MemberDied as death:
                num_deaths += 1
                if num_deaths > MAX_RESTARTS:
                    raise
                reference = next(r for r, share in asked.items() if share.member is death.member)
                lost = asked.pop(reference)
                logger.warning("%s", death)
                self.restart(lost.place, lost.member)
                asked |= self._ask(lost.place, lost.requests, requests, params)
        return [completions[i] for i in range(len(requests))]

    def restart(self, place: int, dead: Member) -> None:
        """Put a new engine in the place of `dead`, unless another thread has done so already."""
        with self._replacing:
            if self.members[place] is dead:
                self._restart(place)

    def update(self, send: Callable[[Sequence[Member]], Iterable[int]]) -> None:
        """Have `send` give all engines weights. It returns the places of those that did not take them.

        These are replaced. No other thread replaces an engine meanwhile: it might get the weights of before.
        """
        with self._replacing:
            for place in send(self.members):
                logger.warning("%s did not take its weights", self.members[place].name)
                self._restart(place)

    def ask(self, method: str, *arguments: object) -> None:
        """Call a method of every engine; one that has died is replaced, and needs no answer any more."""
        asked = [(member, getattr(member.handle, method).remote(*arguments)) for member in self.members]
        for place, (member, reference) in enumerate(asked):
            try:
                self._supervisor.answers([member], [reference], self._timeout_s)
            except MemberDied as death:
                logger.warning("%s", death)
                self.restart(place, member)

    def close(self) -> None:
        """The actors end with their cluster."""

    def _restart(self, place: int) -> None:
        self._supervisor.check_open()  # a Ray that is shut down would start anew
        dead = self.members[place]
        ray.kill(dead.handle)  # it may only be silent
        self.members[place] = self._replace(place, dead)
        self.num_restarts += 1

    def _ask(
        self, place: int, part: Sequence[int], requests: Sequence[RolloutRequest], params: SamplingParams
    ) -> dict[Any, _Share]:
        member = self.members[place]
        reference: Any = member.handle.generate.remote([requests[i] for i in part], params)
        return {reference: _Share(place, member, part)}


def shares(requests: Sequence[RolloutRequest], num_engines: int) -> dict[int, list[int]]:
    """Which engine answers which requests (by their places); engines without a request are left out.

    The requests of a prompt stay together, for they share its KV cache, and go to the engine with the fewest tokens of
    prompts so far.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(request.prompt_ids, []).append(i)
    parts: list[list[int]] = [[] for _ in range(num_engines)]
    load = [0] * num_engines
    for prompt, places in prompts.items():
        engine = min(range(num_engines), key=lambda engine: (load[engine], len(parts[engine]), engine))
        parts[engine] += places
        load[engine] += len(places) * max(len(prompt), 1)
    return {engine: part for engine, part in enumerate(parts) if part}
