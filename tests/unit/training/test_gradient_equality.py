"""The proof: gradients and parameters do not depend on how a step is cut up, and equal a float64 reference."""

import copy
import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from reference.gradient_case import (
    CASES,
    CONTEXTS,
    OPTIMIZER,
    PRESETS,
    SPLITS,
    execution,
    make_batch,
    moved,
    objective_of,
    reference_gradients,
    reference_loss,
    reference_of,
    reference_step,
    relative_l2,
    step_of,
    terms_of,
    tiny_model,
    wanted_gradients,
)
from reference.losses import reinforce_pp
from torch import Tensor

from luffy.config import available_presets
from luffy.config.starts import TracePrefix
from luffy.config.terms import TermConfig
from luffy.objectives.schedules import StepObjective
from luffy.training.batching import take_rows
from luffy.training.policy import Policy
from luffy.types import TrainBatch

TOLERANCE = 1e-5
FAINT = ("reinforce_pp", "kl")
"""The published coefficient of 1e-5 is below what float32 and the tolerance can tell."""
_model = functools.cache(tiny_model)
"""Copied by each test, so that references are computed once a case."""


def _policy(temperature: float = 1.0, **settings: object) -> Policy:
    return Policy(copy.deepcopy(_model()), OPTIMIZER, execution(**settings), "float32", temperature)


def _can_branch(case: str) -> bool:
    objective = objective_of(case)
    return not (
        any(term.needs_whole_sequences for term in terms_of(case))
        or (objective and (objective.needs_critic or objective.replay or objective.group.shows(TracePrefix)))
        or reference_of(case).rows.endswith(("peers", "beside"))  # a teacher's prompt is for a whole response
    )


def _dual_clip(term: TermConfig) -> float | None:
    return getattr(term.loss, "dual_clip", None)


BRANCHED = [case + CONTEXTS for case in CASES if _can_branch(case)]


def _gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: safe_get_full_grad(parameter) for name, parameter in policy.causal_lm.named_parameters()}


def _gradients_of(step: StepObjective, batch: TrainBatch) -> dict[str, Tensor]:
    policy = _policy()
    policy.accumulate(batch, step)
    return _gradients(policy)


def test_every_shipped_method_has_a_reference() -> None:
    assert set(PRESETS) == {*available_presets("methods"), "relift_sft"}


def _runs() -> Iterator[object]:
    """Every case in the two splits that differ most, at a temperature of its own; the other splits in turn.

    One of the two is for the first tier.
    """
    yield from (pytest.param("luffy", split, temperature) for split in SPLITS for temperature in (1.0, 0.7))
    others = [split for split in SPLITS if split not in ("one_row_each", "packed_some_rows")]
    for number, case in enumerate(CASES):
        first, second = ("one_row_each", "packed_some_rows")[:: 1 if number % 2 else -1]
        if case != "luffy":
            yield pytest.param(case, first, (1.0, 0.7)[number // 2 % 2])
            yield pytest.param(case, second, (0.7, 1.0)[number // 2 % 2], marks=pytest.mark.slow)
            yield pytest.param(case, others[number % len(others)], 1.0, marks=pytest.mark.slow)


@pytest.mark.parametrize(("case", "split", "temperature"), _runs())
def test_gradient_and_parameters_equal_the_float64_reference_for_any_split(case, split, temperature):
    expected_gradients, expected_parameters = reference_step(case, _model(), temperature)
    policy = _policy(temperature, **SPLITS[split])
    metrics = policy.accumulate(make_batch(case, _model()), step_of(case))
    # Where a clip has stopped the gradient, the loss still shows its bound.
    assert metrics["actor/loss"] == pytest.approx(reference_loss(case, _model(), temperature), rel=1e-5, abs=1e-6)
    assert relative_l2(_gradients(policy), expected_gradients) < TOLERANCE
    policy.engine.step()
    parameters = {name: parameter.detach().cpu() for name, parameter in policy.causal_lm.named_parameters()}
    start = dict(_model().named_parameters())
    assert relative_l2(parameters, expected_parameters) < TOLERANCE
    assert relative_l2(moved(parameters, start), moved(expected_parameters, start)) < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_step_raises_what_is_rewarded_or_shown(case: str) -> None:
    """A sign that a preset and its reference have wrong alike would pass the proof above."""
    loss, _ = reference_step(case, _model())
    wanted = wanted_gradients(case, _model())
    assert sum(float((loss[name] * wanted[name]).sum()) for name in loss) < 0


@pytest.mark.parametrize(
    ("case", "split"), [(case, ("one_row_each", "packed_some_rows")[n % 2]) for n, case in enumerate(BRANCHED)]
)
def test_episodes_with_several_contexts_weigh_as_one_response_each(case: str, split: str) -> None:
    """Their turns are forwarded one by one in the reference, which knows nothing of rows."""
    expected_gradients, _ = reference_step(case, _model())
    policy = _policy(**SPLITS[split])
    metrics = policy.accumulate(make_batch(case, _model()), step_of(case))
    assert metrics["actor/loss"] == pytest.approx(reference_loss(case, _model()), rel=1e-5, abs=1e-6)
    assert relative_l2(_gradients(policy), expected_gradients) < TOLERANCE
    unbranched, _ = reference_step(case.removesuffix(CONTEXTS), _model())
    assert relative_l2(expected_gradients, unbranched) > 100 * TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if any(map(_dual_clip, terms_of(case)))])
def test_a_dual_clip_that_is_left_out_would_be_missed(case: str) -> None:
    step, batch = step_of(case), make_batch(case, _model())
    bare = [
        term.model_copy(update={"loss": term.loss.model_copy(update={"dual_clip": None})}) if _dual_clip(term) else term
        for term in step.terms
    ]
    found = _gradients_of(dataclasses.replace(step, terms=tuple(bare)), batch)
    assert relative_l2(found, reference_step(case, _model())[0]) > 3 * TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if len(terms_of(case)) > 1])
