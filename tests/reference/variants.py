"""Objectives that no preset ships, so that every option of a term is proved once: configuration and reference."""

import math

import torch
from torch import Tensor

from reference import estimators
from reference.losses import (
    Rows,
    by_entropy,
    chord,
    clipped,
    correction,
    dual_clip,
    few,
    forward_kl,
    group_accuracy,
    jsd,
    k3,
    listed_kl,
    logp_sampler,
    prefix_rft,
    ratio_to_old,
    reverse_kl,
)
from reference.rows import LENGTH_LIMIT, PROGRESS, Reference, mean, total

# CHORD-mu (arXiv 2508.11408) with a warm-up: 0 -> 0.9 over a tenth of the run, a cosine down to 0.05 over the rest.
_MU = 0.05 + 0.5 * (0.9 - 0.05) * (1 + math.cos(math.pi * (PROGRESS - 0.1) / 0.8))
CHORD_MU = """
group: {size: 4, starts: {trace: {show: {kind: trace}}}}
advantage: {kind: group_mean, population: on_policy, scale_by_std: true}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: clipped_surrogate}
    coefficient: {kind: warmup_cosine, start: 1.0, peak: 0.1, end: 0.95, warmup: 0.1, decay: 0.8}
    normaliser: {mode: token, population: joint}
  - name: sft
    select: off_policy
    loss: {kind: nll}
    coefficient: {kind: warmup_cosine, start: 0.0, peak: 0.9, end: 0.05, warmup: 0.1, decay: 0.8}
    normaliser: {mode: token, population: own}
"""

# Decoupled PPO: the clip is against pi_old, truncated importance sampling corrects pi_old against the sampler.
TRUNCATED_IMPORTANCE = """
group: {size: 4}
advantage: {kind: pass_at_k, population: joint, k: 2}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: clipped_surrogate}
    correction: {level: token, kind: truncate, high: 2.0}
    normaliser: {mode: token, population: joint}
  - name: sampler
    select: on_policy
    loss: {kind: kl, estimator: k2, against: behavior}
    coefficient: {kind: linear, start: 0.1, end: 0.0, over: 0.5}
    normaliser: {mode: token, population: own}
"""


def truncated_importance(rows: Rows) -> Tensor:
    policy = mean([correction(r).clamp(max=2.0) * clipped(r) for r in rows])
    return policy + 0.1 * (1 - PROGRESS / 0.5) * mean([(r.logp - logp_sampler(r)).square() / 2 for r in rows])


# Sequences far from their sampler are left out, and half of each one's tokens, those of the lowest entropy.
MASKED_SEQUENCES = """
group: {size: 4}
advantage: {kind: group_mean, population: joint, scale_by_std: false}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: surrogate}
    correction: {level: sequence, kind: mask, low: 0.2, high: 5.0}
    top_entropy_share: 0.5
    normaliser: {mode: sequence, population: joint}
  - name: old
    select: on_policy
    loss: {kind: kl, estimator: k3, against: old}
    coefficient: {kind: cosine, start: 0.2, end: 0.1}
    normaliser: {mode: sequence, population: own}
"""


def masked_sequences(rows: Rows) -> Tensor:
    coefficient = 0.1 + 0.5 * (0.2 - 0.1) * (1 + math.cos(math.pi * PROGRESS))
    means, divergences = [], []
    for r in rows:
        weight = float(correction(r).prod())
        weight = weight if 0.2 <= weight <= 5.0 else 0.0
        entropy = r.entropy.tolist()
        kept = by_entropy(entropy)[: math.ceil(len(entropy) / 2)]
        means.append(weight * (-r.row.advantage * ratio_to_old(r))[kept].sum() / len(entropy))
        divergences.append(k3(r.row.logp_old - r.logp).mean())
    return torch.stack(means).mean() + coefficient * torch.stack(divergences).mean()


# DPPO (arXiv 2602.04879), binary total variation, with k1 to the starting policy.
TOTAL_VARIATION = """
group: {size: 4}
advantage: {kind: group_mean, population: joint, scale_by_std: false}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: tv_masked_surrogate, max_increase: 0.02, max_decrease: 0.03}
    gate: {group_accuracy_above: 0.0, group_accuracy_at_most: 0.5}
    normaliser: {mode: constant, population: joint}
  - name: start
    select: on_policy
    loss: {kind: kl, estimator: k1}
    coefficient: 0.01
    normaliser: {mode: constant, population: own}
"""


