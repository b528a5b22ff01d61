"""The stages of a quick look at an environment, one after another in this process; nothing is kept.

records = play(look_config(look), num_problems=20)
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from luffy.config.experiment import ExperimentConfig
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.data.parquet import read_prompts, write_prompts
from luffy.evaluation.sample_files import read_samples_of
from luffy.evaluation.sample_records import SampleRecord
from luffy.pipeline.machine.events import EventWriter
from luffy.stages import base, evaluate, prepare_data
from luffy.stages.program import StageContext, StageResult


def play(config: ExperimentConfig, num_problems: int) -> list[SampleRecord]:
    """The graded episodes of the first `num_problems` of each suite, suite by suite; raises what the stages raise."""
    with tempfile.TemporaryDirectory(prefix="luffy-eval-") as folder:
        out = Path(folder)
        _run("prepare_data", prepare_data.run, config, out)
        for suite in (out / "prepare_data" / "suites").glob("*.parquet"):
            write_prompts(suite, read_prompts(suite)[:num_problems])
        _run("base", base.run, config, out, data="prepare_data")
        _run("evaluate", evaluate.run, config, out, data="prepare_data", model="base")
        return list(read_samples_of(out / "evaluate"))


def _run(
    stage: str, run: Callable[..., StageResult], config: ExperimentConfig, root: Path, **inputs: str
) -> StageResult:
    configure = STAGE_KINDS[stage].configure
    assert configure is not None
    out = root / stage
    out.mkdir()
    context = StageContext(
        out=out,
        inputs={name: root / folder for name, folder in inputs.items()},
        key=stage,
        node=stage,
        execution=config.execution,
        tracking=config.tracking,
        events=EventWriter(out / "events.jsonl"),
    )
    return run(configure(config), context)
