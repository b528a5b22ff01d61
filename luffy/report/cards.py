"""What the stages that make training data have counted, as sections of their `card.md` and of a chain's report."""

from collections.abc import Sequence
from dataclasses import replace

from luffy.data.answer_cards import DifficultyCard, Fit, RateSummary, SampleCard, TaughtCard
from luffy.evaluation.results import checkpoint_name
from luffy.report.cells import NONE, percent, table, table_of, tally
from luffy.report.page import Page, Section, markdown

_NAMED = 10
"""Prompts that a card names; `card.json` names all."""


def card_markdown(section: Section) -> str:
    """The contents of `card.md`."""
    return markdown(Page(section.title, section.aside, (replace(section, title="", aside=""),)))


def difficulty_section(card: DifficultyCard) -> Section:
    """The pass rates of a policy, and the prompts that they leave to RL."""
    measured = {
        **_measured(card.policy, card.temperature, card.max_response_tokens, card.rates),
        "bounds": f"{card.min_pass_rate:g} to {card.max_pass_rate:g}",
        **{fit.replace("_", " "): f"{card.fits[fit]:,} of {card.rates.prompts:,}" for fit in Fit},
    }
    by_source = {
        "data source": lambda item: item[0] or "(unnamed)",
        "prompts": lambda item: f"{item[1]['prompts']:,.0f}",
        "kept": lambda item: f"{item[1]['kept']:,.0f}",
        "mean pass rate %": lambda item: percent(item[1]["mean_pass_rate"]),
    }
    solved = ("prompts", *(f"{number:,}" for number in card.rates.histogram.values()))
    return Section(
        title="Difficulty",
        aside="which training prompts RL was given, by a policy's pass rates",
        tables=(
            table(tuple(measured), [measured.values()]),
            table((f"correct of {card.rates.num_samples}", *card.rates.histogram), [solved]),
            table_of(card.sources.items(), by_source),
        ),
    )


def sample_section(cards: Sequence[SampleCard]) -> Section:
    """A policy's own answers, and those that became traces, round by round."""
    rows = [
        {
            "round": card.round,
            **_measured(card.policy, card.temperature, card.max_response_tokens, card.rates),
            "kept": f"{card.choose}, at most {card.max_per_prompt} a prompt",
            "prompts with traces": f"{card.kept.prompts:,} of {card.rates.prompts:,}",
            "traces": f"{card.kept.traces:,}",
            "with log-probabilities": f"{card.kept.with_logprobs:,}",
            "tokens of a trace": f"{card.kept.mean_tokens:.1f}",
        }
        for card in cards
    ]
    solved = ((card.round, *(f"{number:,}" for number in card.rates.histogram.values())) for card in cards)
    return Section(
        title="Sampled traces",
        aside="the policy's own correct answers, which the SFT of the same round learned from",
        tables=(
            table(tuple(rows[0]), (row.values() for row in rows)),
            table(("round", *cards[0].rates.histogram), solved, "Prompts by their correct responses"),
        ),
    )


def taught_section(card: TaughtCard) -> Section:
    """Teachers' questions, answers, costs and kept traces, and the prompts that are left without one."""
    used = f"Used: {card.num_tokens:,} tokens of prompts and answers{_of(card.max_tokens, ',')}"
    if card.cost is not None:
        used += f", cost {card.cost:.4f}{_of(card.max_cost, 'g')}"
    by_teacher = {
        "teacher": lambda item: item[0],
        "model": lambda item: item[1].model,
        "decoding": lambda item: f"{item[1].decoding}, at most {item[1].max_response_tokens} tokens",
        "prompts": lambda item: f"{item[1].prompts:,}",
        "questions": lambda item: f"{item[1].questions:,}",
        "answers": lambda item: f"{item[1].answers:,}",
        "pass rate %": lambda item: percent(item[1].pass_rate),
        "prompts solved": lambda item: f"{item[1].solved:,}",
        "outcomes": lambda item: tally(item[1].outcomes),
        "correct, but no trace": lambda item: tally(item[1].rejected),
        "traces": lambda item: f"{item[1].traces:,}",
        "with log-probabilities": lambda item: f"{item[1].with_logprobs:,}",
        "tokens of prompts": lambda item: f"{item[1].prompt_tokens:,}",
        "tokens of answers": lambda item: f"{item[1].num_tokens:,}",
        "cost": lambda item: NONE if item[1].cost is None else f"{item[1].cost:.4f}",
        "not asked, at most": lambda item: f"{item[1].not_asked:,}",
    }
    return Section(
        title="Traces of teachers",
        aside="traces that teachers wrote",
        notes=(
            f"{card.given} of {card.asked_about} prompts got a trace; teachers were asked about {card.asked_about} of "
            f"{card.prompts} training prompts. train.parquet has {card.train_rows} rows, sft.parquet {card.sft_rows}.",
            f"{len(card.without)} were asked and have no usable answer{_named(card.without)}.",
            f"{len(card.never_asked)} were never asked{_named(card.never_asked)}.",
            *([f"Traces after rewriting: {tally(card.origins)}."] if card.origins else []),
            f"{used}.",
        ),
        tables=(table_of(card.teachers.items(), by_teacher),),
    )


def _measured(policy: str, temperature: float, max_response_tokens: int, rates: RateSummary) -> dict[str, str]:
    """How often the policy solved the prompts, by the heading of a column."""
    return {
        "policy": checkpoint_name(policy),
        "responses": f"{rates.num_samples} a prompt, temperature {temperature:g}, at most {max_response_tokens} tokens",
        "mean pass rate %": percent(rates.mean_pass_rate),
        "ever solved %": percent(rates.ever_solved_share),
        "mean tokens": f"{rates.mean_tokens:.1f}",
        "truncated %": percent(rates.truncated_share),
        "outcomes": tally({name: count for name, count in rates.outcomes.items() if count}),
    }


def _named(uids: Sequence[str]) -> str:
    more = ", ... (all in card.json)" if len(uids) > _NAMED else ""
    return f": {', '.join(uids[:_NAMED])}{more}" if uids else ""


def _of(limit: float | None, form: str) -> str:
    return "" if limit is None else f" of {limit:{form}} allowed"
