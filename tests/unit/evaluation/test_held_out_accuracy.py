"""A measurement comes from the weights of one version, and says what each suite came to."""

import random
from dataclasses import replace

import pytest
from synthetic.finished_chain import _record
from synthetic.result_rows import result_row

from luffy.errors import LuffyError
from luffy.evaluation.held_out_accuracy import OneVersionEngine, measure_suites, validation_metrics
from luffy.evaluation.requests import Suite
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.types import FinishReason

PARAMS = SamplingParams(1.0, 4, (), stop=("\n",))


class Versions:
    """An engine whose weights change while it answers."""

    def __init__(self, *versions):
        self._versions = versions
        self.asked = []

    def generate(self, requests, params):
        self.asked.append(params)
        length = len(self._versions)
        return [Completion((1,) * length, (0.0,) * length, FinishReason.LENGTH, self._versions) for _ in requests]


def test_an_answer_of_other_weights_is_refused():
    requests = [RolloutRequest((1,), seed=0)]
    assert len(OneVersionEngine(Versions(3, 3), 3).generate(requests, PARAMS)) == 1
    with pytest.raises(LuffyError, match=r"validation of version 3 was answered by versions \[3, 4\]"):
        OneVersionEngine(Versions(3, 4), 3).generate(requests, PARAMS)


def test_stop_texts_are_left_to_the_client():
    engine = Versions(0)
    OneVersionEngine(engine, 0).generate([RolloutRequest((1,), seed=0)], PARAMS)
    assert engine.asked == [replace(PARAMS, stop=())]


def test_a_measurement_that_a_kill_interrupted_while_it_tidied_up_leaves_no_log(tmp_path):
    (row,) = rows = (result_row([_record("a/b", "validation", 0, 0, 1.0, random.Random(0))], 0.95),)
    write_results(tmp_path / "step_000003.json", EvaluationResults(checkpoint="step 3", confidence=0.95, rows=rows))
    log = tmp_path / "step_000003.a%2Fb.open"
    log.write_bytes(b"")
    evaluator = None  # not needed: everything is measured
    assert measure_suites(evaluator, [Suite(row.suite, [])], 0.95, tmp_path, 3) == rows
    assert not log.exists()


def test_the_mean_is_over_suites_of_any_size():
    luck = random.Random(0)
    rows = [
        result_row([_record(suite, "validation", place, 0, chance, luck) for place in range(count)], 0.95)
        for suite, count, chance in (("small", 2, 1.0), ("large", 6, 0.0))
    ]
    metrics = validation_metrics(rows, version=7)
    assert metrics["val/accuracy"] == 0.5
    assert (metrics["val/small/accuracy"], metrics["val/large/accuracy"]) == (1.0, 0.0)
    assert (metrics["val/small/num_problems"], metrics["val/large/num_problems"]) == (2, 6)
    assert metrics["val/weight_version"] == 7
    assert 0 < metrics["val/small/accuracy_low"] < metrics["val/small/accuracy_high"] == 1
