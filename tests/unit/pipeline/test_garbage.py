"""What `gc` finds and deletes in a workspace whose stages were finished by hand."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from support.patience import PATIENCE_S, wait_until
from synthetic.finished_stages import run_of

from luffy.cli.main import main
from luffy.errors import DataError
from luffy.pipeline.disk import freed_bytes, measure
from luffy.pipeline.experiment import ExperimentRun, StageObserver, open_experiment, start_run
from luffy.pipeline.garbage import Retention, dispose, survey
from luffy.pipeline.job import write_job
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.manifest import read_manifest, write_manifest
from luffy.pipeline.records import find_run, read_run
from luffy.pipeline.workspace import Workspace, claiming, write_run

ALL = Retention()
OTHER_SFT = "sft.optimizer.lr=2e-3"
READ = "import sys; from pathlib import Path; from luffy.pipeline.records import read_run\n"
READ += "print(read_run(Path(sys.argv[1])).condition)"
RUN = """
import os, socket, sys
from pathlib import Path
from luffy.pipeline.workspace import write_run
from luffy.pipeline.lock import stage_lock

directory = Path(sys.argv[1])
with stage_lock(directory):
    write_run(directory, {"state": "running", "pid": os.getpid(), "host": socket.gethostname()})
    print("runs", flush=True)
    sys.stdin.read()
"""
# Deletes one file of what has lost its name, and then takes its time.
SLOW = """
import sys, time
from luffy.cli.main import main
from luffy.pipeline import garbage

def delete(path, **options):
    next(file for file in path.rglob("*") if file.is_file()).unlink()
    print("deleting", flush=True)
    time.sleep(7200)

