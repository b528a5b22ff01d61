"""An upper estimate of the memory that each GPU needs in training and in generation, without using a GPU.

Sources. Model states: ZeRO, arXiv 1910.02054, section 3.1 (2 + 2 + 12 bytes per parameter with Adam in mixed
precision), with gradients summed in float32 as `luffy.training.deepspeed_engine` configures. Activations: the method of
Korthikanti et al., arXiv 2205.05198, section 4 (count the tensors that each operation saves for the backward pass),
applied to a decoder with RMSNorm, rotary embeddings, a gated MLP and attention that stores neither scores nor a mask.
`tests/unit/pipeline/test_memory.py` compares the counts with what torch and DeepSpeed allocate.

vLLM takes a fixed share of each of its GPUs and uses for the KV cache what its process, weights and activations leave
of that share, so an engine fits where one sequence of full length does. The embedded engine takes what its batch needs.

Symbols: `P` parameters, `b` bytes of the compute type, `N` trainer ranks, `L` layers, `h` hidden size, `a` width of all
attention heads, `k` of all key heads, `i` intermediate size, `V` vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.config.answers import DifficultyConfig, SampleConfig
from luffy.config.chain import views_of
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import vllm_rank
from luffy.config.model import LoRAConfig, ModelConfig
from luffy.config.settings import has_own_vllm, scored_by
from luffy.config.starts import Critique, TraceHint
from luffy.config.training import ModelTeacher, SelfTeacher
from luffy.json_text import parse_json
from luffy.model_shape import ModelArchitecture, adapter_activation_bytes, adapter_parameters, architecture_of

GIB = 2**30
RL_ENGINE = "engine GPU"
_SFT_ENGINE = "engine"
REWARD_MODEL = "reward model"
_FLOAT32 = 4
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduce bucket, unless the model is smaller."""
_LIVE_PARAMETERS = 1_050_000_000
"""Parameters that ZeRO 3 keeps gathered at once: `max_live_parameters` and one prefetch bucket (defaults)."""
_BATCH_TOKENS = 16384
"""vLLM's default `max_num_batched_tokens` on a GPU of 70 GiB and more; 8192 on smaller ones."""
_BYTES_A_LOGIT = 42
"""Peak of the embedded engine's sampler, with `top_p`: logits, those divided by the temperature, log-probabilities,
these sorted, with their places; two float64 tensors while probabilities are summed up, and two masks. Without `top_p`
at most 18."""


@dataclass(frozen=True, slots=True)
class Component:
    """One use of a GPU's memory."""

    name: str
    gib: float
    formula: str
    """How the number is computed, in words."""


_PROCESS = Component("process", 1.5, "allowance: CUDA context, NCCL")
"""Empirical, with library workspaces."""
_ENGINE_PROCESS = Component("process", 2.0, "allowance: CUDA context, NCCL, CUDA graphs")
"""The same for a vLLM engine. A sleeping engine keeps it."""
_SLEEPING = replace(_ENGINE_PROCESS, name="engine, asleep", formula="allowance: its process; the rest is released")
_SLEEPING_HERE = Component("engine, asleep", _ENGINE_PROCESS.gib - _PROCESS.gib, "allowance: CUDA graphs")
"""The same in the trainer's process."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Peak memory of the GPUs of one kind, by component."""

    name: str
    count: int
    components: tuple[Component, ...]
    limit_gib: float | None = None
    """Memory available to it; None: unknown."""

    @property
    def total_gib(self) -> float:
        return _total_gib(self.components)

    @property
    def fits(self) -> bool:
        """Whether it fits; true if the limit is unknown."""
        return self.limit_gib is None or self.total_gib <= self.limit_gib

    def gib(self, name: str) -> float:
        """Memory of that component; 0 without one."""
        return sum(component.gib for component in self.components if component.name == name)


def _total_gib(components: Sequence[Component]) -> float:
    return sum(component.gib for component in components)


