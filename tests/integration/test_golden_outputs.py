"""Small chains, and two steps of every method, give the bits that are committed in golden_outputs.json, so that a
change which is to leave results as they are can be seen to do so.

    PYTHONPATH=tests python tests/integration/test_golden_outputs.py

replaces what is committed for this kind of CPU and torch. A change that alters results on purpose says so in the
changelog, and commits what this prints. CPUs of another vendor round differently even with `cpu_instructions: avx2`,
and so may another build of torch: each has an entry of its own.

`smoke_ray` as it is shipped lets the policy run one step ahead of the engine, so that the time at which new weights
arrive decides which of them sample a response: two undisturbed runs are equal in their first step only. Without that
staleness its two ranks and its vLLM engine under Ray give equal bits too, which is what is compared here.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas
import pytest
import torch
from support.installed import needs_vllm
from support.prefect_api import shared_api

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_outputs.json")
TIMEOUT_S = 900.0
CHAINS = {
    # Long enough that RL is rewarded.
    "arithmetic_study": (
        *("data.train.num_prompts=64", "data.corpus.num_prompts=12800", "base.steps=100", "sft.num_traces=16"),
        *("sft.batch_size=8", "sft.epochs=1", "rl.steps=4", "rl.prompts_per_step=8", "execution.checkpoint.rl_every=2"),
        *(f"data.suites.{suite}.num_prompts=16" for suite in ("in_distribution", "longer", "other_mix", "retention")),
    ),
    "smoke_ray": ("rl.max_staleness=0", "rl.correction=null", "stages=[prepare_data, base, rl]"),
}
# The job that Ray would find below another cluster's, and must not join.
FOREIGN_JOB = {
    "RAY_ADDRESS": "10.255.255.1:6379",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}}',
}
_NETWORK = "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2}"
# Turns that are answered, as rollouts and as traces: a game, and calls of a calculator.
EPISODES = {
    "guess_number": (
        "data.train={kind: guess_number, num_prompts: 24, high: 7, max_turns: 3}",
        "data.corpus={kind: guess_number, num_prompts: 512, high: 7, player: random, max_turns: 3}",
        "data.suites={games: {kind: guess_number, num_prompts: 8, high: 7, max_turns: 3}}",
        "environment.limits={max_turns: 3, max_turn_tokens: 8}",
    ),
    "tools": (
        "data.train.num_prompts=24",
        "data.corpus.num_prompts=2048",
        *(f"data.suites.{suite}.num_prompts=8" for suite in ("in_distribution", "more_calls", "without_tool")),
        "environment.limits={max_turns: 3, max_turn_tokens: 24}",
    ),
}
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
METRICS = ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/response_length_mean", "rollout/logp_gap_mean")
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""


def kind_of_machine() -> str:
    """What the bits may depend on beside the code."""
    vendor, model = (re.search(rf"^{what}\s*: (\S+)", CPU, re.MULTILINE) for what in ("vendor_id", "model"))
    if vendor is None or model is None:
        return f"{platform.machine()}, torch {torch.__version__}"
    # Matrix units and caches of Intel's differ by model, and with them what vLLM computes.
    which = vendor[1] if vendor[1] == "AuthenticAMD" else f"{vendor[1]} model {model[1]}"
    return f"{which}, torch {torch.__version__}"


def outputs(name: str, overrides: Sequence[str], workspace: Path) -> Mapping[str, str]:
    """Digests of the data, of weights and metrics of every training stage, and of every evaluation."""
    settings = ["execution.cpu_instructions=avx2", "execution.num_threads=1", *overrides]
    command = [sys.executable, "-m", "luffy", "run", name, *settings, "--workspace", str(workspace)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LUFFY_")}
    environment = {**kept, **FOREIGN_JOB, **shared_api(), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=TIMEOUT_S)
    stages = workspace / "stages"
    (train,) = stages.glob("prepare_data/*/train.parquet")
    found = {"data": _digest(pandas.read_parquet(train).to_json(orient="records"))}
    for stage in ("base", "sft", "rl"):
        if not (stages / stage).is_dir():
            continue
        (folder,) = (stages / stage).iterdir()
        found[f"{stage} weights"] = _digest((folder / "model" / "model.safetensors").read_bytes())
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        found[f"{stage} metrics"] = _digest(json.dumps([[row.get(metric) for metric in METRICS] for row in rows]))
    for file in stages.glob("evaluate/*/results.json"):
        results = json.loads(file.read_text())
        graded = [[row["suite"], row["decoding"], row["outcomes"], row["mean_tokens"]] for row in results["rows"]]
        found[f"evaluation of {results['checkpoint']}"] = _digest(json.dumps(graded))
    return dict(sorted(found.items()))


def outputs_of_methods(folder: Path) -> Mapping[str, str]:
    """Digests of every method's weights after two steps, and of what a policy answers before RL, from a process with
    AVX2 alone."""
    environment = {**os.environ, **_AVX2, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, str(Path(__file__)), "--methods", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    found: dict[str, str] = json.loads((folder / "outputs.json").read_text())
    return found


def _make_methods(folder: Path) -> dict[str, str]:
    from reference.taught_presets import SUPERVISED
    from support.methods import experiment, make_easy, run_rl, taught
    from support.stages import CONFIGS, WEIGHTS, run_stage, upstream_of

    from luffy.config import available_presets, load_experiment

    torch.set_num_threads(1)
    make_easy(folder)
    inputs, found = {"data": folder / "data", "model": folder / "model", "held_out": folder / "data"}, {}
    for method in available_presets("methods"):
        kind, out = ("sft" if method in SUPERVISED else "rl"), folder / method
        if kind == "rl":
            run_rl(experiment(method, "rl.steps=2", *taught(method, inputs)), out, inputs)
        else:
            run_stage(experiment(method, "sft.epochs=1"), "sft", out, inputs)
        found[f"{kind} {method}"] = _digest((out / "model" / "model.safetensors").read_bytes())
    for name, overrides in EPISODES.items():
        small = (_NETWORK, "base={steps: 40, batch_size: 32}", "rl={steps: 2, prompts_per_step: 4}", "chain=rl")
        answering = "difficulty={num_samples: 2, max_pass_rate: 1.0}"
        config = load_experiment(CONFIGS / f"{name}.yaml", [*overrides, *small, answering])
        upstream = upstream_of(config, folder / name)
        for stage, file in (("difficulty", "pass_rates.parquet"), ("rl", WEIGHTS)):
            run_stage(config, stage, folder / name / stage, upstream)
            made = folder / name / stage / file
            content = made.read_bytes() if stage == "rl" else pandas.read_parquet(made).to_json(orient="records")
            found[f"{stage} of episodes: {name}"] = _digest(content)
    answered = {
        "sample": ("sampled.parquet", "chain=expert_iteration", "sample.num_samples=2", "method=sft"),
        "difficulty": ("pass_rates.parquet", "difficulty={num_samples: 2, max_pass_rate: 1.0}"),
    }
    for stage, (file, *overrides) in answered.items():
        run_stage(experiment("luffy", *overrides), stage, folder / stage, inputs)
        found[f"{stage} answers"] = _digest(pandas.read_parquet(folder / stage / file).to_json(orient="records"))
    return found


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic_study", "methods"])
def test_a_chain_and_every_method_give_the_committed_bits(tmp_path, name):
    golden = json.loads(GOLDEN.read_text()).get(kind_of_machine())
    if golden is None:
        pytest.skip(f"needs golden outputs of this machine: {kind_of_machine()}")
    found = outputs_of_methods(tmp_path) if name == "methods" else outputs(name, CHAINS[name], tmp_path)
    assert {what for what, digest in golden[name].items() if found.get(what) != digest} == set()
    assert name == "methods" or found.keys() == golden[name].keys()


@needs_vllm
def test_the_chain_under_ray_makes_its_stages_and_where_the_machine_is_known_the_committed_bits(tmp_path):
    """Two ranks and a vLLM engine, whose kernels depend on AVX-512, below a job of another cluster."""
    found = outputs("smoke_ray", CHAINS["smoke_ray"], tmp_path)
    rows = [json.loads(line) for file in tmp_path.glob("stages/rl/*/metrics.jsonl") for line in file.open()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["rollout/logp_gap_mean"] < 1e-3 and row["actor/grad_norm"] > 0 for row in rows)
    if "avx512f" in CPU and (golden := json.loads(GOLDEN.read_text()).get(kind_of_machine())):
        assert found == golden["smoke_ray"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--methods"]:
        at = Path(sys.argv[2])
        # The name of the folder is in what is sampled from the policy in it.
        (at / "outputs.json").write_text(json.dumps(dict(sorted(_make_methods(at / "made").items()))))
        raise SystemExit
    everything = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        made = {name: outputs(name, overrides, Path(folder) / name) for name, overrides in CHAINS.items()}
        (Path(folder) / "methods").mkdir()
        made["methods"] = outputs_of_methods(Path(folder) / "methods")
    GOLDEN.write_text(json.dumps(everything | {kind_of_machine(): made}, indent=1) + "\n")
    print(GOLDEN.read_text())
