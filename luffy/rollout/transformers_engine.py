"""The embedded engine: batched, KV-cached generation with a transformers model in this process.

A prompt that several rows share is read once. Llama, Qwen2 and Qwen3 then decode by direct calls of their modules
(`_decode`), other models by transformers' own forward pass. A CPU multiplies by packed copies of large weights.

Shape legend: `B` rows still running, `T` tokens, `C` columns of the cache, `V` vocabulary, `H` hidden size, `A` heads
of keys and values, `D` size of a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, limit
from luffy.types import FinishReason

_STOP_TOKENS = 32
"""Number of newest tokens that are decoded to look for a stop string."""
_COMPACT_BELOW = 0.75
"""Finished rows are removed from the KV cache once less than this share of its rows is still running."""
_SPARE_TOKENS = 64
"""Room for further tokens whenever the cache of a layer is enlarged."""
_BLOCK = 256
"""Tokens of the vocabulary whose probabilities are summed before one of them is chosen."""
_LARGE = 2**16
"""Weights of a linear layer from which a CPU gains by packing them."""
_DIRECT = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that `_decode` knows."""


@dataclass(eq=False)
class TransformersEngine:
    """Generates with the current weights of `model`, which may be the one in training.

    The randomness of a response depends on its own seed alone: one uniform number per token, inverted through the
    cumulative distribution.
    """

    model: PreTrainedModel
    batch_size: int
    weight_version: int = 0
    tokenizer_folder: Path | None = None

    @classmethod
    def from_folder(cls, folder: Path, dtype: str, batch_size: int) -> "TransformersEngine":
        """An engine on a model folder, whose tokenizer is used to find `SamplingParams.stop`."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = _load(folder, getattr(torch, dtype), device)
        return cls(model, batch_size, tokenizer_folder=folder)

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        by_length = sorted(range(len(requests)), key=lambda i: (len(_context(requests[i])), i))
        completions: dict[int, Completion] = {}
        with _packed_weights(self.model):
            for start in range(0, len(by_length), self.batch_size):
                indices = by_length[start : start + self.batch_size]
                finished = self._generate_batch([requests[i] for i in indices], params)
                completions.update(zip(indices, finished, strict=True))
        return [completions[i] for i in range(len(requests))]

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace the model with that of a folder, on the same device and with the same dtype."""
        device, dtype = self.model.device, self.model.dtype
        del self.model  # free its memory before loading the next one
        self.model = _load(folder, dtype, device)
        self.weight_version = version

    def close(self) -> None:
        """Nothing to free: the model is the caller's, or is garbage-collected with this object."""

    def _generate_batch(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        limits = [limit(request, params) for request in requests]
        # The first numbers of the request's seed, however many are taken: one for each token that may be sampled.
        seeded = [torch.Generator().manual_seed(request.seed) for request in requests]
        uniforms = [torch.rand(n, generator=each, dtype=torch.float64) for n, each in zip(limits, seeded, strict=True)]
        uniform_BT = pad_sequence(uniforms, batch_first=True)
        token_BT, logp_BT = torch.zeros(uniform_BT.shape, dtype=torch.long), torch.zeros(uniform_BT.shape)
        length_B, stopped_B = torch.tensor(limits), torch.zeros(len(requests), dtype=torch.bool)
        stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.long)

        contexts = [_context(request) for request in requests]
        places = {context: place for place, context in enumerate(dict.fromkeys(contexts))}
        unpadded = [torch.tensor(context, dtype=torch.long) for context in places]
        input_ids_BT, mask_BC = (
            pad_sequence(tensors, batch_first=True, padding_side="left").to(self.model.device)
            for tensors in (unpadded, [torch.ones_like(context) for context in unpadded])
        )
        cache, width = roomy_cache(self.model.config), input_ids_BT.shape[1]
        logits_BV = self._next_logits(input_ids_BT, mask_BC, cache)
        if len(places) < len(contexts):
            source_B = torch.tensor([places[context] for context in contexts], device=self.model.device)
            cache.batch_select_indices(source_B)
            logits_BV, mask_BC = logits_BV[source_B], mask_BC[source_B]
        mask_BC = F.pad(mask_BC, (0, uniform_BT.shape[1]), value=1)
        row_B = torch.arange(len(requests))  # the rows in the cache
        for place in range(uniform_BT.shape[1]):
            newest_B, newest_logp_B = _sample(logits_BV, uniform_BT[row_B, place], params)
            del logits_BV  # freed before the model allocates
            token_BT[row_B, place], logp_BT[row_B, place] = newest_B.cpu(), newest_logp_B.cpu()
            running_B = length_B[row_B] > place
            ended = row_B[running_B & torch.isin(token_BT[row_B, place], stop_ids)].tolist()
            ended += self._ended_by_texts(row_B[running_B].tolist(), token_BT[:, : place + 1], params.stop)
            length_B[ended], stopped_B[ended] = place + 1, True
            running_B = length_B[row_B] > place + 1
            num_running = int(running_B.sum())
            if not num_running:
                break
            # Finished rows stay in the batch, ignored, until removing them is worth copying the cache.
            if num_running < _COMPACT_BELOW * len(row_B):
                row_B, kept_B = row_B[running_B], running_B.nonzero().squeeze(-1).to(mask_BC.device)
                cache.batch_select_indices(kept_B)
                newest_B, mask_BC = newest_B[kept_B], mask_BC[kept_B]
            held_BC = mask_BC[:, : width + place + 1]
            logits_BV = self._next_logits(newest_B.unsqueeze(-1), held_BC, cache)  # noqa: F841 (the next round's)
        return [
            Completion(
                tuple(tokens[:length]),
                tuple(logprobs[:length]),
                FinishReason.STOP if stopped else FinishReason.LENGTH,
                (self.weight_version,) * length,
            )
            for tokens, logprobs, length, stopped in zip(
                token_BT.tolist(), logp_BT.tolist(), length_B.tolist(), stopped_B.tolist(), strict=True
            )
        ]

    def _next_logits(self, input_ids_BT: Tensor, mask_BC: Tensor, cache: DynamicCache) -> Tensor:
        """`(B, V)` logits in float32 after further tokens of every row; 0 in the mask is padding."""
        directly = self.model.config.model_type in _DIRECT and all(type(each) is RoomyLayer for each in cache.layers)
        if directly and input_ids_BT.shape[1] == 1 and cache.get_seq_length():
            return _decode(self.model, input_ids_BT.squeeze(-1), mask_BC, cache).float()
        output = self.model(
            input_ids=input_ids_BT,
            attention_mask=mask_BC,
            position_ids=(mask_BC.cumsum(dim=-1) - 1).clamp(min=0)[:, -input_ids_BT.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _ended_by_texts(self, rows: Sequence[int], token_BT: Tensor, stop: Sequence[str]) -> list[int]:
        """The rows whose newest token completes a stop text."""
        if not stop or self.tokenizer_folder is None:
            return []
        tokenizer = _tokenizer(self.tokenizer_folder)
        tails = {row: str(tokenizer.decode(token_BT[row, -_STOP_TOKENS:].tolist())) for row in rows}
        return [row for row, tail in tails.items() if any(text in tail for text in stop)]


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    )
    return model.eval().to(device)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Loaded once: the embedded engine of RL is a new object for each call."""
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _context(request: RolloutRequest) -> tuple[int, ...]:
    return request.prompt_ids + request.prefix_ids


@contextmanager
def _packed_weights(model: PreTrainedModel) -> Iterator[None]:
    """Let a CPU multiply by copies of large weights in oneDNN's own layout for the length of the context.

    For 64 rows that is 1.2 to 1.8 times as fast, for fewer up to 2.2 times; a copy takes as long as two decoding steps.
    """
    gains = model.device.type == "cpu" and torch.backends.mkldnn.is_available()
    large = [each for each in model.modules() if type(each) is nn.Linear and each.weight.numel() >= _LARGE]
    for linear in large if gains else ():
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        linear.forward = partial(  # type: ignore[method-assign]
            torch.ops.mkldnn._linear_pointwise, W=packed, B=linear.bias, attr="none", scalars=[], algorithm=""
        )
    try:
        yield
    finally:
        for linear in large:
            vars(linear).pop("forward", None)


def _decode(model: PreTrainedModel, token_B: Tensor, mask_BC: Tensor, cache: DynamicCache) -> Tensor:
    """`(B, V)` logits after one more token of every row, by direct calls of the modules of a model in `_DIRECT`.

    transformers' own pass makes its masks and arguments anew for every token, which takes longer than the arithmetic of
    a small model, and with a mask it copies keys and values once for every query head that shares them.
    """
    decoder = model.get_decoder()
    hidden_BH = decoder.embed_tokens(token_B)
    cos_B1D, sin_B1D = decoder.rotary_emb(hidden_BH, mask_BC.sum(dim=-1, keepdim=True) - 1)
    half = sin_B1D.shape[-1] // 2
    sin_B1D[..., :half].neg_()  # the first half of a rotated head has the negated second half
    padding_BC = mask_BC == 0
    bias = torch.zeros_like(mask_BC, dtype=hidden_BH.dtype).masked_fill_(padding_BC, -torch.inf)[:, None, None]
    for index, layer in enumerate(decoder.layers):
        attention, input_BH = layer.self_attn, layer.input_layernorm(hidden_BH)
        query, key, value = (
            project(input_BH).unflatten(-1, (-1, attention.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = (heads * cos_B1D + heads.roll(half, -1) * sin_B1D for heads in (query, key))
        keys_BACD, values_BACD = cache.update(key.unsqueeze(2), value.unsqueeze(2), index)
        # The query heads that share keys are as many queries to them.
        found = F.scaled_dot_product_attention(
            query.unflatten(1, (keys_BACD.shape[1], -1)),
            keys_BACD,
            values_BACD,
            attn_mask=bias,
            scale=attention.scaling,
        )
        hidden_BH = hidden_BH + attention.o_proj(found.flatten(1))
        hidden_BH = hidden_BH + layer.mlp(layer.post_attention_layernorm(hidden_BH))
    logits: Tensor = model.get_output_embeddings()(decoder.norm(hidden_BH))
    return logits


def _sample(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The next token of every row and its log-probability."""
    if params.temperature not in (0, 1):
        logits_BV = logits_BV / params.temperature
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    if params.top_p < 1 and params.temperature > 0:
        logp_BV = _nucleus(logp_BV, params.top_p)
    token_B = logp_BV.argmax(dim=-1) if params.temperature == 0 else _invert(logp_BV, uniform_B.to(logp_BV.device))
    return token_B, logp_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)


