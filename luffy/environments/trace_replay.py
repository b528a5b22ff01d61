"""Plays recorded turns again in an environment, to check that it still answers as recorded.

replayer = EnvironmentReplayer(config)
replayer.replay(prompts)        # for each trace of each prompt: same, differs, crashed; None for a single turn
"""

import asyncio
import logging
from collections.abc import Sequence

from luffy.config.environment import EnvironmentConfig, EpisodeScoring
from luffy.data.conversations import is_cut_from
from luffy.data.row_filters import Replayed
from luffy.environments.environment import EnvironmentFactory
from luffy.environments.limits import run_in_loop
from luffy.environments.live_episode import EpisodeStart, FailedEpisode, LiveEpisode
from luffy.environments.registry import open_environment
from luffy.environments.rubric import EpisodeScorer
from luffy.grading.request import problem_of
from luffy.types import Message, Prompt, Trace

logger = logging.getLogger(__name__)
_POLICY = "assistant"
_AT_ONCE = 16
"""Traces that are played at the same time; each may have a sandbox of its own."""
_NO_MEASURES = EpisodeScorer(EpisodeScoring(), ())


class EnvironmentReplayer:
    """Plays traces; sent to another process, it opens the environment there."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._make: EnvironmentFactory | None = None

    def __reduce__(self) -> tuple[type["EnvironmentReplayer"], tuple[EnvironmentConfig]]:
        return type(self), (self._config,)

    def replay(self, prompts: Sequence[Prompt]) -> list[list[Replayed | None]]:
        make = self._make = self._make or open_environment(self._config)

        async def all_played() -> list[Replayed | None]:
            places = asyncio.Semaphore(_AT_ONCE)
            played = [_replay(make, prompt, trace, places) for prompt in prompts for trace in prompt.traces]
            return list(await asyncio.gather(*played))

        found = iter(run_in_loop(all_played()))
        return [[next(found) for _ in prompt.traces] for prompt in prompts]


async def _replay(make: EnvironmentFactory, prompt: Prompt, trace: Trace, places: asyncio.Semaphore) -> Replayed | None:
    if not trace.turns:
        return None
    answered: list[tuple[Message, list[Message]]] = []  # each turn of the author, with the messages that answered it
    for turn in trace.turns:
        if turn.role == _POLICY:
            answered.append((turn, []))
        else:
            answered[-1][1].append(turn)
    start = EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, (), seed=0)
    async with places:
        live = LiveEpisode(start, make, _NO_MEASURES)
        try:
            live.observe(await live.reset())
            for turn, recorded in answered:
                answers = await live.respond(turn)
                if recorded and not _are_equal(answers or (), recorded):
                    return Replayed.DIFFERS
                live.observe(recorded)
            return Replayed.SAME
        except FailedEpisode as failure:
            logger.warning("%s: a trace cannot be played again", prompt.data_source, exc_info=failure.__cause__)
            return Replayed.CRASHED
        finally:
            await live.close()


def _are_equal(answers: Sequence[Message], recorded: Sequence[Message]) -> bool:
    """Whether role and text are the same, outer white space aside, or the record is of an answer that was cut."""
    return len(answers) == len(recorded) and all(
        was.role == now.role and (was.content.strip() == now.content.strip() or is_cut_from(was.content, now.content))
        for was, now in zip(recorded, answers, strict=True)
    )
