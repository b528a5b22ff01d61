"""An objective in words and symbols: what `luffy config --explain` prints. Text only; training does not use it."""

from collections.abc import Sequence
from textwrap import wrap

from luffy.config.group import (
    BinomialLength,
    DynamicSampling,
    EvenlySpacedLength,
    GroupAdvantage,
    NoAdvantage,
    PrefixConfig,
    SuccessLadder,
    UniformLength,
)
from luffy.config.objective import ObjectiveConfig
from luffy.config.terms import TermConfig

_WIDTH = 110
_LABEL = 12
_SELECTED = {"on_policy": "on-policy tokens", "off_policy": "off-policy tokens", "response": "all response tokens"}
_LEARNED = {"bare": "without it", "hinted": "with it"}
_KEPT = {
    "all": "all replace wrong rollouts",
    "first_correct": "the first correct one replaces a wrong rollout",
    "all_correct": "all correct ones replace wrong rollouts",
    "best": "the first correct one, else the first, replaces a rollout",
}
_SYMBOLS = (
    "A advantage; p = pi_theta(token), with gradient, at the temperature of the rollouts where nothing else is said; "
    "pi_old: the policy before this RL step's updates; r = p / pi_old; mu: the policy that sampled the token; "
    "rho = p / pi_phi, pi_phi the log-probability recorded with a trace, a replayed row or a row with a hint (1 "
    "where there is none, or where it says so); H entropy; sg(x): x without gradient"
)


def explain_objective(objective: ObjectiveConfig, max_response_tokens: int) -> str:
    """The group, the advantage, every term with its coefficient and normaliser, and the symbols."""
    lines = [
        *_entry("Group", _group(objective)),
        *_entry("Advantage", _advantage(objective)),
        *explain_terms(objective.terms, max_response_tokens),
    ]
    if objective.interleaved_sft is not None:
        config = objective.interleaved_sft
        words = (
            f"prompts that every rollout failed are gathered; {config.buffer_size} of them make one SFT step on their "
            f"traces, at the learning rate of RL, which minimises"
        )
        lines += ["", *_entry("Interleaved", words), *explain_terms(config.terms, max_response_tokens)]
    return "\n".join([*lines, "", *_entry("Symbols", _SYMBOLS)])


def explain_terms(terms: Sequence[TermConfig], max_response_tokens: int) -> list[str]:
    """One paragraph a term."""
    lines = ["", *_entry("Loss", "L = " + " + ".join(term.name for term in terms))]
    for term in terms:
        texts = [f"{term.coefficient.formula()} x the sum over {_SELECTED[term.select]} of", term.loss.formula()]
        if term.correction is not None:
            texts.append(f"times {term.correction.formula()}")
        if term.evidence is not None:
            texts.append(f"times {term.evidence.formula()}")
        if term.weigh is not None:
            texts.append(f"times {term.weigh.formula()}")
        if term.gate is not None:
            texts.append(f"where {term.gate.formula()}")
        if term.top_entropy_share is not None:
            texts.append(f"at the {term.top_entropy_share:.0%} of each row's selected tokens with the highest entropy")
        texts.append(f"divided by {_denominator(term, terms, max_response_tokens)}")
        lines.append("")
        for number, text in enumerate(texts):
            lines += _entry("" if number else term.name, text)
    return lines


def _denominator(term: TermConfig, terms: Sequence[TermConfig], max_response_tokens: int) -> str:
    mode, population = term.normaliser.mode, term.normaliser.population
    members = [other.name for other in terms if other.is_policy_gradient] if population == "joint" else [term.name]
    owners = "all responses" if population == "all" else " and ".join(members)
    counted = {
        "token": f"the number of tokens of {owners}",
        "sequence": f"the number of rows of {owners} (a row's tokens are averaged first)",
        "constant": f"the number of rows of {owners} x {max_response_tokens}",
    }[mode]
    if population == "all":
        return f"{counted} in the optimizer step"
    gated = any(other.gate is not None for other in terms if other.name in members)
    when = "" if not gated else ", before the gate" if term.normaliser.before_gate else ", after the gate"
    return f"{counted} in the optimizer step{when}"


