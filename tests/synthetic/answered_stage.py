"""What tests of stages have in common: inputs, a context, and an engine that follows a script."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.data.parquet import write_prompts
from luffy.pipeline.events import EventReader, EventWriter
from luffy.pipeline.identity import IdentityRecord, identity_of, write_identity
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.program import StageContext, StageResult
from luffy.types import Trace
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer


def stage_context(
    node: str, out: Path, inputs: dict[str, Path], batch: int = 8, execution: ExecutionConfig | None = None
) -> StageContext:
    """The context of the stage `node` in `out`, which is made; the engine decodes `batch` sequences at once."""
    out.mkdir(exist_ok=True, parents=True)
    execution = execution or ExecutionConfig(rollout_batch_size=batch)
    return StageContext(out, inputs, "key", node, execution, TrackingConfig(), EventWriter(out / "events.jsonl"))


def messages_of(out: Path) -> list[str]:
    """What the stage in `out` said to the person."""
    return [event.text for event in EventReader(out / "events.jsonl").read() if event.kind == "message"]


def contents(out: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes of these files in `out`."""
    return {name: (out / name).read_bytes() for name in names}


def use(monkeypatch: pytest.MonkeyPatch, script: Callable[[str, int], str]) -> ScriptedEngine:
    """Let every folder's engine answer as `script` says, from the prompt and the seed."""
    engine = ScriptedEngine(tiny_tokenizer(), script)
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    return engine


def number_in(prompt: str) -> int:
    """The first summand of the prompt."""
    return int(prompt.removeprefix("<|bos|>").split()[0])


def prompts_and_policy(root: Path, policy: str) -> dict[str, Path]:
    """Six prompts with somebody else's trace each, and a model of which only tokenizer and context are looked at."""
    traced = [replace(prompt, traces=(Trace("\\boxed{1}", "t", True),)) for prompt in problems(6)]
    for folder in (root / "data" / "tokenizer", root / policy / "model"):
        folder.mkdir(parents=True)
        tiny_tokenizer().save_pretrained(folder)
    write_prompts(root / "data" / "train.parquet", traced)
    (root / policy / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 48}))
    return {"data": root / "data", "model": root / policy}


def assert_an_interrupted_stage_asks_for_the_rest_alone(
    run: Callable[[Path], StageResult],
    script: Callable[[str, int], str],
    root: Path,
    outputs: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted in its third batch of 8, while the second one is graded, for which it does not wait."""

    def dies_late(prompt: str, seed: int) -> str:
        if len(first.requests) > 16:
            raise KeyboardInterrupt
        return script(prompt, seed)

    first = use(monkeypatch, dies_late)
    with pytest.raises(KeyboardInterrupt):
        run(root / "out")
    assert first.closed
    second = use(monkeypatch, script)
    assert run(root / "out").resumed_from == 8
    whole = use(monkeypatch, script)
    run(root / "whole")
    assert [request.seed for request in second.requests] == [request.seed for request in whole.requests[8:]]
    assert contents(root / "out", outputs) == contents(root / "whole", outputs)


def recorded(context: StageContext, chosen: object, consumed: str = "x") -> StageContext:
    """The context, in a directory whose identity is that of a stage with the settings `chosen`."""
    stage, name = context.node.partition("_")[0], context.out.name
    identity = identity_of(stage, chosen, {"data": "1", "model": "2"}, {"code": "3"}, {})
    write_identity(context.out, IdentityRecord(name, context.node, identity, {"data": consumed}))
    return context
