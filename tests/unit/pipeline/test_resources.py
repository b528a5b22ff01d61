"""What is refused before anything starts; the driver is a script in nvidia-smi's place."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic.reward_models import reward_folder

from luffy.config import load_experiment
from luffy.config.execution import VLLMConfig
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.errors import ConfigError, DataError
from luffy.pipeline import gpus
from luffy.pipeline.resources import check_resources, find_resources

CONFIGS = Path(__file__).parents[3] / "exp_configs"
SEVEN_B = CONFIGS / "luffy_qwen2.5_math_7b.yaml"
DETECTED = "execution.gpu_memory_gb=null"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine whose driver says what the test wants it to."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def says(script):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return says


def cards(*mib):
    return "\n".join(f"echo '{index}, GPU-{index}{index}-aa, {size}'" for index, size in enumerate(mib))


def detected_gpus_gib():
    found = gpus.detected_gpus()
    return None if found is None else tuple(gpu.memory_gib for gpu in found)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, (79.65, 40)), ("1", (40,)), ("GPU-00", (79.65,)), ("0, 1", (79.65, 40)), ("", ()), ("-1", ())],
)
def test_visible_gpus_are_counted_and_measured(driver, monkeypatch, visible, expected):
    driver(cards(81559, 40960))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detected_gpus_gib() == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("script", "seen", "notes"),
    [
        *(
            (script, None, ["the number of GPUs is unknown", "memory not checked"])
            for script in ("sleep 60", "echo 'No devices were found'", "exit 9")
        ),
        (None, (), ["this machine has none: ranks and engines would run on its CPU", "memory not checked"]),
    ],
)
def test_without_gpus_or_an_answer_of_the_driver_notes_take_the_place_of_checks(
    driver, monkeypatch, script, seen, notes
):
    monkeypatch.setattr(gpus, "_QUERY_TIMEOUT_S", 0.5)
    if script is not None:
        driver(script)
    assert detected_gpus_gib() == seen
    found = find_resources(load_experiment(SEVEN_B, [DETECTED]))
    assert found.complaints == ()
    assert [words in note for words, note in zip(notes, found.notes, strict=True)] == [True] * len(notes)


def test_the_real_size_configurations_fit_their_machines(driver):
    driver(cards(*[81559] * 8))
    for name in ("luffy_qwen2.5_math_1.5b", "luffy_qwen2.5_math_7b", "luffy_qwen2.5_math_7b_2nodes"):
        for overrides in ([], [DETECTED]):
            check_resources(load_experiment(CONFIGS / f"{name}.yaml", overrides))
    disaggregated = ["execution.ray={placement: disaggregated, trainer_ranks: 4, engines: 4}"]
    check_resources(load_experiment(SEVEN_B, [*disaggregated, "execution.vllm.gpu_memory_utilization=0.9"]))
    overlapping = ["execution.ray.placement=disaggregated", "rl.max_staleness=1", "execution.ray.engines=8"]
    overlapping += ["execution.ray.trainer_ranks=8", "execution.vllm.gpu_memory_utilization=0.9"]
    check_resources(load_experiment(CONFIGS / "luffy_qwen2.5_math_7b_2nodes.yaml", overlapping))


def test_every_arm_of_the_papers_comparison_fits_a_node_of_eight(driver):
    driver(cards(*[81559] * 8))
    arms = load_sweep(CONFIGS / "compare_qwen2.5_math_7b.yaml").candidates()
    found = {each.arm: find_resources(each.config) for each in arms}
    assert {name: resources.complaints for name, resources in found.items()} == dict.fromkeys(found, ())
    in_sft = {name: gpu.count for name, each in found.items() for gpu in each.gpus if gpu.name == "GPU in SFT"}
    assert in_sft == {"sft": 8, "sft_then_rl": 8, "sft_then_luffy": 8}


def test_a_local_run_with_vllm_is_checked_where_there_are_gpus(driver, tmp_path):
    several = ["evaluation.engine=vllm", "execution.vllm={engines: 3, gpu_memory_utilization: 0.9}", "chain=sft"]
    pretrained_14b = ["model={path: Qwen/Qwen2.5-14B}", *UNTRAINED[2:], "method=sft"]
    config = load_experiment(CONFIGS / "smoke.yaml", [*several, *pretrained_14b])
    assert find_resources(config).gpus == ()  # no GPU here
    driver(cards(24564, 24564))
    few, full = find_resources(config).complaints
    assert few.startswith("execution.vllm: 3 engines x 1 GPUs for evaluation take 3 GPUs, this machine has 2")
    assert full.startswith("execution.vllm: an engine in evaluation needs about ")
    assert "its share is 21.6 (gpu_memory_utilization 0.9)" in full
    driver(cards(*[81559] * 3))
    found = find_resources(config)
    assert (found.complaints, [(gpu.name, gpu.count) for gpu in found.gpus]) == ((), [("GPU in evaluation", 3)])


def test_training_that_takes_turns_with_vllm_on_its_gpu_is_checked(driver):
    smaller = ["model={path: Qwen/Qwen2.5-1.5B}", *UNTRAINED[2:], "rl.engine=vllm"]
    smaller += ["execution={zero_stage: 1, gradient_checkpointing: true}"]
    config = load_experiment(CONFIGS / "smoke.yaml", ["chain=rl", "method=luffy", "model.dtype=bfloat16", *smaller])
    assert find_resources(config).gpus == ()  # no GPU here
    driver(cards(81559))
    assert find_resources(config).complaints[0].startswith("execution: a shared GPU in a rollout would hold about ")
    config = config.model_copy(
        update={"execution": config.execution.model_copy(update={"vllm": VLLMConfig(gpu_memory_utilization=0.3)})}
    )
    found = find_resources(config)
    assert (found.complaints, [(gpu.name, gpu.count) for gpu in found.gpus]) == (
        (),
        [("shared GPU in a rollout", 1), ("shared GPU in an update", 1)],
    )
    assert 0 < found.gpus[1].gib("engine, asleep") < 1  # of the process only what the trainer's has not anyway


def test_a_reward_model_beside_an_engine_has_to_fit_too(driver, tmp_path):
    folder = reward_folder(tmp_path / "reward")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(40 << 30)  # as many bytes as 10 B parameters in float32, of which the disk holds none
    driver(cards(*[81559] * 8))
    reward = f"grading.kind={{kind: reward_model, path: '{folder}', correct_from: 0.0}}"
    lines = find_resources(load_experiment(SEVEN_B, [reward])).complaints
    assert lines and all("reward model 40.0" in line and "execution.reward_device: cpu or " in line for line in lines)
    assert any(line.startswith("execution: a GPU in evaluation with a reward model would hold") for line in lines)
    assert find_resources(load_experiment(SEVEN_B, [reward, "execution.reward_device=cpu"])).complaints == ()


def test_a_sweep_needs_nothing_for_training(driver):
    driver(cards(*[81559] * 2))
    config = load_experiment(SEVEN_B, ["execution.vllm.engines=2"])
    assert len(find_resources(config).complaints) == 1
    found = find_resources(config, ("sweep",))
    assert (found.complaints, [gpu.name for gpu in found.gpus]) == ((), ["GPU in evaluation"])


SFT = "sft={epochs: 3, batch_size: 64, optimizer: {lr: 5e-5}}"
SPLIT = "execution.ray.placement=disaggregated"
TWO = ("execution.ray={placement: disaggregated, trainer_ranks: 1, engines: 1}", "execution.vllm.engines=1")
EMBEDDED = ("evaluation.engine=transformers", "execution.vllm.engines=1")
UNDIVIDED = "does not divide the model's 28 attention heads"
FULL_ENGINE = "raise gpu_memory_utilization or tensor_parallel_size"
LAYOUTS = [
    # The GPUs, the overrides, and parts of each line.
    (
        [81559] * 4,
        [],
        [
            "execution.ray: 8 trainer ranks and 8 engines x 1 GPUs (colocated) take 8 GPUs, this machine has 4; lower "
            "execution.ray.trainer_ranks or execution.ray.engines, or give the execution.ray.address of a larger "
            "cluster",
            "execution.vllm: 8 engines x 1 GPUs for evaluation take 8 GPUs, this machine has 4; lower "
            "execution.vllm.engines or execution.vllm.tensor_parallel_size",
        ],
    ),
    ([81559] * 4, ["execution.ray.address=auto", "execution.vllm.engines=4"], []),
    ([40960] * 8, [DETECTED], ["a shared GPU in a rollout would hold about ", "raise execution.zero_stage"]),
    ([81559] * 2, TWO, ["trainer GPU would hold about "]),
    ([81559] * 2, (*TWO, "model.lora={rank: 32, alpha: 64}"), []),
    ([81559] * 8, (*EMBEDDED, "execution.rollout_batch_size=1024"), ["lower execution.rollout_batch_size or generate"]),
    ([81559] * 8, (*EMBEDDED, "execution.rollout_batch_size=64"), []),
    (
        [81559] * 8,
        ["chain=sft", "method=sft", SFT, "execution.ray={trainer_ranks: 1, engines: 1}"],
        ["execution: a GPU in SFT would hold about "],
    ),
    *(
        ([81559] * 8, overrides, [words])
        for overrides, words in (
            (["execution.vllm.gpu_memory_utilization=0.9"], "lower execution.vllm.gpu_memory_utilization"),
            (["execution.gradient_checkpointing=false"], "set execution.gradient_checkpointing: true"),
            (
                ["execution.logprob_chunk_tokens=32768", "execution.micro_batch_tokens=32768"],
                "lower execution.logprob_chunk_tokens",
            ),
            (["execution.micro_batch_tokens=262144"], "lower execution.micro_batch_tokens"),
        )
    ),
    (
        [],
        ["execution.vllm.tensor_parallel_size=3", SPLIT],
        [f"tensor_parallel_size: 3 {UNDIVIDED} (with 4 of keys"],
    ),
    ([], ["execution.vllm.tensor_parallel_size=7", SPLIT], ["keys and values); allowed are 1, 2, 4, 28"]),
    ([], ["execution.sequence_parallel=8"], [f"sequence_parallel: 8 {UNDIVIDED}; allowed are 1, 2, 4, 7, 14, 28"]),
    ([], ["execution.vllm.gpu_memory_utilization=0.2"], [FULL_ENGINE]),
    ([], ["execution.vllm.max_num_seqs=1000000"], [FULL_ENGINE, "a shared GPU in a rollout would hold about "]),
    ([40960] * 8, [], ["execution.gpu_memory_gb: 79 GiB, but the smallest GPU of this machine has 40.0; correct it"]),
]


@pytest.mark.parametrize(("gpus", "overrides", "lines"), LAYOUTS)
def test_a_layout_that_cannot_work_is_a_line_for_each_reason_with_a_remedy(driver, gpus, overrides, lines):
    driver(cards(*gpus))
    found = find_resources(load_experiment(SEVEN_B, overrides)).complaints
    assert [words in line for words, line in zip(lines, found, strict=True)] == [True] * len(lines)


def test_a_local_path_that_is_not_a_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no config\.json; give a Hugging Face model folder"):
        check_resources(load_experiment(SEVEN_B, [f"model.path={tmp_path}"]))


def test_a_local_run_is_not_checked_and_an_unknown_model_is_reported(driver):
    driver("exit 9")
    local = find_resources(load_experiment(CONFIGS / "smoke.yaml"))
    assert (local.gpus, local.notes, local.complaints) == ((), (), ())
    found = find_resources(load_experiment(SEVEN_B, ["model.path=nobody/has-this-model"]))
    assert found.gpus == () == found.complaints
    assert "the shape of nobody/has-this-model is unknown here" in found.notes[1]


@pytest.mark.parametrize("cluster", ["local", "ray"])
@pytest.mark.parametrize(("gpus", "refused"), [(0, True), (8, False)])
def test_attention_for_gpus_is_refused_without_one(driver, cluster, gpus, refused):
    driver(cards(*[81559] * gpus))
    found = find_resources(load_experiment(SEVEN_B, [f"cluster={cluster}", "execution.attention=flash_attention_2"]))
    line = "execution.attention: flash_attention_2 needs a GPU, this machine has none; use sdpa"
    assert found.complaints == ((line,) if refused else ())


LORA = ["chain=rl", "method=luffy", "model.lora={rank: 4, alpha: 8, targets: [q_proj, mlp.up_porj]}"]


@pytest.mark.parametrize("name", ["smoke", "luffy_qwen2.5_math_7b"])
def test_targets_of_an_adapter_that_the_model_does_not_have_are_refused_before_anything_runs(driver, name):
    driver(cards(*[81559] * 8))
    with pytest.raises(ConfigError) as refusal:
        check_resources(load_experiment(CONFIGS / f"{name}.yaml", LORA))
    assert str(refusal.value) == (
        "model.lora.targets: mlp.up_porj is no linear layer that can be adapted; allowed are "
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )


def test_an_adapter_without_its_package_is_refused_before_anything_runs(driver, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lora = [*LORA, "model.lora.targets=null"]
    found = find_resources(load_experiment(CONFIGS / "smoke.yaml", lora))
    assert found.complaints == ("model.lora needs the package peft: pip install 'luffy-rl[lora]'",)


def pretrained(folder, layers):
    shape = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": layers, "num_attention_heads": 9}
    folder.joinpath("config.json").write_text(json.dumps(shape | {"intermediate_size": 1536, "vocab_size": 16384}))
    return f"model={{path: {folder}}}"


UNTRAINED = ["chain=rl", "method=luffy", "base=null", "data.corpus=null", "model.architecture=null"]


@pytest.mark.parametrize(
    ("layers", "gpus", "overrides", "advised"),
    [
        (30, 0, [], "rl.engine: vllm is about three times as fast"),
        (30, 1, [], "rl.engine: vllm shares the GPU with the trainer"),
        (3, 0, [], None),
        (30, 0, ["rl.engine=vllm"], None),
        (30, 0, ["chain=sft", "method=sft"], None),
    ],
)
def test_an_engine_that_is_slow_or_will_refuse_is_advised_against(driver, tmp_path, layers, gpus, overrides, advised):
    driver(cards(*[81559] * gpus))
    config = load_experiment(CONFIGS / "smoke.yaml", [*UNTRAINED, pretrained(tmp_path, layers), *overrides])
    found = find_resources(config)
    assert found.complaints == () == found.gpus
    assert [advised in note for note in found.notes] == ([] if advised is None else [True])


def test_the_check_does_not_load_torch():
    code = "import sys, luffy.pipeline.resources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_servers_elsewhere_take_no_gpu_here(driver):
    driver(cards(*[81920] * 8))
    served = ["rl.engine=openai", "evaluation.engine=openai", "execution.server.urls=[http://a:8000]", SPLIT]
    served.append("execution.vllm.engines=1")
    config = load_experiment(SEVEN_B, [*served, "execution.vllm.tensor_parallel_size=3"])
    check_resources(config)
    assert [gpu.name for gpu in find_resources(config).gpus] == ["trainer GPU"]


TABLE = re.compile(r"^\| `(\S+)` \| (\d+) \| ([\d.-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
KINDS = ("GPU in SFT", "shared GPU in a rollout", "shared GPU in an update", "GPU in evaluation")


def test_the_table_of_the_documentation_has_the_estimates(driver):
    rows = {name: cells for name, *cells in TABLE.findall((CONFIGS.parent / "docs" / "gpus.md").read_text())}
    assert set(rows) == {path.stem for path in CONFIGS.glob("*qwen*.yaml")}
    for name, (number, *cells) in rows.items():
        file = CONFIGS / f"{name}.yaml"
        arms = [each.config for each in load_sweep(file).candidates()] if kind_of_file(file) == "comparison" else []
        kinds = [gpu for config in arms or [load_experiment(file)] for gpu in find_resources(config).gpus]
        found = {kind: {f"{gpu.total_gib:.1f}" for gpu in kinds if gpu.name == kind} or {"-"} for kind in KINDS}
        assert found == {kind: {cell} for kind, cell in zip(KINDS, cells, strict=True)}
        counts = {gpu.name == "GPU in evaluation": gpu.count for gpu in kinds}
        assert counts == {False: int(number), True: min(int(number), 8)}


def model_of(folder, positions):
    shape = {"model_type": "own", "vocab_size": 9, "max_position_embeddings": positions}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


LONG = ["model.architecture.max_position_embeddings=112", "evaluation.max_response_tokens=111"]  # exactly as much


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([], ()),
        (["data.max_prompt_tokens=49"], ("traces: data.max_prompt_tokens (49) and data.max_trace_tokens (64)", "rl: ")),
        (["rl.max_response_tokens=65"], ("rl: data.max_prompt_tokens (48) and rl.max_response_tokens (65)",)),
        (["evaluation.max_response_tokens=112"], ("evaluation: evaluation.max_response_tokens (112)",)),
        (["stages=[prepare_data, base, rl]", "data.max_trace_tokens=64"], ()),
        (["rl.validation={every: 1, suites: [in_distribution], max_response_tokens: 200}"], ("rl.validation: ",)),
        (["difficulty={max_response_tokens: 80}"], ("difficulty: data.max_prompt_tokens (48) and difficulty.max",)),
    ],
)
def test_rows_longer_than_the_positions_are_found_before_anything_runs(overrides, found):
    config = load_experiment(CONFIGS / "smoke.yaml", [*LONG, *overrides])
    complaints = find_resources(config).complaints
    assert len(complaints) == len(found)
    for complaint, start in zip(complaints, found, strict=True):
        assert complaint.startswith(start) and "the 112 positions of the model" in complaint
        assert complaint.endswith("raise model.architecture.max_position_embeddings")


PRETRAINED = ["model.architecture=null", "base=null", "data.corpus=null"]
WRITER = "synthesize={{teachers: {{t: {{path: {0}, max_response_tokens: 100}}}}}}"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([*PRETRAINED, "model.path={0}"], ["traces: ", "rl: "]),
        ([*PRETRAINED, "model.path={0}", "model.max_position_embeddings=112"], []),
        ([*PRETRAINED, "model.path=nobody/has-it"], []),  # unknown
        (
            [*PRETRAINED, "model.path=nobody/has-it", WRITER],
            ["synthesize.teachers.t: synthesize.teachers.t.max_response_tokens (100) are more tokens than"],
        ),
        (
            ["method=opd", "rl.teacher={{kind: model, path: {0}}}"],
            ["rl.teacher: data.max_prompt_tokens (48) and rl.max_response_tokens (64) are more tokens than"],
        ),
    ],
)
def test_the_positions_of_folders_are_read_and_those_of_hub_ids_may_be_unknown(tmp_path, overrides, found):
    folder = model_of(tmp_path / "model", 100)
    config = load_experiment(CONFIGS / "smoke.yaml", [override.format(folder) for override in overrides])
    complaints = find_resources(config).complaints
    assert [line.startswith(start) for line, start in zip(complaints, found, strict=True)] == [True] * len(found)


def test_every_shipped_experiment_fits_its_model():
    for path in sorted(CONFIGS.glob("*.yaml")):
        if not path.name.startswith(("compare_", "grid_", "study_")):
            assert not [line for line in find_resources(load_experiment(path)).complaints if "positions" in line], path
