"""Plays the episodes of an exported environment for the interpreter that has verifiers.

    python -m luffy.environments.exported.environment_service FOLDER     # JSON lines on standard input and output

`task_set_module.py` speaks to it. The episodes follow the rules for models behind OpenAI's protocol
(`luffy.environments.text_episodes`), except that tokens are counted and limited by verifiers.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from luffy import __version__
from luffy.environments.exported.export_folder import read_export, read_problems
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.players import open_text_player
from luffy.environments.text_episodes import TextEpisodePlayer, as_sent
from luffy.errors import LuffyError
from luffy.grading import JUDGE_CACHE, GradeRequest, GraderPool, problem_of
from luffy.grading.judge import Judges
from luffy.hosted.foreign.faults import EpisodeFault, TaskFault
from luffy.hosted.foreign.host_channel import Channel, serve
from luffy.hosted.foreign.plain_messages import PlainMessage, Turn
from luffy.hosted.foreign.turn_exchange import TurnExchange
from luffy.rollout.text_answers import TextCompletion
from luffy.rollout.text_endpoint import TextRequest
from luffy.types import FinishReason, Message, Outcome, Prompt

_UNLIMITED = 1 << 40
_CORRECT = "correct"


class ExportedEnvironment:
    """The exported problems with their player and grader; `player` None: they have a single turn."""

    def __init__(
        self, splits: Mapping[str, Sequence[Prompt]], player: TextEpisodePlayer | None, grader: GraderPool
    ) -> None:
        self._splits = splits
        self._player = player
        self._grader = grader

    async def open(self) -> dict[str, Any]:
        """The version of luffy and the number of problems per split."""
        return {"version": __version__, "tasks": {split: len(prompts) for split, prompts in self._splits.items()}}

    async def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """The messages and answers of problems."""
        prompts = self._splits[split][start:stop]
        return [{"messages": _sent(prompt), "answer": prompt.ground_truth} for prompt in prompts]

    def episode(self, split: str, row: int, digest: str) -> "ExportedEpisode":
        """An episode of a problem; both sides read the problems from the same file, so `digest` is not checked."""
        prompts = self._splits.get(split, ())
        if not 0 <= row < len(prompts):
            raise TaskFault(f"there is no problem {row} in the split {split}")
        return ExportedEpisode(prompts[row], self._player, self._grader)

    async def teardown(self) -> None:
        """Every episode frees what it holds by itself."""


class ExportedEpisode:
    """An episode, whose model is on the other side."""

    def __init__(self, prompt: Prompt, player: TextEpisodePlayer | None, grader: GraderPool) -> None:
        self._prompt = prompt
        self._player = player
        self._grader = grader
        self._result: dict[str, Any] = {}
        self._exchange = TurnExchange(_sent(prompt))
        self._exchange.start(self._play_and_grade())

    @property
    def max_response_tokens(self) -> int:
        """No limit on this side."""
        return _UNLIMITED

    async def ask(self, request: TextRequest, max_tokens: int) -> TextCompletion | None:
        """The policy's next turn; None if the other side sends no other."""
        # The other side's messages are sent back unchanged: `request` has earlier turns without their reasoning.
        known = self._exchange.seen
        new = [_plain(message) for message in request.prompt[len(known) :] if isinstance(message, Message)]
        turn = await self._exchange.ask([*known, *new])
        if turn is None:
            return None
        return TextCompletion(turn["text"], 0, FinishReason.LENGTH if turn["is_cut"] else FinishReason.STOP)

    async def begin(self) -> list[PlainMessage]:
        """What the environment adds to the prompt, usually nothing."""
        return await self._exchange.begin()

    async def respond(self, turn: Turn) -> list[PlainMessage] | None:
        """The answer to a turn; None when the episode is over."""
        return await self._exchange.respond(turn)

    async def score(self) -> dict[str, Any]:
        """The reward, whether the answer is correct, and every measure."""
        await self._exchange.finish()
        return self._result

    async def close(self) -> None:
        """End the episode if it has not ended."""
        await self._exchange.close()

    async def _play_and_grade(self) -> None:
        reply, measures = await self._played()
        request = GradeRequest(reply, self._prompt.ground_truth, problem_of(self._prompt), measures=measures)
        (grade,) = await asyncio.to_thread(self._grader.grade, [request])
        if grade.is_unjudged:
            raise EpisodeFault(f"the answer has no verdict: {grade.reason}")
        reward = grade.reward if self._player is None else self._player.scorer.reward(grade.reward, measures)
        metrics = {_CORRECT: float(grade.outcome is Outcome.CORRECT), **measures}
        self._result = {"reward": reward, "metrics": metrics}

    async def _played(self) -> tuple[str, Mapping[str, float]]:
        """The last turn, which is graded, and the episode's measures."""
        if self._player is None:
            turn = await self._exchange.ask(self._exchange.seen)
            return turn["text"] if turn is not None else "", {}
        prompt = self._prompt
        start = EpisodeStart(problem_of(prompt), prompt.ground_truth, prompt.messages, prompt_ids=(), seed=0)
        episode = await self._player.play_one(start, self)
        if episode.fault:
            raise EpisodeFault(episode.fault)
        turns = [message.content for message in episode.completion if message.role == "assistant"]
        return turns[-1] if turns else "", episode.measures


def _sent(prompt: Prompt) -> list[PlainMessage]:
    return [_plain(as_sent(message)) for message in prompt.messages]


def _plain(message: Message) -> PlainMessage:
    return {"role": message.role, "content": message.content}


async def _serve(number: int, environment: ExportedEnvironment, channel: Channel) -> None:
    channel.send(number, ok=await environment.open())
    await serve(environment, channel)


def main() -> None:
    """Open what the folder holds, and serve it until the other side goes."""
    module, channel = Path(sys.argv[1]), Channel()
    request = channel.receive()
    if request is None:
        return
    with ExitStack() as stack:
        try:
            export = read_export(module)
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="luffy-"))) / JUDGE_CACHE
            workers = len(os.sched_getaffinity(0))
            grader = stack.enter_context(GraderPool.configured(workers, export.grading, cache))
            judges = stack.enter_context(closing(Judges(cache)))
            player = None if export.environment is None else open_text_player(export.environment, judges)
            splits = {split: read_problems(module, split) for split in export.splits}
        except LuffyError as error:
            channel.send(request["id"], refused=str(error))
            return
        asyncio.run(_serve(request["id"], ExportedEnvironment(splits, player, grader), channel))
    sys.stdout.flush()
    os._exit(0)  # threads of tools may never end


if __name__ == "__main__":
    main()