def _part(name: str, num_bytes: float, formula: str) -> Component:
    return Component(name, num_bytes / GIB, formula)


def estimate_memory(
    architecture: ModelArchitecture,
    config: ExperimentConfig,
    gpu_gib: float | None,
    stages: Collection[str] | None = None,
) -> tuple[GpuMemory, ...]:
    """Memory of each kind of GPU in those of `stages` (all) that train; `gpu_gib`: size of one, None: unknown.

    SFT: a rank during an update, and with vLLM a shared GPU during a validation. RL, disaggregated: a trainer's GPU
    during an update, and an engine's. Colocated, as vLLM in the trainer's process is: a shared GPU during a rollout
    (the trainer's weights and optimizer states stay on it) and during an update (the engine sleeps, without weights and
    cache). An engine that is kept for the stages in which finished models answer sleeps in a process of its own.
    """
    found, stages = [], config.kinds if stages is None else stages
    is_kept = any(has_own_vllm(config, stage) for stage in config.kinds if stage not in ("sft", "rl"))
    kept = (replace(_SLEEPING, name="kept engine, asleep"),) if is_kept else ()
    if "sft" in stages:
        rank = _Rank(architecture, config, "sft")
        beside: tuple[Component, ...] = (*kept, *_scoring(config, "sft"))
        if config.sft is not None and config.sft.engine == "vllm":
            # The engine that is kept for others is this one.
            beside = (_SLEEPING_HERE, *_scoring(config, "sft"))
            engine = _vllm_memory(architecture, config, gpu_gib, _SFT_ENGINE, _validation_tokens(config))
            of_engine = (replace(part, name=f"engine {part.name}") for part in engine.components)
            parts = (*rank.in_rollout(), _PROCESS, *of_engine, *_scoring(config, "sft"))
            found.append(GpuMemory("shared GPU in a validation of SFT", rank.count, parts, gpu_gib))
        found.append(GpuMemory("GPU in SFT", rank.count, (*rank.in_update(), *beside), gpu_gib))
    if "rl" in stages:
        rank = _Rank(architecture, config, "rl")
        kept = (*(kept if config.cluster == "ray" else ()), *_scoring(config, "rl"))
        if config.shares_gpus:
            engine = rl_engine_memory(architecture, config, gpu_gib)
            of_engine = (replace(part, name=f"engine {part.name}") for part in engine.components)
            rollout = (*rank.in_rollout(), _PROCESS, *of_engine, *kept)
            update = (*rank.in_update(), _SLEEPING if config.cluster == "ray" else _SLEEPING_HERE, *kept)
            count = max(rank.count, engine.count)
            found.append(GpuMemory("shared GPU in a rollout", count, rollout, gpu_gib))
            found.append(GpuMemory("shared GPU in an update", count, update, gpu_gib))
        else:
            found.append(GpuMemory("trainer GPU", rank.count, (*rank.in_update(), *kept), gpu_gib))
            found += [rl_engine_memory(architecture, config, gpu_gib)] if config.num_engines else []
    return tuple(found)


def layer_activation_bytes(architecture: ModelArchitecture, dtype_bytes: int, *, by_sequence: bool) -> int:
    """Bytes per token that a layer saves for its backward pass.

    Gated MLP: gate, up, their product and the activated gate, 4 b i. Attention: queries and output, 2 b a, keys and
    values, 2 b k, and one log-sum-exp per head; `by_sequence`, where the sequences of a row attend one by one, another
    b a: their outputs are joined by a copy. Each RMSNorm: its input in float32, the normalised and the scaled value,
    4 h + 2 b h, and one scale.
    """
    mlp = 4 * dtype_bytes * architecture.intermediate_size
    heads = (3 if by_sequence else 2) * architecture.attention_size + 2 * architecture.kv_size
    attention = dtype_bytes * heads + _FLOAT32 * architecture.num_heads
    norms = 2 * _norm_bytes(architecture.hidden_size, dtype_bytes)
    if architecture.head_norms:
        # Their outputs are not saved again: the rotation that follows needs no saved input.
        heads = architecture.num_heads + architecture.num_kv_heads
        norms += (_FLOAT32 + dtype_bytes) * heads * architecture.head_size + _FLOAT32 * heads
    return mlp + attention + norms


