"""Environments: what answers the policy between its turns, and how episodes are played."""

from luffy.environments.environment import Environment, EnvironmentFactory
from luffy.environments.episode_state import EpisodeState
from luffy.environments.parsers import after_thinking, xml_fields

__all__ = ["Environment", "EnvironmentFactory", "EpisodeState", "after_thinking", "xml_fields"]