garbage.delete = delete
main(["gc", "--delete", *sys.argv[1:]])
"""


def directories(experiment, *nodes):
    identities = [experiment.identities[node] for node in nodes]
    return {experiment.workspace.stage_directory(identity.stage, identity.key) for identity in identities}


def found(workspace, retention=ALL):
    return {item.path: item for item in survey(workspace, retention).garbage}


@pytest.fixture
def two(opened, finish_all):
    """Two experiments that share what comes before SFT, a run of each."""
    first, second = opened(), opened(OTHER_SFT)
    for experiment in (first, second):
        finish_all(experiment)
        run_of(experiment)
    return first, second


def own_stages(experiment):
    return directories(experiment, "sft", "rl", "evaluate_sft", "evaluate_rl", "report")


def test_unused_results_are_deleted_with_a_reason(workspace, opened, finish_all):
    finish_all(opened())
    run_of(opened())
    finish_all(opened(OTHER_SFT))
    assert set(found(workspace)) == own_stages(opened(OTHER_SFT))
    assert {item.reason for item in found(workspace).values()} == {"no run uses it"}


def test_what_runs_use_stays_and_one_that_is_given_up_frees_what_it_alone_used(workspace, two):
    first, second = two
    assert found(workspace) == {}
    keep_one = Retention(keep_runs=1)
    garbage = survey(workspace, keep_one).garbage
    assert garbage[0].path == workspace.runs / "smoke-1"  # before its stages, so that no run misses one
    assert {item.path for item in garbage[1:]} == own_stages(first)
    assert {item.reason for item in garbage[1:]} == {"only smoke-1 used it"}
    assert dispose(workspace, keep_one, garbage) == []
    assert {plan.action for plan in second.plan()} == {"reuse"}
    assert found(workspace, keep_one) == {}
    assert not (workspace.runs / "smoke-1").exists()


def test_sources_of_a_used_result_stay_though_the_run_does_not_name_them(workspace, opened, finish_all):
    finish_all(opened())
    file = run_of(opened()) / "run.json"
    record = json.loads(file.read_text())
    record["stages"] = {"evaluate_rl": record["stages"]["evaluate_rl"]}
    file.write_text(json.dumps(record))
    assert set(found(workspace)) == directories(opened(), "evaluate_base", "evaluate_sft", "report")


def test_an_unreadable_record_keeps_the_results_linked_beside_it(workspace, opened, finish_all):
    finish_all(opened())
    directory = run_of(opened())
    (directory / "run.json").write_text("{")
    assert found(workspace, Retention(keep_runs=0)) == {}
    (directory / "run.json").write_text('{"state": "paused", "started": "yesterday"}')
    assert directory not in found(workspace, Retention(older_than_s=0.0))


def test_a_live_run_whose_record_cannot_be_read_keeps_all_results(workspace, opened, finish_all):
    finish_all(opened())
    directory = workspace.new_run("smoke", {})
    (directory / "run.json").write_text("{")
    with stage_lock(directory):
        assert found(workspace) == {}
    assert directories(opened(), "prepare_data", "rl") <= set(found(workspace))


@pytest.mark.parametrize("held_before", [True, False])
def test_a_stage_in_use_by_another_process_stays(workspace, opened, finish_all, hold, held_before):
    finish_all(opened())
    workspace.runs.mkdir()
    (victim,) = directories(opened(), "rl")
    with stage_lock(victim):
        pass  # a stage has begun here
    before = survey(workspace, ALL)
    holder = hold(victim)
    now = survey(workspace, ALL)
    assert f"rl/{victim.name}: in use by pid {holder.pid}" in " ".join(now.notes)
    dispose(workspace, ALL, (now if held_before else before).garbage)
    # Neither it nor what it is made from, which it may be reading.
    assert {path for path in workspace.stages.glob("*/*") if path.is_dir()} == directories(
        opened(), "prepare_data", "base", "sft", "rl"
    )


def test_kill_9_during_a_deletion_keeps_needed_results_and_the_next_one_finishes_it(workspace, two):
    first, second = two
    command = [sys.executable, "-c", SLOW, "--keep-runs", "1", "--workspace", str(workspace.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line == "deleting\n":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(workspace.runs.glob(".trash-*")) or list(workspace.stages.glob("*/.trash-*"))
    assert {plan.action for plan in second.plan()} == {"reuse"}
    assert {plan.action for plan in first.plan()} == {"reuse", "run"}
    assert all(not directory.name.startswith(".") for directory in workspace.siblings("rl"))
    assert main(["gc", "--delete", "--keep-runs", "1", "--workspace", str(workspace.root)]) == 0
    assert not list(workspace.root.rglob(".trash-*"))
    assert {plan.action for plan in second.plan()} == {"reuse"}


def test_a_run_under_way_keeps_the_results_it_will_reuse_and_cannot_be_given_up(workspace, opened, finish_all):
    # The keys are those of the real code, as the running flow would compute them.
    experiment = open_experiment(opened().config, workspace)
    finish_all(experiment, steps=20)
    run = ExperimentRun(experiment, workspace.new_run("smoke", {"state": "running"}))
    with stage_lock(run.directory):
        run.execute("prepare_data", StageObserver())
        assert found(workspace, Retention(keep_runs=0)) == {}
        with pytest.raises(DataError, match=f"smoke-1: is under way \\(pid {os.getpid()} on "):
            survey(workspace, Retention(names=("smoke-1",)))


def test_a_run_is_alive_while_a_process_holds_its_lock_whatever_its_record_says(workspace, opened):
    with start_run(opened()) as run:
        record = json.loads((run.directory / "run.json").read_text())
        write_run(run.directory, {**record, "pid": 1, "host": "elsewhere", "started": "2099-01-01T00:00:00+00:00"})
        assert read_run(run.directory).condition == "running"
        assert found(workspace, Retention(keep_runs=0, older_than_s=0)) == {}
    write_run(run.directory, {**record, "pid": os.getpid()})
    assert read_run(run.directory).condition == "killed"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs Debian's package bubblewrap")
def test_a_container_sees_a_live_run_outside_as_running(opened):
    """With the host name of the machine, and process numbers of its own."""
    inside = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", sys.executable, "-c", READ]
    with start_run(opened()) as run:
        seen = subprocess.run([*inside, str(run.directory)], capture_output=True, text=True, check=True)
    assert seen.stdout == "running\n"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs Debian's package bubblewrap")
def test_a_run_that_was_killed_in_a_container_is_seen_to_be_dead_outside(workspace):
    """Under another host name, too, as Docker gives one to each container."""
    directory = workspace.new_run("smoke", {})
    names = ["--unshare-pid", "--unshare-user", "--unshare-uts", "--hostname", "inside"]
    inside = ["bwrap", "--dev-bind", "/", "/", *names, "--proc", "/proc", "--die-with-parent", sys.executable]
    command = [*inside, "-c", RUN, str(directory)]
    container = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert container.stdout.readline() == "runs\n"
    record = read_run(directory)
    assert (record.host, record.condition) == ("inside", "running")
    container.kill()
    container.wait()
    wait_until(lambda: read_run(directory).condition == "killed")


@pytest.mark.parametrize("moment", ["directory", "record"])
def test_a_run_that_is_just_beginning_survives_a_deletion_after_a_jump_of_the_clock(
    workspace, opened, monkeypatch, moment
):
    """Whatever its files' age: an empty directory, and a record that does not name a process yet."""
    deletions = []

    def begin(workspace, experiment, record):
        directory = workspace.runs / f"{experiment}-1"
        directory.mkdir(parents=True)
        if moment == "record":
            write_run(directory, {**record, "experiment": experiment})
        for path in (*directory.iterdir(), directory):
            os.utime(path, (0, 0))
        rules = Retention(keep_runs=0)
        deletions.append(threading.Thread(target=lambda: dispose(workspace, rules, found(workspace, rules).values())))
        deletions[0].start()
        deletions[0].join(0.5)
        return directory

    monkeypatch.setattr(Workspace, "new_run", begin)
    with start_run(opened()) as run:
        deletions[0].join(PATIENCE_S)
        assert not deletions[0].is_alive()
        assert read_run(run.directory).condition == "running"


