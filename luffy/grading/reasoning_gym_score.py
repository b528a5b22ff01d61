"""Answers scored by the package reasoning-gym itself; imported in grading workers alone."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from luffy.config.grading import GYM_ENTRY


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """The package's score of an answer to the entry in `extra_info`, between 0 and 1."""
    known = extra_info[GYM_ENTRY]
    dataset = _dataset(known["task"], json.dumps(known["options"]))
    return float(dataset.score_answer(solution_str, known["entry"]))


@lru_cache(maxsize=64)
def _dataset(task: str, options: str) -> ProceduralDataset:
    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(options))
