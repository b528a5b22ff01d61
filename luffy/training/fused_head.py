"""The output head in training: scores of given tokens from hidden states, without all logits in memory.

A causal model's logits are the largest tensor of an update: 32k tokens over a vocabulary of 152k take 20 GB in float32.
Here only a chunk of tokens has logits at a time. One pass over them gives each token its log-probability, its entropy
and the logarithm of its softmax's denominator; the backward pass computes the logits again and turns them into their
own gradient in one more pass, from those numbers. For p = softmax(z / tau) and H = -sum_j p_j log p_j,

    d log p_y / d z_j = (1[j = y] - p_j) / tau        d H / d z_j = -p_j (log p_j + H) / tau

A divergence from a teacher looks at more of the vocabulary: at some tokens, the choices C, and at all others together,
whose probability is summed from their own logits, since 1 - sum_C p loses its digits:

    d log p_rest / d z_j = (1[j not in C] p_j / p_rest - p_j) / tau

Compiled by torch, a pass over bfloat16 logits is one kernel, which writes at most as many. Otherwise it is a few
operations on tensors in float32. Nothing here is stored between the passes but numbers per token.

Shape legend: `N` tokens that are scored, `H` hidden size, `V` vocabulary, `K` temperatures, `C` choices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Entropy: TypeAlias = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether a gradient flows through them."""