def total_variation(rows: Rows) -> Tensor:
    """The gate lets groups through of which some are right, but at most half."""
    passed = [r for r in rows if 0 < group_accuracy(rows, r.row.group) <= 0.5]
    parts = []
    for r in passed:
        moved = r.logp.detach().exp() - logp_sampler(r).exp()
        kept = torch.where(r.row.advantage > 0, moved <= 0.02, moved >= -0.03)
        parts.append((-r.row.advantage * (r.logp - logp_sampler(r)).exp())[kept])
    start = total([r.logp - r.row.logp_start for r in rows]) / (12 * len(rows))
    return total(parts) / (12 * len(passed)) + 0.01 * start


# Guided rows, shaped otherwise, clamped.
SHAPED_OTHERWISE = """
group: {size: 4, starts: {prefix: {show: {kind: prefix}, dose: {kind: even}}}}
advantage: {kind: group_mean, population: joint, scale_by_std: true}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: surrogate}
    normaliser: {mode: sequence, population: joint}
  - name: power
    select: off_policy
    loss:
      kind: shaped_surrogate
      shaping: {kind: power, exponent: 0.5}
      behavior: recorded
      min_weight: 0.2
      max_weight: 0.3
    coefficient: {kind: linear, start: 1.0, end: 0.0, levels: 10}
    normaliser: {mode: sequence, population: joint}
  - name: logs
    select: off_policy
    loss: {kind: shaped_surrogate, shaping: {kind: log}, behavior: one}
    coefficient: 0.1
    normaliser: {mode: sequence, population: joint}
  - name: both
    select: off_policy
    loss: {kind: shaped_surrogate, shaping: {kind: linear_log, weight: 0.1}, behavior: recorded}
    coefficient: 0.2
    normaliser: {mode: sequence, population: joint}
  - name: entropy
    select: response
    loss: {kind: entropy}
    coefficient: 0.02
    normaliser: {mode: token, population: own}
"""


def shaped_otherwise(rows: Rows) -> Tensor:
    """Mean over sequences of the mean over their tokens; the third of ten levels at two ninths of the run."""
    third_level, per_row = 1 - 2 / 9, []
    for r in rows:
        rho = (r.logp - torch.where(r.row.logp_sampler.isnan(), 0.0, r.row.logp_sampler)).exp()
        shaped = third_level * rho.sqrt().clamp(0.2, 0.3) + 0.1 * r.logp + 0.2 * (rho + 0.1 * rho.log())
        weight = torch.where(r.given, shaped, ratio_to_old(r))
        per_row.append((-r.row.advantage * weight).mean())
    return torch.stack(per_row).mean() - 0.02 * mean([r.entropy for r in rows])


# The other temperatures: SFT at the rollouts', as descendants of verl compute it, and an entropy bonus at 1.
OTHER_TEMPERATURES = """
group: {size: 4, starts: {trace: {show: {kind: trace}}}}
advantage: {kind: group_mean, population: on_policy, scale_by_std: false}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: surrogate}
    normaliser: {mode: token, population: joint}
  - name: sft
    select: off_policy
    loss: {kind: nll, token_weight: p_one_minus_p, temperature: rollout}
    normaliser: {mode: token, population: all}
  - name: entropy
    select: response
    loss: {kind: entropy, temperature: one}
    coefficient: 0.02
    normaliser: {mode: sequence, population: all}
"""


def other_temperatures(rows: Rows) -> Tensor:
    """The SFT term counts all response tokens in its denominator."""
    num_tokens = sum(len(r.logp) for r in rows)
    p_one_minus_p = [(r.logp.detach().exp() * (1 - r.logp.detach().exp())) for r in rows]
    sft = total([(-w * r.logp)[r.given] for w, r in zip(p_one_minus_p, rows, strict=True)]) / num_tokens
    bonus = torch.stack([r.untempered_entropy.mean() for r in rows]).mean()
    surrogate = mean([(-r.row.advantage * ratio_to_old(r))[r.own] for r in rows])
    return surrogate + sft - 0.02 * bonus


