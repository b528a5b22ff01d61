"""How busy an engine is kept by episodes whose tools take their time.

Run: python tests/benchmarks/slow_tools.py [episodes] [turns]

The episodes, their tool calls and the scheduling of turns are real. The engine is a clock: it has 16 slots, as an
engine with continuous batching has, and a turn occupies one of them for 0.15 to 0.35 s, whichever tokens it holds. So
the figures say what slow tools cost, on any machine, and nothing of an engine's own speed. Busy is the share of the
slots' time in which they are taken, from the first turn to the end of the last episode. `lockstep` is `cluster: local`,
where a call of the engine waits for all episodes; `lanes` is everything else.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from measuring import numbers, show
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import LANES, EpisodeLimits, ToolsEnvironment
from luffy.data.conversations import ConversationEncoder
from luffy.data.templates import encode_traces, stop_token_ids
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.call_formats import CALL_FORMATS, ToolCall
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import open_scored
from luffy.grading.request import Problem
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Message

SLOTS = 16
SHORTEST_S, LONGEST_S = 0.15, 0.35
TOOL_S = (0.0, 0.5, 2.0)
SLOW_SHARES = (0.25, 1.0)
"""Share of the calls that take the tool's time; the others return at once."""


async def wait(seconds: float) -> str:
    """Return after some time.

    Args:
        seconds: How long.
    """
    import asyncio

    await asyncio.sleep(seconds)
    return "done"


class TimedEngine:
    """Says a tool call in each turn but the last, and takes the time that a seed decides."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: int, tool_s: float, slow_share: float) -> None:
        syntax = CALL_FORMATS["hermes"]
        texts = [syntax.render([ToolCall("wait", {"seconds": seconds})]) for seconds in (0.0, tool_s)]
        self._fast, self._slow, self._last = (tuple(ids) for ids in encode_traces(tokenizer, [*texts, "done"]))
        self._stop = stop_token_ids(tokenizer)[0]
        self._turns = turns
        self._slow_share = slow_share
        self._slots = ThreadPoolExecutor(SLOTS)
        self.busy_s = 0.0

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One turn for each request; requests of a call occupy slots of their own."""
        return list(self._slots.map(self._turn, requests))

    def close(self) -> None:
        self._slots.shutdown()

    def _turn(self, request: RolloutRequest) -> Completion:
        draw = request.seed % 1000 / 1000
        seconds = SHORTEST_S + (LONGEST_S - SHORTEST_S) * draw
        time.sleep(seconds)
        self.busy_s += seconds
        is_last = request.prefix_ids.count(self._stop) == self._turns - 1
        # Another digit of the seed than the one that decides the length of the turn.
        is_slow = request.seed // 1000 % 1000 / 1000 < self._slow_share
        ids = self._last if is_last else self._slow if is_slow else self._fast
        return Completion(ids, (-0.5,) * len(ids), FinishReason.STOP, (0,) * len(ids))


def busy_share(tokenizer: PreTrainedTokenizerBase, episodes: int, turns: int, tool_s: float, slow: float, lanes: int):
    """(Share of the slots' time, seconds in all) of that many episodes."""
    limits = EpisodeLimits(max_turns=turns)
    make, scorer = open_scored(ToolsEnvironment(kind="tools", tools=("slow_tools:wait",), limits=limits))
    player = EpisodePlayer(make, ConversationEncoder(tokenizer), limits, scorer, lanes)
    engine = TimedEngine(tokenizer, turns, tool_s, slow)
    prompt = (Message("user", "Begin."),)
    starts = [EpisodeStart(Problem(), "", prompt, (5,), seed=index * 7_368_787) for index in range(episodes)]
    began = time.perf_counter()
    player.play(starts, engine, SamplingParams(1.0, 4096, stop_token_ids(tokenizer)))
    wall_s = time.perf_counter() - began
    engine.close()
    return engine.busy_s / (SLOTS * wall_s), wall_s


def main() -> None:
    """Print one line a tool."""
    episodes, turns = numbers(64, 4)
    tokenizer = build_tokenizer(["Begin. done"] * 4)
    rows = []
    for slow in SLOW_SHARES:
        for tool_s in TOOL_S:
            cells = [f"{tool_s:g} s", f"{slow:.0%}"]
            for lanes in (0, LANES):
                share, wall_s = busy_share(tokenizer, episodes, turns, tool_s, slow, lanes)
                cells += [f"{share:.0%}", f"{wall_s:.1f}"]
            rows.append(cells)
    header = ("tool", "slow calls", "lockstep: busy", "s", f"{LANES} lanes: busy", "s")
    show(header, rows, f"{episodes} episodes of {turns} turns, {SLOTS} slots")


if __name__ == "__main__":
    main()