def _norm_bytes(size: int, dtype_bytes: int) -> int:
    return _FLOAT32 * size + 2 * dtype_bytes * size + _FLOAT32


def activation_bytes(
    architecture: ModelArchitecture, dtype_bytes: int, *, checkpointing: bool, by_sequence: bool
) -> tuple[int, int]:
    """Bytes per token that stay allocated for the whole backward pass, and the peak that one layer's own pass adds.

    With checkpointing a layer keeps its input, b h, and recomputes the rest. The backward pass through the MLP adds the
    gradients of gate and up, 2 b i, and that of the residual stream, also in float32, (b + 4) h.
    """
    layer = layer_activation_bytes(architecture, dtype_bytes, by_sequence=by_sequence)
    passing = 2 * dtype_bytes * architecture.intermediate_size + (dtype_bytes + _FLOAT32) * architecture.hidden_size
    # The final norm, and its output's copy in the head.
    last = _norm_bytes(architecture.hidden_size, dtype_bytes)
    if checkpointing:
        return architecture.num_layers * dtype_bytes * architecture.hidden_size + last, layer + passing
    return architecture.num_layers * layer + last, passing


def head_bytes(
    architecture: ModelArchitecture,
    dtype_bytes: int,
    tokens: int,
    chunk_tokens: int,
    *,
    compiled: bool,
    untempered: bool = False,
    frozen: bool = False,
) -> tuple[int, int]:
    """Bytes of a chunk's logits at the peak of `LogProbHead`, its backward pass, and of the gradients that it adds.

    For each logit, compiled: the logits and their gradient, 2 b, in float32 with a copy. Otherwise two float32 tensors,
    beside the logits and their gradient where b is less, and a third if a term also uses the policy at temperature 1.
    The gradient of the output embeddings takes b V h unless they are `frozen`, that of the hidden states b h per token.
    """
    plain = 2 * _FLOAT32 + (2 * dtype_bytes if dtype_bytes != _FLOAT32 else 0) + _FLOAT32 * untempered
    per_logit = (2 if dtype_bytes < _FLOAT32 else 3) * dtype_bytes if compiled else plain
    logits = min(chunk_tokens, tokens) * architecture.vocabulary_size * per_logit
    embeddings = 0 if frozen else architecture.embedding_parameters
    return logits, dtype_bytes * (embeddings + tokens * architecture.hidden_size)


