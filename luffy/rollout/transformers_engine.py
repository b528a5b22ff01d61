"""The embedded engine: batched, KV-cached generation with a transformers model in this process.

Shape legend: `B` rows still running, `T` tokens, `V` vocabulary, `A` heads of keys and values, `D` size of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
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


@dataclass(slots=True)
class _DecodingRow:
    """A response in progress."""

    uniform_T: Tensor
    """One number in [0, 1) for each token that may be sampled."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


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
        # The first numbers of the request's seed, however many are taken.
        seeded = [torch.Generator().manual_seed(request.seed) for request in requests]
        rows = [
            _DecodingRow(torch.rand(limit(request, params), generator=generator, dtype=torch.float64))
            for request, generator in zip(requests, seeded, strict=True)
        ]
        contexts = [torch.tensor(_context(request), dtype=torch.long) for request in requests]
        input_ids_BT, mask_BT = (
            pad_sequence(tensors, batch_first=True, padding_side="left").to(self.model.device)
            for tensors in (contexts, [torch.ones_like(context) for context in contexts])
        )
        cache = roomy_cache(self.model.config)
        running = rows
        while running:
            token_B = _sample(running, self._next_logits(input_ids_BT, mask_BT, cache), params)
            self._end_at_texts(running, params.stop)
            alive = [b for b, row in enumerate(running) if row.finish_reason is None]
            # Finished rows stay in the batch, ignored, until removing them is worth copying the cache.
            if len(alive) < _COMPACT_BELOW * len(running) or not alive:
                running = [running[b] for b in alive]
                keep_B = torch.tensor(alive, dtype=torch.long, device=mask_BT.device)
                cache.batch_select_indices(keep_B)
                token_B, mask_BT = token_B[keep_B], mask_BT[keep_B]
            input_ids_BT = token_B.unsqueeze(-1)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=-1)
        versions = [(self.weight_version,) * len(row.tokens) for row in rows]
        return [
            Completion(tuple(row.tokens), tuple(row.logprobs), cast(FinishReason, row.finish_reason), of_row)
            for row, of_row in zip(rows, versions, strict=True)
        ]

    def _next_logits(self, input_ids_BT: Tensor, mask_BT: Tensor, cache: DynamicCache) -> Tensor:
        # A function, so that the model's output is freed before the sampler allocates.
        output = self.model(
            input_ids=input_ids_BT,
            attention_mask=mask_BT,
            position_ids=(mask_BT.cumsum(dim=-1) - 1).clamp(min=0)[:, -input_ids_BT.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _end_at_texts(self, running: Sequence[_DecodingRow], stop: Sequence[str]) -> None:
        if not stop or self.tokenizer_folder is None:
            return
        tokenizer = _tokenizer(self.tokenizer_folder)
        for row in running:
            if row.finish_reason is None:
                tail = str(tokenizer.decode(row.tokens[-_STOP_TOKENS:]))
                if any(text in tail for text in stop):
                    row.finish_reason = FinishReason.STOP


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


def _sample(running: Sequence[_DecodingRow], logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Sample the next token of every row and record it in the rows that are still running."""
    logp_BV = torch.log_softmax(logits_BV / (params.temperature or 1.0), dim=-1)
    if params.top_p < 1 and params.temperature > 0:
        logp_BV = _nucleus(logp_BV, params.top_p)
    if params.temperature == 0:
        token_B = logp_BV.argmax(dim=-1)
    else:
        # A finished row may have used up its numbers; its token is ignored.
        uniform_B = torch.stack([row.uniform_T[len(row.tokens) - (row.finish_reason is not None)] for row in running])
        token_B = _invert(logp_BV, uniform_B.to(logits_BV.device))
    logp_B = logp_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1).tolist()
    for row, token, logp in zip(running, token_B.tolist(), logp_B, strict=True):
        if row.finish_reason is not None:
            continue
        row.tokens.append(token)
        row.logprobs.append(logp)
        if token in params.stop_token_ids:
            row.finish_reason = FinishReason.STOP
        elif len(row.tokens) == len(row.uniform_T):
            row.finish_reason = FinishReason.LENGTH
    return token_B


def _nucleus(logp_BV: Tensor, top_p: float) -> Tensor:
    """The distribution restricted to the smallest set of tokens with total probability `top_p` (nucleus sampling).

    A. Holtzman et al., "The curious case of neural text degeneration" (2020). Ties at the boundary
    are broken in favour of the lower token id.
    """
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.double().exp().cumsum(dim=-1) - sorted_BV.double().exp()
    out_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(-1, order_BV, before_BV >= top_p)
    return torch.log_softmax(logp_BV.masked_fill(out_BV, -torch.inf), dim=-1)


def _invert(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token whose interval of the cumulative distribution contains the uniform number."""
    cumulative_BV = logp_BV.double().exp().cumsum(dim=-1)
    target_B1 = (uniform_B * cumulative_BV[:, -1]).unsqueeze(-1)
    token_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(-1)
    return token_B.clamp(max=logp_BV.shape[-1] - 1)


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
