"""What `flows/pipeline_form.py` is asked for on a command line: the form that says what the file says."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from luffy.flows.front import Question, Work
from luffy.config.form import experiment_of_form, form_of_file

_EXAMPLES = """\
  python flows/pipeline_form.py exp_configs/arithmetic.yaml
  python flows/pipeline_form.py exp_configs/arithmetic.yaml rl.steps=400 seed=1
"""


def _work(options: argparse.Namespace) -> Work:
    return Work(experiment_of_form(form_of_file(Path(options.config), options.overrides)))


def _told(options: argparse.Namespace) -> Mapping[str, object]:
    return {"experiment": form_of_file(Path(options.config), options.overrides)}


QUESTION = Question(examples=_EXAMPLES, work=_work, told=_told)
