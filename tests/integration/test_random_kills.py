"""`kill -9` of the flow, of a stage and of the Prefect server at random moments of exp_configs/smoke.yaml.

tests/campaigns/random_kills.py does the same a hundred times over a pipeline that learns.
"""

from itertools import islice
from random import Random

import pytest
from campaigns.random_kills import VICTIMS, Kill, Pipeline, differences, disturb, draws, promised
from flow_process import UNDISTURBED
from support.patience import PATIENCE_S
from support.prefect_api import place_empty_database

pytestmark = pytest.mark.slow
PLANNED = list(islice(draws(Random(30), mean_s=7.0), 3))
"""One of each victim."""


def run_to_its_end(pipeline: Pipeline, before: int) -> list[Kill]:
    """Start it again and again, killed as planned for those after the first `before` kills."""
    kills: list[Kill] = []
    while True:
        attempt = disturb(pipeline, iter(PLANNED[before + len(kills) :]), patience_s=PATIENCE_S)
        print(attempt)
        assert attempt.problems == ()
        kills += attempt.kills
        if attempt.exit_code == 0:
            return kills


def test_kills_at_random_moments_give_the_result_of_an_undisturbed_run(undisturbed, tmp_path):
    (config, *overrides), kills, chains = UNDISTURBED, [], 0
    while len(kills) < len(PLANNED):  # a second chain only where the first was too fast for all of them
        pipeline, chains = Pipeline(tmp_path / str(chains), config, tuple(overrides)), chains + 1
        place_empty_database(pipeline.workspace / "prefect")
        kills += run_to_its_end(pipeline, len(kills))
        assert differences(promised(pipeline.workspace), promised(undisturbed[0])) == []
    assert [kill.victim for kill in kills] == [victim for _, victim in PLANNED]
    assert {kill.victim for kill in kills} == set(VICTIMS)
