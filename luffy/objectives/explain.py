"""An objective in words and symbols: what `luffy config --explain` prints. Text only; training does not use it."""

from collections.abc import Sequence
from textwrap import wrap

from luffy.config.group import DynamicSampling, GroupAdvantage, NoAdvantage
from luffy.config.objective import ObjectiveConfig
from luffy.config.starts import Critique, FitDose, StartConfig, TracePrefix, WholeTrace
from luffy.config.terms import TermConfig

_WIDTH = 110
_LABEL = 12
_SELECTED = {"on_policy": "on-policy tokens", "off_policy": "off-policy tokens", "response": "all response tokens"}
_KEPT = {
    "all": "all replace wrong rollouts",
    "first_correct": "the first correct one replaces a wrong rollout",
    "all_correct": "all correct ones replace wrong rollouts",
    "best": "the first correct one, else the first, replaces a rollout",
    "nearest": "those of the best try replace the group, where one of them is correct",
    "beside": "correct ones are learned beside the group, without an advantage",
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
        *(line for name, start in objective.group.starts.items() for line in _paragraph(name, _start(start))),
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
        lines += ["", *_paragraph(term.name, texts)]
    return lines


def _paragraph(name: str, texts: Sequence[str]) -> list[str]:
    return [line for number, text in enumerate(texts) for line in _entry("" if number else name, text)]


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
    parts = [f"{group.size} rows a prompt"]
    parts += [] if group.starts else ["all of them rollouts"]
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


def _start(start: StartConfig) -> list[str]:
    """Which rows have it, what they are shown, how much, and what becomes of them."""
    rows = "all rows" if start.rows == "all" else f"{start.rows} row{'s' * (start.rows > 1)}"
    when, show = start.when, start.show
    shown = {
        "trace": "each a whole trace, of which nothing is sampled",
        "prefix": "the beginning of a trace, which the policy continues",
        "hint": "in the prompt, the first steps of a trace",
        "critique": "in the prompt, responses of the first round and the grader's feedback on them",
    }[show.kind]
    if isinstance(show, WholeTrace) and show.choose == "likeliest_answer":
        shown += (
            " (correct ones, after whose reasoning the policy gives the reference answer's tokens the highest mean "
            "probability)"
        )
    if isinstance(show, TracePrefix) and show.pieces is not None:
        shown += f", cut into {show.pieces} pieces"
    if isinstance(show, Critique):
        shown += {"each": " (one response a row)", "all": " (the wrong ones together)"}[show.about]
        if not show.quotes_responses:
            shown = f"in the prompt, feedback that quotes no response: {show.wrong!r}"
    texts = [f"{rows}: {shown}"]
    if when is not None and when.share is not None:
        texts[0] = f"in {when.share:.0%} of the groups, {texts[0]}"
    elif when is not None and when.accuracy_at_most is not None:
        after = f", after {when.after:.0%} of the steps" if when.after else ""
        more = "as many more rows as the group has" if start.rows == "all" else f"{start.rows} more rows"
        rows = rows if isinstance(show, WholeTrace) else more
        texts[0] = f"where the share of correct rollouts is at most {when.accuracy_at_most:g}{after}, {rows}: {shown}"
    elif when is not None:
        texts[0] = f"of prompts whose running pass rate is at most {when.pass_rate_at_most:g}, {texts[0]}"
    if start.dose is not None:
        whole = "round" if isinstance(start.dose, FitDose) else "group"
        shared = f", one d for the {whole}" if start.shared else ""
        formula = start.dose.formula()
        texts.append(f"the share d of it: {formula if formula.startswith('d') else f'd = {formula}'}{shared}")
    if start.is_in_prompt:
        texts.append(
            {"bare": "learned under the bare prompt, as off-policy rows", "shown": "learned with it"}[start.learn]
        )
    if start.is_fallback:
        texts.append(_KEPT[start.keep])
    return texts


def _advantage(objective: ObjectiveConfig) -> str:
    config = objective.advantage
    if isinstance(config, NoAdvantage):
        return "none: no term uses the rewards"
    words = [f"A = {config.formula()}"]
    if isinstance(config, GroupAdvantage) and config.kind != "raw" and objective.has_off_policy_rows:
        displaced = " that stay" if objective.group.fallback is not None else ""
        outside = f"only the rollouts{displaced}; other rows have A = 0"
        words.append(f"over {'all rows of the group' if config.population == 'joint' else outside}")
    if config.zero_truncated:
        words.append("0 on rollouts that ran into the length limit")
    return ", ".join(words)


def _entry(label: str, text: str) -> list[str]:
    lines = wrap(text.replace(" ,", ","), _WIDTH - _LABEL - 2, break_long_words=False)
    heads = [label.ljust(_LABEL), *[" " * _LABEL] * (len(lines) - 1)]
    return [f"{head}  {line}" for head, line in zip(heads, lines, strict=True)]
