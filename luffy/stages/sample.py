"""The policy answers the training prompts; its correct answers become traces.

Run: python -m luffy.stages.sample --config DIR/config.yaml --out DIR

Samples `sample.num_samples` responses to every prompt of prepare_data's train.parquet and grades them as RL does
(`luffy.stages.answered_prompts`, as the stage `difficulty`); with an environment a response is an episode, and its
trace has many turns. Writes pass_rates.parquet (one row per prompt), sampled.parquet (the prompts with a correct and
complete answer, shortest prompts first, with the traces that `sample.keep` chooses), tokenizer/, card.json and card.md.
The SFT after it reads this directory in place of prepare_data's.
"""

import dataclasses
from collections.abc import Iterator

from luffy.config.answers import KeepAnswers
from luffy.config.settings import SampleSettings
from luffy.data.kept_answers import GradedAnswer, kept_traces
from luffy.data.parquet import write_prompts
from luffy.data.pass_rates import (
    CARD_FILE,
    RATES_FILE,
    KeptCounter,
    RateSummary,
    SampleCard,
    card_json,
    sample_card,
    sample_card_markdown,
    summarise_rates,
    write_pass_rates,
)
from luffy.errors import DataError
from luffy.files import write_atomic
from luffy.pipeline.manifest import read_manifest
from luffy.stages.answered_prompts import AnsweredPrompts, AnswerPlan, answer_prompts
from luffy.stages.program import StageContext, StageResult, main
from luffy.training.model_folder import copy_tokenizer
from luffy.types import Outcome, Prompt, Trace

_TRACES_FILE = "sampled.parquet"


def run(settings: SampleSettings, context: StageContext) -> StageResult:
    """Sample and grade every training prompt and keep correct answers; DataError if there are none."""
    config, out = settings.sample, context.out
    answered = answer_prompts(_plan(settings), context)
    rates = summarise_rates(answered.rates, config.num_samples)
    kept = KeptCounter()
    _refuse_unsolved(rates, settings)
    write_prompts(out / _TRACES_FILE, kept.passing(_with_traces(answered, config.keep)))
    _refuse_incomplete(rates, kept)
    write_pass_rates(out / RATES_FILE, answered.rates)
    manifest = read_manifest(context.inputs["model"])
    card = sample_card(manifest.node if manifest else "policy", settings.round, config, rates, kept.count)
    copy_tokenizer(context.inputs["data"] / "tokenizer", out / "tokenizer")
    write_atomic(out / CARD_FILE, card_json(card))
    write_atomic(out / "card.md", sample_card_markdown(card))
    outputs = (RATES_FILE, _TRACES_FILE, "tokenizer", CARD_FILE, "card.md")
    return StageResult(outputs, _metrics(card), resumed_from=answered.resumed_from)


def _plan(settings: SampleSettings) -> AnswerPlan:
    config = settings.sample
    assert config.max_response_tokens is not None
    assert config.engine is not None
    return AnswerPlan(
        section="sample",
        suite=f"sample_{settings.round}",
        decoding="traces",
        seed=settings.seed,
        num_samples=config.num_samples,
        temperature=config.temperature,
        max_response_tokens=config.max_response_tokens,
        engine=config.engine,
        dtype=settings.dtype,
        grading=settings.grading,
        stop=config.stop,
        environment=settings.environment,
        keeps_answers=True,
        free_settings=("keep",),
        free_words="another sample.keep",
    )


def _with_traces(answered: AnsweredPrompts, keep: KeepAnswers) -> Iterator[Prompt]:
    """The solved prompts, each with the traces that are kept."""
    for prompt in answered.solved():
        traces = kept_traces([_answer(trace) for trace in prompt.traces], keep)
        yield dataclasses.replace(prompt, traces=traces)


def _answer(trace: Trace) -> GradedAnswer:
    """A correct and complete answer, as a shard holds it."""
    assert trace.num_tokens is not None
    return GradedAnswer(
        trace.text,
        trace.num_tokens,
        Outcome.CORRECT,
        is_complete=True,
        author=trace.author,
        model=trace.model,
        decoding=trace.decoding,
        logprobs=trace.logprobs,
        turns=trace.turns,
    )


def _refuse_unsolved(rates: RateSummary, settings: SampleSettings) -> None:
    if rates.ever_solved_share:
        return
    found = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rates.outcomes.items() if count)
    raise DataError(
        f"sample: round {settings.round} produced no correct response to {rates.prompts} prompts x "
        f"{rates.num_samples} ({found}; {100 * rates.truncated_share:.0f} % ran into the limit), so there is nothing "
        "to learn from; take easier prompts or a stronger policy, or raise sample.num_samples or "
        "sample.max_response_tokens"
    )


def _refuse_incomplete(rates: RateSummary, kept: KeptCounter) -> None:
    """Raise DataError if no correct response is complete, and so none can become a trace."""
    if not kept.count.traces:
        raise DataError(
            f"sample: none of the {rates.outcomes[Outcome.CORRECT]} correct responses is text that ended by itself "
            "within sample.max_response_tokens, so there is no trace to learn from; raise it"
        )


def _metrics(card: SampleCard) -> dict[str, float]:
    return {
        "prompts/solved": float(card.kept.prompts),
        "traces/kept": float(card.kept.traces),
        "traces/mean_tokens": card.kept.mean_tokens,
        "pass_rate": card.rates.mean_pass_rate,
        "truncated_share": card.rates.truncated_share,
    }


if __name__ == "__main__":
    main("sample", run, defers_stop_requests=True)