class _Rank:
    """One DeepSpeed rank of `sft` or `rl`."""

    def __init__(self, shape: ModelArchitecture, config: ExperimentConfig, stage: str) -> None:
        self._shape = shape
        self._config = config
        self._execution = config.execution
        self._bytes = _DTYPE_BYTES[config.model.dtype]
        self._rl = config.rl if stage == "rl" else None
        self._lora = config.model.lora
        # Parameters that the optimizer updates: all of them, or those of the adapter.
        self._trained = shape.num_parameters if self._lora is None else adapter_parameters(shape, self._lora)
        self.count = config.num_ranks
        # ZeRO 1 in mixed precision sums whole gradients in float32 and shards them only at the step.
        self._sums_whole_gradients = self._execution.zero_stage == 1 and self._bytes != _FLOAT32
        elements = min(_REDUCE_BUCKET, self._trained)
        words = f"DeepSpeed's reduce bucket: {elements:,} elements x {self._bytes} bytes"
        bucket = _part("gradient bucket", elements * self._bytes, words)
        self._bucket = () if self.count == 1 and self._execution.zero_stage == 0 else (bucket,)

    def in_update(self) -> tuple[Component, ...]:
        """At the peak of an update: in the head, in a layer's backward pass, in Adam's step, or in the teacher."""
        # torch's Adam allocates one temporary the size of its flat tensor; ZeRO 3 splits it into parts of 1e9.
        zero_stage = self._execution.zero_stage
        size = self._trained / (1 if zero_stage == 0 else self.count)
        size = min(size, 1e9) if zero_stage == 3 else size
        in_step = (_part("optimizer step", _FLOAT32 * size, "one float32 temporary of Adam's shard"),)
        peaks = [self._in_pass(), () if self._execution.offload_optimizer else in_step, self._in_teacher()]
        return *self._states(), *max(peaks, key=_total_gib), _PROCESS

    def in_rollout(self) -> tuple[Component, ...]:
        """The states that stay while the engine generates, with gradients if DeepSpeed keeps them in fixed buffers."""
        if self._execution.zero_stage == 3 or self._sums_whole_gradients:
            return *self._states(), *self._bucket
        return tuple(part for part in self._states() if not part.name.endswith("gradients"))

    def _states(self) -> list[Component]:
        """Weights, gradients and optimizer states, which do not depend on the batch."""
        shape, config, rl = self._shape, self._config, self._rl
        objective = config.objective
        policy = shape.num_parameters + (self._trained if self._lora is not None else 0)
        parts = self._learning("", policy, self._trained)
        if rl is None:
            return parts
        assert objective is not None
        # A reference that follows the policy is not the initial policy for long. With an adapter the initial policy is
        # the policy without it.
        moves = objective.needs_reference and rl.reference is not None
        own = [teacher for teacher in rl.teachers.values() if isinstance(teacher, SelfTeacher)]
        teaches = any((teacher.weights, teacher.follows) == ("start", None) for teacher in own)
        if (teaches or (objective.needs_reference and not moves)) and self._lora is None:
            parts.append(self._weights("frozen reference", shape.num_parameters, self._bytes))
        for name in rl.following if self._lora is None else ():
            owner = "moving reference" if name == "rl.reference" else "moving teacher"
            parts.append(self._weights(owner, shape.num_parameters, self._bytes, always_whole=True))
        frozen = [self._weights("frozen teacher", model.num_parameters, size) for model, size in teacher_models(config)]
        take_turns = self._execution.zero_stage < 3 and frozen
        parts += [max(frozen, key=lambda part: part.gib)] if take_turns else frozen
        if rl.critic is not None:
            # The policy's decoder under a head of h weights and a bias; no output embeddings.
            head = shape.hidden_size + 1
            critic = shape.num_parameters - (0 if shape.tied else shape.embedding_parameters) + head
            parts += self._learning("critic ", critic, critic)
        return parts

    def _learning(self, owner: str, parameters: int, trained: int) -> list[Component]:
        """Gradients and optimizer states of the `trained` ones among `parameters`.

        Gradients: sums in float32, sharded from ZeRO 2 on. Optimizer: Adam's two moments, and the master weights that
        ZeRO keeps for every compute type.
        """
        execution, ranks = self._execution, self.count
        of_adapter = "" if trained == parameters else f"{trained:,} parameters of the adapter; "
        if execution.zero_stage >= 2:
            gradients, gradient_words = _FLOAT32 / ranks, f"float32: 4 bytes per parameter / {ranks} ranks"
        else:
            gradients, gradient_words = float(_FLOAT32), "float32: 4 bytes per parameter, whole on each rank"
        moments, words = 2.0 * _FLOAT32, "two moments: 8 bytes per parameter"
        if execution.zero_stage > 0:
            moments = 3.0 * _FLOAT32 / ranks
            words = f"master weights and two moments: 12 bytes per parameter / {ranks} ranks"
        if execution.offload_optimizer:
            moments, words = 0.0, "in CPU memory"
            if execution.zero_stage >= 2:
                gradients, gradient_words = moments, words
        return [
            self._weights(f"{owner}weights", parameters, self._bytes),
            _part(f"{owner}gradients", gradients * trained, of_adapter + gradient_words),
            _part(f"{owner}optimizer", moments * trained, of_adapter + words),
        ]

    def _weights(self, name: str, parameters: int, size: int, *, always_whole: bool = False) -> Component:
        """Weights of `size` bytes each: all of them, or under ZeRO 3 this rank's share and those gathered at a time."""
        words = f"{parameters:,} parameters x {size} bytes"
        if self._execution.zero_stage < 3 or always_whole:
            return _part(name, parameters * size, f"{words}, whole on each rank")
        live = min(parameters, _LIVE_PARAMETERS)
        words = f"{words} / {self.count} ranks, and {live:,} gathered"
        return _part(name, (parameters / self.count + live) * size, words)

    def _in_pass(self) -> tuple[Component, ...]:
        """In the head or in a layer's backward pass, whichever takes more."""
        shape, rl, config, checkpointing = self._shape, self._rl, self._config, self._execution.gradient_checkpointing
        if rl is None:
            assert config.sft is not None
            terms, more = config.sft.objective.terms, config.data.max_trace_tokens
        else:
            objective = config.objective
            assert objective is not None
            terms = (*objective.terms, *(objective.interleaved_sft.terms if objective.interleaved_sft else ()))
            more = rl.max_response_tokens + _hint_tokens(config, learned=True)
        tokens = self._most_tokens(config.data.max_prompt_tokens + more)
        packed = bool(self._execution.packing)
        kept, one_layer = activation_bytes(shape, self._bytes, checkpointing=checkpointing, by_sequence=packed)
        if self._lora is not None:
            lora = self._lora if rl is None else self._lora.without_dropout
            of_layers, transient = adapter_activation_bytes(shape, lora, self._bytes)
            one_layer += transient
            if checkpointing:
                one_layer += of_layers // shape.num_layers
            else:
                kept += of_layers
        which = "layers' inputs" if checkpointing else "all layers"
        words = f"{tokens:,} tokens x {kept:,} bytes ({which})"
        activations = _part("activations", tokens * kept, words)
        name = "recomputed layer" if checkpointing else "layer's gradients"
        layer = _part(name, tokens * one_layer, f"{tokens:,} tokens x {one_layer:,} bytes")

        chunk = min(self._execution.logprob_chunk_tokens, tokens)
        # `compile: null` counts as uncompiled, which takes more.
        logits, gradients = head_bytes(
            shape,
            self._bytes,
            tokens,
            chunk,
            compiled=bool(self._execution.compile),
            untempered=rl is not None and rl.temperature != 1.0 and any(term.is_untempered for term in terms),
            frozen=self._lora is not None,
        )
        per_logit = logits // (chunk * shape.vocabulary_size)
        words = f"{chunk:,} tokens x {shape.vocabulary_size:,} logits x {per_logit} bytes"
        head = (
            _part("logits", logits, words),
            _part("head's gradients", gradients, "output embeddings and the micro-batch's hidden states"),
        )
        in_head, in_layer = (activations, *head, *self._bucket), (activations, layer, *self._bucket)
        return max(in_head, in_layer, key=_total_gib)

    def _in_teacher(self) -> tuple[Component, ...]:
        """A pass without gradient: what one layer allocates, and a chunk's logits; of the teacher that needs most."""
        rl, data = self._rl, self._config.data
        if rl is None or not rl.teachers:
            return ()
        longest = data.max_prompt_tokens + rl.max_response_tokens
        passes = [(model, size, longest) for model, size in teacher_models(self._config)]
        # No token is shorter than a byte: a bound for the words around the problem and the trace.
        passes += [
            (self._shape, self._bytes, longest + (
                _hint_tokens(self._config) if teacher.shows == "start"
                else data.max_trace_tokens + len(teacher.prompt.encode())
            ))
            for teacher in rl.teachers.values() if isinstance(teacher, SelfTeacher)
        ]  # fmt: skip
        return max((self._scoring(*each) for each in passes), key=_total_gib, default=())

    def _scoring(self, shape: ModelArchitecture, size: int, longest: int) -> tuple[Component, ...]:
        tokens, chunk = self._most_tokens(longest), self._execution.logprob_chunk_tokens
        logits, _ = head_bytes(shape, size, tokens, chunk, compiled=bool(self._execution.compile))
        layer = layer_activation_bytes(shape, size, by_sequence=True)
        layer += 2 * size * shape.hidden_size  # the residual stream, before and after
        return (
            _part("teacher's layer", tokens * layer, f"{tokens:,} tokens x {layer:,} bytes"),
            _part("teacher's logits", logits, f"{min(chunk, tokens):,} tokens at a time"),
        )

    def _most_tokens(self, longest: int) -> int:
        """Tokens of the largest micro-batch; a row longer than the budget forms its own."""
        return max(self._execution.micro_batch_tokens, longest)


