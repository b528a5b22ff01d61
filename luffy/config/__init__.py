"""Typed, strict configuration. Imports without torch."""

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import load_experiment
from luffy.config.shipped import available_presets
from luffy.config.stage_kinds import STAGE_KINDS, STAGE_ORDER, StageName

__all__ = ["STAGE_KINDS", "STAGE_ORDER", "ExperimentConfig", "StageName", "available_presets", "load_experiment"]
