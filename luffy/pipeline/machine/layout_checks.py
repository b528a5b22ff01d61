"""Whether the layout of an experiment fits its GPUs: one line for each reason why it does not."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from luffy.config import ExperimentConfig
from luffy.config.stage_kinds import cluster_gpus, engine_gpus
from luffy.pipeline.machine.architecture import ModelArchitecture
from luffy.pipeline.machine.engine_memory import (
    DIFFICULTY,
    EVALUATION,
    RL_ENGINE,
    SAMPLING,
    generation_memory,
    rl_engine_memory,
)
from luffy.pipeline.machine.gpu_memory import GpuMemory
from luffy.pipeline.machine.memory import estimate_memory

_ROUNDING = 1.03
"""Tolerance on the stated memory: a card sold as 80 GB reports 79.2 to 79.6 GiB."""
_TRAINING = {"sft", "rl"}
_EVALUATING = {"evaluate", "sweep"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages of an experiment that will run, and the GPUs that are available to them."""

    config: ExperimentConfig
    stages: Collection[str]
    here_gib: tuple[float, ...] | None
    """Memory of each GPU of this machine; None: unknown."""
    architecture: ModelArchitecture | None
    """None: unknown."""

    @property
    def trains_on_ray(self) -> bool:
        """Whether SFT or RL runs under `cluster: ray`."""
        return self.config.cluster == "ray" and not _TRAINING.isdisjoint(self.stages)

    @property
    def starts_ray(self) -> bool:
        """Whether a stage starts Ray on this machine, for training or for several engines that answer prompts."""
        execution = self.config.execution
        trains_here = self.trains_on_ray and execution.ray.address is None
        return trains_here or (bool(self.vllm_users) and execution.vllm.engines > 1)

    @property
    def num_engines(self) -> int:
        """Engines of RL under `cluster: ray`."""
        return self.config.num_engines if self.trains_on_ray and "rl" in self.stages else 0

    @property
    def vllm_users(self) -> tuple[str, ...]:
        """The stages, in words, in which a finished model answers prompts with vLLM."""
        return tuple(name for name, engine in self._answering if engine == "vllm")

    @property
    def embeds_engine(self) -> bool:
        """Whether the embedded engine answers prompts for a stage that is estimated."""
        return self.checks_generation and any(engine == "transformers" for _, engine in self._answering)

    @property
    def training_here_gib(self) -> tuple[float, ...] | None:
        """Memory of each GPU available to training; None: unknown, as on a joined cluster."""
        return self.here_gib if self.config.execution.ray.address is None else None

    @property
    def training_gpu_gib(self) -> float | None:
        """Memory of the smallest GPU of training; None: unknown."""
        return self._smallest(self.training_here_gib)

    @property
    def generation_gpu_gib(self) -> float | None:
        """The same for stages in which a finished model answers, which always run on this machine."""
        return self._smallest(self.here_gib)

    @property
    def checks_generation(self) -> bool:
        """Whether stages in which a finished model answers are estimated: with `cluster: ray`, or with vLLM on known
        GPUs.

        `cluster: local` without vLLM is for small models; its training is not estimated either.
        """
        by_vllm = bool(self.vllm_users) and self.generation_gpu_gib is not None
        return by_vllm or (self.config.cluster == "ray" and any(engine != "openai" for _, engine in self._answering))

    @property
    def _answering(self) -> list[tuple[str, str | None]]:
        """The stages in which a finished model answers prompts, each with its engine."""
        config, found = self.config, list[tuple[str, str | None]]()
        if config.evaluation is not None and not _EVALUATING.isdisjoint(self.stages):
            found.append(("evaluation", config.evaluation.engine))
        if config.measured_difficulty is not None and "difficulty" in self.stages:
            found.append(("difficulty", config.measured_difficulty.engine))
        if config.sampled_traces is not None and "sample" in self.stages:
            found.append(("sample", config.sampled_traces.engine))
        return found

    def _smallest(self, gpus_gib: tuple[float, ...] | None) -> float | None:
        return self.config.execution.gpu_memory_gb or (min(gpus_gib) if gpus_gib else None)


def memory_of(placement: Placement) -> tuple[GpuMemory, ...]:
    """Memory of each kind of GPU in the stages that are estimated; empty for a model of unknown shape."""
    config, architecture = placement.config, placement.architecture
    if architecture is None:
        return ()
    found: tuple[GpuMemory, ...] = ()
    if placement.trains_on_ray:
        found += estimate_memory(architecture, config, placement.training_gpu_gib)
    if placement.checks_generation:
        found += generation_memory(architecture, config, placement.generation_gpu_gib, placement.stages)
    return found


def complaints_about(placement: Placement) -> list[str]:
    """One line for each reason why the layout cannot work: the field, what was found, what to do."""
    return [
        *_too_few_gpus(placement),
        *_smaller_gpus(placement),
        *_heads_not_divided(placement),
        *_heads_not_shared(placement),
        *_too_full(placement),
    ]


def divides(ways: int, architecture: ModelArchitecture) -> bool:
    """Whether `ways` GPUs can split the heads; with fewer key heads than GPUs, vLLM replicates each key head."""
    kv_heads = architecture.num_kv_heads
    return architecture.num_heads % ways == 0 and (kv_heads % ways == 0 or ways % kv_heads == 0)