def teacher_models(config: ExperimentConfig) -> list[tuple[ModelArchitecture, int]]:
    """The models of `rl.teachers` whose shape is known here, and the bytes of their compute types."""
    named = [each for each in (config.rl.teachers.values() if config.rl else ()) if isinstance(each, ModelTeacher)]
    shapes = [architecture_of(ModelConfig(path=teacher.path)) for teacher in named]
    sizes = [_DTYPE_BYTES[teacher.dtype or config.model.dtype] for teacher in named]
    return [(shape, size) for shape, size in zip(shapes, sizes, strict=True) if shape is not None]


def rl_engine_memory(architecture: ModelArchitecture, config: ExperimentConfig, gpu_gib: float | None) -> GpuMemory:
    """Memory of one of RL's engines on each of its GPUs; `gpu_gib` is the memory of one, None: unknown."""
    assert config.rl is not None
    return _vllm_memory(architecture, config, gpu_gib, RL_ENGINE, config.rl.max_response_tokens + _hint_tokens(config))


def _hint_tokens(config: ExperimentConfig, *, learned: bool = False) -> int:
    """Largest number of tokens that a hint, or the first round, adds to RL's prompts, without the template's words;
    `learned`: to those of the rows that the policy learns from."""
    longest = 0
    for start in config.objective.group.starts.values() if config.objective is not None else ():
        if learned and start.learn == "bare":
            continue
        if isinstance(start.show, Critique):
            assert config.rl is not None
            quoted = config.rl.max_response_tokens if start.show.quotes_responses else 0
            most = start.show.max_prompt_tokens or config.data.max_prompt_tokens + quoted
            longest = max(longest, most - config.data.max_prompt_tokens)
        elif isinstance(start.show, TraceHint):
            longest = max(longest, math.ceil(start.largest_dose * config.data.max_trace_tokens))
    return longest


