"""Check of the GPUs and memory that a run needs, before anything expensive starts.

Under `cluster: local` it covers vLLM engines that answer the prompts of evaluations and `difficulty`, and advice on the
rollout engine.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from luffy.config import ExperimentConfig
from luffy.config.model import ModelConfig
from luffy.config.rl_teacher import ModelTeacher
from luffy.config.stage_kinds import cluster_gpus, engine_gpus
from luffy.errors import ConfigError
from luffy.pipeline.machine.adapter_shape import linear_layers, missing_package
from luffy.pipeline.machine.architecture import architecture_of, positions_of
from luffy.pipeline.machine.gpu_memory import GpuMemory
from luffy.pipeline.machine.gpus import detected_gpus, hidden_gpus
from luffy.pipeline.machine.inherited_environment import complaints_about_variables
from luffy.pipeline.machine.layout_checks import Placement, complaints_about, memory_of, states_other_gpus
from luffy.pipeline.machine.layout_search import nearest_layout

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


def find_resources(config: ExperimentConfig, stages: Sequence[str] | None = None) -> Resources:
    """Check what an experiment needs for `stages`, by default all of its own.

    Under `cluster: local` only vLLM engines on known GPUs are checked, and there may be a note. Raises DataError if
    `model.path` is a local path that is not a model folder.
    """
    wanted = config.stages if stages is None else stages
    placement = Placement(config, wanted, detected_gpus_gib(), architecture=None)
    notes = _advice_on_engine(config) if config.cluster == "local" and "rl" in wanted else []
    notes += _unset_keys(config, wanted)
    if hidden := hidden_gpus():
        notes.append(f"CUDA_VISIBLE_DEVICES hides the GPUs of this machine ({hidden}): stages run on its CPU")
    complaints = complaints_about_variables(os.environ, starts_ray=placement.starts_ray)
    complaints += [*_too_long(config, wanted), *_unusable_adapter(placement), *_attention_without_gpu(placement)]
    if not placement.trains_on_ray and not placement.checks_generation:
        return Resources((), tuple(notes), tuple(complaints))
    placement = replace(placement, architecture=architecture_of(config.model))
    notes += _notes(placement) if config.cluster == "ray" else []
    return Resources(memory_of(placement), tuple(notes), (*complaints, *_complaints(placement)))


def _unset_keys(config: ExperimentConfig, wanted: Sequence[str]) -> list[str]:
    """Notes, not complaints, about missing API keys: answers that are already saved need no key."""
    execution = config.execution
    servers = {f"execution.teachers.{name}": server for name, server in execution.teachers.items()}
    used = servers if "synthesize" in wanted else {}
    if "rl" in wanted and execution.rl_teacher.urls:
        used = used | {"execution.rl_teacher": execution.rl_teacher}
    if not used:
        return []
    from luffy.http_client import missing_key  # loads httpx, which other plans can do without

    found = [missing_key(server, setting) for setting, server in used.items()]
    return [line for line in found if line is not None]


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
    for name, answers in (("difficulty", config.measured_difficulty), ("sample", config.sampled_traces)):
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
    if rl is not None and isinstance(rl.teacher, ModelTeacher):
        positions = positions_of(ModelConfig(path=rl.teacher.path))
        yield from _beyond(positions, "rl.teacher", rows["rl"], rl.teacher.path, "lower them, or take another teacher")
    teachers = config.synthesize.teachers if config.synthesize is not None and "synthesize" in wanted else {}
    for name, teacher in teachers.items():
        where = f"synthesize.teachers.{name}"
        limit = {f"{where}.max_response_tokens": teacher.max_response_tokens}
        positions = None if teacher.path is None else positions_of(ModelConfig(path=teacher.path))
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


def _attention_without_gpu(placement: Placement) -> list[str]:
    kind = placement.config.execution.attention
    trains = {"sft", "rl"} & {*placement.stages}
    if placement.training_here_gib != () or kind == "sdpa" or not trains:
        return []
    return [f"execution.attention: {kind} needs a GPU, this machine has none; use sdpa"]


def _complaints(placement: Placement) -> list[str]:
    """All complaints, and in the last line the nearest layout without any."""
    complaints = complaints_about(placement)
    if not complaints or states_other_gpus(placement):
        return complaints
    nearest = nearest_layout(placement)
    if nearest is None:
        return [*complaints, "execution: no other layout fits these GPUs; take more or larger ones, or a smaller model"]
    return [*complaints, f"execution: the nearest layout that fits: {' '.join(nearest)}"]


def detected_gpus_gib() -> tuple[float, ...] | None:
    """Memory of each GPU that this process may use; None if the driver does not respond."""
    gpus = detected_gpus()
    return None if gpus is None else tuple(gpu.memory_gib for gpu in gpus)


def _unusable_adapter(placement: Placement) -> list[str]:
    """Complaints about an adapter that the first training stage would refuse, perhaps hours later."""
    lora = placement.config.model.lora
    if lora is None or not {"sft", "rl"} & {*placement.stages}:
        return []
    architecture = architecture_of(placement.config.model)
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
            f"rl.engine: vllm works only without a GPU, and this machine has {len(gpus)}: RL fails if torch sees "
            "one; set cluster: ray with execution.ray.placement: colocated instead"
        ]
    if config.rl.engine != "cluster" or config.model.architecture is not None:
        return []
    architecture = architecture_of(config.model)
    if architecture is not None and architecture.num_parameters < _LARGE_FOR_EMBEDDED:
        return []
    better = "cluster: ray generates with vLLM" if detected_gpus() else "rl.engine: vllm is about three times as fast"
    return [f"the embedded engine is slow for a model of this size; {better}"]


def _teacher_of_unknown_shape(config: ExperimentConfig) -> str | None:
    teacher = config.rl.teacher if "rl" in config.stages and config.rl is not None else None
    if not isinstance(teacher, ModelTeacher) or architecture_of(ModelConfig(path=teacher.path)) is not None:
        return None
    return teacher.path


def _notes(placement: Placement) -> list[str]:
    config, architecture = placement.config, placement.architecture
    address, here = config.execution.ray.address, placement.here_gib
    wanted = cluster_gpus(config) if placement.trains_on_ray else engine_gpus(config) if placement.vllm_users else 1
    notes = []
    if placement.trains_on_ray and address is not None:
        notes.append(f"{wanted} GPUs needed on the cluster at {address}, whose GPUs were not checked")
    elif here is None:
        notes.append(f"{wanted} GPUs needed; nvidia-smi did not respond, so the number of GPUs is unknown")
    elif not here:
        notes.append(f"{wanted} GPUs needed; this machine has none: ranks and engines would run on its CPU")
    else:
        notes.append(f"{wanted} GPUs needed, this machine has {len(here)}")
    if architecture is None:
        notes.append(f"no memory estimate: the shape of {config.model.path} is unknown here; give a model folder")
    elif (unknown := _teacher_of_unknown_shape(config)) is not None:
        notes.append(f"the memory estimate lacks rl.teacher: the shape of {unknown} is unknown here")
    elif (placement.training_gpu_gib if placement.trains_on_ray else placement.generation_gpu_gib) is None:
        notes.append("memory not checked: no GPU found; set execution.gpu_memory_gb")
    return notes
