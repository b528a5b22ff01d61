"""The papers' formulas one at a time, in numpy float64, with their gradients written out by hand.

Shares no code with `luffy.objectives`. A loss takes the tokens of one sequence and returns `(loss_T, gradient_T)`:
`gradient_T[t]` is the derivative of the sum of `loss_T` by `logp_T[t]`; what a paper puts under stop-gradient (sg) does
not contribute. An estimator takes the rewards of one group, or of a list of groups.

Shape legend: `T` tokens of one sequence, `n` rows of one group.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Loss = tuple[Array, Array]

# ---- policy-gradient losses ----


def surrogate(logp_T: Array, logp_old_T: Array, advantage_T: Array) -> Loss:
    """-A r, r = pi / pi_old: importance-sampled policy gradient (LUFFY 2504.14945, appendix E.1, "NoClip")."""
    ratio_T = np.exp(logp_T - logp_old_T)
    return -advantage_T * ratio_T, -advantage_T * ratio_T  # dr / dlogp = r


def clipped(logp_T: Array, logp_old_T: Array, advantage_T: Array, low: float, high: float) -> Loss:
    """-min(A r, A clip(r, 1 - low, 1 + high)): PPO 1707.06347 eq. 7; high > low: DAPO 2503.14476 eq. 8.

    The gradient is that of -A r, but 0 where r has left the trust region in the direction of A.
    """
    ratio_T = np.exp(logp_T - logp_old_T)
    bounded_T = np.minimum(np.maximum(ratio_T, 1 - low), 1 + high)
    gone_T = np.where(advantage_T > 0, ratio_T > 1 + high, ratio_T < 1 - low)
    loss_T = -np.minimum(advantage_T * ratio_T, advantage_T * bounded_T)
    return loss_T, np.where(gone_T, 0.0, -advantage_T * ratio_T)


def dual_clipped(logp_T: Array, logp_old_T: Array, advantage_T: Array, low: float, high: float, bound: float) -> Loss:
    """Where A < 0 the objective is max(min(A r, A clip(r)), c A): dual-clip PPO, 1912.09729 eq. 5."""
    loss_T, gradient_T = clipped(logp_T, logp_old_T, advantage_T, low, high)
    beyond_T = (advantage_T < 0) & (np.exp(logp_T - logp_old_T) > bound)
    return np.where(beyond_T, -bound * advantage_T, loss_T), np.where(beyond_T, 0.0, gradient_T)


def sequence_clipped(logp_T: Array, logp_old_T: Array, advantage: float, low: float, high: float) -> Loss:
    """GSPO 2507.18071 eq. 5-7: s = (pi(y) / pi_old(y))^(1/T), every token carries -min(A s, A clip(s)).

    The sum over tokens is T times the sequence's loss; ds / dlogp_t = s / T, so each token's gradient is -A s.
    """
    ratio = float(np.prod(np.exp(logp_T - logp_old_T)) ** (1 / len(logp_T)))
    bounded = min(max(ratio, 1 - low), 1 + high)
    gone = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    loss = -min(advantage * ratio, advantage * bounded)
    return np.full_like(logp_T, loss), np.full_like(logp_T, 0.0 if gone else -advantage * ratio)


def cispo(logp_T: Array, logp_old_T: Array, advantage_T: Array, low: float | None, high: float) -> Loss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: MiniMax-M1 2506.13585 eq. 4-5; low None: no lower bound."""
    weight_T = np.minimum(np.exp(logp_T - logp_old_T), 1 + high)
    if low is not None:
        weight_T = np.maximum(weight_T, 1 - low)
    return -weight_T * advantage_T * logp_T, -weight_T * advantage_T


def aipo(logp_T: Array, logp_mu_T: Array, advantage_T: Array, max_ratio: float) -> Loss:
    """-sg(min(pi / mu, rho)) A log pi: LlamaRL 2505.24034, one-sided truncation."""
    weight_T = np.minimum(np.exp(logp_T - logp_mu_T), max_ratio)
    return -weight_T * advantage_T * logp_T, -weight_T * advantage_T


def tv_masked(logp_T: Array, logp_mu_T: Array, advantage_T: Array, up: float, down: float) -> Loss:
    """-A pi / mu without tokens where pi - mu > up (A > 0) or mu - pi > down (A <= 0): DPPO 2602.04879, binary TV."""
    moved_T = np.exp(logp_T) - np.exp(logp_mu_T)
    dropped_T = ((advantage_T > 0) & (moved_T > up)) | ((advantage_T <= 0) & (moved_T < -down))
    loss_T = np.where(dropped_T, 0.0, -advantage_T * np.exp(logp_T - logp_mu_T))
    return loss_T, loss_T