def test_links_are_not_followed(workspace, opened, finish_all, tmp_path):
    outside = tmp_path / "outside"
    finish_all(opened())
    (moved,) = directories(opened(), "report")
    moved.rename(outside)
    moved.symlink_to(outside)
    (inside,) = directories(opened(), "evaluate_rl")
    (inside / "link").symlink_to(outside)
    result = survey(workspace, ALL)
    assert f"report/{moved.name}: is a link" in " ".join(result.notes)
    dispose(workspace, ALL, result.garbage)
    assert not inside.exists()
    assert (outside / "manifest.json").is_file() and moved.is_symlink()


def test_folders_that_are_not_results_are_left_alone(workspace, opened):
    (workspace.stages / "rl" / "notes").mkdir(parents=True)
    (workspace.stages / "rl" / "notes" / "mine.txt").touch()
    result = survey(workspace, ALL)
    assert result.garbage == () and "rl/notes: is no stage's result" in result.notes[0]


def test_a_finished_stage_keeps_its_newest_checkpoint(workspace, opened, finish_all):
    for steps in (20, 40):
        finish_all(opened(), steps=steps)
    run_of(opened())
    (folder,) = directories(opened(), "rl")
    assert folder / "checkpoints/step_000020" in found(workspace)
    assert all(path.name == "step_000020" for path in found(workspace))
    dispose(workspace, ALL, survey(workspace, ALL).garbage)
    assert {plan.action for plan in opened().plan()} == {"reuse"}
    assert opened("rl.steps=90").plan_node("rl").step == 40


def test_an_unfinished_sweep_keeps_its_checkpoints_in_a_workspace_that_was_moved(workspace, opened, finish, begin):
    swept = open_experiment(opened().config, workspace, code=lambda rooms: {"module": "1"}, sweep_steps=(2, 4))
    run = ExperimentRun(swept, workspace.new_run("smoke", {}))
    for node in swept.nodes:
        for steps in (2, 4) if node.stage != "sweep" else ():
            finish(swept, node.name, steps=steps)
        run.enter(swept.plan_node(node.name))
    plan = swept.plan_node("sweep")
    begin(plan)
    write_job(plan.directory / "config.yaml", swept.job(plan))
    run.record("interrupted")
    own = (plan.inputs["model"] / "checkpoints").relative_to(workspace.root)
    moved = workspace.root.rename(workspace.root.with_name("moved"))
    going = {path.parent for path in found(Workspace(moved))}
    assert moved / own not in going
    assert any(path.name == "checkpoints" for path in going)  # of other stages


def test_requested_checkpoints_stay_unless_all_may_be_deleted(workspace, opened, finish_all):
    kept = opened("execution.checkpoint.keep=5")
    for steps in (20, 40):
        finish_all(kept, steps=steps)
    run_of(kept)
    assert found(workspace) == {}
    assert found(workspace, Retention(all_checkpoints=True))


def test_leftovers_of_a_kill_are_deleted_from_a_stage(workspace, opened, finish, begin):
    experiment = opened()
    finish(experiment, "prepare_data")
    plan = experiment.plan_node("base")
    begin(plan, steps=20)
    run = ExperimentRun(experiment, workspace.new_run("smoke", {}))
    run.enter(experiment.plan_node("prepare_data"))
    run.enter(plan)
    run.record("interrupted")
    left = {plan.directory / "checkpoints/step_000030", plan.directory / "checkpoints/incoming_step_000010"}
    for folder in left:
        folder.mkdir()
    for name in (".manifest.json.a1b2_c3d", ".gitattributes"):
        (plan.directory / name).touch()
    assert set(found(workspace)) == left | {plan.directory / ".manifest.json.a1b2_c3d"}
    dispose(workspace, ALL, survey(workspace, ALL).garbage)
    assert opened().plan_node("base").step == 20


