"""Ray actors of a stage: the ranks of a training process group, and engines as one, which replaces dead actors."""

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVarTuple

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from luffy.cluster.actors import EngineActor, ProcessSetup, RankActor
from luffy.cluster.ray_session import (
    Place,
    joined_gpus,
    lacks,
    layout,
    lost_machines,
    machines_of,
    ray_session,
    reserve,
)
from luffy.cluster.supervision import Member, MemberDied, Supervisor
from luffy.config.execution import RayConfig, VLLMConfig
from luffy.config.model import LoRAConfig
from luffy.errors import ClusterError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.training.ranks import Rank, RankSpec, Result

_LOGS = "logs"
_Arguments = TypeVarTuple("_Arguments")


class RayRanks(Generic[Rank]):
    """One actor for each of `places`; call `open` before anything else, and wait for what it returns."""

    def __init__(
        self, spec: RankSpec[Rank], places: Sequence[Place], group: PlacementGroup, supervisor: Supervisor
    ) -> None:
        self._spec = spec
        self._config = spec.execution.ray
        self._supervisor = supervisor
        self._submitting = threading.Lock()
        self._places = places
        self.members = []
        for rank, place in enumerate(self._places):
            setup = ProcessSetup(log_file(spec.out, f"rank_{rank}"), spec.execution.num_threads)
            self.members.append(start_member(f"trainer rank {rank}", RankActor, place, group, setup))

    @property
    def bundles(self) -> list[int]:
        """Where each rank is: the index of its bundle."""
        return [place.bundle for place in self._places]

    @property
    def num_ranks(self) -> int:
        return len(self.members)

    @property
    def num_gpus(self) -> int:
        return round(sum(place.gpus for place in self._places))

    def open(self) -> list[Any]:
        """Have every rank join the process group and load its model; returns a reference to each answer."""
        first = self.members[0]
        asked = [first.handle.meeting_point.remote()]
        (meeting_point,) = self._supervisor.answers([first], asked, self._config.start_timeout_s)
        return [
            member.handle.open.remote(self._spec, rank, self.num_ranks, meeting_point)
            for rank, member in enumerate(self.members)
        ]

    def call(
        self, method: Callable[[Rank, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        # The calls contain collectives, so every rank has to receive them in the same order.
        with self._submitting:
            asked = [
                member.handle.call.remote(method, *of_rank)
                for member, of_rank in zip(self.members, arguments, strict=True)
            ]
        return self._supervisor.answers(self.members, asked, self._config.call_timeout_s)


@contextmanager
def ray_ranks(spec: RankSpec[Rank]) -> Iterator[RayRanks[Rank]]:
    """Ranks without engines, on `execution.ray.trainer_ranks` GPUs (or CPUs); they end with the context."""
    config, supervisor = spec.execution.ray, Supervisor()
    with ray_session(config, config.trainer_ranks):
        places = layout(config, 1, has_gpus(config), num_engines=0)
        try:
            ranks = RayRanks(spec, places.ranks, reserve(places, config.start_timeout_s), supervisor)
            supervisor.answers(ranks.members, ranks.open(), config.start_timeout_s)
            yield ranks
        finally:
            supervisor.close()


def has_gpus(config: RayConfig) -> bool:
    """Whether the cluster has GPUs, according to Ray for a joined cluster, and to torch for one of this machine."""
    return torch.cuda.is_available() if config.address is None else joined_gpus() > 0


def log_file(out: Path, process: str) -> Path:
    return out / _LOGS / f"{process}.log"


def start_member(
    name: str, actor: type, place: Place, group: PlacementGroup, setup: ProcessSetup, num_threads: int = 1
) -> Member:
    """Start an actor at `place` that answers `num_threads` calls at the same time, and is never restarted by Ray."""
    remote: Any = ray.remote(actor).options(
        num_cpus=place.cpus,
        num_gpus=place.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.bundle),
        max_concurrency=num_threads,
        max_restarts=0,
    )
    handle: object = remote.remote(setup)
    assert isinstance(handle, ActorHandle)  # Ray's annotation also admits the class, for editors
    return Member(name, handle, setup.log, machines_of(group)[place.bundle])


logger = logging.getLogger(__name__)
MAX_RESTARTS = 3
"""Engine restarts allowed in one `generate`: if engines keep dying, a restart does not help."""


@dataclass(frozen=True, slots=True)
class EngineActors:
    """Starts the engines of a stage, each at one of `places` and with the model folder that all begin with."""

    places: Sequence[Place]
    group: PlacementGroup
    num_threads: int
    """Threads of an engine: how many calls it answers at the same time."""
    model: Path
    vllm: VLLMConfig
    dtype: str
    max_model_len: int
    ray: RayConfig
    out: Path
    """The stage's directory, for the engines' logs."""
    sleeps: bool = False
    """Whether vLLM's sleep mode is enabled, for GPUs shared with trainer ranks."""
    reads_text: bool = True
    adapter: LoRAConfig | None = None
    """What updates bring in place of weights; None: weights."""

    def have_room(self) -> bool:
        """Whether there is still room for every process; Ray finds other places for those of a lost machine."""
        return not lacks(self.group.bundle_specs) and self.group.wait(self.ray.start_timeout_s)

    def start(self, place: int) -> Member:
        """A new actor, without a model."""
        # torch.set_num_threads holds for the calling thread alone, and an engine steps in several threads.
        setup = ProcessSetup(log_file(self.out, f"engine_{place}"), num_threads=None)
        return start_member(f"engine {place}", EngineActor, self.places[place], self.group, setup, self.num_threads)

    def open(self, members: Sequence[Member], *, waits: bool = False) -> list[Any]:
        """Have actors load the model at the same time; returns a reference to each answer.

        `waits`: up to what needs the device, which `take_device` allows.
        """
        return [
            member.handle.open.remote(
                self.model,
                self.vllm,
                self.dtype,
                self.max_model_len,
                self.ray.call_timeout_s,
                sleeps=self.sleeps,
                reads_text=self.reads_text,
                adapter=self.adapter,
                waits=waits,
            )
            for member in members
        ]


_EngineShare = tuple[int, Member, Sequence[int]]
"""Place, engine, and the indices of the `generate` call's requests that were sent to it."""


class RayEngine:
    """Generates with several engine actors; `generate` is thread-safe.

    `load` gives engines the current weights and returns the indices of those that did not take them.
    """

    def __init__(
        self,
        members: Sequence[Member],
        actors: EngineActors,
        supervisor: Supervisor,
        load: Callable[[Sequence[Member]], Sequence[int]],
    ) -> None:
        self.members = list(members)
        self.num_restarts = 0
        self._actors = actors
        self._supervisor = supervisor
        self._load = load
        self._timeout_s = actors.ray.call_timeout_s
        self._replacing = threading.Lock()

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order; the requests are distributed over the engines.

        The requests of a dead engine are sent again to its replacement, with the same seeds. Raises MemberDied when
        engines keep dying.
        """
        return self._generate(shares(requests, len(self.members)), requests, params)

    def generate_at(self, place: int, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """Like `generate`, with all requests sent to the engine at `place` or its replacement."""
        return self._generate({place: range(len(requests))}, requests, params)

    def _generate(
        self, parts: Mapping[int, Sequence[int]], requests: Sequence[RolloutRequest], params: SamplingParams
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        asked: dict[Any, _EngineShare] = {}
        for place, part in parts.items():
            asked |= self._ask(place, part, requests, params)
        num_deaths = 0
        while asked:
            try:
                members = {reference: member for reference, (_, member, _) in asked.items()}
                reference, found = self._supervisor.first_answer(members, self._timeout_s)
                completions.update(zip(asked.pop(reference)[2], found, strict=True))
            except MemberDied as death:
                num_deaths += 1
                if num_deaths > MAX_RESTARTS:
                    raise
                reference = next(r for r, (_, member, _) in asked.items() if member is death.member)
                place, member, part = asked.pop(reference)
                logger.warning("%s", death)
                self.restart(place, member)
                asked |= self._ask(place, part, requests, params)
        return [completions[i] for i in range(len(requests))]

    def restart(self, place: int, dead: Member) -> None:
        """Replace the engine `dead`, unless another thread has already done so."""
        with self._replacing:
            if self.members[place] is dead:
                self._restart(place)

    def update(self, send: Callable[[Sequence[Member]], Iterable[int]]) -> None:
        """Call `send` to update all engines, and replace those that failed, whose indices it returns.

        No other thread replaces an engine meanwhile, since the replacement might get the old weights.
        """
        with self._replacing:
            for place in send(self.members):
                logger.warning("%s did not take its weights", self.members[place].name)
                self._restart(place)

    def ask(self, method: str, *arguments: object) -> None:
        """Call a method of every engine. One that has died is replaced, and the replacement called once."""
        asked = [(member, getattr(member.handle, method).remote(*arguments)) for member in self.members]
        for place, (member, reference) in enumerate(asked):
            try:
                self._supervisor.answers([member], [reference], self._timeout_s)
            except MemberDied as death:
                logger.warning("%s", death)
                self.restart(place, member)
                fresh = self.members[place]
                again: Any = getattr(fresh.handle, method).remote(*arguments)
                self._supervisor.answers([fresh], [again], self._timeout_s)

    def sleep(self) -> None:
        self.ask("sleep")

    def wake_up(self, part: str) -> None:
        self.ask("wake_up", part)

    def _restart(self, place: int) -> None:
        self._supervisor.check_open()  # a call to Ray after its shutdown would start it again
        dead = self.members[place]
        ray.kill(dead.handle)  # it may hang rather than be dead
        gone = lost_machines()
        if dead.machine in gone and not self._actors.have_room():
            raise self._supervisor.loss_of(dead, gone[dead.machine])
        member = self._actors.start(place)
        self._supervisor.answers([member], self._actors.open([member]), self._actors.ray.start_timeout_s)
        if self._load([member]):  # weights that may be newer than those of the other engines
            raise ClusterError(f"{member.name} did not take the weights after a restart; see {member.log}")
        self.members[place] = member
        self.num_restarts += 1

    def _ask(
        self, place: int, part: Sequence[int], requests: Sequence[RolloutRequest], params: SamplingParams
    ) -> dict[Any, _EngineShare]:
        member = self.members[place]
        reference: Any = member.handle.generate.remote([requests[i] for i in part], params)
        return {reference: (place, member, part)}


def shares(requests: Sequence[RolloutRequest], num_engines: int) -> dict[int, list[int]]:
    """Indices of the requests for each engine; engines without requests are left out.

    Requests with the same prompt go to the same engine, where they share its KV cache: the engine with the fewest
    prompt tokens so far. Where they also share it with other calls (the turns of episodes), a hash of the prompt
    chooses the engine, the same one in every call.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(request.prompt_ids, []).append(i)
    parts: list[list[int]] = [[] for _ in range(num_engines)]
    load = [0] * num_engines
    for prompt, places in prompts.items():
        if requests[places[0]].shares_cache_with:
            engine = zlib.crc32(repr(prompt).encode()) % num_engines
        else:
            engine = min(range(num_engines), key=lambda engine: (load[engine], len(parts[engine]), engine))
        parts[engine] += places
        load[engine] += len(places) * max(len(prompt), 1)
    return {engine: part for engine, part in enumerate(parts) if part}
