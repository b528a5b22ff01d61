"""Log-probabilities of given tokens under a causal language model, in bounded memory.

`PolicyModel` computes those of a micro-batch, `score` those of a whole batch without gradient.

Shape legend: `K` weights per token, `S` scores of a token, `B` rows, `T` tokens, `N` response tokens of all rows, `H`
hidden size, `V` vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import cast

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from luffy.config.execution import ExecutionConfig
from luffy.errors import DataError
from luffy.training.attention import AttentionInputs, attention_inputs
from luffy.training.batching import dummy_micro_batch, split_into_micro_batches
from luffy.training.ranks import WHOLE_SEQUENCES, RankMesh, device, max_over_ranks
from luffy.types import TrainBatch

_LARGE_LOGIT = 100.0
"""Large enough for a cap on the logits to have an effect (`refuse_processed_logits`)."""


class LogProbHead(nn.Module):
    """Computes log-probabilities and entropies of given tokens from hidden states, in chunks of tokens.

    The logits of 32k tokens over a vocabulary of 152k would take 20 GB. Here only `chunk_tokens` rows of logits exist
    at a time, and the backward pass recomputes them.
    """

    def __init__(self, output_embeddings: nn.Linear, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.linear = output_embeddings
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden_NH: Tensor, target_N: Tensor, entropy_gradient: bool, untempered: bool = False
    ) -> tuple[Tensor, ...]:
        """`(N,)` log-probabilities of `target_N` and `(N,)` entropies (nats), float32, at the head's temperature.

        With `untempered`, those at temperature 1 follow, computed from the same logits.
        """
        parts = [
            checkpoint(self._chunk, hidden, target, entropy_gradient, untempered, use_reentrant=False)
            if torch.is_grad_enabled()
            else self._chunk(hidden, target, entropy_gradient, untempered)
            for hidden, target in zip(
                hidden_NH.split(self.chunk_tokens), target_N.split(self.chunk_tokens), strict=True
            )
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _chunk(
        self, hidden_NH: Tensor, target_N: Tensor, entropy_gradient: bool, untempered: bool
    ) -> tuple[Tensor, ...]:
        logits_NV = F.linear(hidden_NH, self.linear.weight, self.linear.bias).float()
        at_one = _score(logits_NV, target_N, entropy_gradient) if untempered else ()
        # In place: there is no memory for a second copy of the logits, and no backward pass reads them.
        return (*_score(logits_NV.div_(self.temperature), target_N, entropy_gradient), *at_one)


def _score(logits_NV: Tensor, target_N: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    logp_N = logp_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
    return logp_N, entropy_N


class PolicyModel(nn.Module):
    """A causal language model whose forward pass returns log-probabilities and entropies.

    Owns the decoder and the output embeddings; `causal_lm` holds the same weights, named as in the model folder.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, temperature: float, chunk_tokens: int, mesh: RankMesh = WHOLE_SEQUENCES
    ) -> None:
        super().__init__()
        self.decoder = causal_lm.get_decoder()
        self.head = LogProbHead(causal_lm.get_output_embeddings(), temperature, chunk_tokens)
        self._mesh = mesh
        # In a tuple, so that torch does not register the weights a second time under other names.
        self._causal_lm = (causal_lm,)

    @property
    def causal_lm(self) -> PreTrainedModel:
        return self._causal_lm[0]

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        response_mask_BT: Tensor,
        attention: AttentionInputs,
        entropy_gradient: bool,
        untempered: bool = False,
    ) -> tuple[Tensor, ...]:
        """`(B, T)` log-probabilities and entropies at response tokens, 0 elsewhere; see `LogProbHead.forward`.

        Padding is on the right. In packed rows positions restart with every sequence, and `attention` says where; see
        `luffy.training.attention`.
        """

        def head(hidden_NH: Tensor, target_N: Tensor) -> tuple[Tensor, ...]:
            return self.head(hidden_NH, target_N, entropy_gradient, untempered)

        return response_scores(
            self.decoder, head, input_ids_BT, position_ids_BT, response_mask_BT, attention, self._mesh
        )


def response_scores(
    decoder: nn.Module,
    head: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    input_ids_BT: Tensor,
    position_ids_BT: Tensor,
    response_mask_BT: Tensor,
    attention: AttentionInputs,
    mesh: RankMesh,
) -> tuple[Tensor, ...]:
    """One `(B, T)` tensor for each score that `head` computes: the scores of response tokens, 0 elsewhere.

    `head` maps `(N, H)` hidden states and the `(N,)` tokens that follow them to scores `(N,)`. Where ranks share
    sequences, each computes those of its slice, and all get the whole rows.
    """
    hidden_BTH = decoder(
        input_ids=mesh.own_slice(input_ids_BT),
        position_ids=mesh.own_slice(position_ids_BT),
        use_cache=False,
        **attention,
    ).last_hidden_state
    next_id_BT, predicts_BT = (
        mesh.own_slice(F.pad(tensor_BT[:, 1:], (0, 1))) for tensor_BT in (input_ids_BT, response_mask_BT)
    )
    found = head(hidden_BTH[predicts_BT], next_id_BT[predicts_BT])
    score_SBT = mesh.join(torch.stack([scatter(score_N, predicts_BT) for score_N in found]))
    return tuple(F.pad(score_SBT[..., :-1], (1, 0)))


@torch.no_grad()
def refuse_processed_logits(causal_lm: PreTrainedModel) -> None:
    """Raise DataError for architectures that scale or cap the logits after their output embeddings.

    `LogProbHead` applies the embeddings alone, so that it can work in chunks; for such a model it would train on other
    log-probabilities than the rollouts were sampled from. A collective call for a model that is sharded: it gathers the
    output embeddings and nothing else.
    """
    head = causal_lm.get_output_embeddings()
    with deepspeed.zero.GatheredParameters(list(head.parameters())):
        hidden_BTH = torch.linspace(-1.0, 1.0, 4 * head.weight.shape[1], device=causal_lm.device).view(1, 4, -1)
        hidden_BTH = hidden_BTH.to(head.weight.dtype)
        hidden_BTH *= _LARGE_LOGIT / head(hidden_BTH).abs().max()
        plain_BTV = head(hidden_BTH).float()
        # The logits that the model computes from these hidden states; its decoder does not run.
        decoder = causal_lm.get_decoder()
        found = MoeModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, hidden_BTH))
        decoder.forward = lambda *_, **__: found
        try:
            ids_BT = torch.zeros(hidden_BTH.shape[:2], dtype=torch.long, device=hidden_BTH.device)
            full_BTV = causal_lm(input_ids=ids_BT, use_cache=False).logits.float()
        finally:
            del decoder.forward  # restores the method of its class
    if not torch.allclose(plain_BTV, full_BTV, rtol=1e-2, atol=1e-2):
        raise DataError(
            f"model.path: {type(causal_lm).__name__} scales or caps its logits, which training does not support; "
            "use an architecture whose logits are its output embeddings (Qwen2, Llama, Mistral, ...)"
        )


def scatter(value_N: Tensor, mask_BT: Tensor) -> Tensor:
    """`(B, T)`: the N values at the places where the mask is true, in order; 0 elsewhere."""
    return torch.zeros(mask_BT.shape, dtype=value_N.dtype, device=value_N.device).masked_scatter(mask_BT, value_N)


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
