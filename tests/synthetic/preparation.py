"""The stage `prepare_data` on rows that tests write; loads no torch, since its workers load this, too."""

import json
from pathlib import Path

from luffy.config.data import DataConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import PrepareDataSettings
from luffy.pipeline.events import EventWriter
from luffy.stages.prepare_data import run
from luffy.stages.program import StageContext, StageResult

SMALL = {"kind": "arithmetic", "num_prompts": 4, "num_operations": [2]}


def prepare(
    out: Path, workers: int = 1, grading: GradingConfig | None = None, model_path: str | None = None, **data: object
) -> StageResult:
    """Prepare `data`, with generated sources where it names none."""
    given = {
        "train": {**SMALL, "num_prompts": 9, "num_operations": [3]},
        "suites": {"small": SMALL},
        "max_prompt_tokens": 5000,
        "max_trace_tokens": 400,
        **data,
    }
    settings = PrepareDataSettings(
        seed=3,
        data=DataConfig.model_validate_json(json.dumps(given)),
        grading=grading or GradingConfig(),
        model_path=model_path,
        chat_template=None,
    )
    out.mkdir(exist_ok=True, parents=True)
    execution, events = ExecutionConfig(data_workers=workers, grader_workers=1), EventWriter(out / "events.jsonl")
    return run(settings, StageContext(out, {}, "key", "prepare_data", execution, TrackingConfig(), events))


def sources_of(out: Path) -> dict[str, dict]:
    """What the card says of each source."""
    return json.loads((out / "card.json").read_text())["sources"]


def row(question: str, reply: str | None, answer: str = "2", **more: object) -> dict[str, object]:
    reward = {"style": "rule", "ground_truth": answer}
    return {"data_source": "t", "prompt": question, "target": reply, "reward_model": reward, **more}


def written(path: Path, rows: list[dict[str, object]], **more: object) -> dict[str, object]:
    """A source of these rows in a file."""
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"kind": "file", "path": str(path), **more}
