"""The stages `evaluate` and `sweep`: rows, suites, kills in the last steps, both engines, and models behind endpoints.

What they share with other stages that ask is in `test_answering`.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.answered_stage import contents, evaluating, messages_of, progress_of, stage_context, use, write_inputs
from synthetic.arithmetic import problems
from synthetic.endpoint import CHAT, TEXT, Endpoint, Reply, completion, refusal
from synthetic.interrupted import answers_stay, killed_before
from synthetic.stage_jobs import write_stage_job, write_wide_model

from luffy.config.environment import ToolsEnvironment
from luffy.config.evaluation import DecodingConfig, SuiteConfig
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.model import EndpointModel, ModelConfig
from luffy.config.settings import BaseSettings, EvaluateSettings, SweepSettings
from luffy.data.parquet import write_prompts
from luffy.evaluation.results import ResultRow, read_results
from luffy.evaluation.sample_files import SampleRecord, read_samples_of
from luffy.pipeline.manifest import read_manifest
from luffy.pipeline.reuse import COMPLETE_FILE
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.stages import base, sweep
from luffy.stages.answers.store import AnswerStore
from luffy.stages.evaluate import OUTPUTS, ModelEvaluation, run

pytestmark = pytest.mark.usefixtures("shared_graders")
GREEDY = {"greedy": DecodingConfig(temperature=0.0)}


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    return write_inputs(tmp_path)


context_in = partial(stage_context, "evaluate_sft", batch=3)


def rows_in(out: Path) -> dict[tuple[str, str], ResultRow]:
    return {(row.suite, row.decoding): row for row in read_results(out / "results.json").rows}


def test_rows_follow_the_configuration_and_samples_follow_the_rows(tmp_path, inputs, monkeypatch):
    use(monkeypatch, lambda prompt, seed: "\\boxed{1}")
    result = run(evaluating(), context_in(tmp_path / "out", inputs))
    cells = [("longer", "greedy"), ("base", "greedy"), ("longer", "hot/1"), ("base", "hot/1")]
    assert {cell: row.accuracy for cell, row in rows_in(tmp_path / "out").items()} == dict.fromkeys(cells, 0.25)
    assert list(rows_in(tmp_path / "out")) == cells
    assert read_results(tmp_path / "out" / "results.json").checkpoint == "sft"
    records = list(read_samples_of(tmp_path / "out"))
    assert list(dict.fromkeys((record.suite, record.decoding) for record in records)) == cells
    assert (len(records), result.metrics["accuracy/greedy/base"]) == (24, 0.25)
    last = progress_of(tmp_path / "out")
    assert (last.step, last.total, last.metrics["reward"]) == (24, 24, 0.25)
    assert messages_of(tmp_path / "out") == []

    # Suites have their own numbers of responses, and the results say how they were asked.
    own = {"longer": SuiteConfig(num_samples=3, template="none", stop=("=",))}
    run(evaluating(suites=own), context_in(tmp_path / "own", inputs))
    rows = rows_in(tmp_path / "own")
    assert [row.num_samples for row in rows.values()] == [1, 1, 3, 2]
    said = rows["longer", "hot/1"].protocol
    assert said is not None
    assert (said.template, said.stop, said.temperature, said.engine) == ("none", ("=",), 1.0, "transformers")

    # Suites can be evaluated alone; the held-out prompts are one.
    write_prompts(inputs["data"] / "validation.parquet", problems(6))
    run(evaluating(only=("validation", "base")), context_in(tmp_path / "alone", inputs))
    rows = rows_in(tmp_path / "alone")
    assert {suite: row.num_problems for (suite, _), row in rows.items()} == {"base": 4, "validation": 6}

    # Those without readable answers are advised on.
    use(monkeypatch, lambda prompt, seed: "who knows")
    run(evaluating(), context_in(tmp_path / "unread" / "out", inputs))
    advised = [text.partition(": 100 %")[0] for text in messages_of(tmp_path / "unread" / "out")]
    assert advised == ["greedy, longer, base", "hot/1, longer, base"]


def test_what_cannot_be_evaluated_is_refused(tmp_path, inputs):
    with refused("validation", "base, longer"):
        run(evaluating(only=("validation",)), context_in(tmp_path / "out", inputs))
    for path in (inputs["data"] / "suites").iterdir():
        path.unlink()
    with refused("data.suites"):
        run(evaluating(), context_in(tmp_path / "out", inputs))


def test_a_kill_between_any_two_steps_of_the_end_loses_nothing_and_leaves_no_answers(tmp_path, inputs, monkeypatch):
    use(monkeypatch, lambda prompt, seed: "\\boxed{1}")
    with answers_stay():
        run(evaluating(), context_in(tmp_path / "done", inputs))
    engine, write, step, is_killed = use(monkeypatch, lambda prompt, seed: ""), ModelEvaluation.write, 0, True

    def written(evaluation: ModelEvaluation, checkpoint: str) -> object:
        nonlocal is_killed
        is_killed = killed_before(step, partial(write, evaluation, checkpoint))
        raise KeyboardInterrupt

    while is_killed:
        context = context_in(tmp_path / f"killed-{step}", inputs)  # as it is before the samples are written
        shutil.copy(tmp_path / "done" / "answers.jsonl", context.out)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ModelEvaluation, "write", written)
            run(evaluating(), context)
        assert run(evaluating(), context).resumed_from == 24
        assert contents(context.out, OUTPUTS) == contents(tmp_path / "done", OUTPUTS)
        assert sorted(path.name for path in context.out.iterdir()) == sorted([*OUTPUTS, "events.jsonl"])
        step += 1
    assert step > 10
    assert engine.requests == []


KILLED_AT_ITS_FOURTH_BATCH = """
import itertools, os, signal, sys
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages import evaluate, program

