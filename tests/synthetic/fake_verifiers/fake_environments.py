"""Environments for tests, one function each; printing must not disturb the protocol."""

import asyncio
import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import verifiers as vf

print("imported")


def asked(question, answer, **more):
    return {"prompt": [{"role": "user", "content": question}], "answer": answer, **more}


def is_right(completion, answer):
    return completion[-1]["content"] == answer


async def length(completion):
    print("scoring")
    return len(completion[-1]["content"])


def sums(rewards=(is_right, length), weights=(1.0, 0.1), **options):
    tasks = [asked("1 + 1 =", "2", info={"level": 1}), asked("2 + 2 =", "4", info='{"level": 2}')]
    rubric = vf.Rubric(rewards, list(weights)[: len(rewards)])
    return vf.SingleTurnEnv(dataset=tasks, rubric=rubric, **options)


class Game(vf.Environment):
    """Count down from the answer, one per turn; the environment opens the game."""

    async def setup_state(self, state):
        state["left"] = int(state["answer"])
        state["prompt"] = [*state["prompt"], {"role": "user", "content": "Begin."}]
        return state

    async def env_response(self, messages, state):
        die_if_asked()
        state["left"] -= 1
        state["over"] = not state["left"]
        return [{"role": "user", "content": [{"type": "text", "text": f"{state['left']} left"}]}]

    async def cleanup(self, state):
        state["cleaned"] = True


def die_if_asked():
    """Kill this process once, in the step after the first that RL has journalled (`TEST_DIE_AT` is a file)."""
    name = os.environ.get("TEST_DIE_AT")
    if name is None or not Path(name).exists():
        return
    if any(Path(os.environ["LUFFY_WORKSPACE"]).glob("stages/rl/*/journal/step_000001.parquet")):
        Path(name).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def num_turns(state):
    assert state["cleaned"]
    return len(state["trajectory"])


def game():
    return Game([asked("Count.", "3")], vf.Rubric([num_turns]), eval_dataset=[asked("Count!", "1", task="fake")])


def countdowns(num_tasks):
    """Games of one to three turns; the reward is the share of three that was played."""

    def share(state):
        return len(state["trajectory"]) / 3

    games = [asked(f"Game {place}: guess a number.", str(1 + place % 3)) for place in range(num_tasks)]
    return Game(games, vf.Rubric([num_turns, share], [0.0, 1.0]), eval_dataset=games[:4])


class Tools(vf.Environment):
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}  # noqa: RUF012
    tool_defs = ({"name": "square", "description": "A square.", "parameters": parameters},)

    async def is_over(self, state):
        return bool(state["over"] or (state["trajectory"] and not state["trajectory"][-1].get("tool_calls")))

    async def env_response(self, messages, state):
        found = []
        for call in messages[-1]["tool_calls"]:
            try:
                result = str(json.loads(call["arguments"])["x"] ** 2)
            except Exception as error:
                result = str(error)
            found.append({"role": "tool", "content": result, "tool_call_id": call["id"]})
        return found


def num_calls(state):
    return sum(len(turn.get("tool_calls") or ()) for turn in state["trajectory"])


def tools():
    return Tools([asked("7 squared", "49")], vf.Rubric([is_right, num_calls], [1.0, 0.0]))


def raises(completion):
    raise KeyError("no such thing")


def nothing(completion):
    return None


def of_a_group(completions):
    return [0.0 for _ in completions]


def needs_judge(completion, judge):
    return 1.0


class OwnModel(vf.SingleTurnEnv):
    async def get_model_response(self, state, prompt, client=None):
        return None


class WithoutData(vf.SingleTurnEnv):
    """Loads its tasks only when they are first needed."""

    def get_dataset(self):
        raise ConnectionError("the hub is out of reach")


class Rewriting(Game):
    async def rollout(self, task, client, model, sampling_args=None):
        await self.get_model_response({"trajectory": []}, [{"role": "user", "content": "another prompt"}])


class Simulated(Game):
    async def env_response(self, messages, state):
        return [await state["client"].chat(messages)]


class Sleeping(Game):
    """Waits in a way that lets other episodes go on, or that holds up the whole process."""

    async def env_response(self, messages, state):
        if messages[-1]["content"] == "wait":
            await asyncio.sleep(3600)
        if messages[-1]["content"] == "hang":
            time.sleep(3600)
        if messages[-1]["content"] == "die":
            os._exit(3)
        return await super().env_response(messages, state)


def one_turn(*tasks, kind=vf.SingleTurnEnv):
    return kind(dataset=tasks, rubric=vf.Rubric([is_right]))


def counting(kind, answer="3"):
    return kind([asked("Count.", answer)], vf.Rubric([num_turns]))


def load_environment(which="sums", **options):
    made = {
        "sums": sums,
        "game": game,
        "countdowns": countdowns,
        "tools": tools,
        "drawn": lambda: one_turn(asked(f"{random.random()} {set('abcdef')}", "1")),
        **{each.__name__: partial(sums, (each,)) for each in (raises, nothing, of_a_group, needs_judge)},
        "completion": lambda: sums(message_type="completion"),
        "own_model": lambda: one_turn(asked("1", "1"), kind=OwnModel),
        "without_data": lambda: one_turn(kind=WithoutData),
        "rewriting": lambda: counting(Rewriting),
        "simulated": lambda: counting(Simulated),
        "sleeping": lambda: counting(Sleeping, "9"),
    }
    return made[which](**options)