Shaping = tuple[Callable[[Array], Array], Callable[[Array], Array]]
"""f and its derivative f'."""


def rational_shaping(gamma: float) -> Shaping:
    """f(x) = x / (x + gamma), f'(x) = gamma / (x + gamma)^2: LUFFY eq. 6-7."""
    return lambda x: x / (x + gamma), lambda x: gamma / (x + gamma) ** 2


def identity_shaping() -> Shaping:
    """f(x) = x: `no_reshape` of LUFFY's code."""
    return lambda x: x, np.ones_like


def log_shaping() -> Shaping:
    """f(x) = log x: `logp` of LUFFY's code with weight 1."""
    return np.log, lambda x: 1 / x


def power_shaping(exponent: float) -> Shaping:
    """f(x) = x^e: `pow` and `square_root` of LUFFY's code."""
    return lambda x: x**exponent, lambda x: exponent * x ** (exponent - 1)


def linear_log_shaping(weight: float) -> Shaping:
    """f(x) = x + w log x: `p_logp` of LUFFY's code."""
    return lambda x: x + weight * np.log(x), lambda x: 1 + weight / x


def shaped(
    logp_T: Array,
    logp_author_T: Array,
    advantage_T: Array,
    shaping: Shaping,
    low: float = -math.inf,
    high: float = math.inf,
) -> Loss:
    """-A clip(f(rho), low, high), rho = pi / pi_phi, pi_phi = 1 where NaN: LUFFY eq. 6, gradient eq. 7: -A f'(rho) rho.

    The clip is `off_policy_min_clip` and `off_policy_max_clip` of the authors' code.
    """
    function, derivative = shaping
    rho_T = np.exp(logp_T) / np.where(np.isnan(logp_author_T), 1.0, np.exp(logp_author_T))
    value_T = function(rho_T)
    inside_T = (value_T > low) & (value_T < high)
    loss_T = -advantage_T * np.minimum(np.maximum(value_T, low), high)
    return loss_T, np.where(inside_T, -advantage_T * derivative(rho_T) * rho_T, 0.0)


def multiple_importance(logp_T: Array, logp_old_T: Array, advantage_T: Array, exponent: float) -> Loss:
    """RL-PLUS 2508.00222: r^m = 2 pi / (pi_omega + pi_old), pi_omega = (pi_old + 1) / 2, A^c = A (1 - sg pi)^e."""
    p_T, old_T = np.exp(logp_T), np.exp(logp_old_T)
    omega_T = 0.5 * old_T + 0.5
    loss_T = -advantage_T * (1 - p_T) ** exponent * 2 * p_T / (omega_T + old_T)
    return loss_T, loss_T  # d(c p) / dlogp = c p


# ---- auxiliary losses ----


def nll(logp_T: Array, entropy_T: Array, token_weight: str) -> Loss:
    """-sg(w) log pi; w = pi: DFT 2508.05629; pi (1 - pi): CHORD-phi 2508.11408; min(1, pi / 0.1): TRAPO 2512.17636;
    e^(+-H): SRFT 2506.19767.

    H is the mean entropy of the sequence, as in the re-implementation of SRFT by the authors of HPT.
    """
    p_T, mean_entropy = np.exp(logp_T), float(np.mean(entropy_T))
    weight_T = {
        "one": np.ones_like(p_T),
        "probability": p_T,
        "p_one_minus_p": p_T * (1 - p_T),
        "trust_region": p_T / np.maximum(p_T, 0.1),
        "exp_entropy": np.full_like(p_T, math.exp(mean_entropy)),
        "exp_minus_entropy": np.full_like(p_T, math.exp(-mean_entropy)),
    }[token_weight]
    return -weight_T * logp_T, -weight_T


def kl(logp_T: Array, logp_q_T: Array, estimator: str) -> Loss:
    """Schulman, "Approximating KL divergence" (2020), samples from pi, x = q / pi: k1 -log x, k2 (log x)^2 / 2,
    k3 x - 1 - log x (GRPO 2402.03300 eq. 4)."""
    x_T = np.exp(logp_q_T - logp_T)
    if estimator == "k1":
        return -np.log(x_T), np.ones_like(x_T)
    if estimator == "k2":
        return np.log(x_T) ** 2 / 2, -np.log(x_T)
    return x_T - 1 - np.log(x_T), 1 - x_T