def _nucleus(logp_BV: Tensor, top_p: float) -> Tensor:
    """The distribution restricted to the smallest set of tokens with total probability `top_p` (nucleus sampling).

    A. Holtzman et al., "The curious case of neural text degeneration" (2020). Ties at the boundary
    are broken in favour of the lower token id.
    """

    def outside() -> Tensor:  # a function, so that its tensors are freed before the next are allocated
        sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
        probability_BV = sorted_BV.double().exp_()
        before_BV = probability_BV.cumsum(dim=-1).sub_(probability_BV)
        return torch.zeros_like(before_BV, dtype=torch.bool).scatter_(-1, order_BV, before_BV >= top_p)

    return torch.log_softmax(logp_BV.masked_fill(outside(), -torch.inf), dim=-1)


def _invert(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token whose interval of the cumulative distribution contains the uniform number.

    First the block of tokens that contains it, then the token; a token without probability is never chosen.
    """
    rows, size = logp_BV.shape
    probability = logp_BV.new_zeros(rows, -(-size // _BLOCK) * _BLOCK)
    torch.exp(logp_BV, out=probability[:, :size])
    blocks = probability.view(rows, -1, _BLOCK)
    block_B, rest_B = _place(blocks.sum(dim=-1), uniform_B)
    inside_B, _ = _place(blocks[torch.arange(rows, device=block_B.device), block_B], rest_B)
    return block_B * _BLOCK + inside_B


def _place(weight_BN: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """The place whose share of the weights contains the number in [0, 1), and where in that share it lies, likewise."""
    weight_BN = weight_BN.double()
    upto_BN = weight_BN.cumsum(dim=-1)
    target_B1 = uniform_B.unsqueeze(-1) * upto_BN[:, -1:]
    place_B1 = torch.searchsorted(upto_BN, target_B1, right=True).clamp_(max=weight_BN.shape[-1] - 1)
    share_B1 = weight_BN.gather(-1, place_B1)
    rest_B1 = (target_B1 - upto_BN.gather(-1, place_B1)) / share_B1 + 1
    return place_B1.squeeze(-1), rest_B1.clamp_(0, 1 - 2**-53).squeeze(-1)


class RoomyLayer(DynamicLayer):
    """The `(B, A, T, D)` keys and values of one layer of full attention: the beginning of larger tensors.

    A decoding step writes its own keys and values there and copies no others. transformers' `DynamicCache`
    concatenates: every step copies the whole cache, a quadratic amount of memory traffic.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if not self._rooms or end > self._rooms[0].shape[2]:
            rooms = []
            for old, new in ((self.keys, key_states), (self.values, value_states)):
                larger = (*new.shape[:2], end + _SPARE_TOKENS, new.shape[3])
                rooms.append(torch.empty(larger, dtype=new.dtype, device=new.device))
                if old is not None and old.numel():
                    rooms[-1][:, :, : old.shape[2]] = old
            self._rooms = tuple(rooms)
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        return self._show(end)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, in this order."""
        self._rooms = tuple(room[indices] for room in self._rooms)
        self._show(self.get_seq_length())

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (room[:, :, :length] for room in self._rooms)
        return self.keys, self.values


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model of this configuration; layers of other kinds than full attention have their own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
