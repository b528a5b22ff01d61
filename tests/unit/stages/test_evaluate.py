"""The stage `evaluate`: resumes by batches, and runs with a real model."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from synthetic.answered_stage import contents, messages_of, stage_context, use
from synthetic.arithmetic import problems, tiny_tokenizer
from synthetic.interrupted import answers_stay, killed_before
from synthetic.stage_jobs import write_stage_job, write_wide_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import write_prompts
from luffy.errors import ClusterError, ConfigError, DataError
from luffy.evaluation.results import read_results
from luffy.evaluation.sample_files import read_sample_records, read_samples_of
from luffy.pipeline.events import EventReader
from luffy.pipeline.manifest import read_manifest
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.stages.answers.store import AnswerStore
from luffy.stages.evaluate import OUTPUTS, ModelEvaluation, run

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
def inputs(tmp_path) -> dict[str, Path]:
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


def context_in(out, inputs):
    return stage_context("evaluate_sft", out, inputs, 3)


def solve(prompt: str, seed: int) -> str:
    return "\\boxed{1}"


def test_rows_follow_the_configuration_and_samples_follow_the_rows(tmp_path, inputs, monkeypatch):
    engine = use(monkeypatch, solve)
    result = run(SETTINGS, context_in(tmp_path / "out", inputs))
    results = read_results(tmp_path / "out" / "results.json")
    assert results.checkpoint == "sft"
    cells = [("longer", "greedy"), ("base", "greedy"), ("longer", "hot/1"), ("base", "hot/1")]
    assert [(row.suite, row.decoding) for row in results.rows] == cells
    assert {row.accuracy for row in results.rows} == {0.25}
    records = list(read_sample_records(tmp_path / "out" / "samples.jsonl.zst"))
    assert not (tmp_path / "out" / "answers.jsonl").exists()
    assert list(dict.fromkeys((record.suite, record.decoding) for record in records)) == cells
    assert (len(records), result.metrics["accuracy/greedy/base"], engine.closed) == (24, 0.25, True)
    last = EventReader(tmp_path / "out" / "events.jsonl").read()[-1]
    assert (last.step, last.total, last.metrics["reward"]) == (24, 24, 0.25)


def changed(**fields: object) -> EvaluateSettings:
    """SETTINGS with other fields of the section `evaluation`."""
    return SETTINGS.model_copy(update={"evaluation": SETTINGS.evaluation.model_copy(update=fields)})


def test_suites_can_be_evaluated_alone_and_the_held_out_prompts_are_one(tmp_path, inputs, monkeypatch):
    write_prompts(inputs["data"] / "validation.parquet", problems(6))
    use(monkeypatch, solve)
    run(changed(only=("validation", "base")), context_in(tmp_path / "out", inputs))
    rows = read_results(tmp_path / "out" / "results.json").rows
    assert [(row.suite, row.num_problems) for row in rows if row.decoding == "greedy"] == [
        ("base", 4),
        ("validation", 6),
    ]


def test_a_suite_that_was_not_prepared_is_one_line(tmp_path, inputs):
    with pytest.raises(DataError, match=r"no suite validation; there are base, longer$"):
        run(changed(only=("validation",)), context_in(tmp_path / "out", inputs))
    for path in (inputs["data"] / "suites").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no suite to evaluate"):
        run(SETTINGS, context_in(tmp_path / "none", inputs))


@pytest.mark.parametrize(
    ("response", "advised"), [("who knows", ["greedy, longer, base", "hot/1, longer, base"]), ("\\boxed{7}", [])]
)
def test_suites_without_readable_answers_are_advised_on(tmp_path, inputs, monkeypatch, response, advised):
    use(monkeypatch, lambda prompt, seed: response)
    context = context_in(tmp_path / "out", inputs)
    run(SETTINGS, context)
    said = messages_of(tmp_path / "out")
    assert [text.partition(": 100 % of the responses have no answer")[0] for text in said] == advised


@pytest.mark.parametrize(
    ("end", "kept"),
    [(ClusterError("http://host:8000: no answer"), 14), (KeyboardInterrupt(), 11)],
    ids=["failed", "interrupted"],
)
def test_an_evaluation_that_ended_early_goes_on_within_the_suite(tmp_path, inputs, monkeypatch, end, kept):
    """A failure waits for the batch that is being graded; an interrupt waits for nothing."""

    def fails_when_sampling(prompt: str, seed: int) -> str:
        if len(first.requests) > 8 + 6:  # the third batch of the third part
            raise end
        return solve(prompt, seed)

    first = use(monkeypatch, fails_when_sampling)
    with pytest.raises(type(end)):
        run(SETTINGS, context_in(tmp_path / "out", inputs))
    second = use(monkeypatch, solve)
    result = run(SETTINGS, context_in(tmp_path / "out", inputs))
    assert (result.resumed_from, len(second.requests)) == (kept, 24 - kept)
    assert EventReader(tmp_path / "out" / "events.jsonl").read()[-1].step == 24
    assert not (tmp_path / "out" / "answers.jsonl").exists()
    third = use(monkeypatch, solve)
    assert run(SETTINGS, context_in(tmp_path / "out", inputs)).resumed_from == 24  # it is not opened again
    assert third.requests == []
    run(SETTINGS, context_in(tmp_path / "undisturbed", inputs))
    assert contents(tmp_path / "out", OUTPUTS) == contents(tmp_path / "undisturbed", OUTPUTS)


def test_a_kill_between_any_two_steps_of_the_end_loses_nothing_and_leaves_no_answers(tmp_path, inputs, monkeypatch):
    use(monkeypatch, solve)
    with answers_stay():
        run(SETTINGS, context_in(tmp_path / "done", inputs))
    engine, write = use(monkeypatch, solve), ModelEvaluation.write
    killed, step = [True], 0

    def written(evaluation: ModelEvaluation, checkpoint: str) -> object:
        killed[0] = killed_before(step, partial(write, evaluation, checkpoint))
        raise KeyboardInterrupt

    while killed[0]:
        context = context_in(tmp_path / f"killed-{step}", inputs)  # as it is before the samples are written
        shutil.copy(tmp_path / "done" / "answers.jsonl", context.out)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ModelEvaluation, "write", written)
            run(SETTINGS, context)
        assert run(SETTINGS, context).resumed_from == 24
        assert contents(context.out, OUTPUTS) == contents(tmp_path / "done", OUTPUTS)
        assert sorted(path.name for path in context.out.iterdir()) == sorted([*OUTPUTS, "events.jsonl"])
        step += 1
    assert step > 10
    assert engine.requests == []


KILLED_AT_ITS_FOURTH_BATCH = """
import os, signal, sys
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages import evaluate, program