def _too_few_gpus(placement: Placement) -> Iterator[str]:
    config = placement.config
    ray, vllm = config.execution.ray, config.execution.vllm
    here, training_here = placement.here_gib, placement.training_here_gib
    if placement.trains_on_ray and training_here and cluster_gpus(config) > len(training_here):
        yield (
            f"execution.ray: {ray.trainer_ranks} trainer ranks and {config.num_engines} engines x "
            f"{vllm.tensor_parallel_size} GPUs ({ray.placement}) take {cluster_gpus(config)} GPUs, this machine has "
            f"{len(training_here)}; lower execution.ray.trainer_ranks or execution.ray.engines, or give the "
            "execution.ray.address of a larger cluster"
        )
    if placement.vllm_users and here and engine_gpus(config) > len(here):
        users = " and ".join(placement.vllm_users)
        yield (
            f"execution.vllm: {vllm.engines} engines x {vllm.tensor_parallel_size} GPUs for {users} take "
            f"{engine_gpus(config)} GPUs, this machine has {len(here)}; lower execution.vllm.engines or "
            "execution.vllm.tensor_parallel_size"
        )


def states_other_gpus(placement: Placement) -> bool:
    """Whether `execution.gpu_memory_gb` is more than the memory of a GPU that is used here."""
    stated = placement.config.execution.gpu_memory_gb
    here = placement.here_gib if placement.vllm_users else placement.training_here_gib
    if not here or stated is None:
        return False
    return stated > min(here) * _ROUNDING


def _smaller_gpus(placement: Placement) -> Iterator[str]:
    if placement.here_gib and states_other_gpus(placement):
        yield (
            f"execution.gpu_memory_gb: {placement.config.execution.gpu_memory_gb:g} GiB, but the smallest GPU of this "
            f"machine has {min(placement.here_gib):.1f}; correct it, or set it to null to use the detected size"
        )


def _heads_not_divided(placement: Placement) -> Iterator[str]:
    architecture, ways = placement.architecture, placement.config.execution.vllm.tensor_parallel_size
    if architecture is None or not (placement.num_engines or placement.vllm_users) or divides(ways, architecture):
        return
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    allowed = ", ".join(str(number) for number in range(1, heads + 1) if divides(number, architecture))
    yield (
        f"execution.vllm.tensor_parallel_size: {ways} does not divide the model's {heads} attention heads (with "
        f"{kv_heads} of keys and values); allowed are {allowed}"
    )


def _heads_not_shared(placement: Placement) -> Iterator[str]:
    architecture, ways = placement.architecture, placement.config.execution.sequence_parallel
    if architecture is None or not placement.trains_on_ray or architecture.num_heads % ways == 0:
        return
    heads = architecture.num_heads
    allowed = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
    yield (
        f"execution.sequence_parallel: {ways} does not divide the model's {heads} attention heads; allowed are "
        f"{allowed}"
    )


def _too_full(placement: Placement) -> Iterator[str]:
    config, engines = placement.config, _engines(placement)
    unfit = [engine for engine in engines if not engine.fits]
    if unfit:
        yield _engine_complaint(config, max(unfit, key=lambda engine: engine.total_gib))
    names = {engine.name for engine in engines}
    yield from (_complaint(config, kind) for kind in memory_of(placement) if not kind.fits and kind.name not in names)


def _engines(placement: Placement) -> list[GpuMemory]:
    """Every vLLM engine, also one of RL that shares its GPU with a trainer."""
    architecture, config = placement.architecture, placement.config
    if architecture is None:
        return []
    found = [rl_engine_memory(architecture, config, placement.training_gpu_gib)] if placement.num_engines else []
    if placement.checks_generation and placement.vllm_users:
        generating = generation_memory(architecture, config, placement.generation_gpu_gib, placement.stages)
        found += [kind for kind in generating if kind.name.removeprefix("GPU in ") in placement.vllm_users]
    return found


def _engine_complaint(config: ExperimentConfig, engine: GpuMemory) -> str:
    share = config.execution.vllm.gpu_memory_utilization
    which = "an engine" if engine.name == RL_ENGINE else f"an engine in {engine.name.removeprefix('GPU in ')}"
    return (
        f"execution.vllm: {which} needs about {engine.total_gib:.1f} GiB of a GPU for its weights and one sequence "
        f"of full length, and its share is {engine.limit_gib:.1f} (gpu_memory_utilization {share:g}); raise "
        "gpu_memory_utilization or tensor_parallel_size"
    )


def _complaint(config: ExperimentConfig, gpu: GpuMemory) -> str:
    largest = sorted(gpu.components, key=lambda part: -part.gib)[:3]
    parts = ", ".join(f"{part.name} {part.gib:.1f}" for part in largest)
    return (
        f"execution: a {gpu.name} would hold about {gpu.total_gib:.1f} GiB of its {gpu.limit_gib:.1f} ({parts}); "
        f"{' or '.join(_remedies(config, gpu))}"
    )


def _remedies(config: ExperimentConfig, gpu: GpuMemory) -> list[str]:
    """Settings that would free memory, cheapest first."""
    execution = config.execution
    if gpu.name in (EVALUATION, DIFFICULTY, SAMPLING):
        return ["lower execution.rollout_batch_size", "generate with engine: vllm"]
    if gpu.name == "shared GPU in a rollout":
        remedies = ["lower execution.vllm.gpu_memory_utilization"]
    else:
        remedies = [
            *([] if execution.gradient_checkpointing else ["set execution.gradient_checkpointing: true"]),
            *(["lower execution.logprob_chunk_tokens"] if gpu.gib("logits") else []),
            *(["lower execution.micro_batch_tokens"] if gpu.gib("recomputed layer") else []),
        ]
    if execution.zero_stage < 3:
        remedies.append("raise execution.zero_stage")
    elif not execution.offload_optimizer:
        remedies.append("set execution.offload_optimizer: true")
    elif not execution.offload_parameters:
        remedies.append("set execution.offload_parameters: true")
    return [*remedies, "raise execution.ray.trainer_ranks"]
