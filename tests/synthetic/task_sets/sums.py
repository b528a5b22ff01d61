"""A task set of verifiers 0.4.0: sums, one turn each, with a reward, a metric and faults by choice."""

import asyncio
from typing import Literal

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str
    level: int


class SumConfig(vf.TaskConfig):
    fault: Literal["none", "raises", "not_finite", "late"] = "none"


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.config.fault == "raises":
            raise ValueError("no such number")
        return float("nan") if self.config.fault == "not_finite" else float(trace.last_reply == self.data.answer)

    @vf.reward
    async def by_runtime(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """Scored only with a runtime: without one verifiers leaves it out, and the reward is silently smaller."""
        if self.config.fault == "late":
            await asyncio.sleep(60)
        return float((await runtime.run(["echo", "1"], {})).stdout)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    endless: bool = False
    task: SumConfig = SumConfig()


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def __init__(self, config):
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self):
        first = 1 if self.config.split == "train" else 50
        for number in range(first, first + (10**9 if self.config.endless else 3)):
            data = SumData(prompt=f"{number} + 1 =", system_prompt="Add.", answer=str(number + 1), level=number)
            yield SumTask(data, self.config.task)


__all__ = ["SumsTaskset"]