def _group(objective: ObjectiveConfig) -> str:
    group = objective.group
    rollouts = group.size - group.off_policy
    parts = [f"{group.size} rows a prompt: {rollouts} rollouts"]
    if group.off_policy_when_accuracy_at_most is not None:
        parts = [
            f"{group.size} rollouts a prompt; where the share of correct ones is at most "
            f"{group.off_policy_when_accuracy_at_most:g}, {group.off_policy} of the wrong ones give way to traces"
        ]
        if group.choose == "likeliest_answer":
            parts[0] += (
                " (correct ones, after whose reasoning the policy gives the reference answer's tokens the highest mean "
                "probability)"
            )
    elif group.prefix is not None:
        parts.append(f"{group.off_policy} that begin with a prefix of a trace, {_prefix(group.prefix)}")
    elif group.off_policy:
        parts.append(
            f"{group.off_policy} demonstration{'s' * (group.off_policy > 1)} (a whole trace is a row of its own)"
        )
    if group.guidance is not None:
        parts.append(f"traces only for prompts whose running pass rate is at most {group.guidance.pass_rate_at_most:g}")
    if (hint := group.hint) is not None and hint.groups is not None:
        shares = " or ".join(f"{share:.0%}" for share in hint.levels)
        parts.append(
            f"in {hint.groups.share:.0%} of the groups sampled and learned with a hint ({shares} of a trace's steps; "
            f"the level: {hint.groups.level.formula()})"
        )
    elif hint is not None:
        shares = " or ".join(f"{share:.0%}" for share in hint.levels)
        after = f", after {hint.after:.0%} of the steps" if hint.after else ""
        parts.append(
            f"where the share of correct ones is at most {hint.accuracy_at_most:g}{after}: {hint.num_rows} more "
            f"sampled with a hint ({shares} of a trace's steps) and learned {_LEARNED[hint.learn]}, of which "
            f"{_KEPT[hint.keep]}"
        )
    if (retry := group.retry) is not None:
        shown = {"each": "a response of the first round", "all": "the wrong answers of the first round"}[retry.about]
        parts.append(
            f"where the share of correct ones is at most {retry.accuracy_at_most:g}: {retry.num_rows} more sampled "
            f"with {shown} and the grader's feedback in the prompt, and learned {_LEARNED[retry.learn]}, of which "
            f"{_KEPT[retry.keep]}"
        )
    if (anchor := group.anchor) is not None:
        parts.append(
            f"where the share of correct ones is at most {anchor.accuracy_at_most:g}: as many others that continue the "
            f"start of a trace, with as many of its {anchor.pieces} pieces as make a share between "
            f"{anchor.success_at_least:g} and {anchor.success_at_most:g} of them correct (binary search)"
        )
    if objective.replay is not None:
        parts.append(
            f"{objective.replay.share:.0%} of the prompts are replayed (one earlier success in place of a rollout) "
            f"once a step's accuracy was above {objective.replay.start_accuracy:g}"
        )
    if group.filter is not None:
        parts.append("groups whose rewards are all equal are dropped")
    if isinstance(group.filter, DynamicSampling):
        parts.append(f"and replaced by others, in at most {group.filter.max_rounds} rounds")
    return ", ".join(parts)


def _prefix(config: PrefixConfig) -> str:
    length = config.length
    shared = ", the same for all of a group" if config.shared else ""
    if isinstance(length, UniformLength):
        return f"a share ~ U({length.low.formula()}, {length.high.formula()}){shared}"
    if isinstance(length, BinomialLength):
        return f"Binomial({length.chunks}, {length.probability.formula()}) of {length.chunks} pieces{shared}"
    if isinstance(length, SuccessLadder):
        rungs = (f"{rung.rows} with {rung.share:.0%} where below {rung.below:g}" for rung in length.rungs)
        return f"by the share of correct rows so far: {', then '.join(rungs)}, else none of it"
    assert isinstance(length, EvenlySpacedLength)
    return f"shares evenly spaced from {length.low:g} to {length.high:g}"


def _advantage(objective: ObjectiveConfig) -> str:
    config = objective.advantage
    if isinstance(config, NoAdvantage):
        return "none: no term uses the rewards"
    words = [f"A = {config.formula()}"]
    if isinstance(config, GroupAdvantage) and config.kind != "raw" and objective.has_off_policy_rows:
        displaced = " that stay" if objective.group.off_policy_when_accuracy_at_most is not None else ""
        outside = f"only the rollouts{displaced}; other rows have A = 0"
        words.append(f"over {'all rows of the group' if config.population == 'joint' else outside}")
    if config.zero_truncated:
        words.append("0 on rollouts that ran into the length limit")
    return ", ".join(words)


def _entry(label: str, text: str) -> list[str]:
    lines = wrap(text.replace(" ,", ","), _WIDTH - _LABEL - 2, break_long_words=False)
    heads = [label.ljust(_LABEL), *[" " * _LABEL] * (len(lines) - 1)]
    return [f"{head}  {line}" for head, line in zip(heads, lines, strict=True)]
