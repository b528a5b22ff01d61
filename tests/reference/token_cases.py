"""Random tokens for the tests of losses, and what `luffy.objectives` makes of them: values and gradients in float64.

Shape legend: `T` tokens of one sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from luffy.config.terms import LossConfig, NormaliserConfig, TermConfig
from luffy.objectives.losses import TokenBatch, token_loss
from luffy.objectives.objective import objective_loss
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
def sequences(draw: st.DrawFn, unknown: bool = False, one_advantage: bool = False) -> Tokens:
    """Sequences of one to six tokens; the other policies are near for half of the draws, far for the others."""
    size = draw(st.integers(1, 6))
    distance = draw(st.sampled_from([_NEAR, _DISTANCE]))

    def column(values: st.SearchStrategy[float]) -> Array:
        return np.array(draw(st.lists(values, min_size=size, max_size=size)))

    logp_T = column(_LOGP)
    logp_mu_T = np.minimum(logp_T + column(distance), 0.0)
    if unknown:
        logp_mu_T[np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))] = np.nan
    advantage = st.floats(-3.0, 3.0)
    return Tokens(
        logp_T=logp_T,
        logp_old_T=np.minimum(logp_T + column(distance), 0.0),
        logp_mu_T=logp_mu_T,
        logp_ref_T=np.minimum(logp_T + column(distance), 0.0),
        entropy_T=column(st.floats(0.0, 5.0)),
        advantage_T=np.full(size, draw(advantage)) if one_advantage else column(advantage),
    )


def packed(parts: Sequence[Tokens], dtype: torch.dtype = torch.float64) -> TokenBatch:
    """The sequences end to end in one row, all selected."""

    def row(name: str) -> torch.Tensor:
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


def choices(logp_BT: torch.Tensor, logq_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """The token as the teacher's only choice, and all others together."""

    def with_rest(chosen_BT: torch.Tensor) -> torch.Tensor:
        return torch.stack([chosen_BT, (-torch.expm1(chosen_BT)).log().clamp(min=-80.0)], dim=-1)

    return {"logp_BTC": with_rest(logp_BT), "logq_BTC": with_rest(logq_BT)}


def evaluate(config: LossConfig, *parts: Tokens) -> Loss:
    """Token losses and the gradient of their sum by `logp`, of the sequences end to end."""
    batch = packed(parts)
    loss_BT = token_loss(config, batch)
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
