"""A model's answers to the training prompts, the policy's or a teacher's, for the stages `difficulty` and `sample`.

with answer_prompts(settings, context) as answered:
    answered.rates, answered.answers(prompt)
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
from luffy.data.answer_cards import PassRate
from luffy.data.parquet import iterate_prompts
from luffy.data.splits import TRAIN
from luffy.data.templates import load_tokenizer, prompt_lengths
from luffy.data.tokenizer import adapt_tokenizer, check_scores
from luffy.pipeline.identity import Identity, IdentityRecord, read_identity
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.answers.asker import ModelToAsk, ResponseProgress, open_asker
from luffy.stages.answers.clients import (
    Questions,
    SampleRequest,
    Suite,
    as_trace,
    longest_prompt,
    render_as_ids,
    sample_key,
)
from luffy.stages.answers.store import ANSWERS_FILE, AnswerStore, ModelAnswer, siblings
from luffy.stages.program import StageContext
from luffy.training.model_folder import model_folder
from luffy.types import TOKEN_LIMITS, FinishReason, Outcome, Prompt

_FREE = {
    "difficulty": (("min_pass_rate", "max_pass_rate"), "other bounds"),
    "sample": (("keep",), "another sample.keep"),
}
"""By section of the experiment: its fields that no response depends on, and the same in words."""
_TEACHER = "difficulty.teacher"


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
    whole = iterate_prompts(context.inputs["data"] / TRAIN)
    prompts = [dataclasses.replace(prompt, traces=()) for prompt in whole]
    teacher = settings.teacher if isinstance(settings, DifficultySettings) else None
    if teacher is None:
        model = context.inputs["model"] / "model"
        tokenizer = load_tokenizer(model)
    else:
        model = model_folder(teacher.path, _TEACHER)
        policy_tokenizer = load_tokenizer(context.inputs["data"] / "tokenizer")
        check_scores(load_tokenizer(model), policy_tokenizer, f"{_TEACHER}: the tokenizer of {teacher.path}")
        tokenizer = adapt_tokenizer(str(model), None, _TEACHER)
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
            longest = longest_of(section, lengths, most, model)
            decoding = DecodingConfig(temperature=config.temperature, num_samples=config.num_samples)
            protocol = EvaluationConfig(decodings={how: decoding}, max_response_tokens=most, stop=config.stop or ())
            progress, render = ResponseProgress(context, total, done), render_as_ids(tokenizer)
            policy, keep = (tokenizer, kept_answer) if section == "sample" else (None, without_text)
            asked = ModelToAsk(model, tokenizer, None if teacher is None else teacher.dtype, policy)
            opened = open_asker(settings, config.engine, context, longest, progress, total - done, asked, keep)
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


def longest_of(section: str, lengths: Sequence[int], most: int, model: Path) -> int:
    """Tokens of the longest prompt with its response; DataError if it exceeds the model's context."""
    remedy = f"lower data.max_prompt_tokens or {section}.max_response_tokens"
    return most + longest_prompt(section, lengths, most, context_length(read_shape(model)), remedy)


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


def without_text(sample: SampleRequest, answer: ModelAnswer) -> ModelAnswer:
    """The answer's numbers and its grade: texts of all answers to all prompts would be gigabytes."""
    return dataclasses.replace(answer, text=None, reply=None, turns=(), measures={}, logprobs=None)


def kept_answer(sample: SampleRequest, answer: ModelAnswer) -> ModelAnswer:
    """The answer with what a trace needs, where it is right and ended by itself; raises as `as_trace` does."""
    kept = dataclasses.replace(as_trace(sample, answer), measures={})
    is_right = kept.outcome is Outcome.CORRECT and kept.finish_reason is FinishReason.STOP
    return kept if is_right else without_text(sample, answer)
