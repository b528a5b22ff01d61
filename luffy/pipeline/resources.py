"""Check of the GPUs and memory that a run needs, before anything expensive starts.

Under `cluster: local` it covers vLLM engines, and training beside one on a GPU.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from luffy.config import ExperimentConfig
from luffy.config.chain import StageNode
from luffy.config.execution import NO_FLOAT32_ADAPTER
from luffy.config.model import ModelConfig
from luffy.config.settings import cluster_gpus, engine_gpus, has_own_vllm
from luffy.config.training import ModelTeacher
from luffy.errors import ConfigError
from luffy.model_shape import architecture_of, linear_layers, missing_package, positions_of
from luffy.pipeline.gpus import Gpu, detected_gpus, hidden_gpus
from luffy.pipeline.graph import build_graph
from luffy.pipeline.inherited_environment import complaints_about_variables
from luffy.pipeline.memory import (
    GIB,
    REWARD_MODEL,
    RL_ENGINE,
    GpuMemory,
    answering,
    estimate_memory,
    generation_memory,
    rl_engine_memory,
    teacher_models,
)

_ROUNDING = 1.03
"""Tolerance on the stated memory: a card sold as 80 GB reports 79.2 to 79.6 GiB."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The findings about an experiment's GPUs."""

    gpus: tuple[GpuMemory, ...]
    """Estimated memory of each kind of GPU; empty if there is no estimate."""
    notes: tuple[str, ...]
    """Notes for the user who starts the run."""
    complaints: tuple[str, ...]
    """One line for each reason why the run cannot work: the field, what was found, what to do."""


def check_resources(config: ExperimentConfig, nodes: Sequence[StageNode] | None = None) -> None:
    """Raise ConfigError, one line per mistake, if `nodes` (all) need more GPUs or memory than the machine has."""
    complaints = find_resources(config, nodes).complaints
    if complaints:
        raise ConfigError("\n".join(complaints))


def find_resources(config: ExperimentConfig, nodes: Sequence[StageNode] | None = None) -> Resources:
    """Check what an experiment needs for `nodes`, by default all of its own. What the others lack becomes a note.

    Under `cluster: local` only vLLM engines on known GPUs are checked. Raises DataError if
    `model.path` is a local path that is not a model folder.
    """
    gpus, every = detected_gpus(), build_graph(config)
    wanted = every if nodes is None else nodes
    views: dict[int, list[StageNode]] = {}
    for node in wanted:
        views.setdefault(id(node.config), []).append(node)
    found = [_resources_of_view(config, gpus, own) for own in views.values()]
    memory = dict.fromkeys(gpu for each in found for gpu in each.gpus)
    notes = dict.fromkeys(note for each in found for note in each.notes)
    complaints = dict.fromkeys(complaint for each in found for complaint in each.complaints)
    if {node.name for node in wanted} < {node.name for node in every}:
        others = find_resources(config).complaints
        notes |= dict.fromkeys(f"refused without --only: {line}" for line in others if line not in complaints)
    return Resources(tuple(memory), tuple(notes), tuple(complaints))


def _resources_of_view(config: ExperimentConfig, gpus: tuple[Gpu, ...] | None, nodes: Sequence[StageNode]) -> Resources:
    """What the stages need that see the experiment alike."""
    seen, wanted = nodes[0].config, tuple(dict.fromkeys(node.stage for node in nodes))
    placement = _Placement(seen, wanted, None if gpus is None else [gpu.memory_gib for gpu in gpus])
    notes = _unset_keys(seen, wanted)
    if hidden := hidden_gpus():
        notes.append(f"CUDA_VISIBLE_DEVICES hides the GPUs of this machine ({hidden}): stages run on its CPU")
    if gpus and (build := version("torch")).endswith("+cpu"):
        notes.append(f"torch {build} cannot use this machine's GPUs: stages run on its CPU; install a build for CUDA")
    complaints = list(complaints_about_variables(os.environ, starts_ray=placement.starts_ray))
    complaints += [*_too_long(seen, wanted), *_untrainable(placement), *_without_gpus(placement)]
    if placement.is_estimated:
        notes += _notes(placement) if seen.cluster == "ray" else []
        complaints += [*_unfit_gpus(placement), *_heads_not_divided(placement), *_too_full(placement)]
    if seen is config:
        return Resources(placement.memory, tuple(notes), tuple(complaints))
    name = nodes[0].name
    memory = tuple(replace(gpu, name=f"{gpu.name}, {name}") for gpu in placement.memory)
    return Resources(memory, tuple(notes), tuple(f"stages.{name}: {line}" for line in complaints))


