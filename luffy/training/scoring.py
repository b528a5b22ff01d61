"""Per-token scores of a whole batch, computed micro-batch by micro-batch without gradient.

Shape legend: `K` weights per token, `B` rows, `T` tokens.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from luffy.config.execution import ExecutionConfig
from luffy.training.attention import AttentionInputs, attention_inputs
from luffy.training.batching import dummy_micro_batch, split_into_micro_batches
from luffy.training.ranks import device, max_over_ranks
from luffy.types import TrainBatch

Forward = Callable[[TrainBatch], Tensor]
"""`(B, T)` one number per token of a micro-batch."""


@torch.no_grad()
def score(module: nn.Module, forward: Forward, batch: TrainBatch, execution: ExecutionConfig) -> Tensor:
    """`(B, T)` results of `forward` for the response tokens, without gradient, float32 on the CPU; 0 elsewhere.

    `module`, which `forward` runs, is in eval mode meanwhile: dropout is off and consumes no random numbers.
    """
    was_training = module.training
    module.eval()
    score_BT = torch.zeros(batch.input_ids_BT.shape)
    # In place of weights: the position of each token in the batch.
    place_1BT = torch.arange(score_BT.numel()).view(1, *score_BT.shape)
    for micro, micro_place_1BT in micro_batches(batch, place_1BT, execution):
        place_N = micro_place_1BT[0][micro.response_mask_BT]
        score_BT.view(-1)[place_N.cpu()] = forward(micro)[micro.response_mask_BT].float().cpu()
    module.train(was_training)
    return score_BT


def micro_batches(
    batch: TrainBatch, weight_KBT: Tensor, execution: ExecutionConfig
) -> Iterator[tuple[TrainBatch, Tensor]]:
    """This rank's micro-batches and their weights, on its device.

    Every rank gets the same number, so that all make the same collective calls.
    """
    slices = execution.sequence_parallel
    micros = split_into_micro_batches(batch, weight_KBT, execution.micro_batch_tokens, execution.packing, slices)
    missing = max_over_ranks(len(micros)) - len(micros)
    for micro, micro_weight_KBT in micros + [dummy_micro_batch(batch, weight_KBT, slices)] * missing:
        yield micro.map(lambda tensor_BT: tensor_BT.to(device())), micro_weight_KBT.to(device())


def model_inputs(micro: TrainBatch, execution: ExecutionConfig) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
    """Token ids, positions, response mask, and the bounds of packed sequences."""
    bounds = attention_inputs(micro.position_ids_BT, execution)
    return micro.input_ids_BT, micro.position_ids_BT, micro.response_mask_BT, bounds
