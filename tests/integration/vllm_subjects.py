"""Models and requests for engines of vLLM, the log-probabilities that these have to have, and their sleep."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from synthetic.arithmetic import tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams

WIDE = (
    "model.architecture={hidden_size: 64, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 128}"
)
"""An override: of vLLM's CPU attention 32 is the smallest head."""
CONTEXT = 512
STOP = 4
EOS = 9
"""The folder's own end of sequence, which stops nothing here."""
MAX_GAP = 1e-4
PROMPTS = ((1, 2, 3), (5,), (7, 8, 9, 10, 11, 12), (3, 3))
REQUESTS = [RolloutRequest(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(24)]
"""More than an engine runs at once."""
PARAMS = {
    temperature: SamplingParams(temperature, max_response_tokens=20, stop_token_ids=(STOP,))
    for temperature in (0.0, 0.7, 1.0)
}


def model_of(seed: int, tied: bool = True, intermediate_size: int = 32) -> PreTrainedModel:
    # Of vLLM's CPU attention 32 is the smallest head.
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()), hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
        initializer_range=0.2, eos_token_id=EOS,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.generation_config = GenerationConfig(eos_token_id=EOS, do_sample=True, top_k=1, repetition_penalty=2.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.data) for name, parameter in model.named_parameters())


def gap(
    models: Mapping[int, PreTrainedModel],
    completions: Sequence[Completion],
    requests: Sequence[RolloutRequest] = REQUESTS,
    temperature: float = 1.0,
) -> float:
    """The largest distance of a log-probability from that of the model of the token's version."""
    gaps = []
    for request, completion in zip(requests, completions, strict=True):
        expected = _logprobs_with_kept_cache(models, request, completion, temperature)
        gaps += [abs(said - wanted) for said, wanted in zip(completion.logprobs, expected, strict=True)]
    return max(gaps)


def _logprobs_with_kept_cache(
    models: Mapping[int, PreTrainedModel], request: RolloutRequest, completion: Completion, temperature: float
) -> list[float]:
    """Each token's log-probability by a transformers model of its own version.

    A context keeps the KV cache that it was given by the weights of its time, as in an engine in this process: the
    tokens behind an update are not those of a fresh forward pass, and are not asserted to be.
    """
    cache, logp = DynamicCache(config=models[completion.weight_versions[0]].config), []
    fed = [*request.prompt_ids, *request.prefix_ids]
    said = zip(completion.token_ids, completion.weight_versions, strict=True)
    for version, run in itertools.groupby(said, key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        ids = torch.tensor([[*fed, *tokens[:-1]]])
        with torch.no_grad():
            logits_TV = models[version](input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -len(tokens) :]
        logp_TV = torch.log_softmax(logits_TV / (temperature or 1.0), dim=-1)
        logp += logp_TV[torch.arange(len(tokens)), tokens].tolist()
        fed = tokens[-1:]  # its keys and values are those of the next token's weights
    return logp


def sleeping_as_on_a_gpu(patch: pytest.MonkeyPatch) -> list[str]:
    """Replace the device's calls: who sleeps loses its weights, but gets them back from level 1. Returns the turns."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    turns, kept = list[str](), dict[str, Tensor]()

    def sleep(worker: CPUWorker, level: int) -> None:
        turns.append(f"sleep {level}")
        kept.clear()
        for name, weight in worker.get_model().named_parameters():
            if level == 1:
                kept[name] = weight.data.clone()
            weight.data.fill_(torch.nan)

    def wake_up(worker: CPUWorker, tags: list[str] | None) -> None:
        turns.extend(tags or ["all"])
        for name, weight in worker.get_model().named_parameters() if kept else ():
            weight.data.copy_(kept[name])

    patch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
    patch.setattr(CPUWorker, "sleep", sleep)
    patch.setattr(CPUWorker, "wake_up", wake_up)
    return turns
