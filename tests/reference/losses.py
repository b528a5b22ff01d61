"""Whole-batch losses of the presets, written from the papers, one sequence at a time, in float64.

A preset is a function and an entry in `REFERENCES`; the rows it is given are neither padded nor packed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference import estimators
from reference.rows import (
    LENGTH_LIMIT,
    NUM_CHOICES,
    PROGRESS,
    Evaluated,
    Reference,
    ReferenceRow,
    evaluate,
    forward,
    mean,
    total,
)

__all__ = ["REFERENCES", "Evaluated", "Reference", "ReferenceRow", "evaluate", "forward"]

Rows = Sequence[Evaluated]
Loss = Callable[[Rows], Tensor]


def ratio_to_old(r: Evaluated) -> Tensor:
    return (r.logp - r.row.logp_old).exp()


def logp_sampler(r: Evaluated) -> Tensor:
    """log mu of each token; that of the old policy where mu is not known."""
    return torch.where(r.row.logp_sampler.isnan(), r.row.logp_old, r.row.logp_sampler)


def k3(log_q_p: Tensor) -> Tensor:
    """Schulman's estimator of KL(p || q): q / p - 1 - log(q / p)."""
    return log_q_p.exp() - 1 - log_q_p


def _surrogate(r: Evaluated) -> Tensor:
    return -r.row.advantage * ratio_to_old(r)


def clipped(r: Evaluated, low: float = 0.2, high: float = 0.2) -> Tensor:
    """arXiv 1707.06347 eq. 7."""
    ratio, advantage = ratio_to_old(r), r.row.advantage
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def dual_clip(r: Evaluated, high: float = 0.2, bound: float = 3.0) -> Tensor:
    """arXiv 1912.09729 eq. 5: where A < 0 the loss is at most -bound A."""
    loss = clipped(r, high=high)
    return torch.where(r.row.advantage < 0, torch.minimum(loss, -bound * r.row.advantage), loss)


def _nll(r: Evaluated) -> Tensor:
    """Supervised learning is about the model's own distribution, at temperature 1."""
    return -r.untempered_logp


def _luffy_shape(r: Evaluated) -> Tensor:
    """pi_phi = 1, whatever is recorded."""
    p = r.logp.exp()
    return -r.row.advantage * p / (p + 0.1)


def _recorded_shape(r: Evaluated) -> Tensor:
    """Replayed rows: the ratio to the policy that sampled them, which is recorded with every one of them."""
    assert not r.row.logp_sampler[r.given].isnan().any()
    rho = (r.logp - torch.where(r.given, r.row.logp_sampler, 0.0)).exp()
    return -r.row.advantage * rho / (rho + 0.1)


def group_accuracy(rows: Rows, group: int) -> float:
    rewards = [r.row.reward for r in rows if r.row.group == group and r.row.is_rollout]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _entropy_bonus(rows: Rows, coefficient: float = 0.0003) -> Tensor:
    """The mean entropy of all response tokens; LUFFY's coefficient, converted."""
    return -coefficient * mean([r.entropy for r in rows])


def _own(rows: Rows, loss: Callable[[Evaluated], Tensor]) -> list[Tensor]:
    return [loss(r)[r.own] for r in rows]


def _given(rows: Rows, loss: Callable[[Evaluated], Tensor]) -> list[Tensor]:
    return [loss(r)[r.given] for r in rows]


def by_entropy(entropy: Sequence[float]) -> list[int]:
    """Positions, the least certain first."""
    return [t for _, t in sorted((-value, t) for t, value in enumerate(entropy))]


def _num_tokens(parts: Sequence[Tensor]) -> int:
    return sum(len(part) for part in parts)


# ---- supervised ----


def sft(rows: Rows) -> Tensor:
    """Token-mean cross entropy over the whole step."""
    return mean(_given(rows, _nll))


def dft(rows: Rows) -> Tensor:
    """arXiv 2508.05629: each token's cross entropy times its probability, without gradient."""
    return mean(_given(rows, lambda r: -r.untempered_logp.exp().detach() * r.untempered_logp))


