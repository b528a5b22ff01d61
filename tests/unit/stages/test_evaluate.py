"""The stage `evaluate`: resumes by parts, and runs with a real model."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import write_prompts
from luffy.errors import ConfigError, DataError
from luffy.evaluation.results import read_results, read_sample_records
from luffy.pipeline.events import EventReader, EventWriter
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.evaluate import run
from luffy.stages.program import StageContext

SETTINGS = EvaluateSettings(
    seed=7,
    dtype="float32",
    evaluation=EvaluationConfig(
        decodings={"greedy": DecodingConfig(temperature=0.0), "hot/1": DecodingConfig(temperature=1.0, num_samples=2)},
        max_response_tokens=16,
    ),
    grading=GradingConfig(),
)


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Two suites, in the order `longer`, `base`, and a tiny random model."""
    (tmp_path / "data" / "suites").mkdir(parents=True)
    for name in ("longer", "base"):
        write_prompts(tmp_path / "data" / "suites" / f"{name}.parquet", problems(4))
    card = {"sources": {"train": {}, "suites.longer": {}, "suites.base": {}}}
    (tmp_path / "data" / "card.json").write_text(json.dumps(card))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=48, **shape)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "sft" / "model")
    tokenizer.save_pretrained(tmp_path / "sft" / "model")
    return {"data": tmp_path / "data", "model": tmp_path / "sft"}


def context_in(out: Path, inputs: dict[str, Path]) -> StageContext:
    out.mkdir(exist_ok=True)
    execution = ExecutionConfig(rollout_batch_size=3)
    return StageContext(
        out, inputs, "key", "evaluate_sft", execution, TrackingConfig(), EventWriter(out / "events.jsonl")
    )


def use(monkeypatch: pytest.MonkeyPatch, script: Callable[[str, int], str]) -> ScriptedEngine:
    engine = ScriptedEngine(tiny_tokenizer(), script)
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    return engine


def solve(prompt: str, seed: int) -> str:
    return "\\boxed{1}"


def test_rows_follow_the_configuration_and_samples_follow_the_rows(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = use(monkeypatch, solve)
    result = run(SETTINGS, context_in(tmp_path / "out", inputs))
    results = read_results(tmp_path / "out" / "results.json")
    assert results.checkpoint == "sft"
    cells = [("longer", "greedy"), ("base", "greedy"), ("longer", "hot/1"), ("base", "hot/1")]
    assert [(row.suite, row.decoding) for row in results.rows] == cells
    assert {row.accuracy for row in results.rows} == {0.25}
    records = list(read_sample_records(tmp_path / "out" / "samples.jsonl"))
    assert list(dict.fromkeys((record.suite, record.decoding) for record in records)) == cells
    assert (len(records), result.metrics["accuracy/greedy/base"], engine.closed) == (24, 0.25, True)


def test_a_killed_evaluation_goes_on_with_the_next_part(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_when_sampling(prompt: str, seed: int) -> str:
        if len(first.requests) > 8:
            raise KeyboardInterrupt
        return solve(prompt, seed)

    first = use(monkeypatch, dies_when_sampling)
    with pytest.raises(KeyboardInterrupt):
        run(SETTINGS, context_in(tmp_path / "out", inputs))
    second = use(monkeypatch, solve)
    result = run(SETTINGS, context_in(tmp_path / "out", inputs))
    assert (result.resumed_from, len(second.requests)) == (8, 16)
    use(monkeypatch, solve)
    run(SETTINGS, context_in(tmp_path / "undisturbed", inputs))
    for name in ("samples.jsonl", "results.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_progress_counts_responses(tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, solve)
    run(SETTINGS, context_in(tmp_path / "out", inputs))
    last = EventReader(tmp_path / "out" / "events.jsonl").read()[-1]
    assert (last.step, last.total) == (24, 24)
    assert last.metrics["reward"] == 0.25


def test_a_real_model_gives_the_same_results_twice(tmp_path: Path, inputs: dict[str, Path]) -> None:
    for name in ("one", "two"):
        run(SETTINGS, context_in(tmp_path / name, inputs))
    assert (tmp_path / "one" / "samples.jsonl").read_bytes() == (tmp_path / "two" / "samples.jsonl").read_bytes()
    records = list(read_sample_records(tmp_path / "one" / "samples.jsonl"))
    assert all(1 <= record.num_tokens <= 16 for record in records)


def test_prompts_that_leave_no_room_stop_the_stage_before_anything_is_generated(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = use(monkeypatch, solve)
    longer = SETTINGS.evaluation.model_copy(update={"max_response_tokens": 45})
    with pytest.raises(DataError, match="4 of 4 prompts do not fit"):
        run(SETTINGS.model_copy(update={"evaluation": longer}), context_in(tmp_path / "out", inputs))
    assert engine.requests == []


def test_no_suite_at_all_is_an_error(tmp_path: Path, inputs: dict[str, Path]) -> None:
    for path in (inputs["data"] / "suites").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no suite to evaluate"):
        run(SETTINGS, context_in(tmp_path / "out", inputs))


@pytest.fixture
def wide_inputs(inputs: dict[str, Path]) -> dict[str, Path]:
    """The same with heads as wide as vLLM's attention on CPU asks for."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer()), num_key_value_heads=2, max_position_embeddings=48, initializer_range=0.2,
        **shape,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(inputs["model"] / "model")
    return inputs


def with_engine(name: str) -> EvaluateSettings:
    evaluation = EvaluationConfig.model_validate(SETTINGS.evaluation.model_dump() | {"engine": name})
    return SETTINGS.model_copy(update={"evaluation": evaluation})


@pytest.mark.slow
def test_vllm_says_what_the_embedded_engine_says_and_resumes_to_the_same_results(
    tmp_path: Path, wide_inputs: dict[str, Path]
) -> None:
    for name in ("transformers", "vllm"):
        run(with_engine(name), context_in(tmp_path / name, wide_inputs))
    embedded, vllm = (list(read_sample_records(tmp_path / name / "samples.jsonl")) for name in ("transformers", "vllm"))
    assert [record for record in vllm if record.decoding == "greedy"] == embedded[:8]
    assert len({record.response for record in embedded}) > 4
    # As after a kill: two parts are done, and two are left.
    shutil.copytree(tmp_path / "vllm" / "parts", tmp_path / "resumed" / "parts")
    for suite in ("longer", "base"):
        (tmp_path / "resumed" / "parts" / f"hot%2F1@{suite}.jsonl").unlink()
    assert run(with_engine("vllm"), context_in(tmp_path / "resumed", wide_inputs)).resumed_from == 8
    assert (tmp_path / "resumed/samples.jsonl").read_bytes() == (tmp_path / "vllm/samples.jsonl").read_bytes()


def test_a_model_that_vllm_cannot_run_stops_the_stage(tmp_path: Path, inputs: dict[str, Path]) -> None:
    execution = ExecutionConfig.model_validate({"vllm": {"tensor_parallel_size": 3}})
    context = dataclasses.replace(context_in(tmp_path / "out", inputs), execution=execution)
    with pytest.raises(ConfigError, match="3 does not divide the 2 attention heads"):
        run(with_engine("vllm"), context)
