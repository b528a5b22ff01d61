"""Rows that name their graders, judged in the processes of the stage."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import luffy.data.parquet as parquet
from luffy.config.data import DataConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import PrepareDataSettings
from luffy.data.parquet import read_prompts
from luffy.errors import DataError
from luffy.grading.pool import JUDGE_CACHE
from luffy.pipeline.events import EventWriter
from luffy.stages.prepare_data import run
from luffy.stages.program import StageContext

OWN = "def even(data_source, solution_str, ground_truth, extra_info=None):\n    return int(solution_str) % 2 == 0\n"
ASKED: list[str] = []


class Judge(BaseHTTPRequestHandler):
    """Takes `yes` for right."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append(body["messages"][0]["content"])
        verdict = "CORRECT" if "[Answer]\nyes" in ASKED[-1] else "INCORRECT"
        reply = json.dumps({"choices": [{"message": {"content": f"VERDICT: {verdict}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ASKED.clear()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def row(number: int, style: str, truth: str, *replies: str) -> dict[str, object]:
    return {
        "data_source": "t",
        "prompt": f"Question {number} of {style}",
        "traces": [{"text": reply} for reply in replies],
        "reward_model": {"style": style, "ground_truth": truth},
    }


def prepare(out: Path, rows: list[dict[str, object]], grading: GradingConfig, workers: int) -> None:
    out.mkdir()
    (out / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suite = {"kind": "arithmetic", "num_prompts": 4, "num_operations": [2]}
    data = {
        "train": {"kind": "file", "path": str(out / "rows.jsonl")},
        "suites": {"small": suite},
        "max_prompt_tokens": 100,
        "max_trace_tokens": 100,
    }
    settings = PrepareDataSettings(
        seed=3,
        data=DataConfig.model_validate_json(json.dumps(data)),
        grading=grading,
        model_path=None,
        chat_template=None,
    )
    execution = ExecutionConfig(data_workers=workers, grader_workers=1)
    run(settings, StageContext(out, {}, "k", "prepare_data", execution, TrackingConfig(), EventWriter(out / "events")))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_grader_works_in_every_process(tmp_path, monkeypatch, judge_url, workers):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_graders.py").write_text(OWN)
    named = {
        "parity": {"kind": "custom", "function": "own_graders:even"},
        "asked": {"kind": "judge", "url": judge_url, "model": "m"},
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
    prepare(tmp_path / "out", rows, GradingConfig.model_validate_json(json.dumps({"named": named})), workers)
    prompts = read_prompts(tmp_path / "out" / "train.parquet")
    assert [(prompt.grader, [trace.text for trace in prompt.traces]) for prompt in prompts] == [
        (None, ["\\boxed{2}"]),
        ("choice", ["The answer is (C)"]),
        ("parity", ["4"]),
        ("asked", ["yes"]),
    ] * 3
    assert len(ASKED) == 6 == len(list((tmp_path / "out" / JUDGE_CACHE).glob("*.json")))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_grader_that_nobody_has_is_refused_whichever_process_meets_it(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 4)
    rows = [row(n, "prose" if n == 9 else "rule", "2", "\\boxed{2}") for n in range(12)]
    with pytest.raises(DataError, match=r"data\.train: field reward_model\.style names prose, which is no grader"):
        prepare(tmp_path / "out", rows, GradingConfig(), workers)