def trsft(rows: Rows) -> Tensor:
    """arXiv 2512.17636: p over max(p, 0.1) without gradient; as a loss of log p, min(1, p / 0.1) log p."""

    def trusted(r: Evaluated) -> Tensor:
        p = r.untempered_logp.exp().detach()
        return -torch.where(p > 0.1, 1.0, p / 0.1) * r.untempered_logp

    return mean(_given(rows, trusted))


def psft(rows: Rows) -> Tensor:
    """arXiv 2508.17784: the clipped ratio of every given token, without an advantage."""

    def proximal(r: Evaluated) -> Tensor:
        ratio = ratio_to_old(r)
        return -torch.minimum(ratio, ratio.clamp(0.8, 1.28))

    return mean(_given(rows, proximal))


def relift_sft(rows: Rows) -> Tensor:
    """arXiv 2506.07527, its supervised step: cross entropy - 1e-4 entropy."""
    return mean(_given(rows, _nll)) - 1e-4 * mean(_given(rows, lambda r: r.untempered_entropy))


# ---- on-policy ----


def on_policy(rows: Rows) -> Tensor:
    """PPO clip 0.2 over all response tokens; entropy bonus."""
    return mean(_own(rows, clipped)) + _entropy_bonus(rows)


def ppo(rows: Rows) -> Tensor:
    """PPO clip 0.2, token mean; also QuestA's (2507.13266) and POPE's (2601.18779), whose hints are in the prompt."""
    return mean(_own(rows, clipped))


def scaf_grpo(rows: Rows) -> Tensor:
    """The same with verl's dual clip."""
    return mean(_own(rows, dual_clip))


def dr_grpo(rows: Rows) -> Tensor:
    """arXiv 2503.20783: sums over the tokens of each response, divided by a constant, averaged over responses."""
    return torch.stack([clipped(r).sum() / LENGTH_LIMIT for r in rows]).mean()


def dapo(rows: Rows) -> Tensor:
    """arXiv 2503.14476 eq. 8."""
    return mean(_own(rows, lambda r: clipped(r, 0.2, 0.28)))


def relift(rows: Rows) -> Tensor:
    """arXiv 2506.07527, its RL step: DAPO's clip with verl's dual clip."""
    return mean(_own(rows, lambda r: dual_clip(r, high=0.28)))


def reinforce(rows: Rows) -> Tensor:
    """Whole responses as actions (RLOO, OPO): ratios summed over each, up to the length limit as a constant."""
    return torch.stack([_surrogate(r).sum() / LENGTH_LIMIT for r in rows]).mean()


def reinforce_pp(kl: float = 1e-5) -> Loss:
    """arXiv 2501.03262, baseline variant: PPO + kl x k2."""

    def loss(rows: Rows) -> Tensor:
        k2 = [(r.logp - r.row.logp_start).square() / 2 for r in rows]
        return mean(_own(rows, clipped)) + kl * mean(k2)

    return loss


def gspo(rows: Rows) -> Tensor:
    """arXiv 2507.18071 eq. 5 to 7: one number a response."""
    parts = []
    for r in rows:
        s = (r.logp - r.row.logp_old).mean().exp()
        advantage = r.row.advantage[0]
        parts.append(-torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage))
    return torch.stack(parts).mean()


def cispo(rows: Rows) -> Tensor:
    """arXiv 2506.13585 eq. 4: -sg(min(r, 5)) A log p."""
    return mean([-ratio_to_old(r).detach().clamp(max=5.0) * r.row.advantage * r.logp for r in rows])


def aipo(rows: Rows) -> Tensor:
    """arXiv 2505.24034: -sg(min(p / mu, 4)) A log p; mu is pi_old where it is not known."""
    ratios = [(r.logp - logp_sampler(r)).exp().detach().clamp(max=4.0) for r in rows]
    return mean([-ratio * r.row.advantage * r.logp for ratio, r in zip(ratios, rows, strict=True)])


def _distilled(r: Evaluated) -> Tensor:
    """Thinking Machines, "On-Policy Distillation": importance sampling with -(log mu - log q) as the advantage."""
    return -(r.row.logp_teacher - logp_sampler(r)) * (r.logp - logp_sampler(r)).exp()


def opd(rows: Rows) -> Tensor:
    """The article's loss, token mean; arXiv 2601.18734 has another teacher."""
    return mean(_own(rows, _distilled))


