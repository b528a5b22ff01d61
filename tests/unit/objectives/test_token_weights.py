"""What a token weighs: gates and denominators against a count by hand, coefficients over the steps of a stage, and
those of presets against the runs that they are named after (`exp_configs/README.md` shows the terms that differ)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from reference.token_cases import Row, alone, demonstration, objective_of, row_batch, term, tokens_of
from reference.weights import Weight, table, weights

from luffy.config import load_experiment
from luffy.config.terms import (
    EntropyLoss,
    GateConfig,
    NegativeLogLikelihoodLoss,
    RationalShaping,
    ScheduledValue,
    ShapedSurrogateLoss,
    SurrogateLoss,
    TermConfig,
    WeighConfig,
    bounds,
)
from luffy.config.training import ScheduleConfig
from luffy.objectives.objective import objective_loss, token_weights
from luffy.objectives.schedules import objective_at, schedule_multiplier, value_at
from luffy.training.batching import take_rows

CONFIGS = Path(__file__).resolve().parents[3] / "exp_configs"
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


def _chosen(config: TermConfig, row: Row, t: int, gated: bool = True) -> bool:
    fits = config.select == "response" or (t < row.guided) == (config.select == "off_policy")
    gate = config.gate if gated and config.gate is not None else GateConfig.model_construct()
    above, at_most = gate.group_accuracy_above, gate.group_accuracy_at_most
    return (
        t < row.length
        and fits
        and (above is None or row.accuracy > above)
        and (at_most is None or row.accuracy <= at_most)
        and (gate.outcome is None or row.correct == (gate.outcome == "correct"))
    )


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
    denominators = {
        "token": sum(counts), "sequence": sequences * counts[b], "constant": sequences * MAX_RESPONSE_TOKENS,
    }  # fmt: skip
    return config.coefficient.value / denominators[how.mode]


_ROW = st.builds(
    lambda length, guided, correct, accuracy: Row(length, min(guided, length), correct, accuracy),
    st.integers(0, 4),
    st.sampled_from([0, 0, 1, 2, 9]),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
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
    mode, gates = draw(st.sampled_from(MODES)), [draw(_GATE) for _ in range(3)]
    joint = {"mode": mode, "population": "joint", "before_gate": draw(st.booleans()) and any(gates[:2])}
    aside = {"mode": draw(st.sampled_from(MODES)), "before_gate": draw(st.booleans()) and gates[2] is not None}
    selected = draw(st.sampled_from(["on_policy", "response"])), draw(st.sampled_from(SELECTORS))
    return [
        term(SURROGATE, selected[0], "on", gate=gates[0], coefficient=0.7, **joint),
        term(SHAPED, "off_policy", "off", gate=gates[1], coefficient=1.3, **joint),
        term(NLL, selected[1], "aside", gate=gates[2], coefficient=-0.5, **aside),
    ]


@given(terms=_objectives(), rows=st.lists(_ROW, min_size=1, max_size=5))
def test_weights_are_those_counted_by_hand(terms: list[TermConfig], rows: list[Row]) -> None:
    found = _weights(terms, rows)
    for k, config in enumerate(terms):
        expected = [[_by_hand(terms, config, rows, b, t) for t in range(found.shape[2])] for b in range(len(rows))]
        torch.testing.assert_close(found[k], torch.tensor(expected, dtype=torch.float64).reshape(found[k].shape))


# ---- gates and denominators ----

ROWS = (
    Row(2, correct=True, accuracy=0.5), Row(1, accuracy=0.5), Row(4), demonstration(3, accuracy=0.5), demonstration(3),
)  # fmt: skip


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


def test_one_trace_beside_seven_rollouts_of_its_length_weighs_one_eighth() -> None:
    """Not one half, which is what a mean over the rollouts plus a mean over the trace would give it."""
    config = load_experiment(CONFIGS / "smoke.yaml", ["method=luffy"])
    assert config.objective is not None
    on, off = _weights(config.objective.terms[:2], [*[Row(4)] * 7, demonstration(4)])
    assert (on.sum(), off.sum()) == (pytest.approx(7 / 8), pytest.approx(1 / 8))


@pytest.mark.parametrize(("name", "own"), [("first", [1, 0, 0]), ("second", [0, 1, 0])])
def test_a_gate_on_a_teacher_by_its_name_is_open_to_its_rows_alone(name: str, own: list[int]) -> None:
    objective = replace(objective_of(term(SURROGATE, gate=GateConfig(taught=name))), teachers=("first", "second"))
    batch = row_batch([Row(3, teacher=0), Row(3, teacher=1), Row(3)])
    assert token_weights(objective, batch, alone)[0].sum(dim=-1).tolist() == pytest.approx(own)


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


# ---- coefficients, other scheduled values and learning rates ----

LINEAR = {"kind": "linear", "start": 1.0, "end": 0.0}
COSINE = {"kind": "cosine", "start": 0.95, "end": 0.05}
CHORD = {"kind": "warmup_cosine", "start": 0.0, "peak": 0.9, "end": 0.1, "warmup": 0.2, "decay": 0.4}
QUARTER = 0.5 * (1 - math.cos(math.pi / 4))  # 0.1464
VALUES: TypeAdapter[ScheduledValue] = TypeAdapter(ScheduledValue)
EVERY_CURVE = pytest.mark.parametrize("value", [LINEAR, LINEAR | {"levels": 4}, COSINE | {"over": 0.3}, CHORD], ids=str)


def _curve(value: object, total: int) -> list[float]:
    return [value_at(VALUES.validate_python(value), step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.3, [0.3] * 11),
        (LINEAR, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
        (LINEAR | {"over": 0.5}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (LINEAR | {"levels": 3}, [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0]),
        # A level begins with the first step of its window: a tenth of 80 % of 25 moves is two of them.
        (LINEAR | {"over": 0.8, "levels": 10}, [1 - min(move // 2, 9) / 9 for move in range(26)]),
        (COSINE, [0.95, 0.95 - 0.9 * QUARTER, 0.5, 0.05 + 0.9 * QUARTER, 0.05]),
        (COSINE | {"over": 0.5}, [0.95, 0.95 - 0.9 * QUARTER, 0.5, 0.05 + 0.9 * QUARTER, *[0.05] * 5]),
        # Steps of a tenth: 0, peak at 0.2, half-way at 0.4, end from 0.6.
        (CHORD, [0.0, 0.45, 0.9, 0.9 - 0.8 * QUARTER, 0.5, 0.1 + 0.8 * QUARTER, *[0.1] * 5]),
        *((value, [value["start"]]) for value in (LINEAR, LINEAR | {"levels": 4}, COSINE, CHORD)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_by_hand(value: object, expected: list[float]) -> None:
    assert _curve(value, total=len(expected)) == pytest.approx(expected)


def test_luffys_linear_max_is_ten_windows_from_the_maximum_to_a_tenth_of_it() -> None:
    """Window i of ten draws from U(0, max (10 - i) / 10), of equal length."""
    curve = _curve({"kind": "linear", "start": 0.8, "end": 0.08, "levels": 10}, total=1001)
    windows = [curve[100 * i + 1 : 100 * i + 99] for i in range(10)]
    assert [window[0] for window in windows] == pytest.approx([0.8 * (10 - i) / 10 for i in range(10)])
    assert all(len(set(window)) == 1 for window in windows)


@EVERY_CURVE
@given(total=st.integers(1, 500), step=st.integers(1, 500))
def test_values_stay_within_the_bounds_of_the_schedule(value: dict[str, object], total: int, step: int) -> None:
    parsed = VALUES.validate_python(value)
    low, high = bounds(parsed)
    assert low - 1e-12 <= value_at(parsed, min(step, total), total) <= high + 1e-12


@EVERY_CURVE
def test_the_same_share_of_a_longer_stage_has_the_same_value(value: dict[str, object]) -> None:
    assert _curve(value, total=11) == pytest.approx(_curve(value, total=101)[::10])


def test_objective_takes_each_coefficient_at_its_step_and_one_of_zero_weighs_nothing() -> None:
    terms = [term(EntropyLoss(kind="entropy"), "response", coefficient=value) for value in (0.25, LINEAR)]
    assert objective_at(terms, 3, 5, 10).coefficients == pytest.approx((0.25, 0.5))
    assert not _weights([term(NLL, "response", coefficient=LINEAR | {"start": 0.0, "end": 1.0})], ROWS).any()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 5),
        ({"warmup_share": 0.4}, [0.25, 0.5, 0.75, *[1.0] * 7]),  # never 0
        ({"kind": "linear", "final_share": 0.1}, [1.0, 0.775, 0.55, 0.325, 0.1]),
        ({"kind": "cosine", "final_share": 0.1}, [1.0, 1 - 0.9 * QUARTER, 0.55, 0.1 + 0.9 * QUARTER, 0.1]),
    ],
    ids=str,
)
def test_learning_rates_by_hand(settings: dict[str, object], expected: list[float]) -> None:
    config, total = ScheduleConfig(**settings), len(expected)
    assert [schedule_multiplier(config, step, total) for step in range(total)] == pytest.approx(expected)


# ---- presets ----

KEPT_APART = {("rl_sft_loss", "sft"): 3.2, ("hpt", "sft"): 6.1, ("srft", "sft"): 0.46, ("chord", "sft"): 1.75}
"""Terms that keep a published coefficient although it weighs otherwise here, as their headers say."""


def test_the_readme_shows_the_terms_that_weigh_otherwise() -> None:
    expected = table([weight for weight in weights() if (weight.preset, weight.term) in KEPT_APART])
    assert expected in (CONFIGS / "README.md").read_text(), f"paste into exp_configs/README.md:\n{expected}"


@pytest.mark.parametrize("weight", weights(), ids=lambda weight: f"{weight.preset}-{weight.term}")
def test_a_converted_coefficient_weighs_what_the_authors_does(weight: Weight) -> None:
    apart = KEPT_APART.get((weight.preset, weight.term))
    expected, within = (1.0, 0.15) if apart is None else (apart, 0.02)
    assert weight.ours / weight.authors == pytest.approx(expected, rel=within)
