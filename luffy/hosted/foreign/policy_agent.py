"""The policy as the agent of an environment of verifiers 0.4.0: a harness, and the client at the end of its calls."""

import contextlib
import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any, Protocol

from luffy.hosted.foreign.plain_messages import Turn, chat_completion

HARNESS = "luffy_policy_harness"
"""The id by which an environment's configuration names the harness."""


class Seat(Protocol):
    """An episode that has the policy's turns."""

    is_ended: bool
    """Whether a turn was requested after the policy's last one."""

    async def next_turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Turn | None:
        """The policy's turn in the conversation `messages`; None if there is no other."""
        ...


def install_policy(seats: Mapping[str, Seat]) -> None:
    """Give verifiers the harness and the client; `seats` has the episodes by the names of their models."""
    harness = _harness_class(seats)
    plugin = sys.modules[HARNESS] = types.ModuleType(HARNESS)
    vars(plugin).update({harness.__name__: harness, "__all__": [harness.__name__]})
    client = _client_class(seats)
    server: Any = importlib.import_module("verifiers.v1.interception.server")
    server.resolve_client = lambda config: client()


def _harness_class(seats: Mapping[str, Seat]) -> type:
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


def _client_class(seats: Mapping[str, Seat]) -> type:
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
        """Never: nothing is shortened."""
        return False
