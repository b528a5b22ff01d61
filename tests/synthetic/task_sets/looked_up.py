"""A task set of verifiers 0.4.0 with a tool that all episodes share, each with a state of its own."""

import verifiers.v1 as vf


class Seen(vf.State):
    names: tuple[str, ...] = ()


class Facts(vf.Toolset[vf.SharedToolsetConfig, Seen]):
    TOOL_PREFIX = "facts"

    @vf.tool
    async def lookup(self, name: str) -> str:
        """Look a name up."""
        self.state.names = (*self.state.names, name)
        return f"{name} is number {len(self.state.names)}"


class LookTask(vf.Task[vf.TaskData, Seen]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float("number 2" in (trace.last_reply or ""))

    @vf.metric
    async def names(self, trace: vf.Trace) -> float:
        return float(len(trace.state.names))


class LookTaskset(vf.Taskset[LookTask]):
    @classmethod
    def toolsets(cls, config):
        return [Facts(vf.SharedToolsetConfig())]

    def load(self):
        return [LookTask(vf.TaskData(prompt="Look up Ada, then Alan.")) for _ in range(2)]


__all__ = ["LookTaskset"]

if __name__ == "__main__":
    Facts.run()
