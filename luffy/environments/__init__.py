"""Environments, which answer the policy between its turns, and the players of episodes."""

from luffy.environments.environment import Environment, EnvironmentFactory, EpisodeState, ToolError
from luffy.environments.transcript import after_thinking, xml_fields

__all__ = ["Environment", "EnvironmentFactory", "EpisodeState", "ToolError", "after_thinking", "xml_fields"]