class _Placement:
    """The stages of an experiment that will run, and the GPUs that are available to them."""

    def __init__(self, config: ExperimentConfig, stages: Collection[str], here_gib: Sequence[float] | None) -> None:
        execution = config.execution
        self.config = config
        self.here_gib = here_gib
        """Memory of each GPU of this machine; None: unknown."""
        self.training_here_gib = here_gib if config.cluster == "local" or execution.ray.address is None else None
        """Memory of each GPU available to training; None: unknown, as on a joined cluster."""
        self.training_gpu_gib = execution.gpu_memory_gb or min(self.training_here_gib or (), default=None)
        """Memory of the smallest GPU of training; None: unknown."""
        self.generation_gpu_gib = execution.gpu_memory_gb or min(here_gib or (), default=None)
        """The same for stages in which a finished model answers, which always run on this machine."""
        self.trains, self.trains_rl = bool({"sft", "rl"} & {*stages}), "rl" in stages
        self.trains_on_ray = config.cluster == "ray" and self.trains
        has_engines = "rl" in stages and config.num_engines > 0
        self.trains_with_vllm = has_engines or ("sft" in stages and has_own_vllm(config, "sft"))
        beside_engine = config.cluster == "local" and self.trains_with_vllm and self.training_gpu_gib is not None
        self.trains_on_gpus = self.trains_on_ray or beside_engine
        """Whether training is estimated. `cluster: local` without vLLM is for small models."""
        self.has_rl_engines = self.trains_on_gpus and has_engines
        engines = {name: section.engine for name, section in answering(config, stages).items()}
        self.vllm_users = [name for name, engine in engines.items() if engine == "vllm"]
        """The stages, in words, in which a finished model answers prompts with vLLM."""
        trains_here = self.trains_on_ray and execution.ray.address is None
        self.starts_ray = trains_here or (bool(self.vllm_users) and execution.vllm.engines > 1)
        """Whether a stage starts Ray on this machine, for training or for several engines that answer prompts."""
        on_ray = config.cluster == "ray" and any(engine != "openai" for engine in engines.values())
        generates = on_ray or (bool(self.vllm_users) and self.generation_gpu_gib is not None)
        self.is_estimated = self.trains_on_gpus or generates
        self.architecture = architecture_of(config.model) if self.is_estimated else None
        """None: unknown."""
        self.generating: tuple[GpuMemory, ...] = ()
        """Memory of each kind of GPU in the stages in which a finished model answers; empty where not estimated."""
        self.memory: tuple[GpuMemory, ...] = ()
        """The same for all stages."""
        if self.architecture is not None:
            if generates:
                self.generating = generation_memory(self.architecture, config, self.generation_gpu_gib, stages)
            trained = (
                estimate_memory(self.architecture, config, self.training_gpu_gib, stages) if self.trains_on_gpus else ()
            )
            self.memory = (*trained, *self.generating)


def _unfit_gpus(placement: _Placement) -> Iterator[str]:
    """Complaints about too few GPUs, and about smaller ones than stated."""
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
    stated = config.execution.gpu_memory_gb
    used = here if placement.vllm_users else training_here
    if used and stated is not None and stated > min(used) * _ROUNDING:
        yield (
            f"execution.gpu_memory_gb: {stated:g} GiB, but the smallest GPU of this machine has {min(used):.1f}; "
            "correct it, or set it to null to use the detected size"
        )


def _heads_not_divided(placement: _Placement) -> Iterator[str]:
    execution, architecture = placement.config.execution, placement.architecture
    if architecture is None:
        return
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    # With fewer key heads than GPUs, vLLM replicates each key head.
    by_engine = [
        ways for ways in range(1, heads + 1) if heads % ways == 0 and (kv_heads % ways == 0 or ways % kv_heads == 0)
    ]
    ways = execution.vllm.tensor_parallel_size
    if (placement.has_rl_engines or placement.vllm_users) and ways not in by_engine:
        yield (
            f"execution.vllm.tensor_parallel_size: {ways} does not divide the model's {heads} attention heads (with "
            f"{kv_heads} of keys and values); allowed are {', '.join(map(str, by_engine))}"
        )