def shared_context(config: ExperimentConfig) -> int | None:
    """Tokens of the longest prompt and response of the stages that share a vLLM engine; None: there are none.

    Problems of suites may be longer than `data.max_prompt_tokens`: only their own stage knows.
    """
    found = [_shared_context(view.config, view.kinds) for view in views_of(config)]
    return max((tokens for tokens in found if tokens is not None), default=None)


def _shared_context(config: ExperimentConfig, kinds: Collection[str]) -> int | None:
    stages = [stage for stage in kinds if has_own_vllm(config, stage)]
    if not stages:
        return None
    responses = [section.max_response_tokens or 0 for section in answering(config, stages).values()]
    if "rl" in stages and config.rl is not None:
        held_out = config.rl.validation.max_response_tokens if config.rl.validation else None
        responses += [config.rl.max_response_tokens + _hint_tokens(config), held_out or 0]
    if "sft" in stages:
        responses.append(_validation_tokens(config))
    return config.data.max_prompt_tokens + max(responses)


def _validation_tokens(config: ExperimentConfig) -> int:
    """Largest number of tokens of a response in the validation of SFT."""
    own = config.sft.validation.max_response_tokens if config.sft and config.sft.validation else None
    return own or (config.evaluation.max_response_tokens if config.evaluation else 0)


