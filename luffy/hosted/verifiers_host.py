"""Host of an environment of the package verifiers (its classic API); run by the interpreter that has the package.

    PYTHON verifiers_host.py          # JSON lines on standard input and output; `verifiers_process.py` speaks them

It imports the standard library and verifiers alone, never luffy. An environment plays its own `rollout`: where that
asks for a response of the model, the request waits here until the policy's turn arrives. So set-up, stop conditions,
trajectories and clean-up are the environment's own, whatever it overrides. Episodes share one event loop.
"""

import asyncio
import contextvars
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import sys
import threading
import traceback
from typing import Any, TextIO

WORKING_VERSIONS = "0.1.9 to 0.3.1"
_SEED = 0
_QUIT_S = 10.0
"""Limit of the environment's own teardown."""
_CLOSE_S = 5.0
"""Limit for an episode that is closed before its end to clean up after itself."""
_PLURALS = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})
"""Parameters by which verifiers recognises a reward function of a whole group."""
_PROVIDED = frozenset({"prompt", "completion", "answer", "state", "task", "info"})
_SPLITS = {"train": "get_dataset", "eval": "get_eval_dataset"}
_faults: contextvars.ContextVar[list[str]] = contextvars.ContextVar("faults")
"""Exceptions of reward functions during one scoring, which verifiers turns into 0.0."""


class Unusable(Exception):
    """The environment cannot be used here; the message is one line for the user."""


class TaskFault(Exception):
    """There is no such task, or it has changed; the message is one line for the user."""


class EpisodeFault(Exception):
    """The environment failed in one episode."""


class _NoModel:
    """Stands where an environment finds the client of its model."""

    def __getattr__(self, name: str) -> Any:
        return _used()


def load(environment: str, arguments: dict[str, Any]) -> Any:
    """The environment, with reward functions that report what they raise; Unusable where it cannot be used."""
    try:
        vf = importlib.import_module("verifiers")
    except ImportError as error:
        raise Unusable(f"{sys.executable} cannot import verifiers ({error}); install it there") from error
    try:
        load_environment = vf.load_environment
    except (AttributeError, ImportError):
        raise Unusable(
            f"verifiers {vf.__version__} has no load_environment; install one of the versions {WORKING_VERSIONS}"
        ) from None
    try:
        env = load_environment(environment, **arguments)
    except Exception as error:  # a package may raise anything while it loads
        raise Unusable(_line(error.__cause__ or error)) from error
    for leaf in leaves(env):
        _check(leaf, vf)
    for rubric in rubrics(env.rubric):
        _wrap(rubric, columns(env))
    return env


def leaves(env: Any) -> list[Any]:
    """The environments of a group, at any depth; a single environment alone."""
    members = getattr(env, "envs", None)
    return [leaf for member in members for leaf in leaves(member)] if isinstance(members, list) else [env]


def rubrics(rubric: Any) -> list[Any]:
    """The elementary rubrics of a rubric."""
    members = list(getattr(rubric, "rubrics", ()))
    members += [member.rubric for member in getattr(rubric, "env_map", {}).values()]
    return [rubric, *(leaf for member in members for leaf in rubrics(member))]


def columns(env: Any) -> set[str]:
    """Names of the columns of its data sets."""
    return {name for dataset in _datasets(env).values() for name in dataset.column_names}


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


def _check(env: Any, vf: Any) -> None:
    name = type(env).__name__
    if getattr(env, "message_type", "chat") != "chat":
        raise Unusable(f"{name} completes text; only environments of messages can be used")
    if type(env).get_model_response is not vf.Environment.get_model_response:
        raise Unusable(f"{name} calls its model itself (get_model_response), so no policy can take its place")