def opd_rl(rows: Rows) -> Tensor:
    """Bare policy gradient + 0.1 x distillation."""
    return mean(_own(rows, _surrogate)) + 0.1 * opd(rows)


def kdrl(rows: Rows) -> Tensor:
    """arXiv 2506.02208: GRPO + beta x k2 to the teacher, beta falling in a line from 0.005 to 0.001."""
    k2 = mean(_own(rows, lambda r: (r.logp - r.row.logp_teacher).square() / 2))
    return mean(_own(rows, clipped)) + (0.005 - 0.004 * PROGRESS) * k2


def kl_sum(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) at each token, over the vocabulary."""
    return (logp.exp() * (logp - logq)).sum(-1)


def forward_kl(r: Evaluated) -> Tensor:
    return kl_sum(r.row.teacher_all, r.logp_all)


def reverse_kl(r: Evaluated) -> Tensor:
    return kl_sum(r.logp_all, r.row.teacher_all)


def jsd(r: Evaluated, beta: float = 0.5) -> Tensor:
    """arXiv 2306.13649: beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p, q the teacher."""
    mixture = (beta * r.row.teacher_all.exp() + (1 - beta) * r.logp_all.exp()).log()
    return beta * kl_sum(r.row.teacher_all, mixture) + (1 - beta) * kl_sum(r.logp_all, mixture)


def few(r: Evaluated) -> Evaluated:
    """The row with another vocabulary: the teacher's most probable tokens, and what is left of 1 as the last."""
    chosen = r.row.teacher_all.argsort(dim=-1, descending=True)[:, :NUM_CHOICES]

    def coarse(logp_all: Tensor) -> Tensor:
        kept = logp_all.gather(-1, chosen)
        return torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).log()], dim=-1)

    return replace(r, logp_all=coarse(r.logp_all), row=replace(r.row, teacher_all=coarse(r.row.teacher_all)))


def listed_kl(r: Evaluated) -> Tensor:
    """verl's forward_kl_topk: the terms of the forward KL without the last."""
    return kl_sum(r.row.teacher_all[:, :-1], r.logp_all[:, :-1])


def everywhere(measure: Callable[[Evaluated], Tensor]) -> Loss:
    """The divergence alone, token mean."""
    return lambda rows: mean(_own(rows, lambda r: measure(few(r))))


def sdft(rows: Rows) -> Tensor:
    """arXiv 2601.19897 as its code computes it: the mean over sequences of the forward KL's mean over tokens."""
    return torch.stack([forward_kl(few(r)).mean() for r in rows]).mean()


def correction(r: Evaluated) -> Tensor:
    """pi_old / mu of each token, 1 where mu is unknown."""
    return torch.where(r.row.logp_sampler.isnan(), 1.0, (r.row.logp_old - r.row.logp_sampler).exp())


def sdpo(rows: Rows) -> Tensor:
    """arXiv 2601.20802: JSD on the rows beside a right one, the mean over tokens, weighted by min(pi_old / mu, 2)."""
    return mean([correction(r).clamp(max=2.0) * jsd(few(r)) for r in rows if r.row.taught_by >= 0])


def sdpg(rows: Rows) -> Tensor:
    """arXiv 2606.04036: DAPO's clip with dual clip 10 + 0.001 KL(p || q) + 0.001 k2 to the start."""
    k2 = mean([(r.logp - r.row.logp_start).square() / 2 for r in rows])
    divergence = mean(_own(rows, lambda r: reverse_kl(few(r))))
    return mean(_own(rows, lambda r: dual_clip(r, 0.28, 10.0))) + 0.001 * divergence + 0.001 * k2


def rlsd(rows: Rows) -> Tensor:
    """arXiv 2604.03128: PPO's clip on an advantage whose size the teacher's evidence changes; lambda falls from 0.5 to
    0 over half of the steps."""
    share, parts = 0.5 * (1 - PROGRESS / 0.5), []
    for r in rows:
        evidence = ((r.row.logp_teacher - r.row.logp_old) * r.row.advantage.sign()).exp().clamp(0.8, 1.2)
        advantage = r.row.advantage * ((1 - share) + share * evidence)
        ratio = ratio_to_old(r)
        parts.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return mean(parts)