# Prefix-RFT (arXiv 2507.01679) with the clip on the prefix, too.
CLIPPED_PREFIX = """
group: {size: 4, starts: {prefix: {show: {kind: prefix}, dose: {kind: even}}}}
advantage: {kind: group_mean, population: joint, scale_by_std: false}
terms:
  - name: on_policy
    select: on_policy
    loss: {kind: clipped_surrogate, clip_low: 0.2, clip_high: 0.2, dual_clip: 3.0}
    normaliser: {mode: constant, population: joint}
  - name: prefix
    select: off_policy
    loss: {kind: clipped_surrogate, clip_low: 0.2, clip_high: 0.2, dual_clip: 3.0}
    top_entropy_share: 0.8
    normaliser: {mode: constant, population: joint}
"""


# Divergences over few tokens of the vocabulary, by every measure; the last one without all others.
FEW_CHOICES = """
group: {size: 4}
advantage: {kind: none}
terms:
  - name: jsd
    select: on_policy
    loss: {kind: divergence, measure: jsd, beta: 0.1, top_k: 5}
    normaliser: {mode: token, population: own}
  - name: forward
    select: on_policy
    gate: {outcome: wrong}
    loss: {kind: divergence, measure: forward_kl, top_k: 5}
    normaliser: {mode: sequence, population: own}
  - name: reverse
    select: response
    loss: {kind: divergence, measure: reverse_kl, top_k: 5}
    coefficient: 0.5
    normaliser: {mode: constant, population: own}
  - name: ignored
    select: on_policy
    loss: {kind: divergence, measure: forward_kl, top_k: 5, rest: ignored}
    normaliser: {mode: token, population: all}
"""


def few_choices(rows: Rows) -> Tensor:
    coarse = [few(r) for r in rows]
    wrong = [forward_kl(r).mean() for r in coarse if r.row.reward == 0]
    reverse = total([reverse_kl(r) for r in coarse]) / (LENGTH_LIMIT * len(rows))
    ignored = mean([listed_kl(r) for r in coarse])
    return mean([jsd(r, 0.1) for r in coarse]) + torch.stack(wrong).mean() + 0.5 * reverse + ignored


# REINFORCE (Williams 1992) without a baseline, and a trace that is learned from by the same rule.
REINFORCE = """
group: {size: 4, starts: {trace: {show: {kind: trace}}}}
advantage: {kind: raw}
terms:
  - name: reinforce
    select: response
    loss: {kind: surrogate}
    normaliser: {mode: sequence, population: all}
"""


def reinforce(rows: Rows) -> Tensor:
    """Mean over sequences of the mean over their tokens of -R x ratio."""
    return torch.stack([(-r.row.advantage * ratio_to_old(r)).mean() for r in rows]).mean()


_TRUNCATED = Reference("rollouts", estimators.best_of_two, truncated_importance)
VARIANTS: dict[str, tuple[str, Reference]] = {
    "chord_mu": (CHORD_MU, Reference("demonstrations", estimators.standardised_rollouts, chord(_MU, torch.ones_like))),
    "truncated_importance": (TRUNCATED_IMPORTANCE, _TRUNCATED),
    "masked_sequences": (MASKED_SEQUENCES, Reference("rollouts", estimators.centred, masked_sequences)),
    "total_variation": (TOTAL_VARIATION, Reference("rollouts", estimators.centred, total_variation)),
    "shaped_otherwise": (SHAPED_OTHERWISE, Reference("guided", estimators.standardised, shaped_otherwise)),
    "reinforce": (REINFORCE, Reference("demonstrations", estimators.raw, reinforce)),
    "other_temperatures": (
        OTHER_TEMPERATURES,
        Reference("demonstrations", estimators.centred_rollouts, other_temperatures),
    ),
    "few_choices": (FEW_CHOICES, Reference("rollouts", estimators.none, few_choices)),
    "clipped_prefix": (CLIPPED_PREFIX, Reference("guided", estimators.centred, prefix_rft(dual_clip, fifths=4))),
}
"""`rl` objectives in YAML, and what they are held against."""
