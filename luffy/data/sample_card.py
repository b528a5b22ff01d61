"""The card of the stage `sample`: how the policy answered the training prompts, and how many answers became traces."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from luffy.config.answers import SampleConfig
from luffy.data.pass_rates import RateSummary
from luffy.types import Prompt

CARD_FILE = "card.json"


@dataclass(frozen=True, slots=True)
class KeptCount:
    """Number of kept traces, and of prompts with one."""

    prompts: int
    """Training prompts with a trace."""
    traces: int
    mean_tokens: float
    """Mean length of a trace."""
    with_logprobs: int
    """Traces whose text is tokenized into the same tokens that were sampled."""


@dataclass(frozen=True, slots=True)
class SampleCard:
    """All of `card.json`."""

    policy: str
    """Node of the policy that was sampled."""
    round: int
    temperature: float
    max_response_tokens: int
    choose: str
    max_per_prompt: int
    rates: RateSummary
    kept: KeptCount


class KeptCounter:
    """Counts prompts and traces while they are iterated over."""

    def __init__(self) -> None:
        self._prompts = self._traces = self._tokens = self._with_logprobs = 0

    def passing(self, prompts: Iterable[Prompt]) -> Iterable[Prompt]:
        """`prompts`, each counted."""
        for prompt in prompts:
            self._prompts += 1
            self._traces += len(prompt.traces)
            self._tokens += sum(trace.num_tokens or 0 for trace in prompt.traces)
            self._with_logprobs += sum(trace.logprobs is not None for trace in prompt.traces)
            yield prompt

    @property
    def count(self) -> KeptCount:
        """The counts so far."""
        mean = self._tokens / self._traces if self._traces else 0.0
        return KeptCount(self._prompts, self._traces, mean, self._with_logprobs)


def sample_card(policy: str, number: int, config: SampleConfig, rates: RateSummary, kept: KeptCount) -> SampleCard:
    """The card of round `number`; every setting of `config` that has a fallback must be filled in."""
    assert config.max_response_tokens is not None
    return SampleCard(
        policy=policy,
        round=number,
        temperature=config.temperature,
        max_response_tokens=config.max_response_tokens,
        choose=config.keep.choose,
        max_per_prompt=config.keep.max_per_prompt,
        rates=rates,
        kept=kept,
    )


def sample_card_json(card: SampleCard) -> str:
    """The contents of `card.json`."""
    return json.dumps(asdict(card), indent=2, ensure_ascii=False) + "\n"


def read_sample_card(path: Path) -> SampleCard:
    """The card that `sample_card_json` wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return SampleCard(**{**values, "rates": RateSummary(**values["rates"]), "kept": KeptCount(**values["kept"])})


def sample_card_markdown(card: SampleCard) -> str:
    """The contents of `card.md`."""
    rates, kept = card.rates, card.kept
    lines = [
        f"# Sampled traces, round {card.round}",
        "",
        f"Policy {card.policy}: {rates.num_samples} responses a prompt at temperature {card.temperature:g}, of at most "
        f"{card.max_response_tokens} tokens.",
        "",
        *rates.sentences,
        "",
        f"{kept.traces} correct and complete answers to {kept.prompts} of {rates.prompts} training prompts are kept "
        f"({card.choose}, at most {card.max_per_prompt} a prompt), with {kept.mean_tokens:.1f} tokens on average; "
        f"{kept.with_logprobs} have log-probabilities.",
        "",
        "## Prompts by their correct responses",
        "",
        "| correct | prompts | % |",
        "|---|---|---|",
        *(
            f"| {number} of {rates.num_samples} | {count} | {100 * count / rates.prompts:.1f} |"
            for number, count in rates.histogram.items()
        ),
    ]
    return "\n".join(lines) + "\n"
