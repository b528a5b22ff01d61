"""Traces made by teachers, through the real stage programs: one behind an endpoint, killed with `kill -9`, whose traces
SFT learns and `luffy export` hands on; the base policy's own folder, through the embedded engine; and the same
policy behind a real vLLM server, which also teaches another one by on-policy distillation."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_run
import torch
from real_run import REVERSING, execute, started
from safetensors.torch import load_file
from support.installed import needs_vllm
from support.patience import wait_until
from synthetic.endpoint import CHAT, Endpoint, Reply, completion
from transformers import AutoModelForCausalLM
from vllm_serving import NAME, served_by_vllm

from luffy.cli.main import main
from luffy.config.data import FileSource
from luffy.data.parquet import read_prompts
from luffy.data.pass_rates import read_card
from luffy.data.sources import open_source
from luffy.data.synthesis_card import SynthesisCard
from luffy.data.templates import encode_traces, load_tokenizer, render_prompts
from luffy.errors import StageFailed
from luffy.pipeline.experiment import Experiment
from luffy.pipeline.manifest import finished_manifest
from luffy.tracking.metrics import METRICS_FILE, read_metrics

pytestmark = pytest.mark.slow
KEY = "sk-hunter2"
BEFORE_THE_KILL = 7
NEAR = 1e-4
CHANGES = [
    "chain=sft",
    f"data.train={{{REVERSING}, num_prompts: 12}}",
    f"data.corpus={{{REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "model.architecture={hidden_size: 64, num_heads: 2}",  # vLLM needs heads of 32 on a CPU
    "base.steps=150",
    "sft={num_traces: 12, batch_size: 4, epochs: 1}",
    "execution={rollout_batch_size: 8, num_threads: 1, retries: 0}",
]
OUTPUTS = ("train.parquet", "sft.parquet", "rl_complement.parquet", "card.json", "card.md")


def opened(workspace: Path, *overrides: str) -> Experiment:
    return real_run.opened(workspace, "smoke.yaml", *CHANGES, *overrides)


def of_endpoint(url: str) -> list[str]:
    teacher = "endpoint: {name: org/big}, max_response_tokens: 40, num_samples: 2"
    return [
        f"synthesize={{prompts: all, teachers: {{big: {{{teacher}}}}}}}",
        f"execution.teachers={{big: {{urls: [{url}], api_key_variable: TEACHER_KEY, concurrency: 2}}}}",
    ]


def of_folder(folder: Path) -> list[str]:
    teacher = f"path: {folder}, max_response_tokens: 16, num_samples: 8"
    keep = "keep: {choose: diverse, max_per_prompt: 2}, stop_when_kept: false"
    return [f"synthesize={{prompts: all, teachers: {{base: {{{teacher}}}}}, {keep}}}"]


class AnswerKey:
    """Answers what it is asked correctly, with a text that depends on the seed; from `limit` on it stalls."""

    def __init__(self) -> None:
        self.truths: dict[str, str] = {}
        self.limit = BEFORE_THE_KILL
        self.given: list[tuple[str, int]] = []
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, path: str, body: dict) -> Reply | None:
        question = body["messages"][-1]["content"]
        with self._lock:
            may_answer = len(self.given) < self.limit
            if may_answer:
                self.given.append((question, body["seed"]))
        if not may_answer:
            self.ended.wait()
            return None
        # Every third question gets a wrong answer to its first sample, so that a second one is asked.
        is_wrong = int(self.truths[question]) % 3 == 0 and sum(asked == question for asked, _ in self.given) == 1
        answer = "100" if is_wrong else self.truths[question]
        return completion(f"{answer} \\boxed{{{answer}}}", num_tokens=9, prompt_tokens=5)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, request) -> Path:
    """A workspace with the data and the base policy."""
    root = tmp_path_factory.mktemp("workspace")
    os.environ["TEACHER_KEY"] = KEY
    request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
    execute(opened(root, *of_endpoint("http://127.0.0.1:9")), "prepare_data", "base")
    return root


def test_kill_9_pays_no_answer_twice_and_changes_nothing_and_sft_learns_what_came(workspace, tmp_path, capsys):
    script = AnswerKey()
    endpoint = Endpoint(script, (CHAT,), KEY)
    experiment = opened(workspace, *of_endpoint(endpoint.url))
    data = experiment.plan_node("prepare_data").directory
    script.truths = {p.messages[-1].content: p.ground_truth for p in read_prompts(data / "train.parquet")}
    plan, program = started(experiment, "synthesize")
    log = plan.directory / "paid_answers.jsonl"
    wait_until(lambda: log.is_file() and log.read_bytes().count(b"\n\n") == BEFORE_THE_KILL, "the first answers")
    program.kill()
    script.limit = 10**6
    script.ended.set()
    execute(experiment, "synthesize")
    assert finished_manifest(plan.directory).resumed_from == BEFORE_THE_KILL
    assert len(script.given) == len(set(script.given))
    card = read_card(plan.directory / "card.json", SynthesisCard)
    assert card.given == card.prompts == 12
    assert len(script.given) == card.teachers["big"].questions > 12

    folder = execute(experiment, "synthesize", "sft")
    assert experiment.plan_node("sft").inputs["data"] == plan.directory
    kept = {output: (plan.directory / output).read_bytes() for output in OUTPUTS}
    killed = tmp_path / "killed"
    shutil.move(plan.directory, killed)
    script.given.clear()
    execute(experiment, "synthesize")
    assert {output: (plan.directory / output).read_bytes() for output in OUTPUTS} == kept

    exported = tmp_path / "traces.parquet"
    where = ["--workspace", str(workspace)]
    assert main(["export", str(folder), str(exported), "--author", "big", *where]) == 0
    assert "12 traces (12 of big)" in capsys.readouterr().out
    again = list(open_source(FileSource(kind="file", path=str(exported)), "train", 0).rows())
    assert [trace.author for prompt in again for trace in prompt.traces] == ["big"] * 12
    own = {p.uid: p for p in read_prompts(plan.directory / "train.parquet")}
    assert [prompt.traces for prompt in again] == [own[prompt.uid].traces[-1:] for prompt in again]
    assert main(["export", str(folder), str(tmp_path / "o.parquet"), "--author", "bigger", *where]) == 2
    assert main(["export", str(folder), str(exported), *where]) == 2
    endpoint.close()
    files = [path for path in workspace.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_model_folder_teaches_through_the_embedded_engine(workspace):
    base = opened(workspace, *of_endpoint("http://127.0.0.1:9")).plan_node("base").directory / "model"
    experiment = opened(workspace, *of_folder(base))
    execute(experiment, "synthesize")
    directory = experiment.plan_node("synthesize").directory
    card = json.loads((directory / "card.json").read_text())["teachers"]["base"]
    prompts = read_prompts(directory / "train.parquet")
    traces = [t for p in prompts for t in p.traces if t.author == "base"]
    assert card["questions"] == 12 * 8
    assert card["traces"] == len(traces)
    assert {(trace.model, trace.verified) for trace in traces} == {(str(base), True)}
    # The others were sampled as other tokens than those of their text.
    scored = [(p, t) for p in prompts for t in p.traces if t.author == "base" and t.logprobs is not None]
    assert 0 < card["with_logprobs"] == len(scored) <= len(traces)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(base)
    for prompt, trace in scored:
        asked, (written,) = render_prompts(tokenizer, [prompt.messages])[0], encode_traces(tokenizer, [trace.text])
        with torch.no_grad():
            logp_TV = torch.log_softmax(model(torch.tensor([[*asked, *written]])).logits[0], dim=-1)
        expected = [logp_TV[len(asked) - 1 + place, token].item() for place, token in enumerate(written)]
        assert trace.logprobs == pytest.approx(expected, abs=1e-4)
        assert trace.num_tokens == len(written)


@pytest.fixture(scope="module")
def served(workspace, tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The base policy's folder, and the URL of a real vLLM server that has it."""
    base = opened(workspace, *of_endpoint("http://127.0.0.1:9")).plan_node("base").directory / "model"
    with served_by_vllm(base, tmp_path_factory.mktemp("server") / "log.txt", KEY) as url:
        yield base, url


