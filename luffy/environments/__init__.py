"""Environments, which answer the policy between its turns, and the players of episodes."""

from luffy.environments.environment import Environment, EnvironmentFactory
from luffy.environments.episode_state import EpisodeState
from luffy.environments.parsers import after_thinking, xml_fields
from luffy.environments.tool_runner import ToolError

__all__ = ["Environment", "EnvironmentFactory", "EpisodeState", "ToolError", "after_thinking", "xml_fields"]
