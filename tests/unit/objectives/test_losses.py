"""Every loss against its paper's formula and numbers by hand: values, gradients, what is clipped, factors of a term."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import formulas
from reference.token_cases import Tokens, assert_same, evaluate, evaluate_term, packed, sequences, term, tokens

from luffy.config.terms import (
    AipoLoss,
    CispoLoss,
    ClippedSurrogateLoss,
    DistillationLoss,
    DivergenceLoss,
    EntropyLoss,
    IdentityShaping,
    ImportanceCorrection,
    KLLoss,
    LinearLogShaping,
    LogShaping,
    LossConfig,
    MultipleImportanceLoss,
    NegativeLogLikelihoodLoss,
    PowerShaping,
    RationalShaping,
    SequenceSurrogateLoss,
    ShapedSurrogateLoss,
    ShapingConfig,
    SurrogateLoss,
    TokenWeight,
    TotalVariationMaskedLoss,
)
from luffy.objectives.losses import token_loss
from luffy.objectives.objective import logp_gradients, objective_loss

LOG, NAN = math.log, math.nan
RATIONAL = RationalShaping(kind="rational", gamma=0.1)
SHAPINGS: list[tuple[ShapingConfig, formulas.Shaping]] = [
    (RATIONAL, formulas.rational_shaping(0.1)),
    (RationalShaping(kind="rational", gamma=0.5), formulas.rational_shaping(0.5)),
    (IdentityShaping(kind="identity"), formulas.identity_shaping()),
    (LogShaping(kind="log"), formulas.log_shaping()),
    (PowerShaping(kind="power", exponent=0.5), formulas.power_shaping(0.5)),
    (PowerShaping(kind="power", exponent=1.3), formulas.power_shaping(1.3)),
    (LinearLogShaping(kind="linear_log", weight=0.1), formulas.linear_log_shaping(0.1)),
]
SURROGATE = SurrogateLoss(kind="surrogate")
DUAL = ClippedSurrogateLoss(kind="clipped_surrogate", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
AIPO = AipoLoss(kind="aipo", max_ratio=4.0)
MASKED = TotalVariationMaskedLoss(kind="tv_masked_surrogate", max_increase=0.2, max_decrease=0.1)
NLL, WEIGHTS = NegativeLogLikelihoodLoss(kind="nll"), get_args(TokenWeight)
GSPO = SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=0.9, clip_high=9.0)


def shaped(shaping: ShapingConfig = RATIONAL, **settings: object) -> ShapedSurrogateLoss:
    return ShapedSurrogateLoss(kind="shaped_surrogate", shaping=shaping, **{"behavior": "recorded", **settings})


def cispo(low: float | None, high: float) -> CispoLoss:
    return CispoLoss(kind="cispo", clip_low=low, clip_high=high)


def weighted(weight: TokenWeight) -> NegativeLogLikelihoodLoss:
    return NLL.model_copy(update={"token_weight": weight})


# ---- formulas ----


def sampler(case: Tokens) -> np.ndarray:
    """One that is not known is the policy before the update."""
    return np.where(np.isnan(case.logp_mu_T), case.logp_old_T, case.logp_mu_T)


def to_old(case: Tokens) -> tuple[np.ndarray, ...]:
    return case.logp_T, case.logp_old_T, case.advantage_T


def to_sampler(case: Tokens) -> tuple[np.ndarray, ...]:
    return case.logp_T, sampler(case), case.advantage_T


def ratio(case: Tokens) -> np.ndarray:
    return np.exp(case.logp_T - case.logp_old_T)


def sequence_ratio(case: Tokens) -> np.ndarray:
    return np.exp(np.mean(case.logp_T - case.logp_old_T, keepdims=True))


def gap(case: Tokens) -> np.ndarray:
    return np.exp(case.logp_T) - np.exp(sampler(case))


def row(config: LossConfig, formula: Callable, arguments: Callable, *settings: object, at=ratio, kinks=()) -> object:
    """The loss is `formula(*arguments(case), *settings)`, and has no gradient where `at` is one of the kinks."""
    return pytest.param(config, lambda case: formula(*arguments(case), *settings), at, kinks, id=repr(config))


FORMULAS = [
    row(SURROGATE, formulas.surrogate, to_old),
    row(DUAL, formulas.dual_clipped, to_old, 0.2, 0.28, 3.0, kinks=(0.8, 1.28, 3.0)),
    row(AIPO, formulas.aipo, to_sampler, 4.0),
    row(MASKED, formulas.tv_masked, to_sampler, 0.2, 0.1, at=gap, kinks=(0.2, -0.1)),
    row(DistillationLoss(kind="distillation"), formulas.distillation, lambda c: (c.logp_T, sampler(c), c.logp_ref_T)),
    *(row(cispo(*clip), formulas.cispo, to_old, *clip) for clip in itertools.product((None, 0.2), (0.28, 4.0))),
    *(row(weighted(weight), formulas.nll, lambda c: (c.logp_T, c.entropy_T), weight) for weight in WEIGHTS),
]
for low, high in ((0.2, 0.2), (0.2, 0.28), (0.5, 2.0)):
    clip = ClippedSurrogateLoss(kind="clipped_surrogate", clip_low=low, clip_high=high)
    FORMULAS.append(row(clip, formulas.clipped, to_old, low, high, kinks=(1 - low, 1 + high)))
for low, high in ((3e-4, 4e-4), (0.2, 0.28)):
    clip = SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=low, clip_high=high)
    kinks = {"at": sequence_ratio, "kinks": (1 - low, 1 + high)}
    FORMULAS.append(
        row(clip, formulas.sequence_clipped, lambda c: (*to_old(c)[:2], c.advantage_T[0]), low, high, **kinks)
    )
for exponent in (0.0, 0.5, 2.0):
    loss = MultipleImportanceLoss(kind="multiple_importance", exploration_exponent=exponent)
    FORMULAS.append(row(loss, formulas.multiple_importance, to_old, exponent))
# The teacher of a case is its reference.
for against, name in {"reference": "ref", "old": "old", "behavior": "", "teacher": "ref"}.items():
    others = partial(lambda name, c: (c.logp_T, getattr(c, f"logp_{name}_T") if name else sampler(c)), name)
    for estimator in ("k1", "k2", "k3"):
        FORMULAS.append(row(KLLoss(kind="kl", estimator=estimator, against=against), formulas.kl, others, estimator))


@pytest.mark.parametrize(("config", "formula", "at", "kinks"), FORMULAS)
@given(cases=st.lists(sequences(), min_size=1, max_size=3))
def test_a_loss_and_its_gradient_are_their_formula_in_each_sequence_of_a_packed_row(config, formula, at, kinks, cases):
    if config.kind == "sequence_surrogate":
        cases = [case.advantage(case.advantage_T[0]) for case in cases]
    assume(all(np.min(np.abs(at(case) - kink)) > 1e-9 for case in cases for kink in kinks))
    # Multiple importance: 1 - p next to p = 1 keeps half of the digits under the root.
    atol = 1e-7 if config.kind == "multiple_importance" else 1e-12
    expected = tuple(np.concatenate(column) for column in zip(*map(formula, cases), strict=True))
    assert_same(evaluate(config, *cases), expected, atol=atol)


@pytest.mark.parametrize(("config", "shaping"), SHAPINGS, ids=lambda s: getattr(s, "kind", ""))
@given(
    case=sequences(),
    behavior=st.sampled_from(["recorded", "one"]),
    low=st.sampled_from([None, 0.0123]),
    high=st.sampled_from([None, 0.6789]),
)
def test_shaped_surrogate(config, shaping, behavior, low, high, case):
    loss = shaped(config, behavior=behavior, min_weight=low, max_weight=high)
    author_T = case.logp_mu_T if behavior == "recorded" else np.full(len(case), NAN)
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    assert_same(evaluate(loss, case), formulas.shaped(case.logp_T, author_T, case.advantage_T, shaping, *bounds))


@given(sequences())
def test_entropy(case: Tokens) -> None:
    batch = packed([case])
    loss_BT = token_loss(EntropyLoss(kind="entropy"), batch).loss_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), batch.entropy_BT)
    assert_same((loss_BT.detach().numpy()[0], gradient_BT.numpy()[0]), (-case.entropy_T, -np.ones(len(case))))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_nll_weights_have_no_gradient_through_the_entropy(weight: TokenWeight) -> None:
    batch = packed([tokens([LOG(0.5), LOG(0.1)], entropy=[0.5, 1.5])])
    loss_BT = token_loss(weighted(weight), batch).loss_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), batch.entropy_BT, allow_unused=True)
    assert gradient_BT is None or not gradient_BT.any()


# ---- by hand ----

HALF_AND_TENTH = tokens([LOG(0.5), LOG(0.1)], entropy=[0.0, LOG(9.0)])
WEIGHED = {  # the mean of log 1 and log 9 is log 3
    **{"one": (1.0, 1.0), "probability": (0.5, 0.1), "p_one_minus_p": (0.25, 0.09), "trust_region": (1.0, 1.0)},
    **{"exp_entropy": (3.0, 3.0), "exp_minus_entropy": (1 / 3, 1 / 3)},
}
KL = {"k1": (-LOG(2), 1.0), "k2": (LOG(2) ** 2 / 2, -LOG(2)), "k3": (1 - LOG(2), -1.0)}  # q / p = 2
BY_HAND = {  # loss, tokens, and value and gradient of each
    "surrogate": (SURROGATE, tokens([LOG(0.3), LOG(0.1)], old=[LOG(0.2), LOG(0.4)], advantage=[2.0, -1.0]),
                  [-3.0, 0.25], [-3.0, 0.25]),
    "sequence: ratios 2 and 9/8, whose geometric mean is 1.5":
        (GSPO, tokens([LOG(0.8), LOG(0.1)], old=[LOG(0.4), LOG(0.05 / 0.5625)]), [-1.5, -1.5], [-1.5, -1.5]),
    "cispo: a ratio of 90 drops no token":
        (cispo(None, 4.0), tokens([LOG(0.9)], old=[LOG(0.01)]), [-5.0 * LOG(0.9)], [-5.0]),
    "aipo: ratios 10 and 0.2 to the sampler, truncated from above alone":
        (AIPO, tokens([LOG(0.5), LOG(0.1)], mu=[LOG(0.05), LOG(0.5)], old=[0.0, 0.0]),
         [-4.0 * LOG(0.5), -0.2 * LOG(0.1)], [-4.0, -0.2]),
    "shaped: rho 0.1 and 0.4": (shaped(), tokens([LOG(0.1), LOG(0.1)], mu=[NAN, LOG(0.25)], advantage=0.875),
                                [-0.4375, -0.7], [-0.875 * 0.25, -0.875 * 0.16]),
    "clamped, without a gradient":
        (shaped(IdentityShaping(kind="identity"), max_weight=2.0), tokens([LOG(0.6)] * 2, mu=[LOG(0.2), LOG(0.5)]),
         [-2.0, -1.2], [0.0, -1.2]),
    "multiple importance: 0.9 x 0.38 / (0.2 + 0.6)":
        (MultipleImportanceLoss(kind="multiple_importance"), tokens([LOG(0.19)], old=[LOG(0.2)]), [-0.4275], [-0.4275]),
    **{name: (weighted(name), HALF_AND_TENTH, [-first * LOG(0.5), -last * LOG(0.1)], [-first, -last])
       for name, (first, last) in WEIGHED.items()},
    **{name: (KLLoss(kind="kl", estimator=name), tokens([LOG(0.2)], ref=[LOG(0.4)]), [value], [gradient])
       for name, (value, gradient) in KL.items()},
}  # fmt: skip


@pytest.mark.parametrize(("config", "case", "loss", "gradient"), BY_HAND.values(), ids=BY_HAND)
def test_losses_by_hand(config, case, loss, gradient):
    assert_same(evaluate(config, case), (np.array(loss), np.array(gradient)))


# p -> p * f'(p) for f(x) = x / (x + 0.1), rounded as published (LUFFY, arXiv 2504.14945, eq. 6-7).
PUBLISHED = {0.001: 0.0098, 0.01: 0.0826, 0.05: 0.2222, 0.1: 0.25, 0.5: 0.1389, 0.99: 0.0833}


@pytest.mark.parametrize(("p", "expected"), PUBLISHED.items())
def test_the_gradient_of_policy_shaping_is_the_published_table(p: float, expected: float) -> None:
    _, gradient = evaluate(shaped(), tokens([LOG(p)], mu=[NAN]))
    assert -gradient[0] == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.25, 1.0, -1.25, -1.25),  # within clip-higher, where 0.2 on both sides would clip
        (1.5, 1.0, -1.28, 0.0),  # moved up enough
        (1.5, -1.0, 1.5, 1.5),  # moved up against the advantage: the bare ratio pulls back
        (0.5, -1.0, 0.8, 0.0),  # moved down enough
        (0.5, 1.0, -0.5, -0.5),
        (5.0, -1.0, 3.0, 0.0),  # beyond the dual clip
        (5.0, 1.0, -1.28, 0.0),  # the dual clip is for negative advantages alone
    ],
)
def test_clips_by_hand(ratio: float, advantage: float, expected: float, gradient: float) -> None:
    case = tokens([LOG(0.1 * ratio)], old=[LOG(0.1)], advantage=advantage)
    assert_same(evaluate(DUAL, case), (np.array([expected]), np.array([gradient])))
    limited_KBT = objective_loss((term(DUAL),), packed([case]), torch.ones(1, 1, 1)).limited_KBT
    assert limited_KBT.item() == (gradient == 0), "metrics count it as clipped"


@pytest.mark.parametrize("weight", ["exp_entropy", "probability"])
@pytest.mark.parametrize("temperature", ["one", "rollout"])
def test_a_loss_at_temperature_one_sees_nothing_of_the_sampled_distribution(temperature: str, weight: str) -> None:
    """Neither in its value nor in the factor on grad log pi_theta that metrics report."""
    sampled, plain = (tokens([LOG(p), LOG(0.1)], entropy=[LOG(p + 1), 2 * p]) for p in (0.5, 0.3))
    batch, other = packed([sampled]), packed([plain])
    batch = replace(batch, untempered_logp_BT=other.logp_BT, untempered_entropy_BT=other.entropy_BT)
    seen = plain if temperature == "one" else sampled
    nll = NegativeLogLikelihoodLoss(kind="nll", token_weight=weight, temperature=temperature)
    (found_BT,) = logp_gradients((term(nll, "response"),), batch, torch.ones(1, 1, 2))
    assert_same((token_loss(nll, batch).loss_BT.detach().numpy()[0], found_BT.numpy()[0]), evaluate(nll, seen))
    entropy_BT = token_loss(EntropyLoss(kind="entropy", temperature=temperature), batch).loss_BT
    assert entropy_BT[0].tolist() == [*-seen.entropy_T]


# ---- factors on token losses ----


def _corrected(case: Tokens, *how: object) -> formulas.Loss:
    loss_T, gradient_T = formulas.surrogate(*to_old(case))
    weight_T = formulas.importance_weight(case.logp_old_T, case.logp_mu_T, *how)
    return loss_T * weight_T, gradient_T * weight_T


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "low", "high"), [("truncate", 0.0, 2.0), ("mask", 0.5, 5.0)])
@given(cases=st.lists(sequences(), min_size=1, max_size=3))
def test_importance_correction(level: str, kind: str, low: float, high: float, cases: list[Tokens]) -> None:
    for case in cases:
        weight_T = formulas.importance_weight(case.logp_old_T, case.logp_mu_T, level, "truncate", 0.0, np.inf)
        assume(all(np.min(np.abs(weight_T - bound)) > 1e-9 for bound in (low, high)))
    correction = ImportanceCorrection(level=level, kind=kind, low=low, high=high)
    value, gradient = evaluate_term(term(SURROGATE, correction=correction), *cases)
    expected = [_corrected(case, level, kind, low, high) for case in cases]
    assert value == pytest.approx(sum(loss_T.sum() for loss_T, _ in expected), rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, np.concatenate([g for _, g in expected]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("level", "kind", "low", "high", "expected"),
    [
        ("token", "truncate", 0.0, 2.0, [2.0, 0.5, 1.0]),
        ("token", "mask", 0.4, 2.0, [0.0, 0.5, 1.0]),
        ("token", "mask", 0.6, 5.0, [4.0, 0.0, 1.0]),
        ("sequence", "truncate", 0.0, 3.0, [2.0, 2.0, 2.0]),  # 4 x 0.5 x 1
        ("sequence", "truncate", 0.0, 1.5, [1.5, 1.5, 1.5]),
        ("sequence", "mask", 0.0, 1.5, [0.0, 0.0, 0.0]),
    ],
)
def test_correction_by_hand(level: str, kind: str, low: float, high: float, expected: list[float]) -> None:
    case = tokens([LOG(0.4), LOG(0.2), LOG(0.3)], mu=[LOG(0.1), LOG(0.4), NAN])  # w = 4, 0.5, unknown
    correction = ImportanceCorrection(level=level, kind=kind, low=low, high=high)
    _, gradient = evaluate_term(term(SURROGATE, correction=correction), case)
    assert gradient.tolist() == pytest.approx([-w for w in expected])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@given(cases=st.lists(sequences(), min_size=1, max_size=3))
def test_top_entropy_mask_works_on_each_sequence(share: float, cases: list[Tokens]) -> None:
    assume(all(len(set(case.entropy_T)) == len(case) for case in cases))
    _, gradient = evaluate_term(term(NLL, "off_policy", top_entropy_share=share), *cases)
    counts = [-(-len(case) * round(share * 10) // 10) for case in cases]  # rounded up, in whole tenths
    expected = [formulas.highest_entropy(case.entropy_T, n) for case, n in zip(cases, counts, strict=True)]
    assert gradient.tolist() == (-np.concatenate(expected)).tolist()


@pytest.mark.parametrize(("share", "length", "kept"), [(0.5, 4, 2), (0.55, 100, 55)])
def test_tokens_of_equal_entropy_are_kept_up_to_the_share(share: float, length: int, kept: int) -> None:
    """0.55 of 100 tokens is 55.00000000000001 in floats."""
    case = tokens([-1.0] * length, entropy=[1.0] * length)
    _, gradient = evaluate_term(term(NLL, "off_policy", top_entropy_share=share), case)
    assert gradient.sum() == -kept


def test_correction_and_top_entropy_mask_multiply() -> None:
    case = tokens([LOG(0.4), LOG(0.4)], mu=[LOG(0.2), LOG(0.2)], entropy=[1.0, 2.0])
    both = term(SURROGATE, correction=ImportanceCorrection(kind="truncate", high=5.0), top_entropy_share=0.5)
    _, gradient = evaluate_term(both, case)
    assert gradient.tolist() == pytest.approx([0.0, -2.0])


SEQUENCE_WIDE = {
    "sequence ratio": term(GSPO),
    "entropy of the row": term(weighted("exp_entropy"), "off_policy"),
    "correction": term(SURROGATE, correction=ImportanceCorrection(level="sequence", kind="truncate", high=50.0)),
    "highest entropy": term(NLL, "off_policy", top_entropy_share=0.4),
}


@pytest.mark.parametrize("config", SEQUENCE_WIDE.values(), ids=SEQUENCE_WIDE)
@given(cases=st.lists(sequences(), min_size=1, max_size=3), data=st.data())
def test_tokens_that_the_term_does_not_select_do_not_enter_what_is_taken_over_a_sequence(config, cases, data):
    """A term over a part of each sequence is the term over sequences of that part alone."""
    cases = [case.advantage(case.advantage_T[0]) for case in cases]
    chosen = [np.array(data.draw(st.lists(st.booleans(), min_size=len(case), max_size=len(case)))) for case in cases]
    assume(all(part.any() for part in chosen))
    parts = [
        Tokens(**{name: column[part] for name, column in case.__dict__.items()})
        for case, part in zip(cases, chosen, strict=True)
    ]
    selected = np.concatenate(chosen)
    value, gradient = evaluate_term(config, *cases, selected=selected)
    value_alone, gradient_alone = evaluate_term(config, *parts)
    assert value == pytest.approx(value_alone)
    np.testing.assert_allclose(gradient[selected], gradient_alone, rtol=1e-9, atol=1e-12)
    assert not gradient[~selected].any()


# ---- divergences ----

MEASURES = ("forward_kl", "reverse_kl", "jsd")


def _divergence(measure: str, logp_V: torch.Tensor, logq_V: torch.Tensor, top_k: int, rest: str = "bucket") -> float:
    """Over the teacher's `top_k` most probable tokens, of which there may be all."""
    chosen = logq_V.topk(top_k).indices

    def coarse(logp_V: torch.Tensor) -> torch.Tensor:
        others_V = logp_V.index_fill(0, chosen, -torch.inf)
        return torch.cat([logp_V[chosen], others_V.logsumexp(0, keepdim=True).clamp(min=-80.0)]).view(1, 1, -1)

    settings = {"beta": 0.3} if measure == "jsd" else {}
    config = DivergenceLoss(kind="divergence", measure=measure, top_k=top_k, rest=rest, **settings)
    batch = replace(packed([tokens([-1.0])]), logp_BTC=coarse(logp_V), logq_BTC=coarse(logq_V))
    return token_loss(config, batch).loss_BT.item()


