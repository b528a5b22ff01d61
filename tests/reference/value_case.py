"""Two optimizer steps of the critic, twice: by the training engine and row by row in float64, from the same weights.

The first step moves the value head away from 0, where it hides the decoder's gradient; the second is compared.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from luffy.config.training import CriticConfig
from luffy.training.batching import collate
from luffy.training.critic import Critic
from luffy.types import FinishReason, Outcome, Source, TrainBatch, Trajectory
from reference.gradient_case import (
    OPTIMIZER,
    VOCABULARY,
    RowWriter,
    execution,
    gradients_at_step,
    whole,
    with_environment,
)
from reference.rows import learned_places

LENGTHS = ((3, 5), (2, 11), (6, 1), (4, 8), (5, 3), (2, 7))
"""Of prompt and response, row by row; every other row has tokens of an environment besides."""
FIRST_LR = 1.0
LAST_LR = OPTIMIZER.lr


@dataclass(frozen=True, slots=True)
class Targets:
    """Of each row's response tokens: values before each update, and returns."""

    first_old: list[Tensor]
    second_old: list[Tensor]
    returns: list[Tensor]


def config(value_clip: float | None) -> CriticConfig:
    return CriticConfig(optimizer=OPTIMIZER, value_clip=value_clip)


def rows() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(11)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCABULARY, (length,), generator=generator).tolist())

    found = [
        Trajectory(
            ids(prompt), ids(n), (Source.ON_POLICY,) * n, (-1.0,) * n, (0,) * n, 0.0, Outcome.WRONG, FinishReason.STOP
        )
        for prompt, n in LENGTHS
    ]
    writer = RowWriter(seed=13)
    return [with_environment(row, writer) if i % 2 else row for i, row in enumerate(found)]


def batch() -> TrainBatch:
    written = rows()
    return collate(written, torch.zeros(len(written)), pad_id=0)


def targets() -> Targets:
    """Old values of the second update lie so far off that the clip of 0.2 takes some tokens and leaves others."""
    generator = torch.Generator().manual_seed(12)
    noise = [torch.randn(n, generator=generator) for _, n in LENGTHS]
    returns = [torch.rand(n, generator=generator) for _, n in LENGTHS]
    return Targets([torch.zeros(n) for _, n in LENGTHS], [0.3 * n for n in noise], returns)


def at_tokens(of_rows: Sequence[Tensor], like: TrainBatch) -> Tensor:
    """`(B, T)` with each row's numbers at its response tokens, 0 elsewhere."""
    laid_BT = torch.zeros(like.input_ids_BT.shape)
    laid_BT[like.response_mask_BT] = torch.cat(list(of_rows))
    return laid_BT


@functools.cache
def reference_steps(model: PreTrainedModel, value_clip: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of the second step and the parameters after it, in float64, without padding; kept."""
    model64 = copy.deepcopy(model).double()
    weight = torch.zeros(model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    parameters = {f"decoder.{name}": parameter for name, parameter in model64.model.named_parameters()}
    parameters |= {"head.weight": weight, "head.bias": bias}
    optimizer = torch.optim.AdamW(
        parameters.values(), betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    gradients: dict[str, Tensor] = {}
    for old, lr in ((targets().first_old, FIRST_LR), (targets().second_old, LAST_LR)):
        optimizer.zero_grad()
        _reference_loss(model64, weight, bias, old, value_clip).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        torch.nn.utils.clip_grad_norm_(parameters.values(), OPTIMIZER.max_grad_norm)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return gradients, {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _reference_loss(
    model64: PreTrainedModel, weight: Tensor, bias: Tensor, old: Sequence[Tensor], value_clip: float | None
) -> Tensor:
    losses = []
    for row, old_values, returns in zip(rows(), old, targets().returns, strict=True):
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        hidden = model64.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        for t, before, wanted in zip(learned_places(row), old_values.double(), returns.double(), strict=True):
            value = hidden[len(row.prompt_ids) + t - 1] @ weight + bias[0]
            loss = (value - wanted) ** 2
            if value_clip is not None:
                near = torch.minimum(torch.maximum(value, before - value_clip), before + value_clip)
                loss = torch.maximum(loss, (near - wanted) ** 2)
            losses.append(loss / 2)
    return torch.stack(losses).mean()


def engine_steps(
    model: PreTrainedModel, value_clip: float | None, part: slice, settings: dict[str, object]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """The same two steps by the critic on the rows `part`: gradient, parameters and metrics of the second."""
    critic = Critic(copy.deepcopy(model), config(value_clip), execution(**settings), "float32")
    written = targets()
    share = collate(rows()[part], torch.zeros(len(rows()[part])), pad_id=0)
    share = replace(share, return_BT=at_tokens(written.returns[part], share))
    critic.update(replace(share, value_old_BT=at_tokens(written.first_old[part], share)), FIRST_LR)
    gradients = gradients_at_step(critic.engine, dict(critic.engine.module.named_parameters()))
    metrics = critic.update(replace(share, value_old_BT=at_tokens(written.second_old[part], share)), LAST_LR)
    return gradients, whole(dict(critic.engine.module.named_parameters())), metrics


def part_of(named: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named.items() if name.startswith(prefix)}
