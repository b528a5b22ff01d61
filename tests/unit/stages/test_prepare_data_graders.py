"""Rows that name their graders, judged in the processes of the stage."""

import json
from collections.abc import Iterator

import pytest
from synthetic.endpoint import CHAT, Endpoint, completion
from synthetic.preparation import prepare, written

import luffy.data.parquet as parquet
from luffy.config.grading import GradingConfig
from luffy.data.parquet import read_prompts
from luffy.errors import DataError
from luffy.grading.pool import JUDGE_CACHE

OWN = "def even(data_source, solution_str, ground_truth, extra_info=None):\n    return int(solution_str) % 2 == 0\n"


@pytest.fixture
def judge() -> Iterator[Endpoint]:
    """Takes `yes` for right."""

    def verdict(path, body):
        is_right = "[Answer]\nyes" in body["messages"][0]["content"]
        return completion(f"VERDICT: {'CORRECT' if is_right else 'INCORRECT'}")

    endpoint = Endpoint(verdict, (CHAT,))
    yield endpoint
    endpoint.close()


def row(number: int, style: str, truth: str, *replies: str) -> dict[str, object]:
    return {
        "data_source": "t",
        "prompt": f"Question {number} of {style}",
        "traces": [{"text": reply} for reply in replies],
        "reward_model": {"style": style, "ground_truth": truth},
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_grader_works_in_every_process(tmp_path, monkeypatch, judge, workers):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_graders.py").write_text(OWN)
    named = {
        "parity": {"kind": "custom", "function": "own_graders:even"},
        "asked": {"kind": "judge", "url": f"{judge.url}/v1", "model": "m"},
    }
    rows = [
        each
        for n in range(3)
        for each in (
            row(n, "rule", "2", "\\boxed{2}", "\\boxed{3}"),
            row(n, "choice", "C", "The answer is (B)", "The answer is (C)"),
            row(n, "parity", "even", "4", "5"),
            row(n, "asked", "yes", "no", "yes"),
        )
    ]
    grading = GradingConfig.model_validate_json(json.dumps({"named": named}))
    prepare(tmp_path / "out", workers, grading, train=written(tmp_path / "rows.jsonl", rows))
    prompts = read_prompts(tmp_path / "out" / "train.parquet")
    assert [(prompt.grader, [trace.text for trace in prompt.traces]) for prompt in prompts] == [
        (None, ["\\boxed{2}"]),
        ("choice", ["The answer is (C)"]),
        ("parity", ["4"]),
        ("asked", ["yes"]),
    ] * 3
    assert len(judge.asked) == 6 == len(list((tmp_path / "out" / JUDGE_CACHE).glob("*.json")))


@pytest.mark.slow
def test_a_grader_that_nobody_has_is_refused_whichever_process_meets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 4)
    source = written(
        tmp_path / "rows.jsonl", [row(n, "prose" if n == 9 else "rule", "2", "\\boxed{2}") for n in range(12)]
    )
    with pytest.raises(DataError, match=r"data\.train: field reward_model\.style names prose, which is no grader"):
        prepare(tmp_path / "out", 2, train=source)
