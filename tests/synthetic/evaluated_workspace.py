"""Workspaces as finished evaluations leave them, with chosen verdicts, for what only reads them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from luffy.config import load_experiment
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, record_line, write_sample_records
from luffy.pipeline.workspace import Workspace
from synthetic.finished_stages import write_finished
from synthetic.result_rows import result_row, sample_record

Verdict = Callable[[int, int], bool]
"""Whether the response to a problem with that number, of that number, is correct."""
PROTOCOL = {
    "decodings": {"greedy": {"temperature": 0.0, "num_samples": 1}, "sampled": {"temperature": 0.6, "num_samples": 4}},
    "max_response_tokens": 1024,
    "engine": "transformers",
    "confidence": 0.95,
}


def first(count: int) -> Verdict:
    """Correct on the first `count` problems."""
    return lambda problem, sample: problem < count


def write_evaluation(
    workspace: Workspace,
    key: str,
    verdicts: Mapping[tuple[str, str], Verdict],
    *,
    checkpoint: str = "base",
    model: str = "",
    problems: Sequence[str] = tuple(f"p{i}" for i in range(100)),
    evaluation: Mapping[str, object] | None = None,
    day: int = 1,
    without: str = "",
    reference: str = "2",
    system_prompt: str | None = None,
) -> Path:
    """A finished stage `key` whose model (digest `model`) gets `verdicts` by suite and decoding on `problems`.

    Its samples lack the field `without` and are not compressed, as if another version had written them.
    """
    protocol = {**PROTOCOL, **(evaluation or {})}
    directory = workspace.stage_directory("evaluate", key)
    directory.mkdir(parents=True)
    rows, saved = [], []
    for (suite, decoding), verdict in verdicts.items():
        decodings = protocol["decodings"]
        assert isinstance(decodings, dict)
        samples = decodings[decoding]["num_samples"]
        records = [
            sample_record(suite, uid, verdict(number, sample), decoding=decoding, sample=sample, ground_truth=reference)
            for number, uid in enumerate(problems)
            for sample in range(samples)
        ]
        rows.append(result_row(records, 0.95))
        saved += records
    samples = directory / ("samples.jsonl" if without else SAMPLES_FILE)
    if without:
        lines = b"".join(map(record_line, saved))
        samples.write_bytes(lines.replace(f'"{without}"'.encode(), b'"other"'))
    else:
        write_sample_records(samples, saved)
    write_results(
        directory / "results.json", EvaluationResults(checkpoint=checkpoint, confidence=0.95, rows=tuple(rows))
    )
    if system_prompt is not None:
        data = workspace.stage_directory("prepare_data", f"data_of_{key}")
        data.mkdir(parents=True, exist_ok=True)
        settings = {"data": {"system_prompt": system_prompt}}
        write_finished(data, "prepare_data", "prepare_data", f"data_of_{key}", (), settings=settings)
    write_finished(
        directory,
        "evaluate",
        f"evaluate_{checkpoint}",
        key,
        [samples.name, "results.json"],
        settings={"seed": 0, "dtype": "float32", "evaluation": protocol, "grading": {"kind": "math"}},
        upstream={} if system_prompt is None else {"data": f"data_of_{key}"},
        consumed={"data": "d", "model": model or key},
        started=f"2026-03-{day:02d}T10:00:00+00:00",
        ended=f"2026-03-{day:02d}T11:00:00+00:00",
    )
    return directory


def write_run(workspace: Workspace, run: str, evaluations: Mapping[str, str], *overrides: str) -> None:
    """The record of a run of smoke.yaml with `overrides` that used `evaluations` (node to key)."""
    config = load_experiment("exp_configs/smoke.yaml", overrides)
    directory = workspace.runs / run
    directory.mkdir(parents=True)
    record = {
        "state": "finished",
        "experiment": config.name,
        "started": f"2026-03-01T{len(list(workspace.runs.iterdir())):02d}:00:00+00:00",
        "stages": {
            node: {"key": key, "directory": str(workspace.stage_directory("evaluate", key))}
            for node, key in evaluations.items()
        },
        "config": config.model_dump(mode="json"),
    }
    (directory / "run.json").write_text(json.dumps(record), encoding="utf-8")