def test_every_term_weighs_enough_to_be_missed(case: str) -> None:
    """The proof above would notice a term that is left out, but for the one that is proved by itself below."""
    step, batch = step_of(case), make_batch(case, _model())
    expected, _ = reference_step(case, _model())
    for left_out, term in enumerate(step.terms):
        coefficients = tuple(0.0 if k == left_out else c for k, c in enumerate(step.coefficients))
        found = _gradients_of(dataclasses.replace(step, coefficients=coefficients), batch)
        error = relative_l2(found, expected)
        assert error > 3 * TOLERANCE or (case, term.name) == FAINT


def test_the_faintest_term_equals_its_reference_when_it_is_made_louder() -> None:
    case, louder = FAINT[0], 1e4
    step = step_of(case)
    coefficients = tuple(
        louder * c if term.name == FAINT[1] else c for term, c in zip(step.terms, step.coefficients, strict=True)
    )
    found = _gradients_of(dataclasses.replace(step, coefficients=coefficients), make_batch(case, _model()))
    expected = reference_gradients(case, copy.deepcopy(_model()).double(), _model(), reinforce_pp(kl=louder * 1e-5))
    assert relative_l2(found, expected) < TOLERANCE


@pytest.mark.parametrize("case", ["luffy", "hpt", "srft", "prefix_rft", "exgrpo", "shaped_otherwise"])
def test_terms_without_a_token_in_the_whole_step_contribute_exactly_nothing(case: str) -> None:
    """The prompts of a step may all be without a trace."""
    batch = make_batch(case, _model())
    rollouts = (~batch.is_off_policy_BT.any(dim=-1)).nonzero().flatten().tolist()
    part = take_rows(batch, rollouts)
    gradients = []
    for keep in (lambda term: True, lambda term: term.select != "off_policy"):
        step = step_of(case)
        kept = [i for i, term in enumerate(step.terms) if keep(term)]
        terms, coefficients = zip(*((step.terms[i], step.coefficients[i]) for i in kept), strict=True)
        gradients.append(_gradients_of(dataclasses.replace(step, terms=terms, coefficients=coefficients), part))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert any(gradient.any() for gradient in gradients[0].values())


def test_the_gradient_of_luffy_does_not_depend_on_recorded_log_probabilities() -> None:
    """pi_phi is 1 in the paper; taking the data's is a choice that a person makes."""
    batch = make_batch("luffy", _model())
    recorded_BT = batch.is_off_policy_BT & ~batch.logp_behavior_BT.isnan()
    assert recorded_BT.any()
    bare = dataclasses.replace(batch, logp_behavior_BT=batch.logp_behavior_BT.masked_fill(recorded_BT, torch.nan))
    step = step_of("luffy")
    found = [_gradients_of(step, rows) for rows in (batch, bare)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    recorded = {term.name: term.loss.model_copy(update={"behavior": "recorded"}) for term in step.terms}
    chosen = tuple(
        term.model_copy(update={"loss": recorded[term.name]}) if term.name == "off_policy" else term
        for term in step.terms
    )
    assert relative_l2(_gradients_of(dataclasses.replace(step, terms=chosen), batch), found[0]) > 0.01


def test_without_old_log_probabilities_they_are_the_present_ones_as_constants() -> None:
    """A phase with a single update does not compute them."""
    batch, step = make_batch("dapo", _model()), step_of("dapo")
    own_BT, unknown_BT = _policy().logprobs(batch), torch.full_like(batch.logp_old_BT, torch.nan)
    known, found = (
        _gradients_of(step, dataclasses.replace(batch, logp_old_BT=old_BT)) for old_BT in (own_BT, unknown_BT)
    )
    assert relative_l2(found, {name: gradient.double() for name, gradient in known.items()}) < TOLERANCE


def test_reported_gradient_norm_is_the_one_before_clipping() -> None:
    gradients, _ = reference_step("luffy", _model())
    norm = float(sum(gradient.square().sum() for gradient in gradients.values()).sqrt())
    metrics = _policy().update(make_batch("luffy", _model()), step_of("luffy"), lr=1e-2)
    assert norm > OPTIMIZER.max_grad_norm
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
