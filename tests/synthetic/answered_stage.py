"""What tests of stages have in common: inputs, settings, a context, and an engine that follows a script."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from luffy.config.answers import DifficultyConfig, SampleConfig
from luffy.config.data import DataConfig
from luffy.config.environment import EnvironmentConfig
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import DifficultySettings, EvaluateSettings, SampleSettings
from luffy.data.parquet import write_prompts
from luffy.pipeline.events import Event, EventReader, EventWriter
from luffy.pipeline.identity import IdentityRecord, identity_of, write_identity
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.program import StageContext
from luffy.types import Trace
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from synthetic.stage_jobs import write_wide_model


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


def progress_of(out: Path) -> Event:
    """The last that the stage in `out` told of its progress."""
    return [event for event in EventReader(out / "events.jsonl").read() if event.kind == "progress"][-1]


def contents(out: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The bytes of these files in `out`."""
    return {name: (out / name).read_bytes() for name in names}


def use(patch: pytest.MonkeyPatch, script: Callable[[str, int], str]) -> ScriptedEngine:
    """Let every folder's engine answer as `script` says, from the prompt and the seed."""
    engine = ScriptedEngine(tiny_tokenizer(), script)
    patch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    return engine


def number_in(prompt: str) -> int:
    """The first summand of the prompt."""
    found = re.search(r"(\d+) \+1", prompt)
    assert found is not None
    return int(found[1])


def write_inputs(root: Path, policy: str = "sft", chosen: slice = slice(None)) -> dict[str, Path]:
    """Prepared data and a tiny random model with a context of 48 tokens.

    Six training prompts have somebody else's trace each; the suites `longer` and `base`, in this order, ask four
    problems. `chosen` takes some of the training prompts, and of each suite.
    """
    data = root / "data"
    (data / "suites").mkdir(parents=True)
    traced = [replace(prompt, traces=(Trace("\\boxed{1}", "t", True),)) for prompt in problems(6)[chosen]]
    for name, prompts in {"train": traced, "sft": traced, "rl_complement": []}.items():
        write_prompts(data / f"{name}.parquet", prompts)
    for suite in ("longer", "base"):
        write_prompts(data / "suites" / f"{suite}.parquet", problems(4)[chosen])
    (data / "card.json").write_text('{"sources": {"train": {}, "suites.longer": {}, "suites.base": {}}}')
    tiny_tokenizer().save_pretrained(data / "tokenizer")
    write_wide_model(root / policy / "model", seed=0)
    return {"data": data, "model": root / policy}


def evaluating(
    seed: int = 7,
    dtype: str = "float32",
    num_samples: int = 2,
    grading: GradingConfig | None = None,
    environment: EnvironmentConfig | None = None,
    **evaluation: object,
) -> EvaluateSettings:
    """Greedy decoding, and sampling at temperature 1; `evaluation` has other fields of that section."""
    sampled = DecodingConfig(temperature=1.0, num_samples=num_samples)
    section = {"decodings": {"greedy": DecodingConfig(temperature=0.0), "hot/1": sampled}, "max_response_tokens": 16}
    return EvaluateSettings(
        seed=seed,
        dtype=dtype,
        evaluation=EvaluationConfig.model_validate({**section, **evaluation}),
        grading=grading or GradingConfig(),
        environment=environment,
    )


_SAMPLED = {"num_samples": 4, "temperature": 1.0, "max_response_tokens": 16, "engine": "transformers"}


def measuring(seed: int = 7, **difficulty: object) -> DifficultySettings:
    """Four responses to a prompt; pass rates from 1/4 to 3/4 are kept."""
    section = {**_SAMPLED, "min_pass_rate": 0.25, "max_pass_rate": 0.75, **difficulty}
    config = DifficultyConfig.model_validate(section)
    return DifficultySettings(seed=seed, dtype="float32", difficulty=config, grading=GradingConfig())


def sampling(
    seed: int = 7, number: int = 1, environment: EnvironmentConfig | None = None, **sample: object
) -> SampleSettings:
    """Four responses to a prompt, of which the first two right ones are kept, in round `number`."""
    section = {**_SAMPLED, "keep": {"choose": "first", "max_per_prompt": 2}, **sample}
    config, grading = SampleConfig.model_validate(section), GradingConfig()
    return SampleSettings(
        seed=seed, dtype="float32", sample=config, grading=grading, round=number, environment=environment
    )


def teaching(
    teachers: Mapping[str, Mapping[str, object]],
    data: Mapping[str, object] | None = None,
    suites: Sequence[str] = ("longer", "base"),
    seed: int = 7,
    environment: EnvironmentConfig | None = None,
    **sample: object,
) -> SampleSettings:
    """These teachers; `data` and `sample` have other fields of those sections."""
    source = {"kind": "arithmetic", "num_prompts": 1, "num_operations": (1,)}
    limits = {"suites": dict.fromkeys(suites, source), "max_prompt_tokens": 64, "max_trace_tokens": 40, **(data or {})}
    return SampleSettings(
        seed=seed,
        sample=SampleConfig.model_validate({"teachers": teachers, **sample}),
        data=DataConfig.model_validate(limits),
        grading=GradingConfig(),
        environment=environment,
    )


def recorded(context: StageContext, chosen: object, consumed: str = "x") -> StageContext:
    """The context, in a directory whose identity is that of a stage with the settings `chosen`."""
    stage, name = context.node.partition("_")[0], context.out.name
    identity = identity_of(stage, chosen, {"data": "1", "model": "2"}, {"code": "3"}, {})
    write_identity(context.out, IdentityRecord(name, context.node, identity, {"data": consumed}))
    return context