def distillation(logp_T: Array, logp_mu_T: Array, logp_teacher_T: Array) -> Loss:
    """Thinking Machines Lab, "On-Policy Distillation" (2025): importance sampling, the advantage of a token being
    minus its reverse KL, log q - log mu, which is held within 20 nats."""
    advantage_T = -np.clip(logp_mu_T - logp_teacher_T, -20.0, 20.0)
    ratio_T = np.exp(logp_T - logp_mu_T)
    return -advantage_T * ratio_T, -advantage_T * ratio_T


# ---- factors on token losses ----


def importance_weight(logp_old_T: Array, logp_mu_T: Array, level: str, kind: str, low: float, high: float) -> Array:
    """Truncated importance sampling min(w, C), or IcePop's w in [low, high] else 0; w = pi_old / mu of the token or of
    the sequence; mu NaN counts as pi_old."""
    ratios = [1.0 if math.isnan(mu) else math.exp(old - mu) for old, mu in zip(logp_old_T, logp_mu_T, strict=True)]
    if level == "sequence":
        ratios = [math.prod(ratios)] * len(ratios)
    if kind == "truncate":
        return np.array([min(w, high) for w in ratios])
    return np.array([w if low <= w <= high else 0.0 for w in ratios])


def highest_entropy(entropy_T: Array, count: int) -> Array:
    """1 on the `count` tokens of the highest entropy: Prefix-RFT 2507.01679, "top-k% entropy"."""
    ranked = sorted(range(len(entropy_T)), key=lambda t: -entropy_T[t])
    return np.array([float(t in ranked[:count]) for t in range(len(entropy_T))])


# ---- advantages of rows ----


def group_mean(rewards: Sequence[float], scale_by_std: bool) -> list[float]:
    """R - mean, over std + 1e-6 with the n - 1 deviation: GRPO 2402.03300; without std: LUFFY section 4, Dr.GRPO."""
    mean = sum(rewards) / len(rewards)
    if not scale_by_std:
        return [r - mean for r in rewards]
    squares = sum((r - mean) ** 2 for r in rewards)
    std = math.sqrt(squares / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
    return [(r - mean) / (std + 1e-6) for r in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """R_i - mean of the other rows: RLOO 2402.14740; a row without others has 0."""
    found = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        found.append(reward - sum(others) / len(others) if others else 0.0)
    return found


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - sum(l R) / sum(l): OPO 2505.23585."""
    baseline = sum(length * r for length, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def pass_at_k(right: Sequence[bool], k: int) -> list[float]:
    """2508.10751, section 2: every subset of k rows is one sample, worth 1 when any of its rows is right; subsets are
    standardised among themselves, and a row has the mean of the subsets it is in. By enumeration."""
    subsets = list(itertools.combinations(range(len(right)), k))
    worth = [float(any(right[i] for i in subset)) for subset in subsets]
    mean, std = float(np.mean(worth)), float(np.std(worth))
    if std == 0:
        return [0.0] * len(right)
    return [
        float(np.mean([(w - mean) / std for w, subset in zip(worth, subsets, strict=True) if i in subset]))
        for i in range(len(right))
    ]


def global_batch(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], group_baseline: bool
) -> list[list[float]]:
    """REINFORCE++ 2501.03262: every token carries its row's R (less the group's mean), normalised over all tokens of
    the batch, with the n - 1 deviation. The tokens are written out one by one."""
    values = [[r - (sum(g) / len(g) if group_baseline else 0.0) for r in g] for g in groups]
    tokens = [v for g, ls in zip(values, lengths, strict=True) for v, n in zip(g, ls, strict=True) for _ in range(n)]
    mean, std = float(np.mean(tokens)), float(np.std(tokens, ddof=1))
    return [[(v - mean) / std for v in g] for g in values]


# ---- advantages of tokens ----


def gae(reward: float, values_T: Sequence[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """1506.02438 eq. 16 as its sum: A_t = sum_l (gamma lam)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t.

    The reward falls on the last token, V = 0 behind it. Returns advantages and returns A + V.
    """
    n = len(values_T)
    following = [*values_T[1:], 0.0]
    delta = [(reward if t == n - 1 else 0.0) + gamma * following[t] - values_T[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** i * delta[t + i] for i in range(n - t)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values_T, strict=True)]


def whitened(advantages: Sequence[float]) -> list[float]:
    """(A - mean) / std with the n - 1 deviation, over all tokens."""
    mean, std = float(np.mean(advantages)), float(np.std(advantages, ddof=1))
    return [(a - mean) / std for a in advantages]
