"""Check of the GPUs and memory that a run under `cluster: ray` needs, before anything expensive starts.

For `cluster: local` there is only advice on the rollout engine, and the check of an adapter.
"""

from dataclasses import dataclass

from luffy.config import ExperimentConfig
from luffy.config.stage_kinds import cluster_gpus
from luffy.errors import ConfigError
from luffy.pipeline.machine.adapter_shape import linear_layers, missing_package
from luffy.pipeline.machine.architecture import ModelArchitecture, architecture_of
from luffy.pipeline.machine.gpus import detected_gpus
from luffy.pipeline.machine.memory import ENGINE_GPU, GpuMemory, engine_share, estimate_memory

_ROUNDING = 1.03
"""Tolerance on the stated memory: a card sold as 80 GB reports 79.2 to 79.6 GiB."""
_LARGE_FOR_EMBEDDED = 50_000_000
"""Number of parameters from which vLLM is recommended over the embedded engine. For SmolLM2 (135 million), on two CPU
cores in float32, vLLM generates three times as many tokens per second (`tests/benchmarks/rollout_engines.py`)."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The findings about an experiment's GPUs."""

    gpus: tuple[GpuMemory, ...]
    """Estimated memory of each kind of GPU; empty if there is no estimate."""
    notes: tuple[str, ...]
    """Notes for the user who starts the run."""
    complaints: tuple[str, ...]
    """One line for each reason why the run cannot work: the field, what was found, what to do."""


def check_resources(config: ExperimentConfig) -> None:
    """Raise ConfigError, one line per mistake, if the experiment needs more GPUs or memory than the machine has."""
    complaints = find_resources(config).complaints
    if complaints:
        raise ConfigError("\n".join(complaints))


def find_resources(config: ExperimentConfig) -> Resources:
    """Check an experiment's needs. A chain without SFT and RL has no findings.

    Raises DataError if `model.path` is a local path that is not a model folder.
    """
    if not {"sft", "rl"} & {*config.stages}:
        return Resources((), (), ())
    adapter = _unusable_adapter(config)
    if config.cluster == "local":
        return Resources((), tuple(_advice_on_engine(config)), tuple(adapter))
    architecture = architecture_of(config.model)
    here = detected_gpus_gib() if config.execution.ray.address is None else None
    gpu_gib = config.execution.gpu_memory_gb or (min(here) if here else None)
    gpus = estimate_memory(architecture, config, gpu_gib) if architecture else ()
    complaints = [*adapter, *_too_few_gpus(config, here), *_smaller_gpus(config, here)]
    if architecture is not None:
        complaints += [*_heads_not_divided(config, architecture), *_too_full(config, architecture, gpu_gib, gpus)]
    return Resources(gpus, tuple(_notes(config, here, gpu_gib, architecture)), tuple(complaints))


def detected_gpus_gib() -> tuple[float, ...] | None:
    """Memory of each GPU that this process may use; None if the driver does not respond."""
    gpus = detected_gpus()
    return None if gpus is None else tuple(gpu.memory_gib for gpu in gpus)


def _unusable_adapter(config: ExperimentConfig) -> list[str]:
    """What the first training stage would refuse, perhaps hours later."""
    lora = config.model.lora
    if lora is None:
        return []
    architecture = architecture_of(config.model)
    layers = [layer.name for layer in linear_layers(architecture)] if architecture is not None else []
    complaint = lora.complaint(layers) if layers else None
    return [line for line in (missing_package(), complaint) if line is not None]


def _advice_on_engine(config: ExperimentConfig) -> list[str]:
    """Advice against the embedded engine for large models; a pretrained model of unknown shape counts as large.

    And against vLLM in the trainer's process on a machine with GPUs: the stage itself would refuse it only after SFT.
    """
    if "rl" not in config.stages or config.rl is None:
        return []
    if config.rl.engine == "vllm" and (gpus := detected_gpus()):
        return [
            f"rl.engine: vllm works without a GPU only, and this machine has {len(gpus)}: RL will end where torch sees "
            "one; set cluster: ray with execution.ray.placement: colocated instead"
        ]
    if config.rl.engine != "cluster" or config.model.architecture is not None:
        return []
    architecture = architecture_of(config.model)
    if architecture is not None and architecture.num_parameters < _LARGE_FOR_EMBEDDED:
        return []
    better = "cluster: ray generates with vLLM" if detected_gpus() else "rl.engine: vllm is about three times as fast"
    return [f"the embedded engine is slow for a model of this size; {better}"]