def rlrt(rows: Rows) -> Tensor:
    """arXiv 2605.10781: on right rows that have a teacher A_t = A (1/2 + w_t / 2), w_t = (pi_old / q)^sign(A) within
    [0, 2]; PPO's clip over all response tokens."""
    parts = []
    for r in rows:
        advantage, ratio = r.row.advantage, ratio_to_old(r)
        if r.row.taught_by >= 0:
            assert r.row.reward == 1
            evidence = ((r.row.logp_old - r.row.logp_teacher) * advantage.sign()).exp().clamp(max=2.0)
            advantage = advantage * (0.5 + 0.5 * evidence)
        parts.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return mean(parts)


def srpo(rows: Rows) -> Tensor:
    """arXiv 2604.02288: SDPO's loss, weighted by exp(-H(q)) with mean 1, on wrong rows beside a right one; PPO's clip
    on all others; over the tokens of both."""
    taught = [r for r in rows if r.row.taught_by >= 0]
    assert all(r.row.reward == 0 for r in taught)
    weights = [(r.row.teacher_all.exp() * r.row.teacher_all).sum(-1).exp() for r in taught]
    scale = _num_tokens(weights) / total(weights)
    distilled = [w * scale * correction(r).clamp(max=2.0) * jsd(few(r)) for w, r in zip(weights, taught, strict=True)]
    reinforced = [clipped(r) for r in rows if r.row.taught_by < 0]
    return (total(distilled) + total(reinforced)) / _num_tokens(distilled + reinforced)


def mopd(rows: Rows) -> Tensor:
    """arXiv 2601.02780: the advantage of a token is sg(log q - log mu) + A, as a bare policy gradient."""
    bare = [_surrogate(r) for r in rows]
    distilled = [
        -(r.row.logp_teacher - logp_sampler(r)) * (r.logp - logp_sampler(r)).exp() for r in rows if r.row.taught_by >= 0
    ]
    return (total(bare) + total(distilled)) / _num_tokens(bare)


def vold(rows: Rows) -> Tensor:
    """arXiv 2510.23497: GRPO + beta (1 - r) KL to the teacher, by k2."""
    kl = [(1 - r.row.reward) * (r.logp - r.row.logp_teacher).square() / 2 for r in rows]
    return mean(_own(rows, clipped)) + 0.005 * total(kl) / _num_tokens(kl)


def tgopd(rows: Rows) -> Tensor:
    """arXiv 2609.02998: sg(log q - log mu) as the advantage where there is a teacher, PPO's clip on all others."""
    return mean([_distilled(r) if r.row.taught_by >= 0 else clipped(r) for r in rows])


def hdpo(rows: Rows) -> Tensor:
    """arXiv 2603.23871: GRPO on rollouts + 0.1 x JSD to the teacher on right rows that were sampled with the answer,
    where all rollouts are wrong."""
    taught = [r for r in rows if r.row.taught_by >= 0]
    for r in taught:
        assert r.row.reward == 1 and r.given.all() and group_accuracy(rows, r.row.group) == 0
    return mean(_own(rows, clipped)) + 0.1 * mean([jsd(few(r)) for r in taught])


# ---- with demonstrations, guided or replayed rows ----


def mixed(off_policy: Callable[[Evaluated], Tensor], entropy: float = 0.0003) -> Loss:
    """arXiv 2504.14945 eq. 5 with a loss for off-policy tokens: one joint denominator, no clip; entropy bonus.

    ExGRPO (2510.02245) has replayed rows in the place of demonstrations, with recorded log-probabilities; Critique-GRPO
    (2506.03106) refinements.
    """

    def loss(rows: Rows) -> Tensor:
        parts = _own(rows, _surrogate) + _given(rows, off_policy)
        return total(parts) / _num_tokens(parts) + _entropy_bonus(rows, entropy)

    return loss


def _unshaped(r: Evaluated) -> Tensor:
    return -r.row.advantage * r.logp.exp()


def _multiple_importance(r: Evaluated) -> Tensor:
    """arXiv 2508.00222: 2 pi / (pi_old + pi_omega), pi_omega = (pi_old + 1) / 2; advantage A (1 - sg p)^0.5."""
    p, p_old = r.logp.exp(), r.row.logp_old.exp()
    omega = (p_old + 1) / 2
    return -r.row.advantage * (1 - p.detach()).sqrt() * 2 * p / (p_old + omega)


