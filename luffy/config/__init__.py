"""Typed, strict configuration. Imports without torch."""

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import load_experiment
from luffy.config.shipped import available_presets
from luffy.config.stage_kinds import CHAIN_KINDS, STAGE_KINDS, StageName

__all__ = ["CHAIN_KINDS", "STAGE_KINDS", "ExperimentConfig", "StageName", "available_presets", "load_experiment"]
