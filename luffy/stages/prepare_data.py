"""From sources to verified parquet: load, tokenise, grade the traces, filter, write the data card.

    python -m luffy.stages.prepare_data --config DIR/config.yaml --out DIR

Writes train.parquet, corpus.parquet (with `data.corpus`), suites/<name>.parquet, tokenizer/, data_card.json,
data_card.md and quarantine.jsonl.
"""

import dataclasses
import gc
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.config.data import DataConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import PrepareDataSettings
from luffy.data.card import SourceCard, card_json, card_markdown, source_card
from luffy.data.filters import Filtered, Rules, filter_prompts, problems_of, without_traces
from luffy.data.identity import prompt_uid
from luffy.data.parquet import write_prompts
from luffy.data.sources import LoadedSource, load_source
from luffy.data.tokenizer import adapt_tokenizer, build_tokenizer, save_tokenizer, texts_of
from luffy.data.verify_traces import verify_traces
from luffy.errors import DataError
from luffy.files import write_atomic
from luffy.grading import JUDGE_CACHE, GraderPool
from luffy.stages.program import StageContext, StageResult, main
from luffy.types import Message, Outcome, Prompt

logger = logging.getLogger(__name__)

_SUITES = "suites"


def run(settings: PrepareDataSettings, context: StageContext) -> StageResult:
    """Prepare all sources; DataError where one of them has no row left."""
    with _no_cycle_collection():
        return _run(settings, context)


def _run(settings: PrepareDataSettings, context: StageContext) -> StageResult:
    steps = _Steps(context, total=2 + len(_names(settings.data)))
    sources = _load(settings)
    _write_quarantine(context.out / "quarantine.jsonl", sources)
    steps.done()
    tokenizer = _tokenizer(settings, sources)
    save_tokenizer(tokenizer, context.out / "tokenizer")
    steps.done()

    outputs = ["quarantine.jsonl", "tokenizer"]
    cards: list[SourceCard] = []
    forbidden = frozenset().union(*(problems_of(s.prompts) for name, s in sources.items() if _is_suite(name)))
    with GraderPool.configured(context.execution.grader_workers, settings.grading, context.out / JUDGE_CACHE) as grader:
        for name, source in sources.items():
            filtered, outcomes = _prepare(name, source, settings.data, tokenizer, grader, forbidden)
            cards.append(source_card(name, source, outcomes, filtered))
            _refuse_empty(cards[-1])
            outputs.append(_write(context.out, name, filtered.prompts))
            steps.done()
    write_atomic(context.out / "data_card.json", card_json(cards, len(tokenizer)))
    write_atomic(context.out / "data_card.md", card_markdown(cards, len(tokenizer)))
    return StageResult((*outputs, "data_card.json", "data_card.md"), _metrics(cards, len(tokenizer)))


@contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """Rows hold no reference cycles, and looking for some among a million of them costs a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Steps:
    """Reports one step of the stage after another."""

    def __init__(self, context: StageContext, total: int) -> None:
        self._events = context.events
        self._total = total
        self._step = 0

    def done(self) -> None:
        self._step += 1
        self._events.progress(self._step, self._total)


def _names(data: DataConfig) -> list[str]:
    corpus = ["corpus"] if data.corpus is not None else []
    return ["train", *corpus, *(f"{_SUITES}.{name}" for name in data.suites)]


def _is_suite(name: str) -> bool:
    return name.startswith(f"{_SUITES}.")


def _load(settings: PrepareDataSettings) -> dict[str, LoadedSource]:
    data = settings.data
    configs = {"train": data.train, "corpus": data.corpus}
    configs.update({f"{_SUITES}.{name}": source for name, source in data.suites.items()})
    loaded = {}
    for name, config in configs.items():
        if config is None:
            continue
        source = load_source(config, name, settings.seed)
        prompts = _with_system_prompt(source.prompts, data.system_prompt)
        _check_graders(name, prompts, settings.grading)
        loaded[name] = dataclasses.replace(source, prompts=prompts)
        logger.info("%s: %d rows, %d quarantined", name, source.num_rows, len(source.quarantined))
    return loaded


def _check_graders(name: str, prompts: Sequence[Prompt], grading: GradingConfig) -> None:
    unknown = sorted({prompt.grader for prompt in prompts if prompt.grader is not None} - set(grading.names))
    if unknown:
        raise DataError(
            f"data.{name}: field reward_model.style names {', '.join(unknown)}, which is no grader; there are rule, "
            f"{', '.join(grading.names)} (add others to grading.named)"
        )


def _with_system_prompt(prompts: list[Prompt], system_prompt: str | None) -> list[Prompt]:
    if system_prompt is None:
        return prompts
    return [_under(system_prompt, prompt) for prompt in prompts]


def _under(system_prompt: str, prompt: Prompt) -> Prompt:
    """The prompt behind `system_prompt`, unless it has its own; a uid that a file brought along is kept."""
    if any(message.role == "system" for message in prompt.messages):
        return prompt
    messages = (Message("system", system_prompt), *prompt.messages)
    own_uid = prompt.uid != prompt_uid(prompt.data_source, prompt.messages)
    uid = prompt.uid if own_uid else prompt_uid(prompt.data_source, messages)
    return dataclasses.replace(prompt, messages=messages, uid=uid)


def _tokenizer(settings: PrepareDataSettings, sources: Mapping[str, LoadedSource]) -> PreTrainedTokenizerBase:
    if settings.model_path is not None:
        return adapt_tokenizer(settings.model_path, settings.chat_template)
    return build_tokenizer(text for source in sources.values() for text in texts_of(source.prompts))


def _prepare(
    name: str,
    source: LoadedSource,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    grader: GraderPool,
    forbidden: frozenset[str],
) -> tuple[Filtered, Counter[Outcome]]:
    prompts = source.prompts
    outcomes: Counter[Outcome] = Counter()
    if _is_suite(name):
        prompts = without_traces(prompts)
    else:
        prompts, outcomes = verify_traces(prompts, grader)
    rules = Rules(
        max_prompt_tokens=data.max_prompt_tokens,
        max_trace_tokens=data.max_trace_tokens,
        require_verified_traces=data.require_verified_traces,
        allow_repeats=name == "corpus",
        forbidden_problems=frozenset() if _is_suite(name) else forbidden,
    )
    return filter_prompts(prompts, tokenizer, rules), outcomes


def _refuse_empty(card: SourceCard) -> None:
    if card.rows_out:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in card.rejected.items())
    quarantined = f"; {card.quarantined} malformed" if card.quarantined else ""
    raise DataError(
        f"data.{card.name}: no row is left of {card.rows_in}: rejected {reasons}{quarantined}; "
        "change the source or its limits (data.max_prompt_tokens, data.max_trace_tokens, data.require_verified_traces)"
    )


def _write(out: Path, name: str, prompts: Sequence[Prompt]) -> str:
    relative = f"{_SUITES}/{name.removeprefix(f'{_SUITES}.')}.parquet" if _is_suite(name) else f"{name}.parquet"
    (out / relative).parent.mkdir(exist_ok=True)
    write_prompts(out / relative, prompts)
    return relative


def _write_quarantine(path: Path, sources: Mapping[str, LoadedSource]) -> None:
    lines = [
        json.dumps({"source": name, **dataclasses.asdict(row)}) + "\n"
        for name, source in sources.items()
        for row in source.quarantined
    ]
    write_atomic(path, "".join(lines))


def _metrics(cards: Sequence[SourceCard], vocabulary_size: int) -> dict[str, float]:
    metrics = {f"rows/{card.name}": float(card.rows_out) for card in cards}
    metrics["rejected"] = float(sum(sum(card.rejected.values()) for card in cards))
    metrics["quarantined"] = float(sum(card.quarantined for card in cards))
    metrics["vocabulary_size"] = float(vocabulary_size)
    return metrics


if __name__ == "__main__":
    main("prepare_data", run)
