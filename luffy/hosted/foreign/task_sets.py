"""Environments of verifiers 0.4.0: a task set, and a single agent that plays its tasks.

The policy is that agent. Its harness runs verifiers' own chat loop, that of the harness `null`, but in this process;
for each turn it asks verifiers' interception server, whose client is the policy. So set-up, tool servers, stop
conditions, limits, traces and scoring are verifiers' own.
"""

import contextlib
import hashlib
import importlib
import itertools
import json
import math
import sys
import types
from collections.abc import Mapping
from typing import Any

from luffy.hosted.foreign.exchange import (
    EpisodeFault,
    PlainMessage,
    TaskFault,
    Turn,
    TurnExchange,
    Unusable,
    chat_completion,
    line_of,
    plain,
    plain_tool,
)

HARNESS = "luffy_policy_harness"
"""The id by which an environment's configuration names the harness."""
_TASKSET = "taskset"
_EVAL, _SELECT = "eval", "select"
"""Keys of the arguments that are not in the environment's own configuration."""
_LOCAL = {"type": "subprocess"}
"""Where task and tools run unless the arguments say otherwise; verifiers' own default is a remote service."""
_MODEL = "policy"


def load_task_set(environment: str, arguments: dict[str, Any]) -> "TaskSetEnvironment":
    """The environment with the policy as its agent; Unusable if it cannot be used."""
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    except ImportError as error:
        version = importlib.import_module("verifiers").__version__
        raise Unusable(f"verifiers {version} has neither load_environment nor verifiers.v1 ({error})") from error
    own = dict(arguments)
    evaluation, select = _mapping(own.pop(_EVAL, None), _EVAL), _mapping(own.pop(_SELECT, None), _SELECT)
    unknown = sorted(evaluation.keys() - {_TASKSET, _SELECT})
    if unknown:
        raise Unusable(f"arguments.eval: unknown key {unknown[0]!r}; it takes taskset and select")
    own[_TASKSET] = {**_mapping(own.get(_TASKSET), _TASKSET), "id": environment}
    episodes: dict[str, TaskEpisode] = {}
    install_policy(episodes)
    try:
        agent = importlib.import_module("verifiers.v1").AgentConfig
        fields = loaders.env_config_type(environment, own.get("id") or "").model_fields
        roles = [name for name, field in fields.items() if isinstance(field.default, agent)]
        if len(roles) != 1:
            raise Unusable(f"it is played by {len(roles)} agents ({', '.join(roles)}), and the policy can be only one")
        (role,) = roles
        seat = {"runtime": _LOCAL, **_mapping(own.get(role), role), "harness": {"id": HARNESS}}
        env = loaders.load_environment(loaders.resolve_env_config({**own, role: seat}))
        splits = {"train": _tasks(env.taskset, select)}
        if evaluation:
            values = own[_TASKSET] | _mapping(evaluation.get(_TASKSET), f"{_EVAL}.{_TASKSET}")
            config = loaders.taskset_config_type(environment).model_validate(values)
            chosen = _mapping(evaluation.get(_SELECT), f"{_EVAL}.{_SELECT}")
            splits["eval"] = _tasks(loaders.load_taskset(config), chosen)
    except Unusable:
        raise
    except Exception as error:  # a package may raise anything while it loads
        raise Unusable(line_of(error)) from error
    return TaskSetEnvironment(env, splits, episodes)


def _mapping(found: Any, key: str) -> dict[str, Any]:
    if not isinstance(found, dict | None):
        raise Unusable(f"arguments.{key}: {found!r} is no mapping")
    return found or {}


def _tasks(taskset: Any, select: Mapping[str, Any]) -> list[Any]:
    view = taskset.select(importlib.import_module("verifiers.v1.configs.select").SelectConfig(**select))
    if not view.bounded:
        raise Unusable(
            f"{type(taskset).__name__} has no last task; set arguments.select, for example {{limit: 1000}} (and "
            "arguments.eval.select for the split eval)"
        )
    return list(view)