def ampo(rows: Rows) -> Tensor:
    """arXiv 2510.02227: LUFFY's joint denominator with PPO's clip, dual clip 10, on rollouts; entropy bonus 0.0005."""
    parts = _own(rows, lambda r: dual_clip(r, bound=10.0)) + _given(rows, _luffy_shape)
    return total(parts) / _num_tokens(parts) - 0.0005 * mean([r.entropy for r in rows])


def rl_sft_loss(rows: Rows) -> Tensor:
    """Unclipped surrogate on rollouts + 1.0 x token-mean cross entropy on demonstrations + entropy of all rows."""
    return mean(_own(rows, _surrogate)) + mean(_given(rows, _nll)) + _entropy_bonus(rows)


def chord(mu: float, weight: Callable[[Tensor], Tensor]) -> Loss:
    """arXiv 2508.11408: (1 - mu) GRPO + mu SFT, tokens of the latter weighted without gradient."""

    def loss(rows: Rows) -> Tensor:
        weighted = _given(rows, lambda r: -weight(r.untempered_logp.detach().exp()) * r.untempered_logp)
        return (1 - mu) * mean(_own(rows, clipped)) + mu * mean(weighted)

    return loss


def _gated(rows: Rows, policy_gradient: Callable[[Evaluated], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """RL on rollouts of prompts that are not all wrong, and cross entropy on demonstrations of the others."""
    is_solved = [group_accuracy(rows, r.row.group) > 0 for r in rows]
    solved = [r for r, solves in zip(rows, is_solved, strict=True) if solves]
    failed = [r for r, solves in zip(rows, is_solved, strict=True) if not solves]
    return _own(solved, policy_gradient), _given(failed, _nll)


def hpt(rows: Rows) -> Tensor:
    """arXiv 2509.04419, gamma = 0: RL on rollouts of prompts not all wrong, divided by all rollouts' tokens; SFT on
    demonstrations of the others, divided by those."""
    rl, supervised = _gated(rows, _surrogate)
    return total(rl) / sum(int(r.own.sum()) for r in rows) + mean(supervised) + _entropy_bonus(rows)


def superrl(rows: Rows) -> Tensor:
    """arXiv 2506.01096: the same gate on GRPO, both halves divided by all tokens of their kind, gated or not."""
    rl, supervised = _gated(rows, clipped)
    return total(rl) / sum(int(r.own.sum()) for r in rows) + total(supervised) / sum(int(r.given.sum()) for r in rows)


def rlep(rows: Rows) -> Tensor:
    """arXiv 2507.07451: DAPO's clip with dual clip 10 on all tokens, those of earlier successes included."""
    return mean([dual_clip(r, high=0.28, bound=10.0) for r in rows])


def srft(rows: Rows) -> Tensor:
    """arXiv 2506.19767: demonstrations by SFT (0.5 e^-H) and by A p, rollouts by rewards +1 (0.1 e^H) and -1.

    Log-probabilities of sequences are summed over their tokens, and averaged over all sequences.
    """
    per_row = []
    for r in rows:
        if not r.row.is_rollout:
            trust = 0.5 * (-r.untempered_entropy.detach().mean()).exp()
            loss = (-r.row.advantage * r.logp.exp()).sum() - trust * r.untempered_logp.sum()
        elif r.row.reward == 1:
            loss = -0.1 * r.entropy.detach().mean().exp() * r.logp.sum()
        else:
            loss = r.logp.sum()
        per_row.append(loss / LENGTH_LIMIT)
    return torch.stack(per_row).mean()


def trapo(rows: Rows) -> Tensor:
    """arXiv 2512.17636 as its code computes it: unclipped GRPO on the policy's tokens, SFT of prefixes in a trust
    region, one denominator; entropy bonus."""
    trusted = _given(rows, lambda r: -(r.logp.exp().detach() / 0.1).clamp(max=1.0) * r.logp)
    parts = _own(rows, _surrogate) + trusted
    return total(parts) / _num_tokens(parts) + _entropy_bonus(rows, 0.00037)


def stephint(rows: Rows) -> Tensor:
    """arXiv 2507.02841: clipped policy gradient; on given tokens no advantage is below 0. Mean over all tokens."""

    def kept(r: Evaluated) -> Tensor:
        advantage = torch.where(r.given, r.row.advantage.clamp(min=0), r.row.advantage)
        ratio = ratio_to_old(r)
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)

    return mean([kept(r) for r in rows])


def prefix_rft(on_prefix: Callable[[Evaluated], Tensor], fifths: int = 1) -> Loss:
    """arXiv 2507.01679: dual-clip PPO on what the policy wrote; `on_prefix` on the fifth of each prefix that has the
    highest entropy (or on so many fifths); sums over a constant."""

    def loss(rows: Rows) -> Tensor:
        per_row = []
        for r in rows:
            prefix, entropy = on_prefix(r)[r.given], r.entropy[r.given].tolist()
            uncertain = by_entropy(entropy)[: -(-fifths * len(entropy) // 5)]
            per_row.append((dual_clip(r)[r.own].sum() + prefix[uncertain].sum()) / LENGTH_LIMIT)
        return torch.stack(per_row).mean()

    return loss


def guide(rows: Rows) -> Tensor:
    """arXiv 2506.13923 as its code computes it, with gamma = 1: rho / (rho + gamma) on rows sampled with a hint, rho =
    pi(y | x) / pi_old(y | x, h); clip 0.2 on the others. The mean over rows of their token means."""

    def hinted(r: Evaluated) -> Tensor:
        assert not r.row.logp_sampler[r.given].isnan().any()
        rho = (r.logp - torch.where(r.given, r.row.logp_sampler, 0.0)).exp()
        return -r.row.advantage * rho / (rho + 1)

    return torch.stack([torch.where(r.given, hinted(r), clipped(r)).mean() for r in rows]).mean()


def lte(rows: Rows) -> Tensor:
    """arXiv 2510.26109: clip 0.2 on rollouts + r / (r + 0.1) on rows of the second round, r to the policy that saw the
    wrong answers; each a mean over its own tokens."""
    return mean(_own(rows, clipped)) + mean(_given(rows, _recorded_shape))


def uft(rows: Rows) -> Tensor:
    """arXiv 2505.16984: clipped policy gradient + 0.001 cross entropy of the hint + 0.001 KL (k3)."""
    divergence = mean(_own(rows, lambda r: k3(r.row.logp_start - r.logp)))
    return mean(_own(rows, clipped)) + 0.001 * mean(_given(rows, _nll)) + 0.001 * divergence


def g2rpo_a(rows: Rows) -> Tensor:
    """The authors' code of arXiv 2508.13023: the bare ratio and 0.04 KL (k3) on given and written tokens alike; the
    mean over rows of their token means."""
    losses = [_surrogate(r) + 0.04 * k3(r.row.logp_start - r.logp) for r in rows]
    return torch.stack([loss.mean() for loss in losses]).mean()


def mfc(rows: Rows) -> Tensor:
    """arXiv 2609.13997: clip 0.2 / 0.28, and 0.001 KL (k3)."""
    return mean(_own(rows, lambda r: clipped(r, high=0.28) + 0.001 * k3(r.row.logp_start - r.logp)))


def bread(rows: Rows) -> Tensor:
    """arXiv 2506.17211: GRPO with KL (k3) on what follows the start of a trace; the mean of token means over the rows
    in which something follows it."""
    losses = [(clipped(r) + 0.001 * k3(r.row.logp_start - r.logp))[r.own] for r in rows]
    return torch.stack([loss.mean() for loss in losses if len(loss)]).mean()


REFERENCES: dict[str, Reference] = {
    "sft": Reference("demonstrations_only", estimators.none, sft),
    "dft": Reference("demonstrations_only", estimators.none, dft),
    "trsft": Reference("demonstrations_only", estimators.none, trsft),
    "psft": Reference("demonstrations_only", estimators.none, psft),
    "relift_sft": Reference("demonstrations_only", estimators.none, relift_sft),
    "on_policy": Reference("rollouts", estimators.centred, on_policy),
    "dr_grpo": Reference("rollouts", estimators.centred, dr_grpo),
    "dapo": Reference("rollouts", estimators.without_truncated(estimators.standardised), dapo),
    "rloo": Reference("rollouts", estimators.leave_one_out, reinforce),
    "opo": Reference("rollouts", estimators.length_weighted, reinforce),
    "reinforce_pp": Reference("rollouts", estimators.reinforce_pp_baseline, reinforce_pp()),
    "gspo": Reference("rollouts", estimators.standardised, gspo),
    "cispo": Reference("rollouts", estimators.standardised, cispo),
    "aipo": Reference("rollouts", estimators.centred, aipo),
    "ppo": Reference("rollouts", estimators.generalised, ppo),
    "relift": Reference("rollouts", estimators.centred, relift),
    "opd": Reference("rollouts", estimators.none, opd),
    "opd_rl": Reference("rollouts", estimators.centred, opd_rl),
    "kdrl": Reference("rollouts", estimators.standardised, kdrl),
    "gkd": Reference("rollouts", estimators.none, everywhere(jsd)),
    "opd_topk": Reference("rollouts", estimators.none, everywhere(listed_kl)),
    "opsd_jsd": Reference("rollouts", estimators.none, everywhere(jsd)),
    "sdft": Reference("rollouts", estimators.none, sdft),
    "sdpo": Reference("peers", estimators.none, sdpo),
    "sdpg": Reference("rollouts", estimators.standardised, sdpg),
    "rlsd": Reference("rollouts", estimators.standardised, rlsd),
    "rlrt": Reference("right_peers", estimators.standardised, rlrt),
    "srpo": Reference("wrong_peers", estimators.standardised, srpo),
    "mopd": Reference("sourced", estimators.standardised, mopd),
    "vold": Reference("rollouts", estimators.standardised, vold),
    "opsd": Reference("rollouts", estimators.none, opd),
    "tgopd": Reference("probed", estimators.centred, tgopd),
    "hdpo": Reference("beside", estimators.standardised_rollouts, hdpo),
    "luffy": Reference("demonstrations", estimators.centred, mixed(_luffy_shape)),
    "luffy_no_shaping": Reference("demonstrations", estimators.centred, mixed(_unshaped)),
    "luffy_prefix": Reference("guided", estimators.centred, mixed(_luffy_shape)),
    "rl_plus": Reference("demonstrations", estimators.centred, mixed(_multiple_importance)),
    "exgrpo": Reference("replayed", estimators.centred, mixed(_recorded_shape)),
    "rlep": Reference("demonstrations", estimators.standardised, rlep),
    "rl_sft_loss": Reference("demonstrations", estimators.centred_rollouts, rl_sft_loss),
    "chord": Reference("demonstrations", estimators.standardised_rollouts, chord(0.1, lambda p: p * (1 - p))),
    "hpt": Reference("where_failing", estimators.centred_rollouts, hpt),
    "ampo": Reference("where_failing", estimators.centred, ampo),
    "superrl": Reference("demonstrations", estimators.standardised_rollouts, superrl),
    "srft": Reference("demonstrations", estimators.standardised, srft),
    "prefix_rft": Reference("guided", estimators.centred, prefix_rft(_surrogate)),
    "trapo": Reference("guided", estimators.centred, trapo),
    "stephint": Reference("all_guided", estimators.standardised, stephint),  # so that right rows have a prefix, too
    "guide": Reference("hinted", estimators.standardised, guide),
    "lte": Reference("refined", estimators.standardised, lte),
    "critique_grpo": Reference("refined", estimators.centred, mixed(_luffy_shape, entropy=0.0002)),
    "scaf_grpo": Reference("rollouts", estimators.standardised, scaf_grpo),
    "questa": Reference("rollouts", estimators.standardised, ppo),
    "pope": Reference("rollouts", estimators.standardised, ppo),
    "uft": Reference("all_guided", estimators.standardised, uft),
    "bread": Reference("all_guided", estimators.standardised, bread),
    "adaprefix": Reference("all_guided", estimators.standardised, ppo),
    "adaback": Reference("all_guided", estimators.standardised, ppo),
    "mfc": Reference("rollouts", estimators.standardised, mfc),
    "g2rpo_a": Reference("guided", estimators.standardised, g2rpo_a),
    "seele": Reference("all_guided", estimators.standardised, uft),
    "adhint_schedule": Reference("all_guided", estimators.standardised, stephint),
}
"""By the name of the preset; `relift_sft` is the supervised half of `relift`."""
