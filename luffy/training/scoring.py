"""Per-token scores of a whole batch, computed micro-batch by micro-batch without gradient.

Shape legend: `K` weights per token, `B` rows, `T` tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from luffy.config.execution import ExecutionConfig
from luffy.training.batching import MicroBatch, dummy_micro_batch, split_into_micro_batches
from luffy.training.distributed import device, max_over_ranks
from luffy.types import TrainBatch

Forward = Callable[[MicroBatch], Tensor]
"""`(B, T)` one number per token, in the layout of the micro-batch."""


@torch.no_grad()
def score(module: nn.Module, forward: Forward, batch: TrainBatch, execution: ExecutionConfig) -> Tensor:
    """`(B, T)` results of `forward` for the response tokens, without gradient, float32 on the CPU; 0 elsewhere.

    `module`, which `forward` runs, is in eval mode meanwhile: dropout is off and consumes no random numbers.
    """
    was_training = module.training
    module.eval()
    score_BT = torch.zeros(batch.input_ids_BT.shape)
    # The weights carry each token's position in the batch, from 1.
    place_1BT = torch.arange(1, score_BT.numel() + 1).view(1, *score_BT.shape)
    for micro in micro_batches(batch, place_1BT, execution):
        micro_score_BT = forward(micro).float().cpu()
        mask_BT = micro.batch.response_mask_BT & (micro.weight_KBT[0] > 0)
        score_BT.view(-1)[micro.weight_KBT[0][mask_BT] - 1] = micro_score_BT[mask_BT]
    module.train(was_training)
    return score_BT


def micro_batches(batch: TrainBatch, weight_KBT: Tensor, execution: ExecutionConfig) -> list[MicroBatch]:
    """This rank's micro-batches; every rank gets the same number, so that all make the same collective calls."""
    micros = split_into_micro_batches(batch, weight_KBT, execution.micro_batch_tokens, execution.packing)
    missing = max_over_ranks(len(micros)) - len(micros)
    return micros + [dummy_micro_batch(micros[0])] * missing


def model_inputs(micro: MicroBatch) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Token ids, attention mask (None when packed), positions and response mask, on this rank's device."""
    where = device()
    mask_BT = None if micro.packed else micro.batch.attention_mask_BT.to(where)
    return (
        micro.batch.input_ids_BT.to(where),
        mask_BT,
        micro.position_ids_BT.to(where),
        micro.batch.response_mask_BT.to(where),
    )
