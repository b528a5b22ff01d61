"""Gates and denominators against a count by hand: who is let through, and by what a term divides."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.token_cases import Row, alone, demonstration, objective_of, row_batch, term, tokens_of

from luffy.config import load_experiment
from luffy.config.terms import (
    GateConfig,
    NegativeLogLikelihoodLoss,
    RationalShaping,
    ShapedSurrogateLoss,
    SurrogateLoss,
    TermConfig,
    WeighConfig,
)
from luffy.objectives.objective import objective_loss, token_weights
from luffy.training.batching import take_rows

ROOT = Path(__file__).resolve().parents[3]
MAX_RESPONSE_TOKENS = 10
SURROGATE = SurrogateLoss(kind="surrogate")
SHAPED = ShapedSurrogateLoss(kind="shaped_surrogate", shaping=RationalShaping(kind="rational"))
NLL = NegativeLogLikelihoodLoss(kind="nll")
MODES, SELECTORS = ("token", "sequence", "constant"), ("on_policy", "off_policy", "response")


def _weights(terms: Sequence[TermConfig], rows: Sequence[Row]) -> torch.Tensor:
    """`(K, B, T)` without the prompt."""
    objective = objective_of(*terms, max_response_tokens=MAX_RESPONSE_TOKENS)
    return token_weights(objective, row_batch(rows), alone)[:, :, 1:]


# ---- the count by hand ----


def _lets_through(gate: GateConfig | None, row: Row) -> bool:
    if gate is None:
        return True
    above, at_most = gate.group_accuracy_above, gate.group_accuracy_at_most
    return (
        (above is None or row.accuracy > above)
        and (at_most is None or row.accuracy <= at_most)
        and (gate.outcome is None or row.correct == (gate.outcome == "correct"))
    )


def _chosen(config: TermConfig, row: Row, t: int, gated: bool = True) -> bool:
    fits = config.select == "response" or (t < row.guided) == (config.select == "off_policy")
    return t < row.length and fits and (not gated or _lets_through(config.gate, row))


def _by_hand(terms: Sequence[TermConfig], config: TermConfig, rows: Sequence[Row], b: int, t: int) -> float:
    """The weight of token t of row b: the denominators of `NormaliserConfig`, one token at a time."""
    if not _chosen(config, rows[b], t):
        return 0.0
    how = config.normaliser
    members = [other for other in terms if other.is_policy_gradient] if how.population == "joint" else [config]
    counts = [
        sum(any(_chosen(member, row, u, not how.before_gate) for member in members) for u in range(row.length))
        for row in rows
    ]
    sequences = sum(count > 0 for count in counts)
    denominator = {
        "token": sum(counts),
        "sequence": sequences * counts[b],
        "constant": sequences * MAX_RESPONSE_TOKENS,
    }[how.mode]
    return config.coefficient.value / denominator


_ACCURACY = st.sampled_from([0.0, 0.25, 0.5, 1.0])
_ROW = st.builds(
    lambda length, guided, correct, accuracy: Row(length, min(guided, length), correct, accuracy),
    st.integers(0, 4),
    st.sampled_from([0, 0, 1, 2, 9]),
    st.booleans(),
    _ACCURACY,
)
_GATE = st.one_of(
    st.none(),
    st.builds(GateConfig, outcome=st.sampled_from(["correct", "wrong"])),
    st.builds(GateConfig, group_accuracy_above=st.sampled_from([0.0, 0.25, 0.5])),
    st.builds(GateConfig, group_accuracy_at_most=st.sampled_from([0.0, 0.25]), outcome=st.just("wrong")),
)


@st.composite
def _objectives(draw: st.DrawFn) -> list[TermConfig]:
    """Two policy-gradient terms with a joint denominator, and an auxiliary one."""
    mode = draw(st.sampled_from(MODES))
    gates = [draw(_GATE) for _ in range(3)]
    before = draw(st.booleans()) and any(gates[:2])
    joint = {"mode": mode, "population": "joint", "before_gate": before}
    aside = {"mode": draw(st.sampled_from(MODES))}
    aside |= {"before_gate": draw(st.booleans()) and gates[2] is not None}
    return [
        term(
            SURROGATE, draw(st.sampled_from(["on_policy", "response"])), "on", gate=gates[0], coefficient=0.7, **joint
        ),
        term(SHAPED, "off_policy", "off", gate=gates[1], coefficient=1.3, **joint),
        term(NLL, draw(st.sampled_from(SELECTORS)), "aside", gate=gates[2], coefficient=-0.5, **aside),
    ]


@given(terms=_objectives(), rows=st.lists(_ROW, min_size=1, max_size=5))
def test_weights_are_those_counted_by_hand(terms: list[TermConfig], rows: list[Row]) -> None:
    found = _weights(terms, rows)
    for k, config in enumerate(terms):
        expected = [[_by_hand(terms, config, rows, b, t) for t in range(found.shape[2])] for b in range(len(rows))]
        torch.testing.assert_close(found[k], torch.tensor(expected, dtype=torch.float64).reshape(found[k].shape))


# ---- gates ----

ROWS = (
    Row(2, correct=True, accuracy=0.5),
    Row(1, accuracy=0.5),
    Row(4, accuracy=0.0),
    demonstration(3, accuracy=0.5),
    demonstration(3, accuracy=0.0),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before_gate", [False, True])
def test_a_term_without_tokens_weighs_nothing(mode: str, before_gate: bool) -> None:
    shut = GateConfig(group_accuracy_above=0.9)
    terms = [
        term(SURROGATE, name="shut", gate=shut, mode=mode, before_gate=before_gate),
        term(NLL, "off_policy", "open"),
    ]
    batch = row_batch(ROWS)
    weight_KBT = token_weights(objective_of(*terms), batch, alone)
    logp_BT = torch.full(batch.input_ids_BT.shape, -0.5, requires_grad=True)
    output = objective_loss(terms, tokens_of(batch, logp_BT), weight_KBT)
    assert not weight_KBT[0].any() and output.term_K[0] == 0
    assert output.loss.item() == pytest.approx(0.5)
    assert torch.autograd.grad(output.term_K[0], logp_BT, allow_unused=True)[0].count_nonzero() == 0


def test_a_scheduled_coefficient_of_zero_weighs_nothing() -> None:
    rising = {"kind": "linear", "start": 0.0, "end": 1.0}
    assert not _weights([term(NLL, "response", coefficient=rising)], ROWS).any()


# ---- denominators ----


def test_one_trace_beside_seven_rollouts_of_its_length_weighs_one_eighth() -> None:
    """Not one half, which is what a mean over the rollouts plus a mean over the trace would give it."""
    config = load_experiment(ROOT / "exp_configs/smoke.yaml", ["method=luffy"])
    assert config.objective is not None
    on, off = _weights(config.objective.terms[:2], [*[Row(4)] * 7, demonstration(4)])
    assert (on.sum(), off.sum()) == (pytest.approx(7 / 8), pytest.approx(1 / 8))


@pytest.mark.parametrize("mode", MODES)
def test_denominators_are_summed_over_ranks(mode: str) -> None:
    objective, batch = objective_of(term(SURROGATE, mode=mode)), row_batch(ROWS)
    two_ranks = token_weights(objective, batch, lambda tensor: tensor * 2)
    torch.testing.assert_close(two_ranks, token_weights(objective, batch, alone) / 2)


def test_weights_by_the_teachers_entropy_have_mean_one_over_the_tokens_of_all_ranks() -> None:
    """Five tokens have a teacher; the first rank has three of them, the second two and a row without one."""
    config = term(SURROGATE, gate=GateConfig(taught=True), weigh=WeighConfig(teacher_entropy=2.0))
    batch = row_batch([Row(3, teacher=0), Row(4), Row(2, teacher=0)])
    entropy_BT = torch.arange(batch.input_ids_BT.numel()).view(batch.input_ids_BT.shape) / 10
    batch = replace(batch, entropy_teacher_BT=entropy_BT)
    own_BT = batch.response_mask_BT & (batch.taught_by_BT == 0)
    unscaled_BT = (-2 * entropy_BT.double()).exp() * own_BT
    expected_BT = unscaled_BT / unscaled_BT.sum()
    torch.testing.assert_close(token_weights(objective_of(config), batch, alone)[0], expected_BT)

    parts, local = ([0], [1, 2]), ([], [])
    for rows, noted in zip(parts, local, strict=True):  # what each rank asks the sum of
        token_weights(objective_of(config), take_rows(batch, rows), lambda own, noted=noted: noted.append(own) or own)
    sums = [one + other for one, other in zip(*local, strict=True)]
    for rows in parts:
        calls = iter(sums)
        found_BT = token_weights(objective_of(config), take_rows(batch, rows), lambda _, calls=calls: next(calls))[0]
        torch.testing.assert_close(found_BT, expected_BT[rows][:, : found_BT.shape[1]])
