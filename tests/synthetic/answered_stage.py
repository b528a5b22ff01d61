"""What tests of the stages `difficulty` and `sample` have in common: a context, and an engine that follows a script."""

from collections.abc import Callable
from pathlib import Path

import pytest

from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.pipeline.events import EventWriter
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.program import StageContext
from synthetic.arithmetic import ScriptedEngine, tiny_tokenizer


def stage_context(node: str, out: Path, inputs: dict[str, Path], batch: int = 8) -> StageContext:
    """The context of the stage `node` in `out`, which is made; the engine decodes `batch` sequences at once."""
    out.mkdir(exist_ok=True, parents=True)
    execution = ExecutionConfig(rollout_batch_size=batch)
    return StageContext(out, inputs, "key", node, execution, TrackingConfig(), EventWriter(out / "events.jsonl"))


def use(monkeypatch: pytest.MonkeyPatch, script: Callable[[str, int], str]) -> ScriptedEngine:
    """Let every folder's engine answer as `script` says, from the prompt and the seed."""
    engine = ScriptedEngine(tiny_tokenizer(), script)
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    return engine


def number_in(prompt: str) -> int:
    """The first summand of the prompt."""
    return int(prompt.removeprefix("<|bos|>").split()[0])
