"""The policy answers the training prompts; its correct answers become traces.

Run: python -m luffy.stages.sample --config DIR/config.yaml --out DIR

Samples `sample.num_samples` responses to every prompt of prepare_data's train.parquet and grades them as RL does
(`answer_prompts`, as the stage `difficulty`); with an environment a response is an episode, and its trace has many
turns. Writes pass_rates.parquet (one row per prompt), sampled.parquet (the prompts with a correct and complete answer,
shortest prompts first, with the traces that `sample.keep` chooses), tokenizer/, card.json and card.md. The SFT after it
reads this directory in place of prepare_data's.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from luffy.config.answers import DifficultyConfig, SampleConfig
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.settings import DifficultySettings, SampleSettings
from luffy.data.kept_answers import kept_traces, may_be_kept
from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.pass_rates import (
    CARD_FILE,
    RATES_FILE,
    KeptCount,
    PassRate,
    card_json,
    sample_card,
    summarise_rates,
    write_pass_rates,
)
from luffy.data.templates import load_tokenizer, prompt_lengths
from luffy.errors import DataError
from luffy.files import write_atomic
from luffy.pipeline.identity import Identity, IdentityRecord, read_identity
from luffy.pipeline.manifest import read_manifest
from luffy.report.cards import card_markdown, sample_section
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answers.asker import ResponseProgress, open_asker
from luffy.stages.answers.clients import Questions, SampleRequest, Suite, as_trace, render_as_ids, sample_key, trace_of
from luffy.stages.answers.store import ANSWERS_FILE, AnswerStore, ModelAnswer, siblings
from luffy.stages.program import StageContext, StageResult, main
from luffy.training.model_folder import copy_tokenizer
from luffy.types import TOKEN_LIMITS, Outcome, Prompt

TRAIN_FILE = "train.parquet"
_TRACES_FILE = "sampled.parquet"
_AUTHOR = "policy"
_FREE = {
    "difficulty": (("min_pass_rate", "max_pass_rate"), "other bounds"),
    "sample": (("keep",), "another sample.keep"),
}
"""By section of the experiment: its fields that no response depends on, and the same in words."""


def run(settings: SampleSettings, context: StageContext) -> StageResult:
    """Sample and grade every training prompt and keep correct answers; DataError if there are none."""
    config, out, model = settings.sample, context.out, context.inputs["model"]
    with answer_prompts(settings, context) as answered:
        rates, kept = summarise_rates(answered.rates, config.num_samples), KeptCount()
        if not rates.ever_solved_share:
            found = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in rates.outcomes.items() if count)
            raise DataError(
                f"sample: round {settings.round} produced no correct response to {rates.prompts} prompts x "
                f"{rates.num_samples} ({found}; {100 * rates.truncated_share:.0f} % ran into the limit), so there is "
                "nothing to learn from; take easier prompts or a stronger policy, or raise sample.num_samples or "
                "sample.max_response_tokens"
            )
        solved = _with_traces(answered, config, f"{model.parent.name}/{model.name}")
        write_prompts(out / _TRACES_FILE, kept.passing(solved))
    if not kept.traces:
        raise DataError(
            f"sample: none of the {rates.outcomes[Outcome.CORRECT]} correct responses is text that ended by itself "
            "within sample.max_response_tokens, so there is no trace to learn from; raise it"
        )
    write_pass_rates(out / RATES_FILE, answered.rates)
    manifest = read_manifest(model)
    card = sample_card(manifest.node if manifest else "policy", settings.round, config, rates, kept)
    copy_tokenizer(context.inputs["data"] / "tokenizer", out / "tokenizer")
    write_atomic(out / CARD_FILE, card_json(card))
    write_atomic(out / "card.md", card_markdown(sample_section([card])))
    metrics = {
        "prompts/solved": float(card.kept.prompts),
        "traces/kept": float(card.kept.traces),
        "traces/mean_tokens": card.kept.mean_tokens,
        "pass_rate": card.rates.mean_pass_rate,
        "truncated_share": card.rates.truncated_share,
    }
    outputs = (RATES_FILE, _TRACES_FILE, "tokenizer", CARD_FILE, "card.md")
    return StageResult(outputs, metrics, resumed_from=answered.resumed_from)


@dataclass(frozen=True, slots=True)
class AnsweredPrompts:
    """All training prompts, answered `num_samples` times each."""

    prompts: Sequence[Prompt]
    """The prompts of `train.parquet` in its order, without their traces."""
    rates: Sequence[PassRate]
    resumed_from: int
    """Number of responses that an earlier attempt or another stage had sampled."""
    shortest_first: Sequence[Prompt]
    """The same in the order in which they were answered."""
    answers: Callable[[Prompt], list[ModelAnswer]]
    """The answers to a prompt, in the order of sampling."""


@contextmanager
def answer_prompts(settings: DifficultySettings | SampleSettings, context: StageContext) -> Iterator[AnsweredPrompts]:
    """Sample and grade what is left of the responses to all training prompts; DataError where prompts do not fit.

    The seed of a response depends on (seed, suite, decoding, uid, sample) alone. Finished batches are in answers.jsonl:
    a killed stage continues with the next batch, and a stage that differs only in what it makes of the responses reuses
    all of them.
    """
    config: DifficultyConfig | SampleConfig
    if isinstance(settings, SampleSettings):
        section, config, suite, how = "sample", settings.sample, f"sample_{settings.round}", "traces"
    else:
        section, config, suite, how = "difficulty", settings.difficulty, "difficulty", "pass_rate"
    free, free_words = _FREE[section]
    # Their traces would take most of the memory.
    whole = iterate_prompts(context.inputs["data"] / TRAIN_FILE)
    prompts = [dataclasses.replace(prompt, traces=()) for prompt in whole]
    model = context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    lengths = prompt_lengths(tokenizer, [prompt.messages for prompt in prompts])
    # Batches of equal lengths save padding.
    order = [prompts[place] for place in sorted(range(len(prompts)), key=lambda place: lengths[place])]

    def keys(prompt: Prompt) -> list[str]:
        return [sample_key(suite, how, prompt.uid, sample) for sample in range(config.num_samples)]

    alike = [directory / ANSWERS_FILE for directory in _sampled_alike(context.out, section, free)]
    with closing(AnswerStore(context.out / ANSWERS_FILE, alike)) as store:
        sources = store.adopt(key for prompt in order for key in keys(prompt))
        if sources:
            names = ", ".join(path.parent.name for path in sources)
            context.events.message(f"reuses the responses sampled for {free_words} in {names}")
        done, total = len(store), config.num_samples * len(prompts)
        if done < total:
            most = config.max_response_tokens
            assert config.engine is not None and most is not None and config.temperature is not None
            room, longest = context_length(read_shape(model)), max(lengths) + most
            if room is not None and longest > room:
                too_long = sum(length + most > room for length in lengths)
                raise DataError(
                    f"{section}: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} "
                    f"tokens, and the model's context of {room} less {most} for the response leaves {room - most}; "
                    f"lower data.max_prompt_tokens or {section}.max_response_tokens"
                )
            decoding = DecodingConfig(temperature=config.temperature, num_samples=config.num_samples)
            protocol = EvaluationConfig(decodings={how: decoding}, max_response_tokens=most, stop=config.stop or ())
            progress, render = ResponseProgress(context, total, done), render_as_ids(tokenizer)
            policy, keep = (tokenizer, _kept) if section == "sample" else (None, _without_text)
            opened = open_asker(settings, config.engine, context, longest, total - done, policy, keep, progress)
            with opened as (asker, generator):
                progress.begin()
                at_once = max(generator.batch_size // config.num_samples, 1)
                suites = (Suite(suite, order[start : start + at_once]) for start in range(0, len(order), at_once))
                requests = (Questions.of_suite(each, how, protocol, render, settings.seed) for each in suites)
                asker.ask(requests, store, progress.add)

        def answers(prompt: Prompt) -> list[ModelAnswer]:
            return [store[key] for key in keys(prompt)]

        rates = [
            PassRate(
                uid=prompt.uid,
                outcomes=dict(Counter(answer.outcome.value for answer in found)),
                num_tokens=sum(answer.num_tokens for answer in found),
                num_truncated=sum(answer.finish_reason in TOKEN_LIMITS for answer in found),
            )
            for prompt, found in ((prompt, answers(prompt)) for prompt in prompts)
        ]
        yield AnsweredPrompts(prompts, rates, done, order, answers)


def _sampled_alike(directory: Path, section_name: str, free: Collection[str]) -> list[Path]:
    """Directories of other stages whose responses would be those of the stage in `directory`.

    They differ at most in the fields `free` of their settings' section. Empty for a stage without a record.
    """

    def sampling(record: IdentityRecord | None) -> tuple[Identity, Mapping[str, str]] | None:
        """Everything that the responses depend on; None without a readable record."""
        values = record.identity.settings.get(section_name) if record is not None else None
        if record is None or not isinstance(values, dict):
            return None
        section = {name: value for name, value in values.items() if name not in free}
        settings = {**record.identity.settings, section_name: section}
        return dataclasses.replace(record.identity, settings=settings, keyed={}), record.consumed

    own = sampling(read_identity(directory))
    return [path for path in siblings(directory) if own is not None and sampling(read_identity(path)) == own]


def _without_text(sample: SampleRequest, answer: ModelAnswer) -> ModelAnswer:
    """The answer's numbers and its grade: texts of all answers to all prompts would be gigabytes."""
    return ModelAnswer(None, answer.num_tokens, answer.finish_reason, grade=answer.grade, grader=answer.grader)


def _kept(sample: SampleRequest, answer: ModelAnswer) -> ModelAnswer:
    """The answer with what a trace needs, where it may become one; raises as `as_trace` does."""
    kept = dataclasses.replace(as_trace(sample, answer), measures={})
    assert kept.text is not None
    return kept if may_be_kept(kept.text, kept.outcome, kept.finish_reason) else _without_text(sample, answer)


def _with_traces(answered: AnsweredPrompts, config: SampleConfig, model: str) -> Iterator[Prompt]:
    """The solved prompts, each with the traces that are kept; `model` is stage and key, the same in every workspace."""
    decoding = f"temperature {config.temperature:g}"
    for prompt in answered.shortest_first:
        kept = [answer for answer in answered.answers(prompt) if answer.text is not None]
        if kept:
            found = [trace_of(answer, _AUTHOR, model, decoding) for answer in kept]
            yield dataclasses.replace(prompt, traces=kept_traces(found, config.keep))


if __name__ == "__main__":
    main("sample", run, defers_stop_requests=True)
