"""An environment of verifiers 0.4.0 that two agents play."""

import verifiers.v1 as vf


class TwoConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class TwoEnv(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        await agents.proposer.run(task)


class TwoTaskset(vf.Taskset[vf.Task]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="?"))]


__all__ = ["TwoEnv", "TwoTaskset"]