@needs_vllm
def test_a_real_vllm_server_teaches_as_the_embedded_engine_does(workspace, served):
    """Its greedy answers are those of the folder."""
    base, url = served
    greedy = "temperature: 0.0, num_samples: 1, max_response_tokens: 16"
    rows = {}
    for name, model in {"served": "endpoint: {name: base}", "folder": f"path: {base}"}.items():
        changes = [f"synthesize={{prompts: all, teachers: {{{name}: {{{model}, {greedy}}}}}}}"]
        if name == "served":
            changes += [f"execution.teachers={{served: {{urls: [{url}], api_key_variable: TEACHER_KEY}}}}"]
        experiment = opened(workspace, *changes)
        execute(experiment, "synthesize")
        directory = experiment.plan_node("synthesize").directory
        teacher = read_card(directory / "card.json", SynthesisCard).teachers[name]
        traces = [t for p in read_prompts(directory / "train.parquet") for t in p.traces if t.author == name]
        texts = [(trace.text, trace.num_tokens) for trace in traces]
        rows[name] = (teacher.outcomes, teacher.prompt_tokens, teacher.num_tokens, texts)
    assert rows["served"] == rows["folder"]
    assert rows["served"][0]["correct"] > 0


@needs_vllm
def test_on_policy_distillation_from_a_real_vllm_server_is_that_from_the_folder(workspace, served):
    """The policy is another base, of fewer steps."""
    base, url = served
    metrics, weights = {}, {}
    where = f"execution.rl_teacher={{urls: [{url}], api_key_variable: TEACHER_KEY}}"

    def distilled(*overrides: str) -> Path:
        experiment = opened(workspace, "chain=rl", "method=opd", "base.steps=20", "rl.steps=2", *overrides)
        execute(experiment, "prepare_data", "base", "rl")
        return experiment.plan_node("rl").directory

    kinds = {
        "folder": (f"rl.teacher={{kind: model, path: {base}}}",),
        "served": (f"rl.teacher={{kind: served, name: {NAME}}}", where),
    }
    for kind, overrides in kinds.items():
        directory = distilled(*overrides)
        metrics[kind] = read_metrics(directory / METRICS_FILE)
        weights[kind] = load_file(directory / "model" / "model.safetensors")
    with pytest.raises(StageFailed, match="serves base, and not another"):
        distilled("rl.teacher={kind: served, name: another}", where)
    name = "actor/distillation_reverse_kl"
    assert [row[name] for row in metrics["served"]] == pytest.approx([row[name] for row in metrics["folder"]], abs=NEAR)
    assert all(row[name] > 100 * NEAR and row["perf/teacher_s"] > 0 for row in metrics["served"])
    torch.testing.assert_close(weights["served"], weights["folder"], rtol=0, atol=NEAR)
    files = [path for path in (workspace / "stages").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