class TaskEpisode:
    """One episode, with the policy in the seat of its agent; a `HostedEpisode`."""

    def __init__(self, env: Any, task: Any, name: str, tools: list[dict[str, Any]] | None) -> None:
        """`name`: name of the episode's model. `tools`: tools that every task has; None: not known yet."""
        self.tools = tools
        self.is_ended = False
        """Whether a turn was requested after the policy's last one."""
        self._env = env
        self._task = task
        self._name = name
        self._fault: EpisodeFault | None = None
        self._result: dict[str, Any] = {}
        self.exchange = TurnExchange(_prompt(task))
        self.running = self.exchange.start(self._play())
        self.expected: str | None = None
        """The digest that the task should have."""

    async def begin(self) -> list[PlainMessage]:
        messages = await self.exchange.begin()
        if self.expected not in (None, _digest(self._task, self.exchange.seen)):
            raise TaskFault("the task is another one than when the data was prepared")
        return messages

    async def score(self) -> dict[str, Any]:
        await self.exchange.finish()
        return self._result

    async def next_turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Turn | None:
        """The policy's turn in the conversation `messages`; None if there is no other."""
        found = [plain_tool(tool) for tool in tools]
        if self.tools is not None and found != self.tools:
            raise self._noted(EpisodeFault("the tools of this task are not those of the environment"))
        self.tools = found
        try:
            turn = await self.exchange.ask([plain(message) for message in messages])
        except EpisodeFault as fault:
            raise self._noted(fault) from None
        self.is_ended = turn is None
        return turn

    def _noted(self, fault: EpisodeFault) -> EpisodeFault:
        """The fault, which verifiers will wrap in errors of its own."""
        self._fault = self._fault or fault
        return fault

    async def _play(self) -> None:
        clients = importlib.import_module("verifiers.v1.clients")
        context = clients.ModelContext(model=self._name, client=clients.EvalClientConfig())
        episode = await self._env.run_episode(self._task, context)
        if self._fault is not None:
            raise self._fault
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise EpisodeFault(f"{errors[0].type}: {' '.join(errors[0].message.split())[:500]}")
        if len(episode.traces) != 1:
            raise EpisodeFault(f"its agent ran {len(episode.traces)} times, and a response is one conversation")
        if episode.traces[0].response_rewrites:
            raise EpisodeFault("the environment rewrites turns of the policy")
        trace, metrics = episode.traces[0], dict[str, float]()
        for name, found in [*trace.metrics.items(), *trace.rewards.items()]:
            value = getattr(found, "score", found)
            if value is None:
                raise EpisodeFault(f"{name} was not computed" + (" in time" if trace.is_timeout else ""))
            if not math.isfinite(value):
                raise EpisodeFault(f"{name} returned {value!r}")
            metrics[str(name)] = float(value)
        self._result = {"reward": float(trace.reward), "metrics": metrics}


def _prompt(task: Any) -> list[PlainMessage] | None:
    """The messages before the first turn; None if the environment opens the conversation."""
    data = task.data
    if data.prompt is None:
        return None
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    return [plain(message) for message in [*system, *prompt]]


class TaskSetEnvironment:
    """A task set with the policy as its agent; a `HostedEnvironment`."""

    def __init__(self, env: Any, splits: Mapping[str, list[Any]], episodes: dict[str, TaskEpisode]) -> None:
        self._env = env
        self._splits = splits
        self._episodes = episodes
        """Running episodes by the names of their models."""
        self._numbers = itertools.count()
        self._tools: list[dict[str, Any]] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> dict[str, Any]:
        """Also starts the services that episodes share, and begins the first task to see its tools."""
        tasks = next((tasks for tasks in self._splits.values() if tasks), [])
        try:
            await self._stack.enter_async_context(self._env.serving())
            if tasks:
                self._tools = (await self._begun(tasks[0])).tools
        except Exception as error:
            await self._stack.aclose()
            raise Unusable(str(error) if isinstance(error, EpisodeFault) else line_of(error)) from error
        hooks = [hook for task in tasks[:1] for kind in ("reward", "metric") for hook in task.hooks(kind)]
        judges = [judge.reward_name for task in tasks[:1] for judge in task.plugged_judges()]
        return {
            "version": importlib.import_module("verifiers").__version__,
            "kind": type(self._env).__name__,
            "tools": self._tools or [],
            "functions": list(dict.fromkeys([*(hook.__name__ for hook in hooks), *judges])),
            "tasks": {split: len(tasks) for split, tasks in self._splits.items()},
        }

    async def tasks(self, split: str, start: int, stop: int) -> list[dict[str, Any]]:
        """Tasks of a split. One that the environment opens is begun, for its first messages."""
        return [await self._described(task) for task in self._splits[split][start:stop]]

    def episode(self, split: str, row: int, digest: str) -> TaskEpisode:
        tasks = self._splits.get(split, [])
        if not 0 <= row < len(tasks):
            raise TaskFault(f"the environment has no task {row} in its split {split}")
        episode = self._new(tasks[row])
        episode.expected = digest
        return episode

    async def teardown(self) -> None:
        await self._stack.aclose()

    def _new(self, task: Any) -> TaskEpisode:
        name = f"{_MODEL}/{next(self._numbers)}"
        episode = self._episodes[name] = TaskEpisode(self._env, task, name, self._tools)
        episode.running.add_done_callback(lambda _: self._episodes.pop(name))
        return episode

    async def _begun(self, task: Any) -> TaskEpisode:
        """An episode up to its first request, ended there."""
        episode = self._new(task)
        try:
            await episode.begin()
        finally:
            await episode.exchange.cancel()
        return episode

    async def _described(self, task: Any) -> dict[str, Any]:
        prompt = _prompt(task)
        if prompt is None:
            prompt = (await self._begun(task)).exchange.seen
        data = task.data.model_dump(mode="json", exclude_none=True)
        common = importlib.import_module("verifiers.v1").TaskData.model_fields
        return {
            "messages": prompt,
            "answer": str(data.get("answer", "")),
            "info": {name: value for name, value in data.items() if name not in common and name != "answer"},
            "task": data.get("name") or "",
            "digest": _digest(task, prompt),
        }