class LogProbHead(nn.Module):
    """Computes log-probabilities and entropies of given tokens from hidden states, in chunks of tokens."""

    def __init__(self, output_embeddings: nn.Linear, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.linear = output_embeddings
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.is_compiled = False
        """Whether torch compiles the passes over logits when they first run."""
        self.vocabulary: int | None = None
        """Number of tokens that may be chosen, the first ones; None: all."""

    def forward(
        self,
        hidden_NH: Tensor,
        target_N: Tensor,
        entropy: Entropy,
        untempered: bool = False,
        choice_NC: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """`(N,)` log-probabilities of `target_N` and, unless "none", `(N,)` entropies (nats), float32.

        They are those at the head's temperature. With `untempered`, those at temperature 1 follow, from the same
        logits. With `choice_NC`, different tokens, follow the log-probability of each, then that of all other tokens
        together, at the head's temperature.
        """
        temperatures = (self.temperature, 1.0) if untempered else (self.temperature,)
        # Parameters are arguments, so that ZeRO 3 gathers them before both passes.
        inputs = (hidden_NH, self.linear.weight, self.linear.bias, target_N, choice_NC)
        found: tuple[Tensor, ...] = _Scores.apply(*inputs, temperatures, entropy, self.chunk_tokens, self.is_compiled)
        return found if choice_NC is None else (*found[:-1], *found[-1].unbind(-1))

    @torch.no_grad()
    def most_probable(
        self, hidden_NH: Tensor, target_N: Tensor, top_k: int, entropy: bool, candidate_NC: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Log-probabilities of `target_N`, entropies (nats; 0 unless asked for), log-probabilities of the choices and
        of all other tokens; then the choices. Each is `(N,)` float32, exact up to the token 2^24.

        The choices are the `top_k` most probable tokens, and the first of the candidates that are not among them: as
        many as there are candidates in all. Where there are fewer tokens than `top_k`, all are chosen.
        """
        parts = []
        for start in range(0, max(len(target_N), 1), self.chunk_tokens):
            part = slice(start, start + self.chunk_tokens)
            logits, target = self.linear(hidden_NH[part]), target_N[part]
            may_be_chosen = logits[:, : self.vocabulary]
            choice = may_be_chosen.topk(min(top_k, may_be_chosen.shape[-1]), dim=-1).indices
            if candidate_NC is not None:
                choice = _joined(choice, candidate_NC[part])
            scores = choice_scores(logits, choice, (self.temperature,))
            own = token_scores(logits, target, (self.temperature,), entropy)[0, :2]  # the entropy is 0 unless asked for
            parts.append(torch.cat([own.T, scores, choice.float()], dim=-1))
            del logits, may_be_chosen  # before the next chunk has some
        return torch.cat(parts).unbind(-1)


def _joined(choice_NC: Tensor, candidate_NC: Tensor) -> Tensor:
    """The choices, and the first candidates that are not among them, up to the number of candidates."""
    is_new_NC = ~(candidate_NC.unsqueeze(-1) == choice_NC.unsqueeze(1)).any(-1)
    order_NC = (~is_new_NC).long().argsort(dim=-1, stable=True)[:, : candidate_NC.shape[-1] - choice_NC.shape[-1]]
    return torch.cat([choice_NC, candidate_NC.gather(-1, order_NC)], dim=-1)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        choice_NC: Tensor | None,
        temperatures: Sequence[float],
        entropy: Entropy,
        chunk_tokens: int,
        is_compiled: bool,
    ) -> tuple[Tensor, ...]:
        scores, choices = [], []
        for start in range(0, max(len(target_N), 1), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits, target = F.linear(hidden_NH[part], weight_VH, bias_V), target_N[part]
            if choice_NC is not None:
                choices.append(_run(choice_scores, is_compiled, target)(logits, choice_NC[part], temperatures))
            scores.append(_run(token_scores, is_compiled, target)(logits, target, temperatures, entropy != "none"))
            del logits  # before the next chunk has some
        score_K3N = torch.cat(scores, dim=-1)
        choice_logp = None if choice_NC is None else torch.cat(choices)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, score_K3N, choice_NC, choice_logp)
        ctx.how = (temperatures, entropy, chunk_tokens, is_compiled)
        found = score_K3N[:, 0].unbind() if entropy == "none" else score_K3N[:, :2].flatten(0, 1).unbind()
        if entropy == "value":
            ctx.mark_non_differentiable(*found[1::2])
        return found if choice_logp is None else (*found, choice_logp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, score_K3N, choice_NC, choice_logp = ctx.saved_tensors
        temperatures, entropy, chunk_tokens, is_compiled = ctx.how
        own_grads_N, by_choice = (grads_N, None) if choice_NC is None else (grads_N[:-1], grads_N[-1])
        grad_KSN = torch.stack(own_grads_N).unflatten(0, (len(temperatures), -1))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        d_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        for start in range(0, len(target_N), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_NV, by_choices_NV = F.linear(hidden_NH[part], weight_VH, bias_V), None
            if by_choice is not None:
                by_choices_NV = _run(choice_gradient, is_compiled, target_N[part])(
                    logits_NV, choice_NC[part], temperatures, score_K3N[0, 2, part], choice_logp[part], by_choice[part]
                )
            d_logits_NV = _run(logit_gradient, is_compiled, target_N[part])(
                logits_NV,
                target_N[part],
                temperatures,
                # Contiguous, as for a single chunk: torch would compile other strides again.
                score_K3N[..., part].contiguous(),
                grad_KSN[..., part].contiguous(),
                entropy == "gradient",
            )
            del logits_NV
            if by_choices_NV is not None:
                d_logits_NV += by_choices_NV
            if d_hidden_NH is not None:
                torch.mm(d_logits_NV, weight_VH, out=d_hidden_NH[part])
            if d_weight_VH is not None:
                torch.addmm(d_weight_VH, d_logits_NV.T, hidden_NH[part], out=d_weight_VH)
            if d_bias_V is not None:
                d_bias_V += d_logits_NV.sum(dim=0)
            del d_logits_NV, by_choices_NV  # before the next chunk has logits
        return d_hidden_NH, d_weight_VH, d_bias_V, None, None, None, None, None, None


LEAST_LOGP = -80.0
"""Log-probability of all other tokens where there are none, or none that float32 can tell from 0."""


def choice_scores(logits_NV: Tensor, choice_NC: Tensor, temperatures: Sequence[float]) -> Tensor:
    """`(N, C + 1)` float32: log p of the choices and of all other tokens, at the first temperature."""
    scaled_NV = logits_NV.float() / temperatures[0]
    chosen_NC = scaled_NV.gather(-1, choice_NC)
    log_rest_N1 = scaled_NV.scatter_(-1, choice_NC, -torch.inf).logsumexp(dim=-1, keepdim=True)
    denominator_N1 = torch.logaddexp(chosen_NC.logsumexp(dim=-1, keepdim=True), log_rest_N1)
    return torch.cat([chosen_NC - denominator_N1, (log_rest_N1 - denominator_N1).clamp(min=LEAST_LOGP)], dim=-1)


def choice_gradient(
    logits_NV: Tensor,
    choice_NC: Tensor,
    temperatures: Sequence[float],
    denominator_N: Tensor,
    choice_logp: Tensor,
    by_choice: Tensor,
) -> Tensor:
    """`(N, V)` gradient of the logits, in their type, from that of what `choice_scores` returned as `choice_logp`."""
    log_rest_N1, by_logp_NC = choice_logp[:, -1:], by_choice[:, :-1]
    by_rest_N1 = torch.where(log_rest_N1 > LEAST_LOGP, by_choice[:, -1:], 0.0)
    total_N1 = by_logp_NC.sum(dim=-1, keepdim=True) + by_rest_N1
    prob_NV = (logits_NV.float() / temperatures[0]).sub_(denominator_N.unsqueeze(-1)).exp_()
    own_NC = by_logp_NC - prob_NV.gather(-1, choice_NC) * total_N1
    found_NV = prob_NV.mul_(by_rest_N1 * (-log_rest_N1).exp() - total_N1).scatter_(-1, choice_NC, own_NC)
    return found_NV.div_(temperatures[0]).to(logits_NV.dtype)


def token_scores(logits_NV: Tensor, target_N: Tensor, temperatures: Sequence[float], entropy: bool) -> Tensor:
    """`(K, 3, N)` float32: log p(target), entropy (0 unless asked for) and log of the softmax's denominator.

    May overwrite the logits.
    """
    shifted_NV = logits_NV.float()
    top_N = shifted_NV.amax(dim=-1)
    shifted_NV = shifted_NV.sub_(top_N.unsqueeze(-1))
    rows = []
    for k, temperature in enumerate(temperatures):
        is_last = k == len(temperatures) - 1
        scaled_NV = shifted_NV.div_(temperature) if is_last else shifted_NV / temperature
        target_logit_N = scaled_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1)
        exp_NV = scaled_NV.exp()
        total_N = exp_NV.sum(dim=-1)
        log_total_N = total_N.log()
        mean_N = exp_NV.mul_(scaled_NV).sum(dim=-1) / total_N if entropy else log_total_N
        rows += [target_logit_N - log_total_N, log_total_N - mean_N, top_N / temperature + log_total_N]
    return torch.stack(rows).unflatten(0, (len(temperatures), 3))


def logit_gradient(
    logits_NV: Tensor,
    target_N: Tensor,
    temperatures: Sequence[float],
    score_K3N: Tensor,
    grad_KSN: Tensor,
    entropy: bool,
) -> Tensor:
    """`(N, V)` gradient of the logits, in their type, from that of the log-probabilities and, if asked, entropies.

    `score_K3N` is what `token_scores` returned, `grad_KSN` the gradient of its first S numbers. May overwrite the
    logits.
    """
    logits_N, total_NV, at_target_N = logits_NV.float(), None, torch.zeros_like(score_K3N[0, 0])
    for k, temperature in enumerate(temperatures):
        (logp_N, entropy_N, denominator_N), by_logp_N = score_K3N[k], grad_KSN[k, 0]
        is_last = k == len(temperatures) - 1
        logp_NV = logits_N.div_(temperature) if is_last else logits_N / temperature
        logp_NV = logp_NV.sub_(denominator_N.unsqueeze(-1))
        grad_NV, prob_N = logp_NV.exp(), logp_N.exp()
        # The target's own entry is computed apart: 1 - p keeps its digits where p is almost 1.
        own_N = -by_logp_N * logp_N.expm1()
        if entropy:
            by_entropy_N = grad_KSN[k, 1]
            factor_NV = logp_NV.add_(entropy_N.unsqueeze(-1)).mul_(by_entropy_N.unsqueeze(-1))
            grad_NV = grad_NV.mul_(factor_NV.add_(by_logp_N.unsqueeze(-1)))
            del factor_NV  # before the second temperature has its own
            own_N = own_N - by_entropy_N * prob_N * (logp_N + entropy_N)
        else:
            grad_NV = grad_NV.mul_(by_logp_N.unsqueeze(-1))
        grad_NV = grad_NV.div_(-temperature)
        total_NV = grad_NV if total_NV is None else total_NV.add_(grad_NV)
        at_target_N = at_target_N + own_N / temperature
    assert total_NV is not None
    found_NV = total_NV.to(logits_NV.dtype)
    return found_NV.scatter_(-1, target_N.unsqueeze(-1), at_target_N.to(found_NV.dtype).unsqueeze(-1))


def _run(function: Callable[..., Tensor], is_compiled: bool, target_N: Tensor) -> Callable[..., Tensor]:
    # torch would compile again for no token and for one, and gives up after eight variants.
    return _compiled(function) if is_compiled and len(target_N) > 1 else function


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)