def test_what_a_kill_left_anywhere_in_a_run_or_a_finished_stage_is_deleted(workspace, two):
    directory, data = min(directories(two[0], "sft")), min(directories(two[0], "prepare_data"))
    left = {directory / place / ".step_000003.parquet.vbgbxlwv" for place in (".", "journal", "shards", "model/parts")}
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
        (file.parent / "step_000003.parquet").write_bytes(b"whole")
    link, record = workspace.runs / "smoke-1/stages/.sft.12-34", workspace.runs / "smoke-1/.run.json.abcd1234"
    link.symlink_to("../../nowhere")
    record.touch()
    for name in ("shards", "kept"):
        (data / name).mkdir()
    write_manifest(data, read_manifest(data).model_copy(update={"scratch": ("shards", "tables")}))
    assert set(found(workspace)) == left | {link, record, data / "shards"}
    assert {item.kind for item in found(workspace).values()} == {"part"}


def test_a_deletion_that_is_killed_inside_a_stage_is_finished_by_the_next_one(workspace, two, monkeypatch):
    (directory,) = directories(two[0], "prepare_data")
    manifest = read_manifest(directory)
    write_manifest(directory, manifest.model_copy(update={"scratch": ("shards",)}))
    for name in ("shards/000000.json", "model/.tmpAb12Cd", "log.txt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("left")
    os.utime(directory / "log.txt", (0, 0))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("luffy.pipeline.garbage.delete", kill)
        dispose(workspace, ALL, survey(workspace, ALL).garbage)
    (left,) = found(workspace).values()
    assert left.path.name.startswith(".trash-shards-") and left.reason == "an interrupted deletion"
    (directory / "model/.trash-.tmpAb12Cd").touch()  # as versions before this one left it
    dispose(workspace, ALL, survey(workspace, ALL).garbage)
    assert not list(workspace.root.rglob(".trash-*"))
    assert {plan.action for plan in two[0].plan()} == {"reuse"}


def kill(path, **options):
    raise KeyboardInterrupt


def test_a_run_that_was_killed_before_its_record_was_written_is_deleted_once_it_cannot_be_a_new_one(workspace, two):
    begun, fresh = workspace.runs / "smoke-8", workspace.runs / "smoke-9"
    for directory in (begun, fresh):
        directory.mkdir()
    (begun / ".run.json.abcd1234").touch()
    os.utime(begun, (0, 0))
    dispose(workspace, ALL, found(workspace).values())
    assert not begun.exists()
    assert fresh.exists()


def test_results_named_by_path_in_a_kept_configuration_stay(workspace, opened, finish_all):
    finish_all(opened())
    source, other = run_of(opened()), workspace.new_run("other", {})
    model = opened().plan_node("rl").directory / "model"
    own, gone = directories(opened(), "prepare_data", "base", "sft", "rl"), Retention(names=("smoke-1",))

    def going(**config):
        write_run(other, {"state": "finished", "experiment": "other", "stages": {}, "config": config})
        return set(found(workspace, gone))

    assert source not in going(data={"x": ["y", str(source / "stages/sft/model")]}), "its link is named"
    assert source in going(model={"path": str(model)}) and own.isdisjoint(going(model={"path": str(model)}))
    (workspace.root / "circle").symlink_to("circle")
    texts = {"system_prompt": "~~~md/x", "fence": "~nobody-of-that-name/x", "circle": f"{workspace.root}/circle/x"}
    assert own < going(**texts), "they only look like paths"


def test_a_relative_path_of_a_configuration_starts_where_its_run_began(workspace, opened, finish_all, monkeypatch):
    finish_all(opened())
    rows = opened().plan_node("rl").directory / "metrics.jsonl"
    run_of(opened())
    monkeypatch.chdir(workspace.root.parent)
    other = opened(f"data.corpus={{kind: file, path: {rows.relative_to(workspace.root.parent)}}}")
    ExperimentRun(other, workspace.new_run("other", {})).record("finished")
    monkeypatch.chdir("/")
    assert directories(opened(), "rl").isdisjoint(found(workspace, Retention(names=("smoke-1",))))


def test_arms_stay_with_their_comparison_and_go_with_it(workspace):
    names = ("compare", "compare.luffy.1", "compare.luffy.1")
    comparison, arm, newer = (
        workspace.new_run(name, {"state": "finished", "experiment": name, "started": f"2026-01-01T00:00:0{index}"})
        for index, name in enumerate(names)
    )
    (comparison / "arms").mkdir()
    (comparison / "arms" / "luffy-1").symlink_to(arm)
    assert set(found(workspace, Retention(keep_runs=1))) == set()
    assert set(found(workspace, Retention(names=("compare-1",)))) == {comparison, arm}
    assert set(found(workspace, Retention(keep_runs=0))) == {comparison, arm, newer}
    again = {"state": "running", "experiment": "compare", "pid": os.getpid(), "host": os.uname().nodename}
    with stage_lock(workspace.new_run("compare", again)):
        assert set(found(workspace, Retention(keep_runs=0))) == {comparison}, "it may reuse what its arms made before"


def test_both_limits_must_agree(workspace, two):
    assert found(workspace, Retention(keep_runs=0, older_than_s=3600.0)) == {}
    file = workspace.runs / "smoke-1" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": "2026-01-01T00:00:00+00:00"}))
    assert workspace.runs / "smoke-1" in found(workspace, Retention(older_than_s=3600.0))
    assert workspace.runs / "smoke-1" not in found(workspace, Retention(keep_runs=5, older_than_s=3600.0))


def test_a_run_takes_up_no_stage_during_a_deletion_and_says_so(workspace, opened, finish_all, caplog):
    finish_all(opened())
    experiment = opened()
    run = ExperimentRun(experiment, workspace.new_run("smoke", {}))
    taking = threading.Thread(target=lambda: run.execute("prepare_data", StageObserver()))
    with claiming(workspace, exclusive=True):
        taking.start()
        wait_until(lambda: "waiting" in caplog.text and "luffy gc" in caplog.text)
        assert taking.is_alive()
        assert "prepare_data" not in read_run(run.directory).stages
    taking.join(PATIENCE_S)
    assert "prepare_data" in read_run(run.directory).stages
    assert directories(experiment, "prepare_data").isdisjoint(found(workspace))


def test_results_that_came_into_use_after_the_listing_stay(workspace, opened, finish_all):
    finish_all(opened())
    listed = survey(workspace, ALL).garbage
    run_of(opened())
    assert dispose(workspace, ALL, listed) == [(item, "needed by now, or gone") for item in listed]


def test_a_file_hard_linked_elsewhere_frees_nothing(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 1000)
    for folder in ("b", "c"):
        os.link(tmp_path / "a" / "file", tmp_path / folder / "file")
    a, b, c = (tmp_path / folder for folder in ("a", "b", "c"))
    assert (measure(a), measure(b, c)) == (1000, 2000)
    assert (freed_bytes(a, b), freed_bytes(a, b, c)) == (0, 1000)


def test_the_command_deletes_nothing_without_its_flag(workspace, two, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    asked = ["gc", "--keep-runs", "1", "--workspace", str(workspace.root)]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "runs/smoke-1" in out and "only smoke-1 used it" in out and "add --delete" in out
    assert (workspace.runs / "smoke-1").is_dir()
    assert main([*asked, "--delete", "--only", "run"]) == 0
    assert not (workspace.runs / "smoke-1").exists()
    assert {plan.action for plan in two[0].plan()} == {"reuse"}
    assert main(["gc", "--runs", "none", "--workspace", str(workspace.root)]) == 2


def test_runs_are_found_by_name_path_and_experiment(workspace, two):
    assert find_run(workspace, "smoke").name == find_run(workspace, str(workspace.runs / "smoke-2")).name == "smoke-2"
    assert find_run(workspace, "smoke-1").name == "smoke-1"
    with pytest.raises(DataError, match=r"smoek: no such run in workspace .*; there are smoke-2, smoke-1"):
        find_run(workspace, "smoek")
    for odd in ("**", "[", "~nobody-of-that-name"):
        with pytest.raises(DataError, match="no such run in workspace"):
            find_run(workspace, odd)


def test_waiting_for_a_stage_that_is_then_deleted_is_an_error(tmp_path):
    directory, said, waits = tmp_path / "stage", [], threading.Event()
    directory.mkdir()

    def wait():
        try:
            stage_lock(directory, waiting=lambda holder: waits.set()).__enter__()
        except Exception as error:
            said.append(str(error))

    waiter = threading.Thread(target=wait)
    with stage_lock(directory):
        waiter.start()
        assert waits.wait(PATIENCE_S)
        directory.rename(tmp_path / ".trash-stage")
    waiter.join(PATIENCE_S)
    assert "was deleted while this process waited for its lock" in said[0]
