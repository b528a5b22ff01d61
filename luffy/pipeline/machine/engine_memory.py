"""An upper estimate of the GPU memory of vLLM engines and of the embedded engine.

vLLM takes a fixed share of each of its GPUs and uses for the KV cache what its process, weights and activations leave
of that share, so an engine fits where one sequence of full length does. The embedded engine takes what its batch needs.
Symbols as in `luffy.pipeline.machine.memory`.
"""

import math
from collections.abc import Collection

from luffy.config import ExperimentConfig
from luffy.pipeline.machine.architecture import ModelArchitecture
from luffy.pipeline.machine.gpu_memory import DTYPE_BYTES, FLOAT32, GIB, Component, GpuMemory, process_allowance

RL_ENGINE = "engine GPU"
EVALUATION = "GPU in evaluation"
DIFFICULTY = "GPU in difficulty"
SAMPLING = "GPU in sample"
_EVALUATING = ("evaluate", "sweep")
_BATCH_TOKENS = 16384
"""vLLM's default `max_num_batched_tokens` on a GPU of 70 GiB and more; 8192 on smaller ones."""
_BYTES_A_LOGIT = 28
"""Peak of the embedded engine's sampler: the model's logits, logits and log-probabilities in float32, and two float64
tensors while probabilities are summed up."""


def rl_engine_memory(architecture: ModelArchitecture, config: ExperimentConfig, gpu_gib: float | None) -> GpuMemory:
    """Memory of one of RL's engines on each of its GPUs; `gpu_gib` is the memory of one, None: unknown."""
    assert config.rl is not None
    number = config.execution.ray.engines
    longest = config.rl.max_response_tokens + hint_tokens(config)
    return _vllm_memory(architecture, config, gpu_gib, RL_ENGINE, number, longest)


def hint_tokens(config: ExperimentConfig) -> int:
    """Largest number of tokens of a hint in RL's prompts, without the template's words; 0 without hints."""
    hint = config.objective.group.hint if config.objective is not None else None
    return 0 if hint is None else math.ceil(hint.levels[-1] * config.data.max_trace_tokens)


def generation_memory(
    architecture: ModelArchitecture, config: ExperimentConfig, gpu_gib: float | None, stages: Collection[str]
) -> tuple[GpuMemory, ...]:
    """Memory of each kind of GPU in those of `stages` in which a finished model answers prompts.

    Empty for stages whose model is on servers elsewhere.
    """
    found = []
    if config.evaluation is not None and any(stage in stages for stage in _EVALUATING):
        found.append((EVALUATION, config.evaluation.engine, config.evaluation.max_response_tokens))
    difficulty = config.measured_difficulty
    if difficulty is not None and "difficulty" in stages:
        assert difficulty.engine is not None and difficulty.max_response_tokens is not None
        found.append((DIFFICULTY, difficulty.engine, difficulty.max_response_tokens))
    sampled = config.sampled_traces
    if sampled is not None and "sample" in stages:
        assert sampled.engine is not None and sampled.max_response_tokens is not None
        found.append((SAMPLING, sampled.engine, sampled.max_response_tokens))
    number = config.execution.vllm.engines
    return tuple(
        _vllm_memory(architecture, config, gpu_gib, name, number, longest)
        if engine == "vllm"
        else _embedded_memory(architecture, config, gpu_gib, name, longest)
        for name, engine, longest in found
        if engine != "openai"
    )


def kv_cache_bytes_per_token(architecture: ModelArchitecture, config: ExperimentConfig) -> float:
    """Bytes per token on each GPU of a vLLM engine: keys and values of all layers, 2 L k b, split over the GPUs."""
    ways = min(config.execution.vllm.tensor_parallel_size, architecture.num_kv_heads)
    return 2 * architecture.num_layers * architecture.kv_size * DTYPE_BYTES[config.model.dtype] / ways


def _vllm_memory(
    architecture: ModelArchitecture,
    config: ExperimentConfig,
    gpu_gib: float | None,
    name: str,
    num_engines: int,
    max_response_tokens: int,
) -> GpuMemory:
    vllm = config.execution.vllm
    limit = None if gpu_gib is None else gpu_gib * vllm.gpu_memory_utilization
    taken = (
        _weights(architecture, config, vllm.tensor_parallel_size),
        _step(architecture, config),
        process_allowance(of_vllm=True),
    )
    left = None if limit is None else limit - sum(component.gib for component in taken)
    longest = config.data.max_prompt_tokens + max_response_tokens
    cache = _cache_of_share(longest, kv_cache_bytes_per_token(architecture, config), left)
    return GpuMemory(name, num_engines * vllm.tensor_parallel_size, (*taken, cache), limit)


