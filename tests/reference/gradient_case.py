"""One optimizer step, twice: by the training engine and by the float64 reference, from the same rows and weights."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig
from luffy.config.objective import TermConfig
from luffy.config.training import OptimizerConfig
from luffy.objectives.advantages import group_advantages
from luffy.training.batching import collate, take_rows
from luffy.types import FinishReason, Outcome, Source, TrainBatch, Trajectory
from reference.losses import REFERENCES, ReferenceRow, advantages, forward

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("luffy", "on_policy", "rl_sft_loss", "sft")
MAX_RESPONSE_TOKENS = 12
# Adam at eps = 1 is nearly linear in the gradient, so that an error of scale shows in the parameters.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1.0, weight_decay=0.01, max_grad_norm=0.05)
VOCABULARY = 23


def tiny_model(seed: int = 0, tie: bool = False) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tie, attention_dropout=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def terms_of(preset: str) -> tuple[TermConfig, ...]:
    config = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={preset}"])
    if preset == "sft":
        assert config.sft is not None
        return config.sft.objective.terms
    assert config.objective is not None
    return config.objective.terms


def trajectories(preset: str, num_groups: int = 3, seed: int = 1) -> tuple[list[Trajectory], list[int]]:
    """Rows of uneven lengths, with one demonstration a group where the preset has them, and each row's group."""
    generator = torch.Generator().manual_seed(seed)
    rows, groups = [], []

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(1, VOCABULARY, (length,), generator=generator).tolist())

    for group in range(num_groups):
        prompt = ids(2, 7)
        for sample in range(4):
            off = preset == "sft" or (sample == 3 and preset != "on_policy")
            response = ids(1, MAX_RESPONSE_TOKENS + 1)
            reward = float(torch.rand((), generator=generator) < 0.5) if not off else 1.0
            n = len(response)
            source = (Source.OFF_POLICY if off else Source.ON_POLICY,) * n
            # One demonstration's author is known.
            known = off and group == 0
            behavior = tuple((-0.1 - 0.2 * t) for t in range(n)) if known else (float("nan"),) * n
            rows.append(
                Trajectory(prompt, response, source, behavior, (0,) * n, reward, Outcome.WRONG, FinishReason.STOP)
            )
            groups.append(group)
    return rows, groups


def reference_rows(
    preset: str, rows: Sequence[Trajectory], groups: Sequence[int], logp_old: Sequence[Tensor]
) -> list[ReferenceRow]:
    """The rows as the papers speak of them, from the trajectories themselves."""
    found = []
    for group in dict.fromkeys(groups):
        members = [i for i, other in enumerate(groups) if other == group]
        off = [rows[i].source[0] is Source.OFF_POLICY for i in members]
        values = advantages([rows[i].reward for i in members], off, preset)
        for i, is_off, advantage in zip(members, off, values, strict=True):
            row = rows[i]
            known = is_off and row.logp_behavior[0] == row.logp_behavior[0]
            teacher = torch.tensor(row.logp_behavior, dtype=torch.float64) if known else None
            found.append(ReferenceRow(row.prompt_ids, row.response_ids, is_off, advantage, logp_old[i], teacher))
    return found


def noisy_logp(model: PreTrainedModel, rows: Sequence[Trajectory]) -> list[Tensor]:
    """Log-probabilities a little off the model's own, in float32, so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(5)
    noisy = []
    with torch.no_grad():
        for row in rows:
            n = len(row.response_ids)
            own = forward(model, ReferenceRow(row.prompt_ids, row.response_ids, False, 0.0, torch.zeros(n))).logp
            noisy.append((own + 0.3 * torch.randn(n, generator=generator)).float().double())
    return noisy


def make_batch(preset: str, model: PreTrainedModel) -> TrainBatch:
    """The engine's side of the case: collated rows, group advantages, and the noisy `logp_old`."""
    rows, groups = trajectories(preset)
    advantage_B = torch.zeros(len(rows))
    if preset != "sft":
        config = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={preset}"]).objective
        assert config is not None
        off_B = torch.tensor([row.is_off_policy for row in rows])
        reward_B = torch.tensor([row.reward for row in rows])
        advantage_B = group_advantages(reward_B, torch.tensor(groups), off_B, config.advantage)
    batch = collate(rows, advantage_B, pad_id=0)
    for b, (row, logp) in enumerate(zip(rows, noisy_logp(model, rows), strict=True)):
        start = len(row.prompt_ids)
        batch.logp_old_BT[b, start : start + len(logp)] = logp.float()
    return batch


def shard(batch: TrainBatch, rank: int, world_size: int) -> TrainBatch:
    """An uneven share of the rows: the first rank has fewer."""
    cut = len(batch) // 3 if world_size == 2 else len(batch)
    return take_rows(batch, range(cut) if rank == 0 else range(cut, len(batch)))


def reference_step(preset: str, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and parameters after one AdamW step, in float64 on the whole batch."""
    rows, groups = trajectories(preset)
    model64 = copy.deepcopy(model).double()
    written = reference_rows(preset, rows, groups, noisy_logp(model, rows))
    REFERENCES[preset]([forward(model64, row) for row in written]).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model64.named_parameters()}
    adamw_step(model64, reference_optimizer(model64))
    return gradients, {name: parameter.detach() for name, parameter in model64.named_parameters()}


def reference_optimizer(model64: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model64.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )  # fmt: skip


def adamw_step(model64: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float = OPTIMIZER.lr) -> None:
    """Clip, set the rate, step, forget the gradient."""
    torch.nn.utils.clip_grad_norm_(model64.parameters(), OPTIMIZER.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def relative_l2(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||found - expected|| / ||expected|| over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum((found[name].double() - expected[name]).square().sum() for name in expected)
    return float((difference / sum(tensor.square().sum() for tensor in expected.values())).sqrt())


def execution(**settings: object) -> ExecutionConfig:
    return ExecutionConfig(logprob_chunk_tokens=7, **settings)
