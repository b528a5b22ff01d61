"""A tiny policy whose RL runs under `cluster: local` or `cluster: ray`, and groups to learn from."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.patience import PATIENCE_S
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig, RayConfig, VLLMConfig
from luffy.config.model import LoRAConfig
from luffy.config.settings import RLSettings
from luffy.config.training import RLConfig
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.training.learner import TrainerSpec
from luffy.types import Group
from reference.gradient_case import OPTIMIZER, ROOT, VOCABULARY, as_groups, moved, objective_of, trajectories

METHOD = "luffy"
CONTEXT = 64
MAX_RESPONSE_TOKENS = 48
STOP = 4
PROMPTS = ((1, 2, 3), (5,), (7, 8, 9, 10, 11, 12), (3, 3))
REQUESTS = [RolloutRequest(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(16)]


def params(temperature: float = 1.0, max_response_tokens: int = MAX_RESPONSE_TOKENS) -> SamplingParams:
    return SamplingParams(temperature, max_response_tokens, stop_token_ids=(STOP,))


def model_of(tied: bool, num_heads: int = 2) -> PreTrainedModel:
    # Of vLLM's CPU attention 32 is the smallest head.
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=num_heads,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def spec_of(
    folder: Path, model: PreTrainedModel, zero_stage: int, lora: LoRAConfig | None = None, **ray: object
) -> TrainerSpec:
    """What both clusters are built from; the model is written below `folder`, and `ray` is of `execution.ray`.

    Adam at eps = 1, as in the proof, so that an error of scale shows in the parameters.
    """
    objective = objective_of(METHOD)
    smoke = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={METHOD}", "chain=rl"])
    assert objective is not None
    settings = RLSettings(
        seed=7,
        dtype="float32",
        cluster="local",
        rl=RLConfig(
            steps=10, prompts_per_step=5, max_response_tokens=MAX_RESPONSE_TOKENS,
            optimizer=OPTIMIZER.model_copy(update={"max_grad_norm": 10.0}),
        ),
        objective=objective,
        grading=smoke.grading,
        lora=lora,
    )  # fmt: skip
    execution = ExecutionConfig(
        zero_stage=zero_stage,
        num_threads=1,
        rollout_batch_size=64,
        vllm=VLLMConfig(cpu_kv_cache_gb=0.05, max_num_seqs=16),
        ray=RayConfig(**{"start_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S, **ray}),
    )
    model.save_pretrained(folder / "model")
    return TrainerSpec(settings, execution, folder / "model", folder, CONTEXT, pad_id=0)


def groups_of(step: int) -> list[Group]:
    """Groups that no engine has drawn, the same for everybody."""
    return as_groups(*trajectories(METHOD, seed=step))


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def movement(found: Path, start: Path) -> dict[str, Tensor]:
    """How far each parameter of one model folder is from that of another."""
    return moved(weights_in(found), weights_in(start))


def largest_gap(folder: Path, requests: Sequence[RolloutRequest], completions: Sequence[Completion]) -> float:
    """Between the engine's log-probabilities and those of a plain forward pass of the model in `folder`."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gaps = []
    for request, completion in zip(requests, completions, strict=True):
        context = [*request.prompt_ids, *request.prefix_ids]
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*context, *completion.token_ids]])).logits[0, len(context) - 1 : -1]
        logp_TV = torch.log_softmax(logits_TV, dim=-1)
        logp_T = logp_TV.gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)
        gaps.append((logp_T - torch.tensor(completion.logprobs)).abs().max().item())
    return max(gaps)
