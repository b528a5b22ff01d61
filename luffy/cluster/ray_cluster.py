"""`cluster: ray`: DeepSpeed ranks and vLLM engines as Ray actors, on one machine or many."""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

from luffy.cluster.local import RanksInTurn, rollout_engine
from luffy.cluster.ray_engine import EngineActors, RayEngine, RayRanks, has_gpus
from luffy.cluster.ray_session import layout, ray_session, reserve
from luffy.cluster.supervision import Member, Supervisor
from luffy.cluster.weights import send_weights
from luffy.config.execution import WeightTransfer
from luffy.rollout.engine import RolloutEngine
from luffy.training.learner import Trainer, TrainerRank, TrainerSpec
from luffy.training.ranks import call_everywhere

logger = logging.getLogger(__name__)
_UPDATE_THREADS = 3
"""Threads of an engine besides those that generate: `load_weights`, one that receives, and one for other calls."""
_SEND_TIMEOUT_S = 300.0
"""Time limit for sending all weights to the engines; under ZeRO 3 the other ranks wait in a collective meanwhile."""


class RayCluster:
    """Trainer ranks and engines, each in its own process. A context manager: all of them end with it.

    Colocated on GPUs, engines sleep while the trainer learns and wake up with new weights.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._config = spec.execution.ray
        self._stack = ExitStack()
        self._supervisor = Supervisor()
        # Engines and trainer start with the same weights, but engines with adapters without one.
        self._published = 0 if spec.execution.vllm.separate(spec.settings.lora) is None else -1
        self._sending_s = 0.0
        colocated = self._config.placement == "colocated"
        self._way: WeightTransfer = self._config.weight_transfer or ("ipc" if colocated else "object_store")

    def __enter__(self) -> "RayCluster":
        spec, config = self._spec, self._config
        with self._stack:
            num_engines = config.engines
            self._stack.enter_context(ray_session(config, config.trainer_ranks + num_engines))
            gpus = has_gpus(config)
            share_devices = config.placement == "colocated"
            share_gpus = gpus and share_devices
            places = layout(config, spec.execution.vllm.tensor_parallel_size, gpus, num_engines)
            group = reserve(places, config.start_timeout_s)
            self._stack.callback(self._supervisor.close)
            logger.info("Ray is up; starting %d trainer ranks and %d engines", config.trainer_ranks, num_engines)
            settings = spec.settings
            actors = EngineActors(
                places.engines,
                group,
                (settings.rl.max_staleness + 1) * max(settings.lanes, 1) + _UPDATE_THREADS,
                spec.model,
                rollout_engine(spec, num_engines),
                settings.dtype,
                spec.longest,
                config,
                spec.out,
                sleeps=share_gpus,
                reads_text=bool(settings.rl.stop),
                adapter=spec.execution.vllm.separate(settings.lora),
            )
            engines = [actors.start(place) for place in range(num_engines)]
            self._ranks = RayRanks(spec, places.ranks, group, self._supervisor)
            opening, ranks_opening = actors.open(engines, waits=share_devices), self._ranks.open()
            if share_devices:
                # Devices are used one after the other: vLLM's memory profiling counts any change on its GPU as its own
                # use. Libraries and settings are loaded in parallel.
                self._supervisor.answers(self._ranks.members, ranks_opening, config.start_timeout_s)
                call_everywhere(self._ranks, TrainerRank.free_cache)
                logger.info("the trainer ranks are ready; the engines load the model")
                for engine in engines:
                    engine.handle.take_device.remote()
            self._supervisor.answers(
                [*engines, *self._ranks.members], [*opening, *ranks_opening], config.start_timeout_s
            )
            logger.info("trainer ranks and engines are ready; weights go by %s", self._way)
            self._engines = RayEngine(engines, actors, self._supervisor, self._send)
            sharing = self._engines if share_gpus else None
            self.in_turn = RanksInTurn(self._ranks, round(places.total("GPU")), sharing)
            """All ranks, for calls that may need the GPUs of engines."""
            self.trainer = Trainer(spec.settings, self.in_turn)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def engine(self) -> RolloutEngine:
        return self._engines

    def publish(self, version: int) -> None:
        """Send the trainer's weights to every engine; running rollouts continue after the update."""
        if version == self._published and not self.in_turn.engine_sleeps:
            return
        self._published = version
        with self.in_turn.waking():
            began = time.perf_counter()
            self._engines.update(lambda engines: self._send(engines, self._way))
            self._sending_s = time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Restarts so far, and the share of `perf/weights_s` that was not spent on waking engines."""
        return {"perf/engine_restarts": float(self._engines.num_restarts), "perf/weights_sending_s": self._sending_s}

    def _send(self, engines: Sequence[Member], way: WeightTransfer = "object_store") -> list[int]:
        """Indices of the engines that did not take the weights."""
        # With ipc all engines, each from the rank in its bundle; otherwise any engines, from rank 0.
        bundles = self._ranks.bundles
        served = (
            [[bundle] for bundle in bundles] if way == "ipc" else [[*range(len(engines))], *[[] for _ in bundles[1:]]]
        )
        # Shorter than the time limit of the ranks' call, or a hanging engine would be reported as a hanging rank.
        timeout_s = min(self._config.call_timeout_s / 4, _SEND_TIMEOUT_S)
        sent = self._ranks.call(
            send_weights,
            [([engines[i].handle for i in own], self._published, timeout_s, way) for own in served],
        )
        for of_rank in sent:
            if of_rank.refusal is not None and self._way != "object_store":
                logger.warning("weights go by object_store from now on, not by %s: %s", self._way, of_rank.refusal)
                self._way = "object_store"
        return sorted(own[i] for own, of_rank in zip(served, sent, strict=True) for i in of_rank.failed)
