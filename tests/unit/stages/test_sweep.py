"""The stage `sweep`: each step is what `evaluate` finds for that model, by one engine, and a killed one goes on.

`tests/integration/test_engine_pool.py` swaps the weights of vLLM engines.
"""

import shutil
from pathlib import Path

import pytest
from synthetic.answered_stage import stage_context
from synthetic.arithmetic import problems
from synthetic.interrupted import answers_stay
from synthetic.stage_jobs import write_wide_model

from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import EvaluateSettings, SweepSettings
from luffy.data.parquet import write_prompts
from luffy.errors import DataError
from luffy.evaluation.results import read_results
from luffy.pipeline.reuse import COMPLETE_FILE
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages import evaluate, sweep

STEPS = (20, 40)


def protocol() -> EvaluateSettings:
    decodings = {"greedy": DecodingConfig(temperature=0.0), "hot": DecodingConfig(temperature=1.0, num_samples=2)}
    evaluation = EvaluationConfig.model_validate({"decodings": decodings, "max_response_tokens": 16})
    return EvaluateSettings(seed=7, dtype="float32", evaluation=evaluation, grading=GradingConfig())


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> dict[str, Path]:
    """A suite, and an RL stage whose checkpoints are plain model folders, exported by copying them."""
    data, rl = tmp_path / "data", tmp_path / "rl"
    (data / "suites").mkdir(parents=True)
    write_prompts(data / "suites" / "sums.parquet", problems(4))
    (data / "tokenizer").mkdir()
    write_wide_model(rl / "model", seed=0)
    for step in STEPS:
        write_wide_model(rl / "checkpoints" / f"step_{step:06d}", seed=step)
        (rl / "checkpoints" / f"step_{step:06d}" / COMPLETE_FILE).touch()
    copy = lambda checkpoint, start, tokenizer, dtype, folder: shutil.copytree(checkpoint, folder)  # noqa: E731
    monkeypatch.setattr(sweep, "export_checkpoint", copy)
    return {"data": data, "model": rl}


def context_in(out, inputs):
    return stage_context("sweep", out, inputs, 3)


def alone(tmp_path: Path, inputs: dict[str, Path], step: int) -> bytes:
    """The samples of `evaluate` on that checkpoint's model."""
    model = tmp_path / f"alone-{step}"
    shutil.copytree(inputs["model"] / "checkpoints" / f"step_{step:06d}", model / "model")
    evaluate.run(protocol(), context_in(tmp_path / f"out-{step}", {"data": inputs["data"], "model": model}))
    return (tmp_path / f"out-{step}" / "samples.jsonl.zst").read_bytes()


def test_each_step_is_what_its_model_gets_alone_and_one_engine_serves_all(tmp_path, inputs, monkeypatch):
    opened: list[Path] = []
    start = TransformersEngine.from_folder
    monkeypatch.setattr(
        TransformersEngine, "from_folder", lambda folder, *rest: opened.append(folder) or start(folder, *rest)
    )
    result = sweep.run(SweepSettings(protocol=protocol(), steps=STEPS), context_in(tmp_path / "out", inputs))
    assert opened == [inputs["model"] / "model"]
    found = {step: (tmp_path / "out" / f"step_{step:06d}" / "samples.jsonl.zst").read_bytes() for step in STEPS}
    assert found == {step: alone(tmp_path, inputs, step) for step in STEPS}
    assert found[20] != found[40]
    assert read_results(tmp_path / "out" / "step_000040" / "results.json").checkpoint == "step 40"
    assert set(result.metrics) == {f"accuracy/{how}/sums/{step}" for how in ("greedy", "hot") for step in STEPS}
    html = (tmp_path / "out" / "curve.html").read_text()
    assert "step 20 → 40" in html and html.count("<svg") == 2
    assert not any(mark in html for mark in ("<script", "<link", "<img", "@import"))
    assert "| step 20 → 40 |" in (tmp_path / "out" / "curve.md").read_text()
    assert not (tmp_path / "out" / "swap").exists()


def test_a_killed_sweep_asks_only_for_what_is_left(tmp_path, inputs, monkeypatch):
    settings, out = SweepSettings(protocol=protocol(), steps=STEPS), tmp_path / "out"
    with answers_stay():
        sweep.run(settings, context_in(out, inputs))
    before = (out / "step_000040" / "samples.jsonl.zst").read_bytes()
    (out / "step_000040" / "samples.jsonl.zst").unlink()
    commits = (out / "step_000040" / "answers.jsonl").read_bytes().split(b"\n\n")  # the first two are the greedy ones
    (out / "step_000040" / "answers.jsonl").write_bytes(b"".join(commit + b"\n\n" for commit in commits[:2]))
    (out / "swap").mkdir()
    shutil.rmtree(inputs["model"] / "checkpoints" / "step_000020")  # done, and no longer wanted
    assert sweep.run(settings, context_in(out, inputs)).resumed_from == 16
    assert (out / "step_000040" / "samples.jsonl.zst").read_bytes() == before
    monkeypatch.setattr(TransformersEngine, "from_folder", None)
    assert sweep.run(settings, context_in(out, inputs)).resumed_from == 24


def test_a_step_without_a_checkpoint_is_named_with_those_that_are_there(tmp_path, inputs):
    with pytest.raises(DataError, match=r"no checkpoint of step 30; there are: 20, 40"):
        sweep.run(SweepSettings(protocol=protocol(), steps=(20, 30)), context_in(tmp_path / "out", inputs))
