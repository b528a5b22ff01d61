"""Tokens and rows for the tests of losses, and what `luffy.objectives` makes of them.

Sequences of random tokens with values and gradients in float64; batches of rows laid out by hand, a prompt token and
then the response. Shape legend: `T` tokens of one sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from synthetic.trajectories import row_of
from torch import Tensor

from luffy.config.terms import LossConfig, NormaliserConfig, TermConfig
from luffy.objectives.losses import TokenBatch, token_loss
from luffy.objectives.objective import objective_loss
from luffy.objectives.schedules import StepObjective, objective_at
from luffy.training.batching import collate
from luffy.types import Source, TrainBatch
from reference.formulas import Array, Loss


@dataclass(frozen=True)
class Tokens:
    """One sequence, as the papers speak of it."""

    logp_T: Array
    logp_old_T: Array
    logp_mu_T: Array
    """NaN where unknown."""
    logp_ref_T: Array
    entropy_T: Array
    advantage_T: Array

    def __len__(self) -> int:
        return len(self.logp_T)

    def advantage(self, value: float) -> "Tokens":
        """The same tokens with one advantage for all."""
        return Tokens(**{**self.__dict__, "advantage_T": np.full(len(self), value)})


def tokens(
    logp: Sequence[float],
    old: Sequence[float] | None = None,
    mu: Sequence[float] | None = None,
    advantage: float | Sequence[float] = 1.0,
    entropy: Sequence[float] | None = None,
    ref: Sequence[float] | None = None,
) -> Tokens:
    """Tokens by hand; what is not given equals `logp` (entropy: 0)."""

    def array(values: Sequence[float] | None) -> Array:
        return np.array(logp if values is None else values, dtype=float)

    spread = np.broadcast_to(np.array(advantage, dtype=float), (len(logp),)).copy()
    return Tokens(array(logp), array(old), array(mu), array(ref), array(entropy or [0.0] * len(logp)), spread)


_LOGP = st.floats(-12.0, 0.0)
_DISTANCE = st.floats(-6.0, 6.0)
_NEAR = st.floats(-0.5, 0.5)


@st.composite
def sequences(draw: st.DrawFn) -> Tokens:
    """Sequences of one to six tokens, the sampler of some unknown; the other policies are near for half of the draws,
    far for the others."""
    size = draw(st.integers(1, 6))
    distance = draw(st.sampled_from([_NEAR, _DISTANCE]))

    def column(values: st.SearchStrategy[float]) -> Array:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)))

    logp_T = column(_LOGP)
    logp_mu_T = np.minimum(logp_T + column(distance), 0.0)
    logp_mu_T[np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))] = np.nan
    return Tokens(
        logp_T=logp_T,
        logp_old_T=np.minimum(logp_T + column(distance), 0.0),
        logp_mu_T=logp_mu_T,
        logp_ref_T=np.minimum(logp_T + column(distance), 0.0),
        entropy_T=column(st.floats(0.0, 5.0)),
        advantage_T=column(st.floats(-3.0, 3.0)),
    )


def packed(parts: Sequence[Tokens], dtype: torch.dtype = torch.float64) -> TokenBatch:
    """The sequences end to end in one row, all selected."""

    def row(name: str) -> Tensor:
        return torch.tensor(np.concatenate([getattr(part, name) for part in parts])).to(dtype).unsqueeze(0)

    owner = list(itertools.chain.from_iterable([i] * len(part) for i, part in enumerate(parts)))
    logp_BT, entropy_BT = row("logp_T").requires_grad_(), row("entropy_T").requires_grad_()
    return TokenBatch(
        logp_BT=logp_BT,
        entropy_BT=entropy_BT,
        untempered_logp_BT=logp_BT,
        untempered_entropy_BT=entropy_BT,
        logp_old_BT=row("logp_old_T"),
        logp_behavior_BT=row("logp_mu_T"),
        logp_ref_BT=row("logp_ref_T"),
        logp_teacher_BT=row("logp_ref_T"),
        **choices(logp_BT, row("logp_ref_T")),
        advantage_BT=row("advantage_T"),
        sequence_BT=torch.tensor([owner]),
        selected_BT=torch.ones_like(logp_BT, dtype=torch.bool),
    )


def choices(logp_BT: Tensor, logq_BT: Tensor) -> dict[str, Tensor]:
    """The token as the teacher's only choice, and all others together."""

    def with_rest(chosen_BT: Tensor) -> Tensor:
        return torch.stack([chosen_BT, (-torch.expm1(chosen_BT)).log().clamp(min=-80.0)], dim=-1)

    return {"logp_BTC": with_rest(logp_BT), "logq_BTC": with_rest(logq_BT)}


