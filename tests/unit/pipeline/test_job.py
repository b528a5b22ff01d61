"""What a stage is started with: its job, and an environment without the variables of a launcher."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
from support.refusals import refused
from synthetic.finished_stages import finish, finish_all

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.config.removed import REMOVED
from luffy.errors import ConfigError
from luffy.pipeline.inherited_environment import complaints_about_variables, drop_foreign, own_environment
from luffy.pipeline.job import inputs_of, read_job, write_job
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.records import RunRecord
from luffy.pipeline.resources import find_resources
from luffy.pipeline.supervise import supervise
from luffy.pipeline.workspace import WORKSPACE_VARIABLE


def test_a_job_is_read_from_yaml_as_written_and_a_mistake_in_it_names_the_field(opened, tmp_path):
    experiment = opened("data.train.stepwise_share={2: 0.5, 3: 1.0}", "sft.optimizer.lr=1e-5", "difficulty={}")
    file = tmp_path / "config.yaml"
    for job in map(experiment.job, experiment.plan()):
        write_job(file, job)
        assert read_job(file) == job and read_job(file).identity.key == job.key
        if job.stage == "rl":
            for written, instead, complaint in (
                ("prompts_per_step: 4", "prompts_per_stop: 4", "prompts_per_stop: unknown key"),
                ("stage: rl", "stage: sft", "settings"),  # of another stage
            ):
                write_job(file, job)
                file.write_text(file.read_text().replace(written, instead))
                with pytest.raises(ConfigError, match=complaint):  # a line for each mistake
                    read_job(file)
    for digest in ("099071447312e206", "0990714473120206", "1e4", "1.5", "0x1f", "0o17", "1_0", "null"):
        write_job(file, job.model_copy(update={"code": {"luffy": digest}}))
        assert read_job(file).code == {"luffy": digest}, "text that looks like a number"


GONE = {name: REMOVED[name].default for name in ("attention", "offload_parameters", "sequence_parallel")}
EARLIER = [  # a line of a job, what an earlier version has in its place, and why that is no longer started
    ("kind: bubblewrap", "kind: bubblewrap\n      unsafe_local: false", ""),
    ("kind: bubblewrap", "kind: bubblewrap\n      unsafe_local: true", "unsafe_local: is gone"),
    ("kind: bubblewrap", "kind: unsafe_local", "unsafe_local is gone"),
    ("calls: hermes", "calls: xml", "xml is gone"),
    ("engine: cluster", "engine: openai", "sft.engine: openai is gone"),
    ("engine: cluster", "engine: openai", "rl.engine: openai is gone"),
    ("    scoring:", "    scoring:\n      group_measures: {}", ""),
    ("    scoring:", "    scoring:\n      group_measures: {a: 'b:c'}", "group_measures: is gone"),
    ("  tensorboard: null", "  tensorboard: null\n  mlflow: null", ""),
    ("    remove_system: false", "    replay_traces: 'off'\n    remove_system: false", ""),
    ("    remove_system: false", "    replay_traces: keep\n    remove_system: false", "replay_traces: is gone"),
    *(("execution:\n", f"execution:\n  {name}: {json.dumps(default)}\n", "") for name, default in GONE.items()),
    *(("execution:\n", f"execution:\n  {name}: other\n", f"execution.{name}: is gone; ") for name in GONE),
]


@pytest.mark.parametrize(("line", "earlier", "complaint"), EARLIER)
def test_a_job_of_an_earlier_version_is_read_unless_its_stage_would_run_without_what_is_gone(
    opened, tmp_path, line, earlier, complaint
):
    experiment, file = opened("environment={kind: tools, tools: [calculator]}"), tmp_path / "config.yaml"
    for job in map(experiment.job, experiment.plan()[3 if complaint.startswith("rl.") else 0 :]):
        write_job(file, job)
        if (text := file.read_text()).count(line) == 1:
            break
    file.write_text(text.replace(line, earlier))
    with refused(complaint, error=ConfigError) if complaint else nullcontext():
        assert read_job(file) == job
    (tmp_path / MANIFEST_FILE).touch()  # of a finished stage
    assert read_job(file) == job


@pytest.mark.parametrize("said", [GONE, dict.fromkeys(GONE, "other")], ids=["defaults", "other values"])
def test_records_of_what_is_finished_are_read_whatever_they_say_of_what_is_gone(opened, tmp_path, said):
    experiment = opened()
    directory = finish(experiment, "prepare_data").directory
    expected = read_manifest(directory)
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    manifest["execution"] |= said
    manifest["execution"]["ray"]["weight_transfer"] = "broadcast"
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert read_manifest(directory) == expected is not None
    values = experiment.config.model_dump(mode="json")
    values["execution"] |= said
    assert RunRecord(tmp_path, "finished", config=values).configuration == experiment.config


COMPILED = [
    (("sft.epochs=null", "sft.steps=3"), False, False),
    (("sft.epochs=null", "sft.steps=200", "rl.steps=200"), None, None),
    (("rl.steps=1", "rl.prompts_per_step=20000"), None, None),
    (("execution.compile=true",), True, True),
]


@pytest.mark.parametrize(("overrides", "sft", "rl"), COMPILED)
def test_layers_are_compiled_by_themselves_in_stages_that_repay_it(opened, overrides, sft, rl):
    experiment = opened("execution.micro_batch_tokens=256", *overrides)
    found = {plan.node.stage: experiment.job(plan).execution.compile for plan in experiment.plan()}
    assert (found["sft"], found["rl"]) == (sft, rl)


def test_inputs_are_found_in_a_workspace_that_was_copied_or_moved_and_outside_where_the_job_says(opened, workspace):
    experiment = opened()
    finish_all(experiment)
    plan = experiment.plan_node("rl")
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    for take in (shutil.copytree, shutil.move):
        root = workspace.root.with_name(take.__name__)
        take(workspace.root, root)
        directory = root / plan.directory.relative_to(workspace.root)
        found = inputs_of(read_job(directory / "config.yaml"), directory)
        assert found == {name: root / path.relative_to(workspace.root) for name, path in plan.inputs.items()}
    job = experiment.job(plan).model_copy(update={"inputs": {"data": "/elsewhere/data"}})
    assert str(inputs_of(job, workspace.root / "mine" / "stage")["data"]) == "/elsewhere/data"


# ---- variables ----

LAUNCHERS = """
MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
ROLE_WORLD_SIZE ROLE_NAME NODE_RANK CROSS_RANK CROSS_SIZE TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK PMI_SIZE PMIX_RANK MV2_COMM_WORLD_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
ACCELERATE_USE_FSDP FSDP_CPU_RAM_EFFICIENT_LOADING PARALLELISM_CONFIG_TP_SIZE SM_FRAMEWORK_PARAMS SM_HP_MP_PARAMETERS
SMDATAPARALLEL_LOCAL_RANK VLLM_DP_RANK VLLM_PORT VLLM_BATCH_INVARIANT DS_ACCELERATOR TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
ATEN_CPU_CAPABILITY MKL_CBWR ONEDNN_MAX_CPU_ISA
"""
FOREIGN = LAUNCHERS.split()
OF_PYTHON = ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONSAFEPATH", "PYTHONINTMAXSTRDIGITS")
KEPT = (
    "SLURM_JOB_ID",
    "NCCL_DEBUG",
    "CUDA_VISIBLE_DEVICES",
    "HF_TOKEN",
    "RAY_ADDRESS",
    "PYTHONPATH",
    "MY_RANK",
    "SIZE",
)
PRINT = "import json, os, sys; {}; print(json.dumps(dict(os.environ)))"
ACTOR = "from pathlib import Path; from luffy.cluster.actors import ProcessSetup; "
ACTOR += "ProcessSetup(Path({!r}), None).apply()"


def test_a_variable_of_a_launcher_is_dropped():
    for name in (*FOREIGN, *OF_PYTHON):
        variables = {name: "3", **dict.fromkeys(KEPT, "mine")}
        drop_foreign(variables)
        assert variables == dict.fromkeys(KEPT, "mine"), name


@pytest.mark.parametrize("start", ["supervised", "by hand", "actor of Ray"])
def test_no_process_of_a_stage_has_them(tmp_path, monkeypatch, start):
    for name in (*FOREIGN, "KEPT"):
        monkeypatch.setenv(name, "3")
    log = tmp_path / "actor.log"
    before = {"supervised": "pass", "by hand": "import luffy.stages", "actor of Ray": ACTOR.format(str(log))}[start]
    command, lines = [sys.executable, "-c", PRINT.format(before)], list[str]()
    if start == "supervised":
        supervise(command, tmp_path, on_event=lambda event: None, on_line=lines.append)
    else:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout or log.read_text()
        lines = said.splitlines()
    seen = json.loads(lines[-1])
    assert seen["KEPT"] == "3"
    assert {*FOREIGN}.isdisjoint(seen)


FITS, TOO_LONG = f"/tmp/{'x' * 34}", f"/tmp/{'x' * 35}"
"""With the longest process id, Ray's socket has the 107 bytes that its `validate_socket_filepath` allows, or more."""
FOLDERS = [
    ({}, True, None),
    ({"TMPDIR": "/tmp"}, True, None),
    ({"TMPDIR": "/nowhere"}, False, "TMPDIR='/nowhere': is not the absolute path of a folder"),
    ({"TMPDIR": "/proc"}, False, "TMPDIR='/proc'"),
    ({"TMPDIR": ""}, True, "unset TMPDIR"),
    ({"TMP": "tests"}, False, "TMP='tests'"),
    ({"RAY_TMPDIR": "/nowhere"}, False, None),
    ({"RAY_TMPDIR": "/nowhere"}, True, "RAY_TMPDIR='/nowhere'"),
    ({"TMPDIR": FITS}, True, None),
    ({"TMPDIR": TOO_LONG}, True, "export RAY_TMPDIR=FOLDER with at most 39 bytes"),
    ({"TMPDIR": TOO_LONG}, False, None),
    ({"TMPDIR": TOO_LONG, "RAY_TMPDIR": "/tmp"}, True, None),
]


@pytest.mark.parametrize(("variables", "starts_ray", "words"), FOLDERS)
def test_what_would_fail_is_one_line_with_the_remedy(monkeypatch, variables, starts_ray, words):
    if variables.get("TMPDIR") in (FITS, TOO_LONG):
        monkeypatch.setattr("luffy.pipeline.inherited_environment._is_usable", lambda folder: True)
    found = list(complaints_about_variables(variables, starts_ray=starts_ray))
    assert len(found) == (words is not None)
    assert all(words in line and "\n" not in line for line in found)


def test_only_runs_that_start_ray_need_a_short_temporary_folder_and_a_plan_refuses_one(monkeypatch, capsys, tmp_path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    for overrides, is_refused in (
        ([], False),
        (["cluster=ray"], True),
        (["cluster=ray", "execution.ray.address=10.0.0.1:6379"], False),
        (["evaluation.engine=vllm", "execution.vllm.engines=2"], True),
    ):
        complaints = find_resources(load_experiment("smoke", overrides)).complaints
        assert any("Ray's sockets" in line for line in complaints) == is_refused, overrides
    monkeypatch.setenv("TEMP", "/nowhere")
    assert main(["plan", "smoke", "--workspace", str(long)]) == 2
    assert "TEMP='/nowhere'" in capsys.readouterr().err
    assert not [*long.iterdir()]


def test_compiled_code_is_kept_in_the_workspace_unless_a_variable_names_another_place(monkeypatch, tmp_path):
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    for name in (*names, WORKSPACE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert not {*names} & {*own_environment()}
    monkeypatch.setenv(WORKSPACE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/own")
    found = own_environment()
    assert [found[name] for name in names] == ["/own", str(tmp_path / "compiled/inductor")]
