"""What training runs on: a cluster for RL, ranks for SFT; with `cluster: local`, one process for trainer and engine.

The embedded engine generates with the very model in training. A vLLM engine (`rl.engine: vllm`) has a copy of its
weights, which every `publish` replaces. On a GPU it sleeps while the trainer learns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, Protocol, TypeVarTuple

import torch

from luffy.cluster.rank_processes import rank_processes
from luffy.config.execution import VLLMConfig
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.kept_engine import open_vllm
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.rollout.vllm_limits import check_installed, settled
from luffy.training.learner import Trainer, TrainerRank, TrainerSpec
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks, Rank, Ranks, RankSpec, Result, call_everywhere, device
from luffy.training.supervised import SupervisedRank, SupervisedSpec

_NEED_GPU = (TrainerRank.learn, TrainerRank.sft_step, TrainerRank.entropies, TrainerRank.mean_probabilities)
"""Methods of a rank that need more GPU memory than it holds permanently."""
_Arguments = TypeVarTuple("_Arguments")


class _HasPolicy(Protocol):
    @property
    def policy(self) -> Policy: ...


class RanksEngine:
    """Generates with the current weights of the policy in training; each rank answers its share.

    Finds stop texts with the tokenizer in `folder`.
    """

    def __init__(
        self, ranks: Ranks[_HasPolicy], batch_size: int, weight_version: int, folder: Path | None = None
    ) -> None:
        self._ranks = ranks
        self._batch_size = batch_size
        self._folder = folder
        self.weight_version = weight_version

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        number = self._ranks.num_ranks
        common = (params, self._batch_size, self.weight_version, self._folder)
        shares = [(list(requests[rank::number]), *common) for rank in range(number)]
        answered = [iter(share) for share in self._ranks.call(_generate_on_rank, shares)]
        return [next(answered[place % number]) for place in range(len(requests))]


@contextmanager
def open_answers(
    engine: Literal["cluster", "vllm"],
    spec: SupervisedSpec,
    ranks: Ranks[SupervisedRank],
    longest: int,
    num_responses: int,
) -> Iterator[Callable[[int], AbstractContextManager[RolloutEngine]]]:
    """How the policy in supervised training answers: a function from a step to the engine with the weights after it.

    `engine` is `sft.engine`. Prompts with their responses have at most `longest` tokens; `num_responses`: about how
    many there will be. vLLM sleeps on a GPU while nothing is answered. Raises ConfigError for an unusable engine.
    """
    vllm: VLLMEngine | None = None
    execution, sleeps = spec.execution, torch.cuda.is_available()
    with ExitStack() as stack:
        if engine == "vllm":
            layout = settled(execution.vllm, num_responses, longest)
            torch.cuda.empty_cache()
            vllm = open_vllm(
                spec.model,
                layout,
                spec.dtype,
                longest=longest,
                reads_text=False,
                shares_gpu=sleeps,
                adapter=execution.vllm.separate(spec.lora),
            )
            stack.enter_context(closing(vllm))
            if sleeps:
                vllm.sleep()

        @contextmanager
        def after(step: int) -> Iterator[RolloutEngine]:
            if vllm is None:
                yield RanksEngine(ranks, execution.rollout_batch_size, step)
                return
            torch.cuda.empty_cache()
            vllm.wake_up("weights")  # without effect where it does not sleep
            ranks.call(_give_weights, [(vllm, step)])
            vllm.wake_up("kv_cache")
            yield vllm
            if sleeps:
                vllm.sleep()

        yield after


def _give_weights(rank: _HasPolicy, engine: VLLMEngine, step: int) -> None:
    engine.load_weights(rank.policy.published(device()), step)


def _generate_on_rank(
    rank: _HasPolicy,
    requests: list[RolloutRequest],
    params: SamplingParams,
    batch_size: int,
    weight_version: int,
    folder: Path | None,
) -> list[Completion]:
    with rank.policy.inference_model() as model:
        return TransformersEngine(model, batch_size, weight_version, folder).generate(requests, params)


def rollout_engine(spec: TrainerSpec, num_engines: int) -> VLLMConfig:
    """How each of so many engines is laid out that sample RL's rollouts."""
    config, rl, rows = spec.execution.vllm, spec.settings.rl, spec.settings.objective.group.size
    at_once = max(rl.prompts_per_step * rows // num_engines, config.max_num_seqs)  # a step waits for all of its rows
    return settled(config, rl.steps * at_once, spec.longest)


class SleepingEngine(Protocol):
    """Engines that leave their GPUs to the trainer in turn."""

    def sleep(self) -> None:
        """Release the GPU memory, weights included."""

    def wake_up(self, part: str) -> None:
        """Allocate a part of the memory again: first `weights`, then, once they are loaded, `kv_cache`."""


class RanksInTurn:
    """Trainer ranks, and engines that generate with the same GPUs in turn.

    The engines sleep from the first call that needs their memory until they get new weights.
    """

    def __init__(self, ranks: Ranks[TrainerRank], num_gpus: int, sharing: SleepingEngine | None) -> None:
        """`num_gpus` are those of ranks and engines; `sharing`: None where each has its own."""
        self._ranks = ranks
        self._sharing = sharing
        self.num_gpus = num_gpus
        self.num_ranks = ranks.num_ranks
        self.engine_sleeps = False

    def call(
        self, method: Callable[[TrainerRank, *_Arguments], Result], arguments: Sequence[tuple[*_Arguments]]
    ) -> list[Result]:
        """Call a method of every rank at once."""
        if self._sharing is not None and method in _NEED_GPU and not self.engine_sleeps:
            self._sharing.sleep()
            self.engine_sleeps = True
        return self._ranks.call(method, arguments)

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Wake the engines, if they sleep, around the block, which gives them all weights."""
        if self._sharing is None or not self.engine_sleeps:
            yield
            return
        call_everywhere(self._ranks, TrainerRank.free_cache)
        self._sharing.wake_up("weights")
        yield
        self._sharing.wake_up("kv_cache")
        self.engine_sleeps = False


class LocalCluster:
    """Trainer ranks on this machine (`execution.ranks`), with the engine that `rl.engine` names.

    A resumed run generates the steps that are not in the journal again, from the same requests and weights. The
    embedded engine then samples the same tokens. So does vLLM on the same machine with the same number of threads and
    the same `execution.vllm`: it schedules a call's requests in the same way and reuses nothing of earlier calls.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        settings = spec.settings
        if settings.rl.engine == "vllm":
            check_installed()
        self._stack = ExitStack()
        self._ranks = self._stack.enter_context(open_ranks("local", spec))
        self._embedded = RanksEngine(self._ranks, spec.execution.rollout_batch_size, 0, spec.model)
        self._vllm: VLLMEngine | None = None
        shares_gpu = settings.rl.engine == "vllm" and torch.cuda.is_available()
        if settings.rl.engine == "vllm":
            call_everywhere(self._ranks, TrainerRank.free_cache)
            self._vllm = open_vllm(
                spec.model,
                rollout_engine(spec, 1),
                settings.dtype,
                longest=spec.longest,
                reads_text=bool(settings.rl.stop),
                shares_gpu=shares_gpu,
                adapter=spec.execution.vllm.separate(settings.lora),
            )
        self._in_turn = RanksInTurn(self._ranks, self._ranks.num_gpus, self._vllm if shares_gpu else None)
        self.trainer = Trainer(settings, self._in_turn)

    @property
    def engine(self) -> RolloutEngine:
        return self._vllm or self._embedded

    def publish(self, version: int) -> None:
        """Send the weights to vLLM; the embedded engine shares them and only gets the version."""
        if self._vllm is not None and (self._in_turn.engine_sleeps or version != self._vllm.weight_version):
            with self._in_turn.waking():
                self._ranks.call(_give_weights, [(self._vllm, version)])
        self._embedded.weight_version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        if self._vllm is not None:
            self._vllm.close()
        self._stack.close()


class Cluster(Protocol):
    """A trainer, a rollout engine, and the transfer of weights between them.

    A context manager: everything it started ends with the context.
    """

    @property
    def trainer(self) -> Trainer: ...

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights published last."""

    def publish(self, version: int) -> None:
        """Send the trainer's current weights, after `version` RL steps, to the engine unless it has them."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the cluster for the step's log (`perf/`)."""

    def __enter__(self) -> "Cluster": ...

    def __exit__(self, *_: object) -> None: ...


def open_cluster(spec: TrainerSpec) -> Cluster:
    """The cluster that `cluster` in the settings names; a context manager."""
    if spec.settings.cluster == "ray":
        from luffy.cluster.ray_cluster import RayCluster  # imported here so that local runs need no Ray

        return RayCluster(spec)
    return LocalCluster(spec)


def open_ranks(cluster: Literal["local", "ray"], spec: RankSpec[Rank]) -> AbstractContextManager[Ranks[Rank]]:
    """Ranks without engines: `execution.ranks` on this machine, or `execution.ray.trainer_ranks` on Ray."""
    if cluster == "ray":
        from luffy.cluster.ray_engine import ray_ranks  # imported here so that local runs need no Ray

        return ray_ranks(spec)
    ranks = spec.execution.ranks
    if torch.cuda.is_available():
        ranks = min(ranks, torch.cuda.device_count())
    if ranks > 1:
        return rank_processes(spec, ranks)
    return nullcontext(LocalRanks(spec.open_rank()))