def _too_full(placement: _Placement) -> Iterator[str]:
    """Engines first, of which the fullest stands for all; then every other kind of GPU, with settings to change."""
    config, architecture = placement.config, placement.architecture
    if architecture is None:
        return
    # RL's engine counts also where it shares its GPU with a trainer.
    engines = [kind for kind in placement.generating if kind.name.removeprefix("GPU in ") in placement.vllm_users]
    if placement.has_rl_engines:
        engines.insert(0, rl_engine_memory(architecture, config, placement.training_gpu_gib))
    if unfit := [engine for engine in engines if not engine.fits]:
        engine = max(unfit, key=lambda engine: engine.total_gib)
        which = "an engine" if engine.name == RL_ENGINE else f"an engine in {engine.name.removeprefix('GPU in ')}"
        yield (
            f"execution.vllm: {which} needs about {engine.total_gib:.1f} GiB of a GPU for its weights and one sequence "
            f"of full length, and its share is {engine.limit_gib:.1f} (gpu_memory_utilization "
            f"{config.execution.vllm.gpu_memory_utilization:g}); raise gpu_memory_utilization or tensor_parallel_size"
        )
    names = {engine.name for engine in engines}
    for gpu in placement.memory:
        if not gpu.fits and gpu.name not in names:
            largest = sorted(gpu.components, key=lambda part: -part.gib)[:3]
            parts = ", ".join(f"{part.name} {part.gib:.1f}" for part in largest)
            yield (
                f"execution: a {gpu.name} would hold about {gpu.total_gib:.1f} GiB of its {gpu.limit_gib:.1f} "
                f"({parts}); {' or '.join(_remedies(config, gpu))}"
            )


def _remedies(config: ExperimentConfig, gpu: GpuMemory) -> list[str]:
    """Settings that would free memory, cheapest first."""
    execution = config.execution
    if gpu.gib(REWARD_MODEL):
        return [
            "set execution.reward_device: cpu",
            "give the reward model dtype: bfloat16",
            "lower execution.vllm.gpu_memory_utilization (vLLM) or execution.rollout_batch_size (the embedded engine)",
        ]
    if gpu.name in ("GPU in evaluation", "GPU in difficulty", "GPU in sample"):
        return ["lower execution.rollout_batch_size", "generate with engine: vllm"]
    if gpu.name in ("shared GPU in a rollout", "shared GPU in a validation of SFT"):
        remedies = ["lower execution.vllm.gpu_memory_utilization"]
    else:
        remedies = [
            *([] if execution.gradient_checkpointing else ["set execution.gradient_checkpointing: true"]),
            *(["lower execution.logprob_chunk_tokens"] if gpu.gib("logits") else []),
            *(["lower execution.micro_batch_tokens"] if gpu.gib("recomputed layer") else []),
        ]
    if execution.zero_stage < 3 and config.cluster == "ray":
        remedies.append("raise execution.zero_stage")
    elif not execution.offload_optimizer:
        sharded = "" if execution.zero_stage else " and execution.zero_stage: 1"
        remedies.append(f"set execution.offload_optimizer: true{sharded}")
    return [*remedies, "raise execution.ray.trainer_ranks" if config.cluster == "ray" else "use several: cluster: ray"]


def _unset_keys(config: ExperimentConfig, wanted: Sequence[str]) -> list[str]:
    """Notes, not complaints, about missing API keys: answers that are already saved need no key."""
    teachers = config.execution.teachers if "sample" in wanted else {}
    used = [(server, f"execution.teachers.{name}") for name, server in teachers.items()]
    scorers = config.execution.rl_teachers if "rl" in wanted else {}
    used += [(server, f"execution.rl_teachers.{name}") for name, server in scorers.items()]
    if not used:
        return []
    from luffy.http_client import missing_key  # loads httpx, which other plans can do without

    return [line for server, setting in used if (line := missing_key(server, setting)) is not None]


def _too_long(config: ExperimentConfig, wanted: Sequence[str]) -> Iterator[str]:
    """Complaints about rows that may be longer than their model's positions, which a stage would refuse hours later.

    Prompts of suites have no limit in the settings, and teachers count in tokens of their own: only responses count.
    """
    rl, tokens = config.rl if "rl" in wanted else None, {"data.max_prompt_tokens": config.data.max_prompt_tokens}
    rows: dict[str, Mapping[str, int | None]] = {}
    if "sft" in wanted or ("base" in wanted and config.model.architecture is not None):
        rows["traces"] = tokens | {"data.max_trace_tokens": config.data.max_trace_tokens}
    if rl is not None:
        rows["rl"] = tokens | {"rl.max_response_tokens": rl.max_response_tokens}
        if rl.validation is not None:
            rows["rl.validation"] = {"rl.validation.max_response_tokens": rl.validation.max_response_tokens}
    for name, answers in (("difficulty", config.policy_difficulty), ("sample", config.sampled_traces)):
        if answers is not None and name in wanted:
            rows[name] = tokens | {f"{name}.max_response_tokens": answers.max_response_tokens}
    if "sft" in wanted and config.sft is not None and config.sft.validation is not None:
        rows["sft.validation"] = {"sft.validation.max_response_tokens": config.sft.validation.max_response_tokens}
    if config.evaluation is not None and {"evaluate", "sweep"} & {*wanted}:
        rows["evaluation"] = {"evaluation.max_response_tokens": config.evaluation.max_response_tokens}
    part = "model" if config.model.architecture is None else "model.architecture"
    remedy = f"lower them, or raise {part}.max_position_embeddings"
    for name, row in rows.items():
        yield from _beyond(positions_of(config.model), name, row, "the model", remedy)
    for name, scorer in rl.teachers.items() if rl is not None else ():
        if isinstance(scorer, ModelTeacher):
            where, remedy = f"rl.teachers.{name}", "lower them, or take another teacher"
            positions = positions_of(ModelConfig(path=scorer.path), f"{where}.path")
            yield from _beyond(positions, where, rows["rl"], scorer.path, remedy)
    for name, teacher in config.teachers.items() if "sample" in wanted else ():
        where = f"sample.teachers.{name}"
        limit = {f"{where}.max_response_tokens": teacher.max_response_tokens}
        positions = None if teacher.path is None else positions_of(ModelConfig(path=teacher.path), f"{where}.path")
        yield from _beyond(positions, where, limit, str(teacher.path), "lower it")


