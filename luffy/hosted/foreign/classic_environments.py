"""Environments of verifiers 0.1.9 to 0.3.1, which have `load_environment` and play their own `rollout`.

If a rollout asks for a response of the model, the request waits until the policy's turn arrives. So set-up, stop
conditions, trajectories and clean-up are the environment's own, whatever it overrides. Episodes share one event loop.
"""

import contextlib
import contextvars
import functools
import hashlib
import importlib
import inspect
import json
import math
from typing import Any

from luffy.hosted.foreign.exchange import (
    EpisodeFault,
    PlainMessage,
    TaskFault,
    Turn,
    TurnExchange,
    Unusable,
    chat_completion,
    finish_reason,
    line_of,
    plain,
    plain_tool,
)

_PROVIDED = frozenset({"prompt", "completion", "answer", "state", "task", "info"})
_SPLITS = {"train": "get_dataset", "eval": "get_eval_dataset"}
_faults: contextvars.ContextVar[list[str]] = contextvars.ContextVar("faults")
"""Exceptions of reward functions during one scoring, which verifiers turns into 0.0."""


class _NoModel:
    """Placeholder for the client of an environment's model."""

    def __getattr__(self, name: str) -> Any:
        return _used()


def load_classic(vf: Any, environment: str, arguments: dict[str, Any]) -> "ClassicEnvironment":
    """The environment, with reward functions that report what they raise; Unusable if it cannot be used."""
    try:
        env = vf.load_environment(environment, **arguments)
        for leaf in leaves(env):
            kind = type(leaf).__name__
            if getattr(leaf, "message_type", "chat") != "chat":
                raise Unusable(f"{kind} completes text; only environments of messages can be used")
            if type(leaf).get_model_response is not vf.Environment.get_model_response:
                raise Unusable(f"{kind} calls its model itself (get_model_response), so no policy can take its place")
        columns = {name for dataset in _datasets(env).values() for name in dataset.column_names}
        for rubric in rubrics(env.rubric):
            _wrap(rubric, columns)
        return ClassicEnvironment(env)
    except Unusable:
        raise
    except Exception as error:  # a package may raise anything while it loads, and so may its data
        raise Unusable(line_of(error.__cause__ or error)) from error


def leaves(env: Any) -> list[Any]:
    """The environments of a group, at any depth; a single environment alone."""
    members = getattr(env, "envs", None)
    return [leaf for member in members for leaf in leaves(member)] if isinstance(members, list) else [env]


def rubrics(rubric: Any) -> list[Any]:
    """The elementary rubrics of a rubric."""
    members = list(getattr(rubric, "rubrics", ()))
    members += [member.rubric for member in getattr(rubric, "env_map", {}).values()]
    return [rubric, *(leaf for member in members for leaf in rubrics(member))]


def _datasets(env: Any) -> dict[str, Any]:
    found = {}
    for split, method in _SPLITS.items():
        try:
            rows = getattr(env, method)()
        except ValueError:  # an environment may have one of the two alone
            continue
        if split == "train" or env.eval_dataset is not None:  # without one, verifiers gives the training tasks
            found[split] = rows
    return found


def _wrap(rubric: Any, known_columns: set[str]) -> None:
    """Have the functions of a rubric report what they raise; Unusable for one of a group, or one that lacks a value."""
    functions = getattr(rubric, "funcs", [])
    for place, function in enumerate(functions):
        name = getattr(function, "__name__", repr(function))
        parameters = inspect.signature(function).parameters
        if rubric._is_group_func(function):
            raise Unusable(
                f"the reward function {name} compares the responses of a group; each episode is scored by itself"
            )
        known = _PROVIDED | set(rubric.class_objects)
        if hasattr(rubric, "score_objects"):
            known |= known_columns
        if not getattr(rubric, "score_object_providers", ()):
            required = (
                each.name
                for each in parameters.values()
                if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            )
            missing = [name for name in required if name not in known]
            if missing:
                raise Unusable(f"the reward function {name} needs `{missing[0]}`, which verifiers does not give it")
        functions[place] = reporting(function, name)