def _wrap(rubric: Any, known_columns: set[str]) -> None:
    """Have the functions of a rubric report what they raise; Unusable for one of a group, or one that lacks a value."""
    functions = getattr(rubric, "funcs", [])
    for place, function in enumerate(functions):
        name = getattr(function, "__name__", repr(function))
        parameters = inspect.signature(function).parameters
        if rubric._is_group_func(function):
            raise Unusable(
                f"the reward function {name} compares the responses of a group; each episode is scored alone"
            )
        known = _PROVIDED | set(rubric.class_objects)
        if hasattr(rubric, "score_objects"):
            known |= known_columns
        if not getattr(rubric, "score_object_providers", ()):
            missing = [each.name for each in parameters.values() if _is_required(each) and each.name not in known]
            if missing:
                raise Unusable(f"the reward function {name} needs `{missing[0]}`, which verifiers does not give it")
        functions[place] = reporting(function, name)


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not is_variadic


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
            _faults.get([]).append(f"the reward function {name} failed: {_line(error)}")
            raise
        return found

    called.__name__ = name
    return called


def tools_of(env: Any) -> list[dict[str, Any]]:
    """The tools in the form of OpenAI's protocol; Unusable where the members of a group have different ones."""
    found = [[_tool(tool) for tool in _defined_tools(leaf)] for leaf in leaves(env)]
    if any(tools != found[0] for tools in found):
        raise Unusable("the environments of its group have different tools; use them one by one")
    return found[0]


def _defined_tools(holder: Any) -> list[Any]:
    return list(getattr(holder, "tool_defs", None) or getattr(holder, "oai_tools", None) or [])


def _tool(tool: Any) -> dict[str, Any]:
    tool = tool if isinstance(tool, dict) else tool.model_dump()
    function = tool.get("function", tool)
    kept = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": kept}


def plain(message: Any) -> dict[str, str]:
    """Role and text of a message; EpisodeFault where it is more than text."""
    message = message if isinstance(message, dict) else message.model_dump()
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any(not isinstance(part.get("text"), str) for part in parts):
            raise EpisodeFault("a message of the environment holds more than text")
        content = "".join(part["text"] for part in parts)
    return {"role": str(message["role"]), "content": content or ""}