def generation_memory(
    architecture: ModelArchitecture, config: ExperimentConfig, gpu_gib: float | None, stages: Collection[str]
) -> tuple[GpuMemory, ...]:
    """Memory of each kind of GPU in those of `stages` in which a finished model answers prompts.

    A GPU that a vLLM engine shares with a reward model counts twice: vLLM has to fit into its share, and both into the
    GPU.
    """
    found: list[GpuMemory] = []
    for name, section in answering(config, stages).items():
        assert section.max_response_tokens is not None
        memory = _vllm_memory if section.engine == "vllm" else _embedded_memory
        gpu = memory(architecture, config, gpu_gib, f"GPU in {name}", section.max_response_tokens)
        if scoring := _scoring(config, "evaluate" if name == "evaluation" else name):
            found += [gpu] if section.engine == "vllm" else []
            of_both = (*gpu.components, *scoring)
            gpu = GpuMemory(f"{gpu.name} with a {REWARD_MODEL}", gpu.count, of_both, gpu_gib)
        found.append(gpu)
    return tuple(found)


def _scoring(config: ExperimentConfig, stage: str) -> tuple[Component, ...]:
    """The reward models of the stage, on one of its GPUs: weights, and what a layer of a batch allocates.

    The number of weights is that of the bytes in the folder; a layer is counted where its shape is known.
    """
    parts = []
    for kind in scored_by(config, stage) if config.execution.reward_device != "cpu" else ():
        folder, size = Path(kind.path).expanduser(), _DTYPE_BYTES[kind.dtype]
        stored = parse_json((folder / "config.json").read_bytes())
        stored_size = _DTYPE_BYTES.get(stored.get("dtype") or stored.get("torch_dtype") or "float32", 2)
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / stored_size
        parts.append(_part(REWARD_MODEL, weights * size, f"{weights:,.0f} parameters x {size} bytes"))
        if (shape := architecture_of(ModelConfig(path=kind.path))) is not None:
            tokens = config.execution.micro_batch_tokens
            layer = layer_activation_bytes(shape, size, by_sequence=False) + 2 * size * shape.hidden_size
            parts.append(_part("its layer", tokens * layer, f"{tokens:,} tokens x {layer:,} bytes"))
    return tuple(parts)


def answering(
    config: ExperimentConfig, stages: Collection[str]
) -> dict[str, EvaluationConfig | DifficultyConfig | SampleConfig]:
    """The sections, by name, by which the finished policy answers prompts in any of `stages`."""
    sections = (
        ("evaluation", config.evaluation, {"evaluate", "sweep"}),
        ("difficulty", config.policy_difficulty, {"difficulty"}),
        ("sample", config.sampled_traces, {"sample"}),
    )
    return {name: section for name, section, users in sections if section is not None and users & {*stages}}


