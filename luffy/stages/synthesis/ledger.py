"""Usage of all teachers, and whether the budget allows the next question.

A question is asked exactly when the answers to all questions before it, in order, have used less than the limit. With
several questions under way, the ledger counts those at the most that they could use: while even that is below the
limit, the next one may be asked at once, and otherwise it has to wait. So the questions that are asked do not depend on
how many are under way, nor on which answer comes first, and the limit is exceeded by less than one answer. (By more
only where a teacher exceeds `max_response_tokens`.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from luffy.config.answers import PriceConfig, SpendingLimit
from luffy.stages.answers.store import ModelAnswer

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompts and answers."""

    prompt_tokens: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, answer: ModelAnswer) -> "Usage":
        assert answer.prompt_tokens is not None
        return cls(answer.prompt_tokens, answer.num_tokens)

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt_tokens + other.prompt_tokens, self.num_tokens + other.num_tokens)

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.prompt_tokens - other.prompt_tokens, self.num_tokens - other.num_tokens)

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.num_tokens

    def cost(self, price: PriceConfig | None) -> float:
        """What the tokens cost; 0 without a price."""
        if price is None:
            return 0.0
        prompts, answers = price.prompt_per_million * self.prompt_tokens, price.completion_per_million * self.num_tokens
        return (prompts + answers) / _MILLION


class Ledger:
    """Usage by teacher. Costs are computed from whole numbers of tokens, so they do not depend on any order."""

    def __init__(self, prices: Mapping[str, PriceConfig | None], limit: SpendingLimit | None) -> None:
        self._prices = prices
        self._limit = limit
        self.used = dict.fromkeys(prices, Usage())
        self._reserved = dict.fromkeys(prices, Usage())

    @property
    def is_spent(self) -> bool:
        """Whether what was used has reached the limit."""
        return self._reaches_limit(self.used)

    @property
    def may_be_spent(self) -> bool:
        """Whether it could reach the limit with what is under way."""
        return self._reaches_limit({name: used + self._reserved[name] for name, used in self.used.items()})

    def reserve(self, teacher: str, most: Usage) -> None:
        """Record that a question was sent whose answer uses at most `most`."""
        self._reserved[teacher] += most

    def settle(self, teacher: str, used: Usage, reserved: Usage | None = None) -> None:
        """An answer is there: it used `used` of what was reserved for it."""
        self.used[teacher] += used
        if reserved is not None:
            self._reserved[teacher] -= reserved

    def cost(self, teacher: str) -> float:
        return self.used[teacher].cost(self._prices[teacher])

    def _reaches_limit(self, usages: Mapping[str, Usage]) -> bool:
        if self._limit is None:
            return False
        tokens = sum(usage.total for usage in usages.values())
        cost = sum(usage.cost(self._prices[name]) for name, usage in usages.items())
        too_long = self._limit.max_tokens is not None and tokens >= self._limit.max_tokens
        return too_long or (self._limit.max_cost is not None and cost >= self._limit.max_cost)
