"""A task set of verifiers 0.4.0 whose environment opens the conversation, and asks until the number is found."""

from typing import Literal

import verifiers.v1 as vf


class GameData(vf.TaskData):
    number: int


class GameTask(vf.Task[GameData]):
    @vf.stop
    async def given_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    misbehaves: Literal["no", "plays_twice", "answers_for_the_policy"] = "no"


class GameEnv(vf.Env[GameConfig]):
    async def run(self, task, agents):
        if self.config.misbehaves == "plays_twice":
            await agents.player.run(task.with_data(prompt="first"))
            await agents.player.run(task.with_data(prompt="second"))
            return
        async with agents.player.interaction(task) as interaction:
            question, found = f"Which number? Try {task.data.number - 1} or more.", False
            while not found:
                segment = await interaction.turn(question)
                if segment.terminated:
                    break
                found = segment.last_reply == str(task.data.number)
                question = "No."
                if self.config.misbehaves == "answers_for_the_policy":
                    question = [vf.AssistantMessage(content="I know."), vf.UserMessage(content="No.")]
        interaction.trace.record_reward("found", float(found))


class GameTaskset(vf.Taskset[GameTask]):
    def load(self):
        return [GameTask(GameData(number=number, name=f"game {number}")) for number in (4, 7)]


__all__ = ["GameEnv", "GameTaskset"]