@pytest.mark.parametrize("measure", MEASURES)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 5.0]))
def test_a_divergence_over_few_tokens_bounds_the_whole_from_below_and_meets_it(measure, seed, spread) -> None:
    generator = torch.Generator().manual_seed(seed)
    logp_V, logq_V = (spread * torch.randn(2, 9, generator=generator, dtype=torch.float64)).log_softmax(-1)
    p, q = logp_V.exp(), logq_V.exp()
    m = 0.3 * q + 0.7 * p
    kl = {"forward_kl": q * (q / p).log(), "reverse_kl": p * (p / q).log()}
    whole = (kl | {"jsd": 0.3 * q * (q / m).log() + 0.7 * p * (p / m).log()})[measure].sum().item()
    found = [_divergence(measure, logp_V, logq_V, top_k) for top_k in range(1, 10)]
    assert found[-1] == pytest.approx(whole, abs=1e-6)
    # Each further token parts one that was counted with the others.
    assert all(0 <= few <= more + 1e-12 for few, more in itertools.pairwise([0.0, *found, whole + 1e-9]))


def test_the_ignored_rest_is_left_out_and_the_sum_may_be_negative() -> None:
    logp_V, logq_V = torch.tensor([[0.5, 0.4, 0.1], [0.4, 0.3, 0.3]], dtype=torch.float64).log()
    expected = 0.4 * LOG(0.4 / 0.5) + 0.3 * LOG(0.3 / 0.4)
    assert _divergence("forward_kl", logp_V, logq_V, 2, "ignored") == pytest.approx(expected)
    assert expected < 0 < _divergence("forward_kl", logp_V, logq_V, 2)


def test_expected_gradients_are_what_the_config_says() -> None:
    """Over tokens sampled from the policy, the sample itself held fixed. k2 and distillation: the gradient of the
    reverse divergence KL(p || q); k3: of the forward one, KL(q || p); k1: nothing."""
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    logq_V = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)

    def gradient(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of.sum(), logits_V, retain_graph=True)[0]

    reverse_V, forward_V = gradient(logp_V.exp() * (logp_V - logq_V)), gradient(logq_V.exp() * (logq_V - logp_V))
    expected = {"k1": 0 * reverse_V, "k2": reverse_V, "k3": forward_V, "distillation": reverse_V}
    for name, expected_V in expected.items():
        config = DistillationLoss(kind=name) if name == "distillation" else KLLoss(kind="kl", estimator=name)
        _, by_logp_V = evaluate(config, tokens(logp_V.tolist(), ref=logq_V.tolist()))
        found_V = gradient(logp_V.exp().detach() * torch.from_numpy(by_logp_V) * logp_V)
        torch.testing.assert_close(found_V, expected_V, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