def _beyond(positions: int | None, where: str, row: Mapping[str, int | None], whose: str, remedy: str) -> Iterator[str]:
    """A complaint if a row does not fit; where only the response is known, one token of the prompt is added."""
    given = {name: tokens for name, tokens in row.items() if tokens is not None}
    if positions is not None and sum(given.values()) + (len(row) == 1) > positions:
        words = " and ".join(f"{name} ({tokens})" for name, tokens in given.items())
        yield (
            f"{where}: {words} are more tokens than the {positions} positions of {whose} (max_position_embeddings); "
            f"{remedy}"
        )


def _untrainable(placement: _Placement) -> list[str]:
    """Complaints about an adapter that the first training stage would refuse, perhaps hours later."""
    lora = placement.config.model.lora
    if lora is None or not placement.trains:
        return []
    architecture = architecture_of(placement.config.model)
    found = [missing_package(), lora.complaint(list(linear_layers(architecture))) if architecture else None]
    is_beside = placement.trains_with_vllm and placement.config.execution.vllm.adapter == "separate"
    if is_beside and placement.config.model.dtype == "float32" and placement.training_here_gib:
        found.append(NO_FLOAT32_ADAPTER)
    return [line for line in found if line is not None]


def _without_gpus(placement: _Placement) -> Iterator[str]:
    """A complaint about vLLM's kernels for GPUs on a machine without any, which the first engine would refuse."""
    samples = (placement.vllm_users, placement.here_gib), (placement.trains_with_vllm, placement.training_here_gib)
    if placement.config.execution.vllm.batch_invariant and any(where == [] for stages, where in samples if stages):
        yield "execution.vllm.batch_invariant: needs GPUs, and this machine has none; set it to false"


def _notes(placement: _Placement) -> list[str]:
    config, architecture = placement.config, placement.architecture
    address, here = config.execution.ray.address, placement.here_gib
    wanted = cluster_gpus(config) if placement.trains_on_ray else engine_gpus(config) if placement.vllm_users else 1
    teachers = config.rl.teachers if placement.trains_rl and config.rl is not None else {}
    notes = []
    if placement.trains_on_ray and address is not None:
        notes.append(f"{wanted} GPUs needed on the Ray cluster at {address}, or as many CPUs where it has no GPU")
    elif here is None:
        notes.append(f"{wanted} GPUs needed; nvidia-smi did not respond, so the number of GPUs is unknown")
    elif not here:
        notes.append(f"{wanted} GPUs needed; this machine has none: ranks and engines would run on its CPU")
    else:
        notes.append(f"{wanted} GPUs needed, this machine has {len(here)}")
    if placement.trains_rl and config.execution.ray.placement == "disaggregated" and here != []:
        notes.append("engines on GPUs of their own get each step's weights through CPU memory (Ray's object store)")
    if architecture is None:
        notes.append(f"no memory estimate: the shape of {config.model.path} is unknown here; give a model folder")
    elif (placement.training_gpu_gib if placement.trains_on_ray else placement.generation_gpu_gib) is None:
        notes.append("memory not checked: no GPU found; set execution.gpu_memory_gb")
    of_teachers = [shape.num_parameters * size / GIB for shape, size in teacher_models(config)] if teachers else []
    if len(of_teachers) > 1 and config.execution.zero_stage < 3:
        notes.append(f"the teachers take turns on a GPU: {sum(of_teachers):.1f} GiB of CPU memory for each rank")
    for name, teacher in teachers.items() if architecture is not None else ():
        if isinstance(teacher, ModelTeacher) and architecture_of(ModelConfig(path=teacher.path)) is None:
            notes.append(f"the memory estimate lacks rl.teachers.{name}: the shape of {teacher.path} is unknown here")
    return notes