def _too_few_gpus(config: ExperimentConfig, here: tuple[float, ...] | None) -> list[str]:
    if not here or cluster_gpus(config) <= len(here):
        return []
    ray, ways = config.execution.ray, config.execution.vllm.tensor_parallel_size
    return [
        f"execution.ray: {ray.trainer_ranks} trainer ranks and {config.num_engines} engines x {ways} GPUs "
        f"({ray.placement}) take {cluster_gpus(config)} GPUs, this machine has {len(here)}; lower "
        "execution.ray.trainer_ranks or execution.ray.engines, or give the execution.ray.address of a larger cluster"
    ]


def _smaller_gpus(config: ExperimentConfig, here: tuple[float, ...] | None) -> list[str]:
    stated = config.execution.gpu_memory_gb
    if not here or stated is None or stated <= min(here) * _ROUNDING:
        return []
    return [
        f"execution.gpu_memory_gb: {stated:g} GiB, but the smallest GPU of this machine has {min(here):.1f}; correct "
        "it, or set it to null to use the detected size"
    ]


def _heads_not_divided(config: ExperimentConfig, architecture: ModelArchitecture) -> list[str]:
    ways = config.execution.vllm.tensor_parallel_size
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if not config.num_engines or _divides(ways, architecture):
        return []
    allowed = ", ".join(str(number) for number in range(1, heads + 1) if _divides(number, architecture))
    return [
        f"execution.vllm.tensor_parallel_size: {ways} does not divide the model's {heads} attention heads (with "
        f"{kv_heads} of keys and values); allowed are {allowed}"
    ]


def _divides(ways: int, architecture: ModelArchitecture) -> bool:
    """Whether `ways` GPUs can split the heads; with fewer key heads than GPUs, vLLM replicates each key head."""
    kv_heads = architecture.num_kv_heads
    return architecture.num_heads % ways == 0 and (kv_heads % ways == 0 or ways % kv_heads == 0)


def _too_full(
    config: ExperimentConfig, architecture: ModelArchitecture, gpu_gib: float | None, gpus: tuple[GpuMemory, ...]
) -> list[str]:
    if gpu_gib is None:
        return []
    complaints = [_complaint(config, gpu) for gpu in gpus if not gpu.fits and gpu.name != ENGINE_GPU]
    if config.num_engines and not (engine := engine_share(architecture, config, gpu_gib)).fits:
        return [_engine_complaint(config, engine), *complaints]
    return complaints


def _engine_complaint(config: ExperimentConfig, engine: GpuMemory) -> str:
    share = config.execution.vllm.gpu_memory_utilization
    return (
        f"execution.vllm: an engine needs about {engine.total_gib:.1f} GiB of a GPU for its weights and one sequence "
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
    return [*remedies, "raise execution.ray.trainer_ranks"]


def _notes(
    config: ExperimentConfig,
    here: tuple[float, ...] | None,
    gpu_gib: float | None,
    architecture: ModelArchitecture | None,
) -> list[str]:
    address, wanted = config.execution.ray.address, cluster_gpus(config)
    notes = []
    if address is not None:
        notes.append(f"{wanted} GPUs needed on the cluster at {address}, whose GPUs were not checked")
    elif here is None:
        notes.append(f"{wanted} GPUs needed; nvidia-smi did not respond, so the number of GPUs is unknown")
    elif not here:
        notes.append(f"{wanted} GPUs needed; this machine has none: ranks and engines would run on its CPU")
    else:
        notes.append(f"{wanted} GPUs needed, this machine has {len(here)}")
    if architecture is None:
        notes.append(f"no memory estimate: the shape of {config.model.path} is unknown here; give a model folder")
    elif gpu_gib is None:
        notes.append("memory not checked: no GPU found; set execution.gpu_memory_gb")
    return notes
