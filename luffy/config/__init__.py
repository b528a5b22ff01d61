"""Typed, strict configuration. Imports without torch."""

from luffy.config.experiment import STAGE_ORDER, ExperimentConfig, StageName
from luffy.config.load import available_presets, load_experiment

__all__ = ["STAGE_ORDER", "ExperimentConfig", "StageName", "available_presets", "load_experiment"]