def reporting(function: Any, name: str) -> Any:
    """The function, which notes every exception and every result that is no finite number, and raises as before."""

    @functools.wraps(function)
    async def called(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
            found = await found if inspect.isawaitable(found) else found
            if not math.isfinite(float(found)):
                raise ValueError(f"it returned {found!r}")
        except Exception as error:
            _faults.get([]).append(f"the reward function {name} failed: {line_of(error)}")
            raise
        return found

    called.__name__ = name
    return called


def tools_of(env: Any) -> list[dict[str, Any]]:
    """The tools in the form of OpenAI's protocol; Unusable where the members of a group have different ones."""
    defined = [getattr(leaf, "tool_defs", None) or getattr(leaf, "oai_tools", None) or [] for leaf in leaves(env)]
    found = [[plain_tool(tool) for tool in tools] for tools in defined]
    if any(tools != found[0] for tools in found):
        raise Unusable("the environments of its group have different tools; use them one by one")
    return found[0]


class ClassicEpisode:
    """One rollout of an environment; a `HostedEpisode`."""

    def __init__(self, env: Any, row: dict[str, Any]) -> None:
        self._env = env
        self._state: Any = None
        self.exchange = TurnExchange([plain(message) for message in row["prompt"]])
        self.exchange.start(self._play(row))

    async def begin(self) -> list[PlainMessage]:
        return await self.exchange.begin()

    async def score(self) -> dict[str, Any]:
        await self.exchange.finish()
        state, faults = self._state, list[str]()
        _faults.set(faults)
        rubric = self._env.rubric
        takes_semaphore = "score_sem" in inspect.signature(rubric.score_group).parameters
        await rubric.score_group([state], **({"score_sem": contextlib.nullcontext()} if takes_semaphore else {}))
        if hasattr(rubric, "cleanup"):
            await rubric.cleanup(state)
        if faults:
            raise EpisodeFault(faults[0])
        metrics = {str(name): float(value) for name, value in (state["metrics"] or {}).items()}
        return {"reward": float(state["reward"]), "metrics": metrics}

    async def ask(self, state: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """The policy's next turn, as a response of the model (takes the place of `get_model_response`)."""
        defined = state.get("tool_defs") or state.get("oai_tools") or []
        tools = {plain_tool(tool)["function"]["name"] for tool in defined}
        if tools != {tool["function"]["name"] for tool in tools_of(self._env)}:
            raise EpisodeFault("the tools of this task are not those of the environment")
        turn = await self.exchange.ask([plain(message) for message in prompt])
        if turn is None:
            # As verifiers has it where the context has no room for another turn: the rollout ends and is scored.
            raise importlib.import_module("verifiers").OverlongPromptError()
        return response(turn)

    async def _play(self, row: dict[str, Any]) -> None:
        _asking.set(self)
        self._state = await self._env.rollout(row, client(), "policy", {})
        fault = self._state.get("error")
        # Calls of tools that end the rollout by `stop_errors` are the policy's doing.
        if fault is not None and not isinstance(fault, importlib.import_module("verifiers").ToolError):
            raise fault


_asking: contextvars.ContextVar[ClassicEpisode] = contextvars.ContextVar("asking")
"""The episode that runs."""


async def _ask(*args: Any, **kwargs: Any) -> Any:
    return await _asking.get().ask(*args, **kwargs)


def _used(*_: Any, **__: Any) -> Any:
    raise EpisodeFault("the environment uses the client of its model by itself")


def client() -> Any:
    """What an environment is given as the client of its model, of the class that its version checks for."""
    try:
        base = importlib.import_module("verifiers.clients").Client
    except ImportError:
        return _NoModel()
    cls = type("NoModel", (base,), {"__init__": lambda self: None, **dict.fromkeys(base.__abstractmethods__, _used)})
    return cls()


def response(turn: Turn) -> Any:
    """A turn of the policy as what `get_model_response` returns in this version."""
    types = importlib.import_module("verifiers.types")
    if not hasattr(types, "Response"):
        return types.ChatCompletion.model_validate(chat_completion(turn))
    calls = [{**call, "id": f"call_{place}"} for place, call in enumerate(turn["calls"])]
    message = {"content": turn["text"], "finish_reason": finish_reason(turn), "is_truncated": turn["is_cut"]}
    return types.Response.model_validate(
        {"id": "turn", "created": 0, "model": "policy", "message": {**message, "tool_calls": calls or None}}
    )


class ClassicEnvironment:
    """A loaded environment, whose model is the policy; a `HostedEnvironment`."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._rows = _datasets(env)
        for leaf in leaves(env):
            leaf.get_model_response = _ask

    async def open(self) -> dict[str, Any]:
        names = [
            getattr(each, "__name__", "")
            for rubric in rubrics(self._env.rubric)
            for each in getattr(rubric, "funcs", [])
        ]
        return {
            "version": importlib.import_module("verifiers").__version__,
            "kind": type(self._env).__name__,
            "tools": tools_of(self._env),
            "functions": list(dict.fromkeys(names)),
            "tasks": {split: len(rows) for split, rows in self._rows.items()},
        }

    async def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        return [self._task(split, row) for row in range(start, stop)]

    def episode(self, split: str, row: int, digest: str) -> ClassicEpisode:
        if split not in self._rows or not 0 <= row < len(self._rows[split]):
            raise TaskFault(f"the environment has no task {row} in its split {split}")
        if self._task(split, row)["digest"] != digest:
            raise TaskFault(f"task {row} of the split {split} is another one than when the data was prepared")
        return ClassicEpisode(self._env, self._rows[split][row])

    async def teardown(self) -> None:
        for leaf in leaves(self._env):
            await leaf._teardown()

    def _task(self, split: str, row: int) -> dict[str, Any]:
        found = self._rows[split][row]
        info = found.get("info")
        return {
            "messages": [plain(message) for message in found["prompt"]],
            "answer": str(found.get("answer") or ""),
            "info": json.loads(info) if isinstance(info, str) and info else info or {},
            "task": found["task"] if isinstance(found.get("task"), str) else "",
            "digest": hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16],
        }
