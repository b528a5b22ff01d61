"""What `flows/prepare_data.py` is asked for: the data stage of an experiment, and nothing else."""

import argparse

from luffy.flows.front import Question, Work
from luffy.config import ExperimentConfig, load_experiment

_EXAMPLES = """\
  python flows/prepare_data.py exp_configs/arithmetic.yaml
  python flows/prepare_data.py exp_configs/own_data.yaml data.max_prompt_tokens=2048
"""


def data_alone(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment cut after `prepare_data`, whose result is the one that the whole chain reads."""
    return config.model_copy(update={"stages": ("prepare_data",)})


def _work(options: argparse.Namespace) -> Work:
    return Work(data_alone(load_experiment(options.config, options.overrides)))


QUESTION = Question(examples=_EXAMPLES, work=_work)