generate, calls = TransformersEngine.generate, []


def killed(self, requests, params):
    calls.append(requests)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return generate(self, requests, params)


TransformersEngine.generate = killed
sys.exit(program.run_program("evaluate", evaluate.run, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_process_costs_one_batch_and_the_result_is_the_same_bytes(tmp_path, inputs):
    execution = ExecutionConfig(rollout_batch_size=3, num_threads=1)
    killed, undisturbed = (
        write_stage_job(tmp_path / name, "evaluate", SETTINGS, inputs, execution) for name in ("killed", "undisturbed")
    )
    program = [sys.executable, "-c", KILLED_AT_ITS_FOURTH_BATCH, *killed]
    assert subprocess.run(program, check=False, capture_output=True).returncode == -9
    kept = len(AnswerStore(tmp_path / "killed" / "answers.jsonl"))
    # Two batches of the first suite, one of the second; the one before the kill may still have been in grading.
    assert kept in (4, 7)
    for arguments in (killed, undisturbed):
        subprocess.run([sys.executable, "-m", "luffy.stages.evaluate", *arguments], check=True, capture_output=True)
    assert contents(tmp_path / "killed", OUTPUTS) == contents(tmp_path / "undisturbed", OUTPUTS)
    assert read_manifest(tmp_path / "killed").resumed_from == kept


def test_a_real_model_draws_the_same_again_and_whatever_the_batch_size(tmp_path, inputs):
    for size in (1, 3, 256):
        context = context_in(tmp_path / str(size), inputs)
        run(SETTINGS, dataclasses.replace(context, execution=ExecutionConfig(rollout_batch_size=size)))
    files = {(tmp_path / str(size) / "samples.jsonl.zst").read_bytes() for size in (1, 3, 256)}
    assert len(files) == 1
    assert all(1 <= record.num_tokens <= 16 for record in read_samples_of(tmp_path / "1"))


def test_suites_have_their_own_numbers_of_responses_and_the_results_say_how_they_were_asked(
    tmp_path, inputs, monkeypatch
):
    use(monkeypatch, solve)
    own = {"longer": SuiteConfig(num_samples=3, template="none", stop=("=",))}
    run(changed(suites=own), context_in(tmp_path / "out", inputs))
    rows = {(row.suite, row.decoding): row for row in read_results(tmp_path / "out" / "results.json").rows}
    assert {cell: row.num_samples for cell, row in rows.items()} == {
        ("longer", "greedy"): 1, ("base", "greedy"): 1, ("longer", "hot/1"): 3, ("base", "hot/1"): 2,
    }  # fmt: skip
    said = rows["longer", "hot/1"].protocol
    assert said is not None
    assert (said.template, said.stop, said.temperature, said.engine) == ("none", ("=",), 1.0, "transformers")
    last = EventReader(tmp_path / "out" / "events.jsonl").read()[-1]
    assert (last.step, last.total) == (28, 28)


def test_prompts_that_leave_no_room_stop_the_stage_before_anything_is_generated(tmp_path, inputs, monkeypatch):
    engine = use(monkeypatch, solve)
    with pytest.raises(DataError, match="4 of 4 prompts do not fit"):
        run(changed(max_response_tokens=45), context_in(tmp_path / "out", inputs))
    assert engine.requests == []


@pytest.fixture
def wide_inputs(inputs) -> dict[str, Path]:
    """The same with heads as wide as vLLM's attention on CPU asks for."""
    write_wide_model(inputs["model"] / "model", seed=0)
    return inputs


@pytest.mark.slow
def test_top_p_and_stop_texts_mean_the_same_to_both_engines(tmp_path, wide_inputs, monkeypatch):
    """Greedy rows are equal to the token; the sampled ones end at the stop texts with either engine."""
    drawn: list[Completion] = []

    def noted(engine: VLLMEngine, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        completions = generate(engine, requests, params)
        drawn.extend(completions if params.stop else [])
        return completions

    generate = VLLMEngine.generate
    monkeypatch.setattr(VLLMEngine, "generate", noted)
    settings = EvaluationConfig.model_validate(
        SETTINGS.evaluation.model_dump()
        | {
            "decodings": {"greedy": {"temperature": 0.0}, "hot": {"temperature": 1.0, "top_p": 0.6, "num_samples": 16}},
            "suites": {"longer": {"stop": ("1", "ed")}, "base": {"template": "none"}},
        }
    )
    records = {}
    for name in ("transformers", "vllm"):
        evaluation = settings.model_copy(update={"engine": name})
        run(SETTINGS.model_copy(update={"evaluation": evaluation}), context_in(tmp_path / name, wide_inputs))
        records[name] = list(read_sample_records(tmp_path / name / "samples.jsonl.zst"))
    greedy = [[record for record in rows if record.decoding == "greedy"] for rows in records.values()]
    assert greedy[0] == greedy[1]
    # vLLM itself has ended them: nothing was drawn that had to be cut off.
    assert sum(len(one.token_ids) for one in drawn) == sum(
        row.num_tokens for row in records["vllm"] if row.suite == "longer"
    )
    for rows in records.values():
        stopped = [row for row in rows if row.suite == "longer" and row.response.endswith(("1", "ed"))]
        assert stopped
        assert {row.finish_reason for row in stopped} == {"stop"}
        assert all("1" not in row.response[:-1] for row in rows if row.suite == "longer")
    lengths = [
        sum(row.num_tokens for row in rows if row.decoding == "hot" and row.suite == "longer")
        for rows in records.values()
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.5)


def test_a_model_that_vllm_cannot_run_stops_the_stage(tmp_path, inputs):
    execution = ExecutionConfig.model_validate({"vllm": {"tensor_parallel_size": 3}})
    context = dataclasses.replace(context_in(tmp_path / "out", inputs), execution=execution)
    with pytest.raises(ConfigError, match="3 does not divide the 2 attention heads"):
        run(changed(engine="vllm"), context)
