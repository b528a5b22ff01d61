"""PPO's critic: a value model, separate from the policy.

Shape legend: `B` rows, `T` tokens, `N` response tokens, `H` hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.config.training import CriticConfig
from luffy.training.attention import AttentionInputs, compile_layers, set_attention
from luffy.training.deepspeed_engine import ClippedStep, check_finite, start_engine
from luffy.training.policy_model import micro_batches, model_inputs, response_scores, score
from luffy.training.ranks import device, sum_over_ranks, to_device
from luffy.types import TrainBatch

_NO_VARIANCE = 1e-12
"""Smallest variance above rounding error, which is about the square of 1e-16 when all returns are equal."""


class ValueHead(nn.Module):
    """A linear map from hidden states to values, computed in float32 and initialised with zeros."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_NH: Tensor) -> Tensor:
        return hidden_NH.float() @ self.weight.float() + self.bias.float()


class ValueModel(nn.Module):
    """The decoder of a causal language model with a value head in place of the output embeddings."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = causal_lm.get_decoder()
        self.head = ValueHead(causal_lm.config.hidden_size)

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        response_mask_BT: Tensor,
        attention: AttentionInputs,
    ) -> Tensor:
        """`(B, T)` values at response tokens, 0 elsewhere; the value at token t is that of the state before it (t - 1).

        Packed rows are passed like to `PolicyModel.forward`.
        """

        def head(hidden_NH: Tensor, target_N: Tensor, place_N: Tensor) -> tuple[Tensor, ...]:
            return (self.head(hidden_NH),)

        (value_BT,) = response_scores(self.decoder, head, input_ids_BT, position_ids_BT, response_mask_BT, attention)
        return value_BT


class Critic:
    """A value model in training, with its own optimizer and DeepSpeed engine.

    Takes over `causal_lm`, which has to be a different instance from the policy's.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, config: CriticConfig, execution: ExecutionConfig, dtype: DType
    ) -> None:
        if execution.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        causal_lm.train()
        model = ValueModel(causal_lm).to(device())
        self.engine = start_engine(model, config.optimizer, execution, dtype)
        # Tries the decoder, whose weights the engine may have to gather.
        self._execution = compile_layers(causal_lm, set_attention(causal_lm, execution))
        self._step = ClippedStep(self.engine, config.optimizer)
        self._config = config

    def values(self, batch: TrainBatch) -> Tensor:
        """`(B, T)` values of the states before response tokens, float32 on the CPU, 0 elsewhere; no gradient."""
        return score(self.engine.module, self._forward, batch, self._execution)

    def update(self, batch: TrainBatch, lr: float) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch; returns the step's metrics (`critic/...`).

        `batch.value_old_BT` is the centre of the clip, `batch.return_BT` the target. Raises NumericalError when the
        loss or the gradient is not finite; the weights are then unchanged.
        """
        metrics = self.accumulate(batch)
        return metrics | self._step.take(lr, "critic")

    def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        """Add the gradient of a batch to the engine without stepping; returns the batch's metrics."""
        mask_BT = batch.response_mask_BT.double()
        return_sum = (mask_BT * batch.return_BT.double()).sum()
        num_tokens, return_sum = sum_over_ranks(torch.stack([mask_BT.sum(), return_sum]))
        weight_BT = mask_BT / num_tokens.clamp(min=1)
        return_mean = float(return_sum / num_tokens.clamp(min=1))
        sums = torch.zeros(7, dtype=torch.float64, device=device())
        for on_cpu, (weight_on_cpu,) in micro_batches(batch, weight_BT.unsqueeze(0), self._execution):
            micro, micro_weight_BT = on_cpu.map(to_device), to_device(weight_on_cpu)
            value_BT, return_BT = self._forward(on_cpu), micro.return_BT.double()
            token_loss_BT, is_clipped_BT = value_loss(
                value_BT, micro.value_old_BT.double(), return_BT, self._config.value_clip
            )
            # DeepSpeed averages gradients over ranks; the weights already divide by the total over all of them.
            self.engine.backward((micro_weight_BT * token_loss_BT).sum() * self.engine.world_size)
            error_BT = return_BT - value_BT.detach()
            # Centred on the mean: sums of squares would lose precision for large returns.
            centred_BT = return_BT - return_mean
            columns = (
                torch.ones_like(return_BT), token_loss_BT.detach(), value_BT.detach(), error_BT, error_BT.square(),
                centred_BT.square(), is_clipped_BT,
            )  # fmt: skip
            mask_BT = micro.response_mask_BT
            sums += torch.stack([torch.where(mask_BT, column_BT.double(), 0.0).sum() for column_BT in columns])
        total, *others = sum_over_ranks(sums).tolist()
        loss, value, error, error_square, return_variance, clipped = (each / max(total, 1) for each in others)
        check_finite("critic's loss", loss)
        summary = {
            "critic/loss": loss,
            "critic/value_mean": value,
            "critic/return_mean": return_mean,
            "critic/clip_fraction": clipped,
        }
        if return_variance > _NO_VARIANCE:  # 1 - Var(R - V) / Var(R)
            summary["critic/explained_variance"] = 1 - (error_square - error**2) / return_variance
        return summary

    def _forward(self, micro: TrainBatch) -> Tensor:
        return self.engine(*model_inputs(micro, self._execution))


def value_loss(
    value_BT: Tensor, value_old_BT: Tensor, return_BT: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """`(B, T)` float64 loss of each value against its return, and a mask of where the clip removed the gradient.

    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2): the value loss of PPO's published code (arXiv 2005.12729;
    the paper, 1707.06347, has no clip here). Without `value_clip`, 0.5 (V - R)^2.
    """
    value_BT = value_BT.double()
    plain_BT = (value_BT - return_BT).square()
    if value_clip is None:
        return 0.5 * plain_BT, torch.zeros_like(plain_BT, dtype=torch.bool)
    near_BT = value_BT.clamp(value_old_BT - value_clip, value_old_BT + value_clip)
    clipped_BT = (near_BT - return_BT).square()
    return 0.5 * torch.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT
