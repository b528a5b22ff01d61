"""GPUs and memory that a run needs, checked before anything starts, and GPUs of its own for each stage.

The driver is a script in nvidia-smi's place.
"""

import importlib.util
import json
import os
import re
import tempfile
import threading

import psutil
import pytest
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused
from support.stages import CONFIGS
from synthetic.reward_models import reward_folder

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.errors import EXIT_INTERRUPTED, EXIT_TEMPORARY, LostError, StageFailed, WorkspaceError
from luffy.pipeline import gpus, resources
from luffy.pipeline.gpus import gpus_of_stage, own_gpus
from luffy.pipeline.graph import build_graph
from luffy.pipeline.resources import check_resources, find_resources

SMOKE, SEVEN_B = "smoke", "luffy_qwen2.5_math_7b"
NODE = [81559] * 8
"""MiB of the GPUs of a machine with eight."""


def load(file, overrides=()):
    return load_experiment(CONFIGS / f"{file}.yaml", overrides)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine whose driver is a script, or has GPUs of so many MiB, with a torch that can use them."""
    monkeypatch.setattr(resources, "version", lambda package: "2.13.0+cu130")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def says(script):
        if not isinstance(script, str):
            script = "\n".join(f"echo '{index}, GPU-{index}{index}-aa, {mib}'" for index, mib in enumerate(script))
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return says


def named(line, words):
    """Whether a line has these words, between which others may stand: `this ... and that`."""
    return all(part in line for part in words.split(" ... "))


def test_visible_gpus_are_counted_and_measured(driver, monkeypatch):
    driver([81559, 40960])
    shown = {"1": (40,), "GPU-00": (79.65,), "0, 1": (79.65, 40), "": (), "-1": ()}
    for visible, expected in {None: (79.65, 40), **shown}.items():
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = [gpu.memory_gib for gpu in gpus.detected_gpus()]
        assert found == pytest.approx(expected, abs=0.01), visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver("echo '0, GPU-aa, [N/A]'")  # as of a GPU that shares the machine's
    (gpu,) = gpus.detected_gpus()
    assert gpu.memory_gib == psutil.virtual_memory().total / 2**30


KINDS = ("GPU in SFT", "shared GPU in a rollout", "shared GPU in an update", "GPU in evaluation")
UNKNOWN = ["number of GPUs is unknown", "memory not checked"]
DETECTED = ["execution.gpu_memory_gb=null"]
APART = "execution.ray={placement: disaggregated, trainer_ranks: 4, engines: 4}"
TEACHERS = [
    "method=opd",
    "rl.teachers={half: {kind: model, path: Qwen/Qwen2.5-1.5B, dtype: bfloat16, rows: {outcome: wrong}}, "
    "whole: {kind: model, path: Qwen/Qwen2.5-1.5B, dtype: float32}}",
]
UNTRAINED = ["base=null", "data.corpus=null", "model.architecture=null"]


UNCHECKED = [
    ("sleep 60", SEVEN_B, DETECTED, UNKNOWN),
    ("echo 'No devices were found'", SEVEN_B, DETECTED, UNKNOWN),
    ("exit 9", SEVEN_B, DETECTED, UNKNOWN),
    (None, SEVEN_B, DETECTED, ["this machine has none: ranks and engines would run on its CPU", UNKNOWN[1]]),
    ("exit 9", SEVEN_B, ["model.path=nobody/has-it"], [UNKNOWN[0], "the shape of nobody/has-it is unknown here"]),
    (NODE, SEVEN_B, [APART, "model.path=nobody/x"], ["8 GPUs needed", "weights through CPU memory", "nobody/x"]),
    # 1,543,714,304 parameters in bfloat16, and as many in float32
    (NODE, SEVEN_B, TEACHERS, ["8 GPUs needed", "take turns on a GPU: 8.6 GiB of CPU memory for each rank"]),
    ("exit 9", SMOKE, [], []),
]


@pytest.mark.parametrize(("script", "file", "overrides", "notes"), UNCHECKED)
def test_what_cannot_be_checked_is_a_note(driver, monkeypatch, script, file, overrides, notes):
    monkeypatch.setattr(gpus, "_QUERY_TIMEOUT_S", 0.5)
    if script is not None:
        driver(script)
    found = find_resources(load(file, overrides))
    assert found.complaints == () or overrides == TEACHERS
    assert found.gpus == () or overrides in (DETECTED, TEACHERS)
    assert all(named(note, words) for note, words in zip(found.notes, notes, strict=True)), found.notes


SFT = ["chain=sft", "method=sft", "sft={epochs: 3, batch_size: 64, optimizer: {lr: 5e-5}}"]
SPLIT, ONE_EACH = "execution.ray.placement=disaggregated", "execution.ray={trainer_ranks: 1, engines: 1}"
SHARE, TENSOR = "execution.vllm.gpu_memory_utilization", "execution.vllm.tensor_parallel_size"
CHUNK, MICRO = "execution.logprob_chunk_tokens", "execution.micro_batch_tokens"
TWO = [ONE_EACH, SPLIT, "execution.vllm.engines=1"]
EMBEDDED = ["evaluation.engine=transformers", "execution.vllm.engines=1"]
HALVES = ["execution.ray={placement: disaggregated, trainer_ranks: 4, engines: 4}", f"{SHARE}=0.9"]
OVERLAPPING = [SPLIT, f"{SHARE}=0.9", "rl.max_staleness=1", "execution.ray.engines=8", "execution.ray.trainer_ranks=8"]
QWEN_14B = [
    "evaluation.engine=vllm", "execution.vllm={engines: 3, gpu_memory_utilization: 0.9}", "chain=sft",
    "model={path: Qwen/Qwen2.5-14B}", *UNTRAINED, "method=sft",
]  # fmt: skip
IN_TURNS = [
    "chain=rl", "method=luffy", "model.dtype=bfloat16", "model={path: Qwen/Qwen2.5-1.5B}", *UNTRAINED,
    "rl.engine=vllm", "execution={zero_stage: 1, gradient_checkpointing: true}",
]  # fmt: skip
LORA = ["chain=rl", "method=luffy", "rl.engine=vllm", "model.lora={rank: 4, alpha: 8}"]
KERNELS = "execution.vllm.batch_invariant"
TWO_NODES = ["execution.ray={address: auto, trainer_ranks: 16, engines: 16}"]
FITTING = [  # experiment, MiB of the GPUs, overrides, and how many GPUs of each kind are estimated, where that matters
    *((file, NODE, overrides, None) for file in ("luffy_qwen2.5_math_1.5b", SEVEN_B) for overrides in ([], DETECTED)),
    *((SEVEN_B, NODE, [*TWO_NODES, *overrides], None) for overrides in ([], DETECTED, OVERLAPPING)),
    (SEVEN_B, NODE, HALVES, None),
    (SEVEN_B, NODE[:4], ["execution.ray.address=auto", "execution.vllm.engines=4"], None),
    (SEVEN_B, NODE[:2], [*TWO, "model.lora={rank: 32, alpha: 64}"], None),
    (SEVEN_B, NODE, [*EMBEDDED, "execution.rollout_batch_size=64"], None),
    (SEVEN_B, NODE, ["cluster=local"], None),
    # An adapter beside float32 weights, and kernels for GPUs, where there are none or which are not needed.
    (SMOKE, [], [*LORA, "model.dtype=float32"], None),
    (SMOKE, NODE, [*LORA, "execution.vllm.adapter=merged"], None),
    (SMOKE, NODE, [*LORA, "rl.engine=cluster"], None),
    (SMOKE, [], [f"{KERNELS}=true"], None),
    (SMOKE, [], [f"{KERNELS}=true", "cluster=ray", "execution.ray.address=auto"], None),
    (SMOKE, NODE, [f"{KERNELS}=true", "rl.engine=vllm"], None),
    # A local run with vLLM is checked where there are GPUs.
    (SMOKE, [], QWEN_14B, {}),
    (SMOKE, NODE[:3], QWEN_14B, {"GPU in evaluation": 3}),
    (SMOKE, [], IN_TURNS, {}),
    (SMOKE, NODE[:1], [*IN_TURNS, f"{SHARE}=0.3"], dict.fromkeys(KINDS[1:3], 1)),
]


@pytest.mark.parametrize(("file", "mib", "overrides", "counts"), FITTING)
def test_a_layout_that_can_work_has_no_complaints(driver, file, mib, overrides, counts):
    driver(mib)
    found = find_resources(load(file, overrides))
    assert found.complaints == ()
    assert counts in (None, {gpu.name: gpu.count for gpu in found.gpus})


def test_what_a_part_of_a_chain_does_not_need_is_said_beforehand(driver):
    driver(NODE[:4])
    config = load(SEVEN_B, [])
    data, whole = find_resources(config, build_graph(config)[:1]), find_resources(config)
    assert data.complaints == () != whole.complaints
    later = [note for note in data.notes if note not in whole.notes]
    assert later == [f"refused without --only: {line}" for line in whole.complaints]
    config = load(SEVEN_B, ["execution.vllm.engines=2"])
    sweep = find_resources(config, build_graph(config, (1,))[-1:])
    assert (sweep.complaints, {gpu.name: gpu.count for gpu in sweep.gpus}) == ((), {"GPU in evaluation": 2})


UNDIVIDED = "does not divide the model's 28 attention heads"
SHARED, FULL = "a shared GPU in a rollout would hold ", "raise gpu_memory_utilization or tensor_parallel_size"
TOO_FEW = [
    "execution.ray: 8 trainer ranks and 8 engines x 1 GPUs ... take 8 GPUs, this machine has 4 ... "
    "execution.ray.trainer_ranks or execution.ray.engines ... execution.ray.address",
    "execution.vllm: 8 engines x 1 GPUs for evaluation take 8 GPUs, this machine has 4 ... "
    "execution.vllm.engines or execution.vllm.tensor_parallel_size",
]
TOO_FEW_AND_FULL = [
    "execution.vllm: 3 engines x 1 GPUs for evaluation take 3 GPUs, this machine has 2",
    "execution.vllm: an engine in evaluation needs ... share is 21.6 (gpu_memory_utilization 0.9)",
]


UNFIT = [
    (SEVEN_B, NODE[:4], [], TOO_FEW),
    (SMOKE, [24564] * 2, QWEN_14B, TOO_FEW_AND_FULL),
    (SEVEN_B, [40960] * 8, DETECTED, [SHARED, "raise execution.zero_stage"]),
    (SEVEN_B, [40960] * 8, [], ["execution.gpu_memory_gb: 79 GiB, but the smallest GPU ... has 40.0"]),
    (SEVEN_B, NODE[:2], TWO, ["trainer GPU would hold about "]),
    (SEVEN_B, NODE, [*EMBEDDED, "execution.rollout_batch_size=1024"], ["lower execution.rollout_batch_size"]),
    (SEVEN_B, NODE, [*SFT, ONE_EACH], ["execution: a GPU in SFT would hold about "]),
    (SEVEN_B, NODE, [f"{SHARE}=0.9"], [f"lower {SHARE}"]),
    (SEVEN_B, NODE, ["execution.gradient_checkpointing=false"], ["set execution.gradient_checkpointing: true"]),
    (SEVEN_B, NODE, [f"{CHUNK}=32768", f"{MICRO}=32768"], [f"lower {CHUNK}"]),
    (SEVEN_B, NODE, [f"{MICRO}=262144"], [f"lower {MICRO}"]),
    (SEVEN_B, [], [f"{TENSOR}=3", SPLIT], [f"tensor_parallel_size: 3 {UNDIVIDED} ... 4 of keys"]),
    (SEVEN_B, [], [f"{TENSOR}=7", SPLIT], ["keys and values ... allowed are 1, 2, 4, 28"]),
    (SEVEN_B, [], [f"{SHARE}=0.2"], [FULL]),
    (SEVEN_B, [], ["execution.vllm.max_num_seqs=1000000"], [FULL, SHARED]),
    (SMOKE, NODE[:1], IN_TURNS, [f"execution: {SHARED}"]),
    (SMOKE, NODE, [*LORA, "model.dtype=float32"], ["execution.vllm.adapter: "]),
    (SMOKE, [], [f"{KERNELS}=true", "rl.engine=vllm"], [f"{KERNELS}: needs GPUs"]),
    (SMOKE, [], [f"{KERNELS}=true", "evaluation.engine=vllm"], [f"{KERNELS}: needs GPUs"]),
    (SMOKE, [], [f"{KERNELS}=true", "cluster=ray"], [f"{KERNELS}: needs GPUs"]),
]


@pytest.mark.parametrize(("file", "mib", "overrides", "complaints"), UNFIT)
def test_a_layout_that_cannot_work_is_a_line_for_each_reason_with_a_remedy(driver, file, mib, overrides, complaints):
    driver(mib)
    found = find_resources(load(file, overrides)).complaints
    assert all(named(line, words) for line, words in zip(found, complaints, strict=True)), found


def test_a_reward_model_beside_an_engine_has_to_fit_too(driver, tmp_path):
    folder = reward_folder(tmp_path / "reward")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(40 << 30)  # as many bytes as 10 B parameters in float32, of which the disk holds none
    driver(NODE)
    reward = f"grading.kind={{kind: reward_model, path: '{folder}', correct_from: 0.0}}"
    lines = find_resources(load(SEVEN_B, [reward])).complaints
    assert lines and all("reward model 40.0" in line and "execution.reward_device: cpu or " in line for line in lines)
    assert any(line.startswith("execution: a GPU in evaluation with a reward model would hold") for line in lines)
    assert find_resources(load(SEVEN_B, [reward, "execution.reward_device=cpu"])).complaints == ()


@pytest.mark.parametrize("file", [SMOKE, SEVEN_B])
def test_targets_and_a_package_that_an_adapter_lacks_are_refused_before_anything_runs(driver, monkeypatch, file):
    driver(NODE)
    lora = ["chain=rl", "method=luffy", "model.lora={rank: 4, alpha: 8, targets: [q_proj, mlp.up_porj]}"]
    with refused("model.lora.targets: mlp.up_porj ", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"):
        check_resources(load(file, lora))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("model.lora", "peft: pip install 'luffy-rl[lora]'"):
        check_resources(load(SMOKE, [*lora, "model.lora.targets=null"]))


def test_a_torch_without_cuda_beside_gpus_is_a_note(driver, monkeypatch):
    monkeypatch.setattr(resources, "version", lambda package: "2.13.0+cpu")
    driver([])
    assert find_resources(load(SMOKE)).notes == ()
    driver([81559])
    (note,) = find_resources(load(SMOKE)).notes
    assert named(note, "torch 2.13.0+cpu ... stages run on its CPU ... a build for CUDA")


TABLE = re.compile(r"^\| `(\S+)` \| (\d+) \| ([\d.-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_the_table_of_the_documentation_has_the_estimates_and_every_arm_of_the_papers_comparison_fits(driver):
    driver(NODE)
    rows = {name: cells for name, *cells in TABLE.findall((CONFIGS.parent / "docs" / "gpus.md").read_text())}
    assert set(rows) == {path.stem for path in CONFIGS.glob("*qwen*.yaml")}
    for name, (number, *cells) in rows.items():
        file = CONFIGS / f"{name}.yaml"
        arms = {each.arm: each.config for each in load_sweep(file).candidates()} if name.startswith("compare") else {}
        resources = {arm: find_resources(config) for arm, config in (arms or {"": load_experiment(file)}).items()}
        kinds = [gpu for each in resources.values() for gpu in each.gpus]
        found = {kind: {f"{gpu.total_gib:.1f}" for gpu in kinds if gpu.name == kind} or {"-"} for kind in KINDS}
        assert found == {kind: {cell} for kind, cell in zip(KINDS, cells, strict=True)}
        counts = {gpu.name == "GPU in evaluation": gpu.count for gpu in kinds}
        assert counts == {False: int(number), True: min(int(number), 8)}
        if name == "compare_qwen2.5_math_7b":
            assert [arm for arm, each in resources.items() if each.complaints] == []
            in_sft = [arm for arm, each in resources.items() if any(gpu.name == "GPU in SFT" for gpu in each.gpus)]
            assert in_sft == ["sft", "sft_then_rl", "sft_then_luffy"]


LONG = ["model.architecture.max_position_embeddings=112", "evaluation.max_response_tokens=111"]  # exactly as much
PRETRAINED = ["model.architecture=null", "base=null", "data.corpus=null"]
WRITER = "sample={teachers: {t: {path: FOLDER, max_response_tokens: 100}}}"
TEACHER = "rl.teachers={teacher: {kind: model, path: FOLDER}}"
VALIDATED = "rl.validation={every: 1, suites: [in_distribution], max_response_tokens: 200}"
TRACES = "traces: data.max_prompt_tokens (49) and data.max_trace_tokens (64)"
PROMPT = "data.max_prompt_tokens (48) and"
POSITIONS = [
    (112, LONG, []),
    (112, [*LONG, "data.max_prompt_tokens=49"], [TRACES, "rl: "]),
    (112, [*LONG, "rl.max_response_tokens=65"], [f"rl: {PROMPT} rl.max_response_tokens (65)"]),
    (112, [*LONG, "evaluation.max_response_tokens=112"], ["evaluation: evaluation.max_response_tokens (112)"]),
    (112, [*LONG, "stages=[prepare_data, base, rl]", "data.max_trace_tokens=64"], []),
    (112, [*LONG, VALIDATED], ["rl.validation: "]),
    (112, [*LONG, "difficulty={max_response_tokens: 80}"], [f"difficulty: {PROMPT} difficulty.max"]),
    # Those of a folder are read, and those of a hub's id may be unknown.
    (100, [*PRETRAINED, "model.path=FOLDER"], ["traces: ", "rl: "]),
    (100, [*PRETRAINED, "model.path=FOLDER", "model.max_position_embeddings=112"], []),
    (100, [*PRETRAINED, "model.path=nobody/has-it"], []),
    (100, [*PRETRAINED, "model.path=nobody/has-it", WRITER], ["sample.teachers.t: sample.teachers.t.max"]),
    (100, ["method=opd", TEACHER], [f"rl.teachers.teacher: {PROMPT} rl.max_response_tokens (64)"]),
]


@pytest.mark.parametrize(("positions", "overrides", "found"), POSITIONS)
def test_rows_longer_than_the_positions_are_found_before_anything_runs(tmp_path, positions, overrides, found):
    shape = {"model_type": "own", "vocab_size": 9, "max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = load(SMOKE, [override.replace("FOLDER", str(tmp_path)) for override in overrides])
    complaints = find_resources(config).complaints
    for line, words in zip(complaints, found, strict=True):
        assert line.startswith(words) and f"the {positions} positions of" in line
        assert positions == 100 or line.endswith("raise model.architecture.max_position_embeddings")


def test_every_shipped_experiment_fits_its_model():
    for path in sorted(CONFIGS.glob("*.yaml")):
        if not path.name.startswith(("compare_", "grid_", "study_")):
            assert not [line for line in find_resources(load_experiment(path)).complaints if "positions" in line], path


@pytest.fixture
def machine(tmp_path, driver, monkeypatch):
    """A machine with two GPUs, and lock files of its own; its driver fails while the file `sick` is there."""
    driver(f"test -e {tmp_path / 'sick'} && exit 9\necho '0, GPU-aa, 81920'\necho '1, GPU-bb, 81920'")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpus, "_POLL_S", 0.02)
    monkeypatch.setattr(gpus, "_DRIVER_PAUSE_S", 0.02)
    return tmp_path


def test_each_stage_is_shown_gpus_of_its_own_by_the_names_that_the_user_has_given_them(machine, monkeypatch):
    with own_gpus(1) as first, own_gpus(1) as second:
        assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
        assert first["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with own_gpus(2) as both:
        assert both["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    with own_gpus(1) as shown:
        assert shown == {"CUDA_VISIBLE_DEVICES": "GPU-b"}


def test_a_stage_that_finds_too_few_gpus_waits_and_holds_none(machine):
    told, got = [], []

    def two():
        with own_gpus(2, told.append) as shown:
            got.append(shown["CUDA_VISIBLE_DEVICES"])

    with own_gpus(1):
        waiter = threading.Thread(target=two)
        waiter.start()
        wait_until(lambda: told)
        assert not got
        with own_gpus(1):  # the other one is still to be had
            pass
    waiter.join(PATIENCE_S)
    assert (got, told) == (["0,1"], ["2 of 2 GPUs"])


def test_a_run_that_is_stopped_waits_no_longer_for_gpus_or_their_driver(machine):
    (machine / "sick").touch()
    with pytest.raises(StageFailed), own_gpus(1, stopped=lambda: True):
        pass
    (machine / "sick").unlink()
    with own_gpus(2), pytest.raises(StageFailed) as caught, own_gpus(1, stopped=lambda: True):
        pass
    assert caught.value.exit_code == EXIT_INTERRUPTED


@pytest.mark.parametrize("visible", ["7", "0,7", "0,0", "0,GPU-aa", "GPU-", "GPU-cc"])
def test_gpus_that_are_not_there_or_named_twice_are_refused(machine, monkeypatch, visible):
    with refused("takes 3 GPUs, this machine has 2"), own_gpus(3):
        pass
    with own_gpus(3, fewer=True) as shown:
        assert shown["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with refused(f"CUDA_VISIBLE_DEVICES={visible}: ", "it has 0, 1"), own_gpus(1):
        pass
    assert main(["plan", "smoke"]) == 2


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_plan_says_that_the_gpus_of_the_machine_are_hidden(machine, monkeypatch, capsys, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with own_gpus(1) as shown:
        assert shown == {}
    assert main(["plan", "smoke", "--workspace", str(machine)]) == 0
    assert "CUDA_VISIBLE_DEVICES hides the GPUs of this machine" in capsys.readouterr().out


MISPLACED = [
    lambda place: place.symlink_to(place.parent),
    lambda place: place.touch(),
    lambda place: place.mkdir(0o777),
]


@pytest.mark.parametrize("make", MISPLACED, ids=["a link", "a file", "open to all"])
def test_the_locks_of_gpus_lie_in_a_folder_of_ones_own(machine, make):
    old = os.umask(0)
    make(machine / f"luffy-gpus-{os.getuid()}")
    os.umask(old)
    with refused("luffy-gpus", "TMPDIR", error=WorkspaceError), own_gpus(1):
        pass


def test_the_death_of_the_holder_frees_its_gpu(machine, monkeypatch, holding):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (holder, shown), told = holding("gpus.own_gpus(1)", machine, env={**os.environ, "TMPDIR": str(machine)}), []
    assert shown == "{'CUDA_VISIBLE_DEVICES': '1'}"
    threading.Timer(0.3, holder.kill).start()
    with own_gpus(1, told.append) as shown:
        assert shown == {"CUDA_VISIBLE_DEVICES": "1"}
    assert told == ["1 of 1 GPUs"]


def test_a_stage_waits_for_a_driver_that_fails_for_a_moment_and_gives_up_one_that_never_responds(machine):
    told, sick = [], machine / "sick"
    sick.touch()

    def waiting(what):
        told.append(what)
        sick.unlink(missing_ok=True)

    with own_gpus(1, waiting=waiting) as first, own_gpus(1, waiting=told.append) as second:
        assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
    assert told == ["the NVIDIA driver, which does not respond"]
    sick.touch()
    with pytest.raises(LostError, match=r"6 times .* execution\.gpus=0") as caught, own_gpus(1, told.append):
        pass
    assert (caught.value.exit_code, len(told)) == (EXIT_TEMPORARY, 2)


TAKEN = [
    (SMOKE, [], {"prepare_data": 0, "base": 1, "sft": 1, "rl": 1, "evaluate": 1, "sweep": 1, "report": 0}),
    (SMOKE, ["execution.gpus=0"], {"prepare_data": 0, "base": 0, "rl": 0, "report": 0}),
    (SMOKE, ["execution.gpus=2"], {"prepare_data": 0, "sft": 2, "report": 0}),
    (SEVEN_B, [], {"base": 0, "rl": 8, "evaluate": 8, "sweep": 8}),
    (SEVEN_B, ["execution.vllm.tensor_parallel_size=2", SPLIT], {"evaluate": 16, "rl": 24}),
    (SEVEN_B, ["difficulty={}", "execution.vllm.engines=3"], {"difficulty": 3, "evaluate": 3}),
    (SEVEN_B, TWO_NODES, {"rl": 0, "evaluate": 8}),
]


@pytest.mark.parametrize(("file", "overrides", "expected"), TAKEN)
def test_a_stage_takes_the_gpus_that_it_uses(file, overrides, expected):
    config = load(file, overrides)
    assert {stage: gpus_of_stage(config, stage) for stage in expected} == expected