class HostedEpisode:
    """One rollout, which waits for the policy's turns."""

    def __init__(self, env: Any, row: dict[str, Any]) -> None:
        self.state: Any = None
        self._env = env
        self._seen: list[dict[str, str]] = [plain(message) for message in row["prompt"]]
        self._requests: asyncio.Queue[list[dict[str, str]] | None] = asyncio.Queue()
        """Messages of each request for a turn; None when the rollout has ended."""
        self._turns: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """The policy's turns; None: there will be no other."""
        self._rollout = asyncio.create_task(self._play(row))

    async def begin(self) -> list[dict[str, str]]:
        """Messages that follow the prompt's own."""
        return await self._asked() or []

    async def respond(self, turn: dict[str, Any]) -> list[dict[str, str]] | None:
        """The answer to a turn; None when the episode is over."""
        if self._rollout.done():
            raise EpisodeFault("the episode is over and takes no further turn")
        self._seen.append({"role": "assistant", "content": turn["text"]})
        self._turns.put_nowait(turn)
        return await self._asked()

    async def score(self) -> dict[str, Any]:
        """The reward and the value of every reward function by its name."""
        await self._end()
        state, faults = self.state, list[str]()
        _faults.set(faults)
        rubric = self._env.rubric
        takes_semaphore = "score_sem" in inspect.signature(rubric.score_group).parameters
        await rubric.score_group([state], **({"score_sem": _NoLimit()} if takes_semaphore else {}))
        if hasattr(rubric, "cleanup"):
            await rubric.cleanup(state)
        if faults:
            raise EpisodeFault(faults[0])
        metrics = {str(name): float(value) for name, value in (state["metrics"] or {}).items()}
        return {"reward": float(state["reward"]), "metrics": metrics}

    async def close(self) -> None:
        """End the rollout where it has not ended, in order if that does not take long."""
        self._turns.put_nowait(None)
        await asyncio.wait([self._rollout], timeout=_CLOSE_S)
        self._rollout.cancel()
        await asyncio.gather(self._rollout, return_exceptions=True)

    async def ask(self, state: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        """The policy's next turn, as a response of the model (takes the place of `get_model_response`)."""
        messages = [plain(message) for message in prompt]
        kept = messages[: len(self._seen)]
        if kept != self._seen:
            raise EpisodeFault("the environment rewrites earlier messages, and a response can only be extended")
        tools = {_tool(tool)["function"]["name"] for tool in _defined_tools_of(state)}
        if tools != {tool["function"]["name"] for tool in tools_of(self._env)}:
            raise EpisodeFault("the tools of this task are not those of the environment")
        answer = messages[len(self._seen) :]
        if len(state["trajectory"]) and any(message["role"] == "assistant" for message in answer):
            raise EpisodeFault("the environment writes turns of the policy")
        self._seen = messages
        self._requests.put_nowait(answer)
        turn = await self._turns.get()
        if turn is None:
            self._turns.put_nowait(None)
            # As verifiers has it where the context has no room for another turn: the rollout ends and is scored.
            raise importlib.import_module("verifiers").OverlongPromptError()
        return response(turn)

    async def _end(self) -> None:
        self._turns.put_nowait(None)
        await asyncio.wait([self._rollout])
        self._raise_fault()

    async def _asked(self) -> list[dict[str, str]] | None:
        """Wait for the next request, or None for the end of the rollout; raises what ended it."""
        found = await self._requests.get()
        if found is None:
            self._raise_fault()
        return found

    def _raise_fault(self) -> None:
        """Raise what ended the rollout; calls of tools that end it by `stop_errors` are the policy's doing."""
        if self._rollout.cancelled():
            raise EpisodeFault("the episode was cancelled")
        fault = self._rollout.exception() or self.state.get("error")
        if isinstance(fault, EpisodeFault):
            raise fault
        if fault is not None and not isinstance(fault, importlib.import_module("verifiers").ToolError):
            raise EpisodeFault(_line(fault)) from fault

    async def _play(self, row: dict[str, Any]) -> None:
        _asking.set(self)
        try:
            self.state = await self._env.rollout(row, client(), "policy", {})
        finally:  # later, when this task is done
            asyncio.get_running_loop().call_soon(self._requests.put_nowait, None)


class _NoLimit:
    """A semaphore that lets everyone pass."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


_asking: contextvars.ContextVar[HostedEpisode] = contextvars.ContextVar("asking")
"""The episode that runs."""


async def _ask(*args: Any, **kwargs: Any) -> Any:
    return await _asking.get().ask(*args, **kwargs)


def _defined_tools_of(state: Any) -> list[Any]:
    return list(state.get("tool_defs") or state.get("oai_tools") or [])


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


def response(turn: dict[str, Any]) -> Any:
    """A turn of the policy as what `get_model_response` returns in this version."""
    types = importlib.import_module("verifiers.types")
    calls = [{**call, "id": f"call_{place}"} for place, call in enumerate(turn["calls"])]
    reason = "length" if turn["is_cut"] else "tool_calls" if calls else "stop"
    if hasattr(types, "Response"):
        message = {"content": turn["text"], "finish_reason": reason, "is_truncated": turn["is_cut"]}
        return types.Response.model_validate(
            {"id": "turn", "created": 0, "model": "policy", "message": {**message, "tool_calls": calls or None}}
        )
    functions = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls
    ]
    message = {"role": "assistant", "content": turn["text"], "tool_calls": functions or None}
    choice = {"index": 0, "finish_reason": reason, "message": message}
    return types.ChatCompletion.model_validate(
        {"id": "turn", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]}
    )


class Host:
    """Answers requests about one environment."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._rows = _datasets(env)
        self._episodes: dict[int, HostedEpisode] = {}
        for leaf in leaves(env):
            leaf.get_model_response = _ask

    def describe(self) -> dict[str, Any]:
        """What the other side has to know before the first episode."""
        names = [getattr(each, "__name__", "") for rubric in rubrics(self._env.rubric) for each in _functions(rubric)]
        return {
            "version": importlib.import_module("verifiers").__version__,
            "kind": type(self._env).__name__,
            "tools": tools_of(self._env),
            "functions": list(dict.fromkeys(names)),
            "tasks": {split: len(rows) for split, rows in self._rows.items()},
        }

    async def answer(self, op: str, request: dict[str, Any]) -> Any:
        """The reply to a request; EpisodeFault, TaskFault and whatever an environment raises are passed on."""
        match op:
            case "tasks":
                return [self._task(request["split"], row) for row in range(request["start"], request["stop"])]
            case "reset":
                return await self._reset(request)
            case "respond":
                return await self._episodes[request["episode"]].respond(request)
            case "score":
                return await self._episodes[request["episode"]].score()
            case "close":
                episode = self._episodes.pop(request["episode"], None)
                return await episode.close() if episode else None
        raise AssertionError(f"unknown request {op}")

    async def teardown(self) -> None:
        """The environment's own teardown."""
        for leaf in leaves(self._env):
            await leaf._teardown()

    async def _reset(self, request: dict[str, Any]) -> Any:
        split, row = request["split"], request["row"]
        if split not in self._rows or not 0 <= row < len(self._rows[split]):
            raise TaskFault(f"the environment has no task {row} in its split {split}")
        if self._task(split, row)["digest"] != request["digest"]:
            raise TaskFault(f"task {row} of the split {split} is another one than when the data was prepared")
        episode = self._episodes[request["episode"]] = HostedEpisode(self._env, self._rows[split][row])
        return await episode.begin()

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


def _functions(rubric: Any) -> list[Any]:
    return list(getattr(rubric, "funcs", []))


class Channel:
    """JSON lines in and out; the environment's own output goes to standard error."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), encoding="utf-8")
        self._replies: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None when the other side has gone."""
        line = self._requests.readline()
        return json.loads(line) if line else None

    def send(self, number: int, **reply: Any) -> None:
        """Send a reply."""
        self._replies.write(json.dumps({"id": number, **reply}, default=str) + "\n")
        self._replies.flush()


async def serve(host: Host, channel: Channel) -> None:
    """Answer requests until the other side goes."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    tasks: dict[int, asyncio.Task[None]] = {}

    def take(request: dict[str, Any] | None) -> None:
        if request is None:
            over.set()
        elif request["op"] == "cancel":
            if request["target"] in tasks:
                tasks[request["target"]].cancel()
            channel.send(request["id"], ok=None)
        else:
            task = tasks[request["id"]] = loop.create_task(_answered(host, channel, request))
            task.add_done_callback(lambda _: tasks.pop(request["id"], None))

    def read() -> None:
        while (request := channel.receive()) is not None:
            loop.call_soon_threadsafe(take, request)
        threading.Timer(_QUIT_S, os._exit, [1]).start()  # in case the environment hangs
        loop.call_soon_threadsafe(take, None)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()
    await host.teardown()


async def _answered(host: Host, channel: Channel, request: dict[str, Any]) -> None:
    try:
        channel.send(request["id"], ok=await host.answer(request["op"], request))
    except TaskFault as error:
        channel.send(request["id"], task=str(error))
    except Exception as error:  # noqa: BLE001 - an environment may raise anything, which ends its own episode alone
        if not isinstance(error, EpisodeFault) or error.__cause__ is not None:
            traceback.print_exc()
        channel.send(request["id"], fault=str(error) if isinstance(error, EpisodeFault) else _line(error))


def _line(error: BaseException) -> str:
    cause = f" ({_line(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{cause}"


def _seed() -> None:
    """Give an environment that draws its tasks without a seed the same tasks in every process."""
    random.seed(_SEED)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(_SEED)


def main() -> None:
    """Load the environment that the first line names, and serve it."""
    channel = Channel()
    request = channel.receive()
    if request is None:
        return
    # Nothing beside this file, or in the working directory, may shadow an installed package.
    sys.path[:] = [*sys.path[1:], request["directory"]]
    _seed()
    try:
        host = Host(load(request["environment"], request["arguments"]))
        channel.send(request["id"], ok=host.describe())
    except (Unusable, EpisodeFault) as error:
        if error.__cause__ is not None:
            traceback.print_exc()
        channel.send(request["id"], refused=str(error))
        return
    asyncio.run(serve(host, channel))
    sys.stdout.flush()
    os._exit(0)  # threads of the environment may never end


if __name__ == "__main__":
    main()
