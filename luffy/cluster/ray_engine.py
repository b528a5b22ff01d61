"""The engines of a cluster as one: requests are shared among them, and one that dies is replaced."""

import threading
from collections.abc import Callable, Sequence

import ray

from luffy.cluster.supervision import Member, MemberDied, answers
from luffy.errors import ClusterError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams

MAX_RESTARTS = 3
"""Of engines, in one `generate`: one that dies again and again has a reason that a restart does not mend."""


class RayEngine:
    """Generates with several engine actors. Threads may call `generate` at the same time.

    `replace(place, member)` must start an engine in the place of a dead one, give it the current weights and return it.
    """

    def __init__(self, members: Sequence[Member], replace: Callable[[int, Member], Member], timeout_s: float) -> None:
        self.members = list(members)
        self.num_restarts = 0
        self._replace = replace
        self._timeout_s = timeout_s
        self._replacing = threading.Lock()

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests.

        What a dead engine was asked for is asked again, of the one in its place: each request has its own seed, and
        no answer of a dead engine was taken. Raises ClusterError when engines keep dying.
        """
        completions: dict[int, Completion] = {}
        parts = shares(requests, len(self.members))
        for attempt in range(MAX_RESTARTS + 1):
            asked = {place: self._ask(place, part, requests, params) for place, part in parts.items()}
            dead: dict[int, Member] = {}
            for place, (member, reference) in asked.items():
                try:
                    (found,) = answers([member], [reference], self._timeout_s)
                except MemberDied:
                    dead[place] = member
                    if attempt == MAX_RESTARTS:
                        raise
                else:
                    completions.update(zip(parts[place], found, strict=True))
            parts = {place: parts[place] for place in dead}
            if not parts:
                return [completions[i] for i in range(len(requests))]
            for place, member in dead.items():
                self.restart(place, member)
        raise ClusterError("unreachable")  # the last attempt returns or raises

    def restart(self, place: int, dead: Member) -> None:
        """Put a new engine in the place of `dead`, unless another thread has done so already."""
        with self._replacing:
            if self.members[place] is dead:
                ray.kill(dead.handle)  # it may only be silent
                self.members[place] = self._replace(place, dead)
                self.num_restarts += 1

    def close(self) -> None:
        """The actors end with their cluster."""

    def _ask(
        self, place: int, part: Sequence[int], requests: Sequence[RolloutRequest], params: SamplingParams
    ) -> tuple[Member, object]:
        member = self.members[place]
        return member, member.handle.generate.remote([requests[i] for i in part], params)


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