def evaluate(config: LossConfig, *parts: Tokens) -> Loss:
    """Token losses and the gradient of their sum by `logp`, of the sequences end to end."""
    batch = packed(parts)
    loss_BT = token_loss(config, batch).loss_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), batch.logp_BT, allow_unused=True)
    return loss_BT.detach().numpy()[0], gradient_BT.numpy()[0]


def term(
    loss: LossConfig,
    select: str = "on_policy",
    name: str = "tested",
    mode: str = "token",
    population: str = "own",
    before_gate: bool = False,
    **settings: object,
) -> TermConfig:
    normaliser = NormaliserConfig(mode=mode, population=population, before_gate=before_gate)
    return TermConfig(name=name, select=select, loss=loss, normaliser=normaliser, **settings)


def evaluate_term(config: TermConfig, *parts: Tokens, selected: Sequence[bool] | None = None) -> tuple[float, Array]:
    """The term's sum over its tokens (weight 1 each) and its gradient by `logp`: with correction and masks."""
    batch = packed(parts)
    weight_KBT = torch.ones(1, *batch.logp_BT.shape, dtype=torch.float64)
    if selected is not None:
        weight_KBT[0, 0] = torch.tensor(selected)
    loss = objective_loss((config,), batch, weight_KBT).loss
    (gradient_BT,) = torch.autograd.grad(loss, batch.logp_BT)
    return loss.item(), gradient_BT.numpy()[0]


def assert_same(found: Loss, expected: Loss, atol: float = 1e-12) -> None:
    """Values and gradients agree to rounding."""
    for name, got, want in zip(("value", "gradient"), found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=atol, err_msg=name)


# ---- rows ----


@dataclass(frozen=True)
class Row:
    """One response."""

    length: int
    guided: int = 0
    """How many of its first tokens are off-policy."""
    correct: bool = False
    accuracy: float = 0.0
    """Of its group."""
    teacher: int = -1
    """Index of its teacher; -1 for none."""


def demonstration(length: int, **settings: float) -> Row:
    return Row(length, guided=length, **settings)


def row_batch(rows: Sequence[Row], advantage: float = 1.0) -> TrainBatch:
    """Prompts of one token; `logp_old` and the reference are 0, the sampler is unknown."""
    written = []
    for row in rows:
        source = (Source.OFF_POLICY,) * row.guided + (Source.ON_POLICY,) * (row.length - row.guided)
        unknown = {"logp_behavior": (float("nan"),) * row.length, "taught_by": row.teacher}
        written.append(row_of(float(row.correct), (1,) * row.length, source, **unknown))
    accuracy_B = torch.tensor([row.accuracy for row in rows], dtype=torch.float64)
    batch = collate(written, torch.full((len(rows),), advantage), pad_id=1, group_accuracy_B=accuracy_B)
    zeros_BT = torch.zeros(batch.input_ids_BT.shape)
    choices = {
        "choice_BTC": torch.zeros((*zeros_BT.shape, 1), dtype=torch.int32),
        "logq_BTC": torch.full((*zeros_BT.shape, 2), -0.7),
    }
    return replace(batch, logp_old_BT=zeros_BT, **choices)


def tokens_of(
    batch: TrainBatch, logp_BT: Tensor, entropy_BT: Tensor | None = None, logp_BTC: Tensor | None = None
) -> TokenBatch:
    """What the losses see of a batch under the given log-probabilities, at temperature 1."""
    entropy_BT = torch.ones_like(logp_BT) if entropy_BT is None else entropy_BT
    return TokenBatch(
        logp_BT=logp_BT,
        entropy_BT=entropy_BT,
        untempered_logp_BT=logp_BT,
        untempered_entropy_BT=entropy_BT,
        logp_old_BT=batch.logp_old_BT,
        logp_behavior_BT=batch.logp_behavior_BT,
        logp_ref_BT=batch.logp_ref_BT,
        logp_teacher_BT=batch.logp_teacher_BT,
        logp_BTC=torch.stack([logp_BT, logp_BT], dim=-1) if logp_BTC is None else logp_BTC,
        logq_BTC=batch.logq_BTC,
        advantage_BT=batch.advantage_BT,
        sequence_BT=batch.sequence_BT,
        selected_BT=batch.response_mask_BT,
    )


def objective_of(*terms: TermConfig, max_response_tokens: int = 10) -> StepObjective:
    """The terms at the first step of a stage."""
    return objective_at(terms, step=1, total_steps=1, max_response_tokens=max_response_tokens)


def alone(tensor: Tensor) -> Tensor:
    """The sum over ranks where there is one."""
    return tensor