def _digest(task: Any, prompt: list[PlainMessage]) -> str:
    """Digest of the task's content and its first messages; its position does not count."""
    data = task.data.model_dump(mode="json", exclude_none=True, exclude={"idx"})
    return hashlib.sha256(json.dumps([data, prompt], sort_keys=True).encode()).hexdigest()[:16]


def install_policy(seats: Mapping[str, TaskEpisode]) -> None:
    """Give verifiers the harness and the client; `seats` has the episodes by the names of their models."""
    harness = _harness_class(seats)
    plugin = sys.modules[HARNESS] = types.ModuleType(HARNESS)
    vars(plugin).update({harness.__name__: harness, "__all__": [harness.__name__]})
    client = _client_class(seats)
    server: Any = importlib.import_module("verifiers.v1.interception.server")
    server.resolve_client = lambda config: client()


def _harness_class(seats: Mapping[str, TaskEpisode]) -> type:
    vf = importlib.import_module("verifiers.v1")
    core, mcp, compaction = (
        importlib.import_module(f"verifiers.v1.harnesses.utils.{name}") for name in ("core", "mcp", "compaction")
    )
    for module in (mcp, compaction):  # verifiers writes the three into one script
        vars(core).update({name: found for name, found in vars(module).items() if not name.startswith("__")})
    openai = importlib.import_module("openai")
    program_result = importlib.import_module("verifiers.v1.runtimes").ProgramResult
    wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    options = types.SimpleNamespace(tool_interception_url="", bash=False, edit=False, search=False)

    class PolicyHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[name-defined]
        """The chat loop of verifiers' harness `null`, in this process."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
        ) -> Any:
            """Play until a turn of the policy has no call of a tool, or there is no other turn."""
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(wire, prompt or [])]
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            async with contextlib.AsyncExitStack() as stack:
                model = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
                stack.push_async_callback(model.close)
                tools, dispatch, connections = await mcp.connect_mcp(servers, stack)
                asker = _Asker(model, ctx.model, tools)
                try:
                    await core.run_chat_loop(options, asker, messages, dispatch, connections, None)
                except openai.APIStatusError as error:
                    if trace.stop_condition is None and not seats[ctx.model].is_ended:
                        return program_result(1, "", str(error))
            return program_result(0, "", "")

    PolicyHarness.__module__ = HARNESS
    return PolicyHarness


def _client_class(seats: Mapping[str, TaskEpisode]) -> type:
    vf = importlib.import_module("verifiers.v1")
    model_error = importlib.import_module("verifiers.v1.errors").model_error

    class PolicyClient(vf.Client):  # type: ignore[name-defined]
        """The model's end of the chain."""

        async def get_response(self, dialect: Any, body: Mapping[str, Any], *_: Any, **__: Any) -> Any:
            """The policy's turn, or an error that ends the conversation if there is no other."""
            turn = await seats[body["model"]].next_turn(body["messages"], body.get("tools") or [])
            if turn is None:
                raise model_error("the response has reached its limit", status_code=400)
            raw = chat_completion(turn)
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    return PolicyClient


class _Asker:
    """Replaces the object with which verifiers' chat loop calls its model and shortens long conversations."""

    enabled, threshold = False, None

    def __init__(self, model: Any, name: str, tools: list[dict[str, Any]]) -> None:
        self._model = model
        self._options = {"model": name, **({"tools": tools} if tools else {})}

    async def complete(self, messages: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
        """The response of the model, by way of the interception server, and the conversation before it."""
        return await self._model.chat.completions.create(messages=messages, **self._options), messages

    def reached(self, *_: Any) -> bool:
        return False
