"""A small package with the classic interface of verifiers, its faults included: exceptions of rewards become 0.0."""

import asyncio
import inspect
from copy import deepcopy

__version__ = "0.0.fake"


class Error(Exception):
    pass


class OverlongPromptError(Error):
    pass


class ToolError(Error):
    pass


class Rows(list):
    @property
    def column_names(self):
        return list(self[0])


class Rubric:
    def __init__(self, funcs=(), weights=None):
        self.funcs = list(funcs)
        self.weights = weights or [1.0] * len(self.funcs)
        self.class_objects = {"parser": object()}

    def _is_group_func(self, func):
        return bool({"states", "completions", "answers"} & set(inspect.signature(func).parameters))

    async def score_group(self, states, score_sem):
        async with score_sem:
            for state in states:
                await self._score(state)

    async def _score(self, state):
        known = {**{key: state.get(key) for key in ("prompt", "completion", "answer", "task", "info")}, "state": state}
        known.update(self.class_objects)
        found = {}
        for func in self.funcs:
            wanted = inspect.signature(func).parameters
            try:
                value = func(**{key: known[key] for key in wanted if key in known})
                found[func.__name__] = float(await value if inspect.isawaitable(value) else value)
            except Exception:
                found[func.__name__] = 0.0
        state["metrics"] = found
        state["reward"] = sum(
            weight * found[func.__name__] for func, weight in zip(self.funcs, self.weights, strict=True)
        )


class Environment:
    def __init__(self, dataset, rubric, eval_dataset=None, max_turns=-1, **options):
        self.message_type = "chat"
        self.max_turns = max_turns
        self.__dict__.update(options)
        self.dataset = Rows({"example_id": place, "task": "fake", **row} for place, row in enumerate(dataset))
        self.eval_dataset = None if eval_dataset is None else Rows(eval_dataset)
        self.rubric = rubric

    def get_dataset(self):
        return self.dataset

    def get_eval_dataset(self):
        return self.eval_dataset or self.dataset

    async def get_model_response(self, state, prompt, client=None):
        return await state["client"].chat(prompt)

    async def setup_state(self, state):
        return state

    async def is_over(self, state):
        return bool(state.get("over")) or 0 < self.max_turns <= len(state["trajectory"])

    async def rollout(self, task, client, model, sampling_args=None):
        state = {**deepcopy(task), "client": client, "trajectory": [], "error": None, "over": False}
        state["tool_defs"] = getattr(self, "tool_defs", [])
        state = await self.setup_state(state)
        messages = list(state["prompt"])
        while not state["error"] and not await self.is_over(state):
            try:
                if state["trajectory"]:
                    messages = messages + await self.env_response(messages, state)
                    if state["over"]:
                        break
                response = await self.get_model_response(state, messages)
                message = response.message
                calls = message.get("tool_calls")
                turn = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
                messages = [*messages, turn]
                state["trajectory"].append(message)
            except OverlongPromptError:
                state["over"] = True
            except Error as error:
                state["error"] = error
        await self.cleanup(state)
        state["completion"] = messages[len(state["prompt"]) :]
        return state

    async def cleanup(self, state):
        pass

    async def _teardown(self):
        await asyncio.sleep(0)


class SingleTurnEnv(Environment):
    def __init__(self, **options):
        super().__init__(max_turns=1, **options)


def load_environment(env_id, **arguments):
    return __import__(env_id.replace("-", "_")).load_environment(**arguments)
