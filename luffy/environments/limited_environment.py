"""An environment whose asynchronous methods have a time limit: `with_time_limit(environment, timeout_s)`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from luffy.environments.environment import Environment, ScoringEnvironment
from luffy.environments.limited_calls import LateCall
from luffy.grading.request import Problem
from luffy.types import Message


def with_time_limit(environment: Environment, timeout_s: float) -> Environment:
    """The environment; its asynchronous methods are cancelled after `timeout_s` seconds each and raise LateCall."""
    if isinstance(environment, ScoringEnvironment):
        return _LimitedScoring(environment, timeout_s)
    return _Limited(environment, timeout_s)


class _Limited:
    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s

    async def reset(self, problem: Problem) -> Sequence[Message]:
        async with self._limit("reset"):
            return await self._environment.reset(problem)

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        async with self._limit("respond"):
            return await self._environment.respond(conversation)

    def counts(self) -> Mapping[str, float]:
        return self._environment.counts()

    async def close(self) -> None:
        async with self._limit("close"):
            await self._environment.close()

    @asynccontextmanager
    async def _limit(self, method: str) -> AsyncIterator[None]:
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():  # the method's own
                raise
            raise LateCall(f"{method} did not end within {self._timeout_s:g} s (environment.timeout_s)") from error


class _LimitedScoring(_Limited):
    def __init__(self, environment: ScoringEnvironment, timeout_s: float) -> None:
        super().__init__(environment, timeout_s)
        self._scoring = environment

    async def score(self, conversation: Sequence[Message]) -> None:
        async with self._limit("score"):
            await self._scoring.score(conversation)