def _weights(architecture: ModelArchitecture, config: ExperimentConfig, ways: int) -> Component:
    size = DTYPE_BYTES[config.model.dtype]
    words = f"{architecture.num_parameters:,} parameters x {size} bytes{f' / {ways} GPUs' if ways > 1 else ''}"
    return Component("weights", architecture.num_parameters * size / ways / GIB, words)


def _step(architecture: ModelArchitecture, config: ExperimentConfig) -> Component:
    """Memory of one engine step: the widest layer over its tokens, and logits, probabilities and log-probabilities."""
    vllm = config.execution.vllm
    tokens = vllm.max_num_batched_tokens or _BATCH_TOKENS
    width = 3 * architecture.intermediate_size / vllm.tensor_parallel_size + 2 * architecture.hidden_size
    layer = tokens * width * DTYPE_BYTES[config.model.dtype]
    logits = vllm.max_num_seqs * architecture.vocabulary_size * 3 * FLOAT32
    words = f"a step of {tokens:,} tokens, logits of {vllm.max_num_seqs} sequences"
    return Component("activations", (layer + logits) / GIB, words)


def _cache_of_share(longest: int, per_token: float, left_gib: float | None) -> Component:
    """KV cache in the rest of vLLM's share, at least for one sequence of full length; that, if the rest is unknown."""
    least = longest * per_token / GIB
    if left_gib is None or left_gib < least:
        return Component("KV cache", least, f"at least one sequence of {longest:,} tokens x {per_token:,.0f} bytes")
    tokens = int(left_gib * GIB / per_token)
    words = f"the rest of its share: {tokens:,} tokens of {per_token:,.0f} bytes, {tokens // longest} full sequences"
    return Component("KV cache", left_gib, words)


def _embedded_memory(
    architecture: ModelArchitecture,
    config: ExperimentConfig,
    gpu_gib: float | None,
    name: str,
    max_response_tokens: int,
) -> GpuMemory:
    """The embedded engine with a whole batch at full length, or at its prompts, whichever takes more."""
    rows, prompt = config.execution.rollout_batch_size, config.data.max_prompt_tokens
    longest, size = prompt + max_response_tokens, DTYPE_BYTES[config.model.dtype]
    cache = embedded_cache_bytes(architecture, size) * rows
    logits = rows * architecture.vocabulary_size * _BYTES_A_LOGIT
    prefill = embedded_prefill_bytes(architecture, size, prompt) * rows * prompt
    at_the_end = (
        Component("KV cache", cache * longest / GIB, f"{rows} rows of {longest:,} tokens, and a copy of one layer's"),
        Component("logits", logits / GIB, f"{rows} rows x {architecture.vocabulary_size:,} x {_BYTES_A_LOGIT} bytes"),
    )
    at_the_start = (
        Component("KV cache", cache * prompt / GIB, f"{rows} rows of {prompt:,} tokens"),
        Component("activations", (prefill + logits) / GIB, f"a layer over {rows} prompts, and their logits"),
    )
    peak = max(at_the_end, at_the_start, key=lambda parts: sum(part.gib for part in parts))
    return GpuMemory(name, 1, (_weights(architecture, config, 1), *peak, process_allowance()), gpu_gib)


def embedded_cache_bytes(architecture: ModelArchitecture, dtype_bytes: int) -> int:
    """Bytes per token: keys and values of all layers, 2 L k b, and the copy of one layer's that a step makes, 2 k b."""
    return 2 * (architecture.num_layers + 1) * architecture.kv_size * dtype_bytes


def embedded_prefill_bytes(architecture: ModelArchitecture, dtype_bytes: int, width: int) -> int:
    """Bytes per token in the widest layer of a prefill with rows of `width` tokens, which saves no activations.

    MLP: its input, gate, the activated gate, up and their product, 4 b i + 2 b h; or attention: queries, repeated keys
    and values and the output, 4 b a + 2 b h, and the mask as a bias, b per token of the row, besides its one byte.
    """
    mlp = 4 * architecture.intermediate_size * dtype_bytes
    attention = 4 * architecture.attention_size * dtype_bytes
    hidden = (2 * dtype_bytes + FLOAT32) * architecture.hidden_size
    return max(mlp, attention) + hidden + (dtype_bytes + 1) * width