generate, calls = TransformersEngine.generate, itertools.count(1)


def killed(*asked):
    if next(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return generate(*asked)


TransformersEngine.generate = killed
sys.exit(program.run_program("evaluate", evaluate.run, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_process_costs_one_batch_and_the_result_is_the_same_bytes(tmp_path, inputs):
    execution, jobs = ExecutionConfig(rollout_batch_size=3, num_threads=1), {}
    for name in ("killed", "undisturbed"):
        jobs[name] = write_stage_job(tmp_path / name, "evaluate", evaluating(), inputs, execution)
    program = [sys.executable, "-c", KILLED_AT_ITS_FOURTH_BATCH, *jobs["killed"]]
    assert subprocess.run(program, check=False, capture_output=True).returncode == -9
    kept = len(AnswerStore(tmp_path / "killed" / "answers.jsonl"))
    # Two batches of the first suite, one of the second; the one before the kill may still have been in grading.
    assert kept in (4, 7)
    for arguments in jobs.values():
        subprocess.run([sys.executable, "-m", "luffy.stages.evaluate", *arguments], check=True, capture_output=True)
    assert contents(tmp_path / "killed", OUTPUTS) == contents(tmp_path / "undisturbed", OUTPUTS)
    assert read_manifest(tmp_path / "killed").resumed_from == kept


@pytest.mark.slow
def test_top_p_and_stop_texts_mean_the_same_to_both_engines(tmp_path, inputs, monkeypatch):
    """Greedy rows are equal to the token; the sampled ones end at the stop texts with either engine."""
    drawn: list[Completion] = []
    generate = VLLMEngine.generate

    def noted(engine: VLLMEngine, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        completions = generate(engine, requests, params)
        drawn.extend(completions if params.stop else [])
        return completions

    monkeypatch.setattr(VLLMEngine, "generate", noted)
    decodings = {**GREEDY, "hot": DecodingConfig(temperature=1.0, top_p=0.6, num_samples=16)}
    suites = {"longer": SuiteConfig(stop=("1", "ed")), "base": SuiteConfig(template="none")}
    records = {}
    for name in ("transformers", "vllm"):
        run(evaluating(engine=name, decodings=decodings, suites=suites), context_in(tmp_path / name, inputs))
        records[name] = list(read_samples_of(tmp_path / name))
    greedy = [[record for record in rows if record.decoding == "greedy"] for rows in records.values()]
    assert greedy[0] == greedy[1]
    longer = {name: [row for row in rows if row.suite == "longer"] for name, rows in records.items()}
    # vLLM itself has ended them: nothing was drawn that had to be cut off.
    assert sum(len(one.token_ids) for one in drawn) == sum(row.num_tokens for row in longer["vllm"])
    for rows in longer.values():
        assert {row.finish_reason for row in rows if row.response.endswith(("1", "ed"))} == {"stop"}
        assert all("1" not in row.response[:-1] for row in rows)
    lengths = [sum(row.num_tokens for row in rows if row.decoding == "hot") for rows in longer.values()]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.5)


# The stage `sweep`: checkpoints of an RL run, by one engine.

STEPS = (20, 40)


@pytest.fixture
def rl_inputs(inputs, monkeypatch) -> dict[str, Path]:
    """An RL stage whose checkpoints are plain model folders, exported by copying them."""
    for step in STEPS:
        write_wide_model(inputs["model"] / "checkpoints" / f"step_{step:06d}", seed=step)
        (inputs["model"] / "checkpoints" / f"step_{step:06d}" / COMPLETE_FILE).touch()
    monkeypatch.setattr(sweep, "export_checkpoint", lambda checkpoint, *others: shutil.copytree(checkpoint, others[-1]))
    return inputs


def sweep_in(out: Path, inputs: dict[str, Path], *steps: int):
    return sweep.run(SweepSettings(protocol=evaluating(), steps=steps), stage_context("sweep", out, inputs, 3))


def test_a_step_is_what_its_model_gets_alone_and_a_killed_sweep_needs_no_checkpoint_of_one_that_is_done(
    tmp_path, rl_inputs
):
    """`test_evaluate_command` has a sweep by one engine, its page, and a last step that is the run's model."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    result = sweep_in(out, rl_inputs, *STEPS)
    assert f"accuracy/hot/1/base/{STEPS[0]}" in result.metrics and len(result.metrics) == 8
    assert "| step 20 → 40 |" in (out / "summary.md").read_text() and not (out / "swap").exists()
    before, name = contents(out / "step_000040", OUTPUTS), "samples.jsonl.zst"
    shutil.copytree(rl_inputs["model"] / "checkpoints" / "step_000040", alone / "model")
    run(evaluating(), context_in(tmp_path / "apart" / "out", {**rl_inputs, "model": alone}))
    assert (tmp_path / "apart" / "out" / name).read_bytes() == before[name] != (out / "step_000020" / name).read_bytes()
    shutil.rmtree(out / "step_000040")
    (out / "swap").mkdir()
    shutil.rmtree(rl_inputs["model"] / "checkpoints" / "step_000020")
    assert sweep_in(out, rl_inputs, *STEPS).resumed_from == 24
    assert contents(out / "step_000040", OUTPUTS) == before
    with refused("step 30", "there are: 40"):
        sweep_in(tmp_path / "other", rl_inputs, 40, 30)


# A model that others serve.

KEY = "sk-hunter2"
served_by = partial(evaluating, engine="openai", decodings={"hot": DecodingConfig(temperature=1.0, num_samples=3)})
PLAIN = {"base": SuiteConfig(template="r1_zero")}


class Bench:
    """Evaluates what `base` makes of a model behind an endpoint: a suite of twelve problems, and one of four."""

    def __init__(self, root: Path, serve) -> None:
        self.root, self._serve = root, serve
        self.inputs = {**write_inputs(root), "model": root / "served"}
        self.suites = self.inputs["data"] / "suites"
        write_prompts(self.suites / "longer.parquet", problems(12))
        model = ModelConfig(endpoint=EndpointModel(name="gpt-x", request={"reasoning_effort": "low"}))
        base.run(BaseSettings(seed=7, model=model, base=None), stage_context("base", root / "served", {}))

    def serve(self, *arguments: object, **named: object) -> Endpoint:
        return self._serve(*arguments, key=KEY, **named)

    def evaluate(self, served: Endpoint, settings: EvaluateSettings, out: str = "out") -> list[SampleRecord]:
        execution = ExecutionConfig(server=ServerConfig(urls=(served.url,), max_retries=0, concurrency=2))
        run(settings, stage_context("evaluate_base", self.root / out, self.inputs, execution=execution))
        return list(read_samples_of(self.root / out))


@pytest.fixture
def bench(tmp_path, serve, monkeypatch) -> Bench:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return Bench(tmp_path, serve)


def test_each_suite_is_asked_in_its_way_and_every_response_is_graded(tmp_path, bench):
    served = bench.serve()
    chat, *_, plain = bench.evaluate(served, served_by(suites=PLAIN))
    rows = read_results(tmp_path / "out" / "results.json").rows
    assert [(row.suite, row.num_problems, row.num_samples, row.mean_tokens) for row in rows] == [
        ("longer", 12, 3, 7), ("base", 4, 3, 7),
    ]  # fmt: skip
    assert rows[0].protocol is not None and rows[0].protocol.engine == "openai"
    assert (chat.prompt, plain.prompt[-30:]) == ("user: 0 +1", "\nUser: 3 +1\nAssistant: <think>")
    assert (chat.response[:6], plain.response[:13]) == ("\\boxed", "<think>\\boxed")
    assert [path for path, _ in served.asked] == [CHAT] * 36 + [TEXT] * 12
    assert {(body["model"], body["reasoning_effort"]) for _, body in served.asked} == {("gpt-x", "low")}
    assert len({body["seed"] for _, body in served.asked}) == 48
    (described,) = (bench.inputs["model"] / "model").iterdir()
    assert json.loads(described.read_text()) == {"name": "gpt-x", "request": {"reasoning_effort": "low"}}


def test_no_file_holds_the_key_and_reasoning_that_is_not_closed_is_no_answer(tmp_path, bench):
    said = completion("", "length", reasoning_content="\\boxed{1}")
    record = bench.evaluate(bench.serve(lambda path, body: said), served_by())[0]
    assert (record.response, record.outcome, record.finish_reason) == ("<think>\n\\boxed{1}", "no_answer", "length")
    with refused("403"):
        forbidding = bench.serve(lambda path, body: refusal(403, f"Bearer {KEY} may not"))
        bench.evaluate(forbidding, served_by(), "apart/refused")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_what_cannot_be_asked_is_refused_before_anything_is(bench):
    served = bench.serve(paths=(CHAT,))
    with refused("/v1/completions", "404", "evaluation.template"):
        bench.evaluate(served, served_by(suites=PLAIN))
    turns = dataclasses.replace(problems(1)[0], messages=problems(1)[0].messages * 2)
    write_prompts(bench.suites / "base.parquet", [turns])
    with refused("suite base", "p0", "r1_zero"):
        bench.evaluate(served, served_by(suites=PLAIN))
    assert served.asked == []


def test_an_environment_answers_a_model_behind_an_endpoint(bench):
    """The model calls the calculator with the question, and boxes what it is told; the last turn is graded."""

    def calling(path: str, body: dict) -> Reply:
        asked, *rest = (turn["content"] for turn in body["messages"] if turn["role"] == "user")
        call = json.dumps({"name": "calculator", "arguments": {"expression": asked}})
        told = rest[0].split("\n")[1] if rest else ""
        return completion(f"\\boxed{{{told}}}" if rest else f"<tool_call>\n{call}\n</tool_call>", num_tokens=4)

    tools = ToolsEnvironment(kind="tools", tools=("calculator",))
    records = bench.evaluate(bench.serve(calling, (CHAT,)), served_by(decodings=GREEDY, environment=tools))
    assert len(records) == 16
    for record in records:
        assert record.correct
        assert record.measures["tool_calls/calculator"] == 1.0
        assert record.num_tokens == 2 * 4
        assert record.response.count("--- policy ---") == 2 and "--- environment ---" in record.response