def _vllm_memory(
    architecture: ModelArchitecture, config: ExperimentConfig, gpu_gib: float | None, name: str, response_tokens: int
) -> GpuMemory:
    """Weights, one engine step, and a KV cache in the rest of vLLM's share, at least for one sequence of full length.

    A step: the widest layer over its tokens, and logits, probabilities and log-probabilities. Cache per token: keys and
    values of all layers, 2 L k b, split over the GPUs, which repeat key heads where there are too few for all.
    """
    vllm, size = config.execution.vllm, _DTYPE_BYTES[config.model.dtype]
    num_engines = config.num_engines if name == RL_ENGINE else vllm.engines
    limit = None if gpu_gib is None else gpu_gib * vllm.gpu_memory_utilization
    tokens, ways = vllm.max_num_batched_tokens or _BATCH_TOKENS, vllm.tensor_parallel_size
    width = 3 * architecture.intermediate_size / ways + 2 * architecture.hidden_size
    logits = vllm.max_num_seqs * architecture.vocabulary_size * 3 * _FLOAT32
    step = f"a step of {tokens:,} tokens, logits of {vllm.max_num_seqs} sequences"
    lora = vllm.separate(config.model.lora) if name in (RL_ENGINE, _SFT_ENGINE) else None
    taken = (
        _engine_weights(architecture, size, ways),
        *([] if lora is None else [_adapter_layers(architecture, lora, size)]),
        _part("activations", tokens * width * size + logits, step),
        _ENGINE_PROCESS,
    )
    longest = config.data.max_prompt_tokens + response_tokens
    per_token = 2 * architecture.num_layers * architecture.kv_size * size / min(ways, architecture.num_kv_heads)
    least, left = longest * per_token / GIB, None if limit is None else limit - _total_gib(taken)
    if left is None or left < least:
        cache = Component("KV cache", least, f"at least one sequence of {longest:,} tokens x {per_token:,.0f} bytes")
    else:
        room = int(left * GIB / per_token)
        words = f"the rest of its share: {room:,} tokens of {per_token:,.0f} bytes, {room // longest} full sequences"
        cache = Component("KV cache", left, words)
    return GpuMemory(name, num_engines * ways, (*taken, cache), limit)


def _engine_weights(architecture: ModelArchitecture, size: int, ways: int) -> Component:
    words = f"{architecture.num_parameters:,} parameters x {size} bytes{f' / {ways} GPUs' if ways > 1 else ''}"
    return _part("weights", architecture.num_parameters * size / ways, words)


def _adapter_layers(architecture: ModelArchitecture, lora: LoRAConfig, size: int) -> Component:
    """vLLM's buffers for the factors; of several GPUs each has them whole, or nearly so."""
    rank = vllm_rank(lora)
    parameters = adapter_parameters(architecture, lora.model_copy(update={"rank": rank}))
    return _part("adapter", parameters * size, f"{parameters:,} parameters at rank {rank} x {size} bytes")


def _embedded_memory(
    architecture: ModelArchitecture, config: ExperimentConfig, gpu_gib: float | None, name: str, response_tokens: int
) -> GpuMemory:
    """The embedded engine with a whole batch at full length, or at its prompts, whichever takes more.

    Cache per token: keys and values of all layers, 2 L k b, and those of the layer that is being enlarged, 2 k b.
    Prefill per token, in the widest layer, which saves no activations. MLP: its input, gate, the activated gate, up and
    their product, 4 b i + 2 b h; or attention: queries, repeated keys and values and the output, 4 b a + 2 b h, and the
    mask as a bias, b per token of the row, besides its one byte.
    """
    size, rows = _DTYPE_BYTES[config.model.dtype], config.execution.rollout_batch_size
    prompt = config.data.max_prompt_tokens
    longest = prompt + response_tokens
    cache = 2 * (architecture.num_layers + 1) * architecture.kv_size * size * rows
    logits = rows * architecture.vocabulary_size * _BYTES_A_LOGIT
    widest = 4 * size * max(architecture.intermediate_size, architecture.attention_size)
    hidden = (2 * size + _FLOAT32) * architecture.hidden_size
    prefill = (widest + hidden + (size + 1) * prompt) * rows * prompt
    at_the_end = (
        _part("KV cache", cache * longest, f"{rows} rows of {longest:,} tokens, and a copy of one layer's"),
        _part("logits", logits, f"{rows} rows x {architecture.vocabulary_size:,} x {_BYTES_A_LOGIT} bytes"),
    )
    at_the_start = (
        _part("KV cache", cache * prompt, f"{rows} rows of {prompt:,} tokens"),
        _part("activations", prefill + logits, f"a layer over {rows} prompts, and their logits"),
    )
    peak = max(at_the_end, at_the_start, key=_total_gib)
    return GpuMemory(name, 1, (_engine_weights(architecture, size, 1), *peak, _PROCESS), gpu_gib)
