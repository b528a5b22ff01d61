"""Opens environments from their configuration: `open_environment` and `instructions_of`.

A new kind needs a config class in `luffy/config/environment.py`, added to its union, and a function registered here.
"""

import asyncio
import inspect
from collections.abc import Mapping
from functools import singledispatch
from typing import cast

from luffy.config.environment import (
    CustomEnvironment,
    EnvironmentConfig,
    GuessNumberEnvironment,
    MixtureEnvironment,
    SingleEnvironment,
    ToolsEnvironment,
    VerifiersEnvironment,
)
from luffy.environments.call_formats import CALL_FORMATS, CallSyntax
from luffy.environments.environment import Environment, EnvironmentFactory
from luffy.environments.guess_number import GuessingGame
from luffy.environments.limited_environment import with_time_limit
from luffy.environments.mixed_episode import MixedEpisode
from luffy.environments.python_tool import SandboxOfLoop, python_tool
from luffy.environments.tool_functions import Tool, load_tools
from luffy.environments.tool_runner import ToolRunner
from luffy.environments.tools import ToolEpisode
from luffy.environments.verifiers_episode import VerifiersEpisode, hosted_tools
from luffy.errors import ConfigError
from luffy.hosted.verifiers_process import shared_process
from luffy.import_paths import imported_setting
from luffy.sandbox import open_sandbox

_TOOLS = "environment.tools"
_FACTORY = "environment.factory"
_AWAITED = ("reset", "respond", "close")


def open_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Return the factory that makes an environment per episode; ConfigError when the user's code cannot be used."""
    return _factory(config)


def instructions_of(config: EnvironmentConfig) -> str:
    """Return the text that the system message of every prompt ends with, "" for none; ConfigError as above."""
    return _instructions(config)


def instructions_by_source(config: EnvironmentConfig) -> dict[str | None, str]:
    """Return `instructions_of` for each data source that a mixture plays; without a mixture, for all under None."""
    if not isinstance(config, MixtureEnvironment):
        return {None: _instructions(config)}
    found = {name: _instructions(part.environment) for name, part in config.parts.items()}
    return {source: found[name] for source, name in config.sources.items()}


def syntax_of_results(config: SingleEnvironment) -> CallSyntax | None:
    """How the environment writes the results of tools; None where it has no tools of its own."""
    if isinstance(config, VerifiersEnvironment) and not shared_process(config).description.tools:
        return None
    return CALL_FORMATS[config.calls] if isinstance(config, ToolsEnvironment | VerifiersEnvironment) else None


@singledispatch
def _factory(config: EnvironmentConfig) -> EnvironmentFactory:
    raise AssertionError(f"no environment is registered for {type(config).__name__}")


@_factory.register
def _tools(config: ToolsEnvironment) -> EnvironmentFactory:
    tools = _loaded(config)
    if "python" in config.tools:
        asyncio.run(open_sandbox(config.sandbox))  # refused now, not in the first episode
    CALL_FORMATS[config.calls].instructions(tools)  # refuses tools that cannot be called in this format
    runner = ToolRunner()
    return lambda: ToolEpisode(config, tools, runner)


def _loaded(config: ToolsEnvironment) -> Mapping[str, Tool]:
    sandbox = SandboxOfLoop(config.sandbox)
    return load_tools(config.tools, _TOOLS, {"python": python_tool(sandbox.open_session)})


@_factory.register
def _guess_number(config: GuessNumberEnvironment) -> EnvironmentFactory:
    return GuessingGame


@_factory.register
def _custom(config: CustomEnvironment) -> EnvironmentFactory:
    made = imported_setting(config.factory, _FACTORY)
    if not isinstance(made, type):
        raise ConfigError(f"{_FACTORY}: {config.factory} is a {type(made).__name__}; it has to be a class")
    for name in _AWAITED:
        if not inspect.iscoroutinefunction(getattr(made, name, None)):
            raise ConfigError(
                f"{_FACTORY}: {config.factory} needs `async def {name}`; see luffy.environments.Environment"
            )
    if not callable(counts := getattr(made, "counts", None)) or inspect.iscoroutinefunction(counts):
        raise ConfigError(f"{_FACTORY}: {config.factory} needs `def counts`; see luffy.environments.Environment")
    try:
        inspect.signature(made).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"{_FACTORY}: {config.factory} does not take environment.options: {error}") from None
    make = _refused_at_load(config, lambda: cast(Environment, made(**config.options)))
    return lambda: with_time_limit(make(), config.timeout_s)


def _refused_at_load(config: CustomEnvironment, make: EnvironmentFactory) -> EnvironmentFactory:
    """`make`, after it has made one environment as a test; ConfigError when the user's own code fails then."""
    try:
        dict(make().counts())
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"{_FACTORY}: {config.factory} fails before the first episode: {type(error).__name__}: {error}"
        ) from error
    return make


@_factory.register
def _verifiers(config: VerifiersEnvironment) -> EnvironmentFactory:
    tools = hosted_tools(shared_process(config).description, config.calls)
    CALL_FORMATS[config.calls].instructions(tools)  # refuses tools that cannot be called in this format
    return lambda: VerifiersEpisode(shared_process(config), CALL_FORMATS[config.calls], tools)


@_factory.register
def _mixture(config: MixtureEnvironment) -> EnvironmentFactory:
    parts = {name: open_environment(part.environment) for name, part in config.parts.items()}
    sources = config.sources
    return lambda: MixedEpisode(parts, sources)


@singledispatch
def _instructions(config: EnvironmentConfig) -> str:
    raise AssertionError(f"no environment is registered for {type(config).__name__}")


@_instructions.register
def _instructions_of_tools(config: ToolsEnvironment) -> str:
    return CALL_FORMATS[config.calls].instructions(_loaded(config)) if config.describe else ""


@_instructions.register
def _instructions_of_game(config: GuessNumberEnvironment) -> str:
    return ""  # the prompt has the rules


@_instructions.register
def _instructions_of_custom(config: CustomEnvironment) -> str:
    return config.instructions


@_instructions.register
def _instructions_of_verifiers(config: VerifiersEnvironment) -> str:
    tools = hosted_tools(shared_process(config).description, config.calls)
    return CALL_FORMATS[config.calls].instructions(tools) if config.describe and tools else ""
