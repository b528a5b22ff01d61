"""What `gc` finds and deletes in a workspace whose stages were finished by hand, and what it leaves."""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading

import pytest
from support.patience import PATIENCE_S, ran, wait_until
from support.refusals import refused
from synthetic.finished_stages import begin, finish, finish_all, run_of

from luffy.cli.main import main
from luffy.pipeline import experiment as experiments
from luffy.pipeline.disk import freed_bytes, measure
from luffy.pipeline.experiment import ExperimentRun, StageObserver, open_experiment, start_run
from luffy.pipeline.garbage import Retention, dispose, survey
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.manifest import read_manifest, write_manifest
from luffy.pipeline.records import find_run, read_run
from luffy.pipeline.workspace import Workspace, claiming, write_run

ALL = Retention()
OTHER_SFT = "sft.optimizer.lr=2e-3"
RUN = "lock.stage_lock(place), nullcontext(workspace.write_run(place, %s))"
RUN %= '{"state": "running", "pid": os.getpid(), "host": socket.gethostname()}'


def directories(experiment, *nodes):
    identities = [experiment.identities[node] for node in nodes]
    return {experiment.workspace.stage_directory(identity.stage, identity.key) for identity in identities}


def own_stages(experiment):
    """Those that two experiments do not share which differ in SFT."""
    return directories(experiment, "sft", "rl", "evaluate_sft", "evaluate_rl", "report")


def going(workspace, **rules):
    return {item.path for item in survey(workspace, Retention(**rules)).garbage}


def actions(experiment):
    return {plan.action for plan in experiment.plan()}


@pytest.fixture
def two(opened):
    """Two experiments that share what comes before SFT, a run of each."""
    made = opened(), opened(OTHER_SFT)
    for experiment in made:
        finish_all(experiment)
        run_of(experiment)
    return made


def test_what_no_run_uses_goes_first_the_run_that_is_given_up(workspace, two, opened):
    first, second = two
    assert going(workspace) == set()
    unused = opened("rl.steps=9")
    finish_all(unused)
    garbage = survey(workspace, Retention(keep_runs=1)).garbage
    assert garbage[0].path == workspace.runs / "smoke-1"  # before its stages, so that no run misses one
    never = directories(unused, "rl", "evaluate_rl", "report")
    assert {item.path: item.reason for item in garbage[1:]} == {
        **dict.fromkeys(own_stages(first) | directories(unused, "sft", "evaluate_sft"), "only smoke-1 used it"),
        **dict.fromkeys(never, "no run uses it"),
    }
    assert dispose(workspace, Retention(keep_runs=1), garbage) == []
    assert actions(second) == {"reuse"}
    assert going(workspace, keep_runs=1) == set()
    assert not (workspace.runs / "smoke-1").exists()


def test_what_a_record_names_or_links_stays_with_its_sources_and_for_a_live_one_all(workspace, opened):
    finish_all(opened())
    directory = run_of(opened())
    file = directory / "run.json"
    record = json.loads(file.read_text())
    only = {"evaluate_rl": record["stages"]["evaluate_rl"]}
    file.write_text(json.dumps({**record, "stages": only}))
    assert going(workspace) == directories(opened(), "evaluate_base", "evaluate_sft", "report")
    # A record of another version, or a damaged one: what is linked beside it.
    for text in ('{"state": "paused", "started": "yesterday"}', '{"state": 1, "started": 2, "config": [3]}', "{"):
        file.write_text(text)
        assert directory not in going(workspace, keep_runs=0), text
        assert (going(workspace), read_run(directory).tags) == (set(), frozenset()), text
    finish_all(opened(OTHER_SFT))
    live = workspace.new_run("smoke", {})
    (live / "run.json").write_text("{")
    with stage_lock(live):
        assert going(workspace) == set()
    assert going(workspace) == own_stages(opened(OTHER_SFT))


@pytest.mark.parametrize("held_before", [True, False])
def test_a_stage_in_use_by_another_process_stays(workspace, opened, holding, monkeypatch, held_before):
    finish_all(opened())
    workspace.runs.mkdir()
    (victim,) = directories(opened(), "rl")
    with stage_lock(victim):
        pass  # a stage has begun here
    before = survey(workspace, ALL)
    holder, _ = holding(RUN, victim)
    now = survey(workspace, ALL)
    assert f"rl/{victim.name}: in use by pid {holder.pid}" in " ".join(now.notes)
    dispose(workspace, ALL, (now if held_before else before).garbage)
    # Neither it nor what it is made from, which it may be reading.
    left = {path for path in workspace.stages.glob("*/*") if path.is_dir()}
    assert left == directories(opened(), "prepare_data", "base", "sft", "rl")
    monkeypatch.setattr("luffy.pipeline.garbage.holder_of", lambda directory: None)  # who looked before it began
    spared = dispose(workspace, ALL, survey(workspace, ALL).garbage)
    assert [(item.path, why) for item, why in spared] == [(victim, "a process has just begun to work on it")]
    assert victim.is_dir()


STRUCK = """
import os, signal, sys
from luffy.cli.main import main
from luffy.pipeline import garbage

def delete(path, **options):
    next(file for file in path.rglob("*") if file.is_file()).unlink()
    os.kill(os.getpid(), signal.SIGKILL)

garbage.delete = delete
main(["gc", "--delete", *sys.argv[1:]])
"""


def test_the_command_lists_and_deletes_with_its_flag_and_after_kill_9_of_it_the_next_one_finishes(
    workspace, two, capsys, monkeypatch
):
    first, second = two
    monkeypatch.setenv("COLUMNS", "200")
    asked = ["--keep-runs", "1", "--workspace", str(workspace.root)]
    assert main(["gc", *asked]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in ("runs/smoke-1", "only smoke-1 used it", "--delete"))
    assert actions(first) == actions(second) == {"reuse"} and (workspace.runs / "smoke-1").is_dir()
    assert ran([sys.executable, "-c", STRUCK, *asked]).returncode == -signal.SIGKILL
    assert list(workspace.runs.glob(".trash-*")) or list(workspace.stages.glob("*/.trash-*"))
    assert (actions(first), actions(second)) == ({"reuse", "run"}, {"reuse"})
    assert all(not directory.name.startswith(".") for directory in workspace.siblings("rl"))
    assert main(["gc", "--delete", *asked]) == 0
    assert not list(workspace.root.rglob(".trash-*")) and not (workspace.runs / "smoke-1").exists()
    assert actions(second) == {"reuse"}
    assert main(["gc", "--runs", "none", *asked[2:]]) == 2


def test_a_run_that_holds_its_lock_keeps_what_it_will_reuse_and_cannot_be_given_up(workspace, opened):
    # The keys are those of the real code, as the running flow would compute them.
    experiment = open_experiment(opened().config, workspace)
    finish_all(experiment, steps=20)
    with start_run(experiment) as run:
        run.execute("prepare_data", StageObserver())
        record = json.loads((run.directory / "run.json").read_text())
        with refused("--runs smoke-1", "is under way", f"pid {os.getpid()} on "):
            survey(workspace, Retention(names=("smoke-1",)))
        for said in ({}, {"pid": 1, "host": "elsewhere", "started": "2099-01-01T00:00:00+00:00"}):
            write_run(run.directory, {**record, **said})
            assert (read_run(run.directory).condition, going(workspace, keep_runs=0)) == ("running", set()), said
    write_run(run.directory, {**record, "pid": os.getpid()})
    assert read_run(run.directory).condition == "killed"


@pytest.mark.parametrize(("again", "name"), [((), "smoke-1"), (("base.steps=21",), "smoke-3")])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_the_same_command_after_an_early_end_goes_on_with_the_same_run(opened, error, again, name):
    with contextlib.suppress(BaseException), start_run(opened()) as run:
        started = read_run(run.directory).started
        raise (error or SystemExit)
    if error is None:  # killed: its record still says that it runs
        run.record("running")
    with start_run(opened("base.steps=22")):  # in between
        pass
    with start_run(opened(*again)) as run:
        assert run.directory.name == name
        assert again or read_run(run.directory).started == started
    with start_run(opened(*again)) as run:
        assert run.directory.name != name, "a finished run is another one"


def test_the_same_command_at_the_same_moment_begins_a_run_of_its_own(opened, monkeypatch):
    with contextlib.suppress(KeyboardInterrupt), start_run(opened()):
        raise KeyboardInterrupt
    unfinished = experiments._unfinished_run
    with contextlib.ExitStack() as other:

        def found(experiment):
            record = unfinished(experiment)
            other.enter_context(stage_lock(record.directory))  # the other one is as fast, and takes it
            return record

        monkeypatch.setattr(experiments, "_unfinished_run", found)
        with start_run(opened()) as run:
            assert run.directory.name == "smoke-2"


READ = "import sys; from pathlib import Path; from luffy.pipeline.records import read_run\n"
READ += "print(read_run(Path(sys.argv[1])).condition)"
CONTAINER = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--die-with-parent"]
NAMED = ["--unshare-user", "--unshare-uts", "--hostname", "inside"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")
def test_runs_outside_and_inside_of_a_container_are_seen_to_live_and_to_be_dead(workspace, opened, holding):
    """With process numbers of its own, and another host name, as Docker gives one to each container."""
    with start_run(opened()) as run:
        seen = ran([*CONTAINER, sys.executable, "-c", READ, run.directory])
    assert seen.stdout == "running\n", seen.stderr
    directory = workspace.new_run("smoke", {})
    container, _ = holding(RUN, directory, command=[*CONTAINER, *NAMED, sys.executable])
    record = read_run(directory)
    assert (record.host, record.condition) == ("inside", "running")
    container.kill()
    container.wait()
    wait_until(lambda: read_run(directory).condition == "killed")


@pytest.mark.parametrize("moment", ["directory", "record"])
def test_a_run_that_is_just_beginning_survives_a_deletion_after_a_jump_of_the_clock(opened, monkeypatch, moment):
    """Whatever its files' age: an empty directory, and a record that does not name a process yet."""
    deletions = []

    def begins(workspace, experiment, record):
        directory = workspace.runs / f"{experiment}-1"
        directory.mkdir(parents=True)
        if moment == "record":
            write_run(directory, {**record, "experiment": experiment})
        for path in (*directory.iterdir(), directory):
            os.utime(path, (0, 0))
        rules = Retention(keep_runs=0)
        deletions.append(threading.Thread(target=lambda: dispose(workspace, rules, survey(workspace, rules).garbage)))
        deletions[0].start()
        deletions[0].join(0.5)
        return directory

    monkeypatch.setattr(Workspace, "new_run", begins)
    with start_run(opened()) as run:
        deletions[0].join(PATIENCE_S)
        assert not deletions[0].is_alive()
        assert read_run(run.directory).condition == "running"


def test_only_what_the_pipeline_has_made_goes_and_links_are_not_followed(workspace, opened, tmp_path):
    """An empty folder that is named like a key is of a stage that has never begun."""
    finish_all(opened())
    outside, key, places = tmp_path / "outside", "0123456789abcdef", workspace.stages / "rl"
    for name in (key, key[::-1], "notes"):
        (places / name).mkdir()
    (places / key[::-1] / "mine.txt").write_text("kept")
    (moved,) = directories(opened(), "report")
    moved.rename(outside)
    moved.symlink_to(outside)
    (inside,) = directories(opened(), "evaluate_rl")
    (inside / "link").symlink_to(outside)
    found = survey(workspace, ALL)
    assert {note.split(":")[0] for note in found.notes} == {f"rl/{key[::-1]}", "rl/notes", f"report/{moved.name}"}
    assert f"report/{moved.name}: is a link" in " ".join(found.notes)
    dispose(workspace, ALL, found.garbage)
    assert not inside.exists() and {path.name for path in places.iterdir()} == {key[::-1], "notes"}
    assert (outside / "manifest.json").is_file() and moved.is_symlink()


WRITTEN, HALF = "a file that was being written", "a checkpoint that is not complete"
LEFT = {  # what lies where, folders with a slash at their end; and why it goes, None where it stays
    "{begun}/checkpoints/step_000020/": None,
    "{begun}/checkpoints/step_000030/": HALF,
    "{begun}/checkpoints/incoming_step_000010/": HALF,
    "{begun}/checkpoints/.trash-step_000010-0f/": HALF,
    "{begun}/.manifest.json.a1b2_c3d": WRITTEN,
    "{begun}/.gitattributes": None,
    "{sft}/checkpoints/step_000040/": None,
    "{sft}/.step_000003.parquet.vbgbxlwv": WRITTEN,
    "{sft}/journal/.step_000003.parquet.vbgbxlwv": WRITTEN,
    "{sft}/journal/step_000003.parquet": None,
    "{sft}/model/parts/.step_000003.parquet.vbgbxlwv": WRITTEN,
    "{sft}/model/.trash-.tmpAb12Cd": "an interrupted deletion",  # as versions before this one left it
    "{data}/shards/": "needed only until the stage was finished",
    "{data}/kept/": None,
    "{runs}/smoke-1/.run.json.abcd1234": WRITTEN,
    "{runs}/smoke-8/": "killed before it began",
    "{runs}/smoke-9/": None,  # may be a new one
    "{root}/stages/rl/notes/mine.txt": None,
}


def test_what_a_kill_has_left_goes(workspace, opened):
    finished = opened("evaluation.confidence=0.9")
    finish_all(finished)
    finish(finished, "sft", steps=40)
    run_of(finished)
    experiment = opened("sft.epochs=9")
    plan = experiment.plan_node("sft")
    begin(plan, steps=20)
    run = ExperimentRun(experiment, workspace.new_run("smoke", {}))
    run.enter(plan)
    run.record("interrupted")

    (data,), (sft,) = directories(finished, "prepare_data"), directories(finished, "sft")
    places = {"begun": plan.directory, "sft": sft, "data": data, "runs": workspace.runs, "root": workspace.root}
    reasons = {}
    for place, reason in LEFT.items():
        path = workspace.root / place.format(**places)
        (path if place.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not place.endswith("/"):
            path.write_text("left")
        reasons[path] = reason
    link = workspace.runs / "smoke-1/stages/.sft.12-34"
    link.symlink_to("../../nowhere")
    (workspace.runs / "smoke-8/.run.json.abcd1234").touch()
    os.utime(workspace.runs / "smoke-8", (0, 0))
    write_manifest(data, read_manifest(data).model_copy(update={"scratch": ("shards", "tables")}))

    listed = survey(workspace, ALL)
    goes = {path: reason for path, reason in reasons.items() if reason is not None}
    assert {item.path: item.reason for item in listed.garbage} == {**goes, link: WRITTEN}
    dispose(workspace, ALL, listed.garbage)
    assert not list(workspace.root.rglob(".trash-*")) and not link.is_symlink()
    assert {path: path.exists() for path in reasons} == {path: reason is None for path, reason in reasons.items()}
    assert actions(finished) == {"reuse"}
    assert opened("sft.epochs=9").plan_node("sft").step == 20


def test_results_named_by_path_in_a_kept_configuration_stay(workspace, opened, monkeypatch):
    finish_all(opened())
    source, other = run_of(opened()), workspace.new_run("other", {})
    model = opened().plan_node("rl").directory / "model"
    own = directories(opened(), "prepare_data", "base", "sft", "rl")

    def goes(**config):
        write_run(other, {"state": "finished", "experiment": "other", "stages": {}, "config": config})
        return going(workspace, names=("smoke-1",))

    assert source not in goes(data={"x": ["y", str(source / "stages/sft/model")]}), "its link is named"
    assert source in goes(model={"path": str(model)}) and own.isdisjoint(goes(model={"path": str(model)}))
    (workspace.root / "circle").symlink_to("circle")
    texts = {"system_prompt": "~~~md/x", "fence": "~nobody-of-that-name/x", "circle": f"{workspace.root}/circle/x"}
    assert own < goes(**texts), "they only look like paths"

    # A relative path starts where its run began.
    rows = opened().plan_node("rl").directory / "metrics.jsonl"
    monkeypatch.chdir(workspace.root.parent)
    relative = opened(f"data.corpus={{kind: file, path: {rows.relative_to(workspace.root.parent)}}}")
    ExperimentRun(relative, workspace.new_run("relative", {})).record("finished")
    monkeypatch.chdir("/")
    assert directories(opened(), "rl").isdisjoint(goes())


def test_arms_stay_with_their_comparison_and_go_with_it(workspace):
    names = ("compare", "compare.luffy.1", "compare.luffy.1")
    comparison, arm, newer = (
        workspace.new_run(name, {"state": "finished", "experiment": name, "started": f"2026-01-01T00:00:0{index}"})
        for index, name in enumerate(names)
    )
    (comparison / "arms").mkdir()
    (comparison / "arms" / "luffy-1").symlink_to(arm)
    assert going(workspace, keep_runs=1) == set()
    assert going(workspace, names=("compare-1",)) == {comparison, arm}
    assert going(workspace, keep_runs=0) == {comparison, arm, newer} and going(workspace, keep_runs=5) == set()
    again = {"state": "running", "experiment": "compare", "pid": os.getpid(), "host": os.uname().nodename}
    with stage_lock(workspace.new_run("compare", again)):
        assert going(workspace, keep_runs=0) == {comparison}, "it may reuse what its arms made before"


def test_a_run_takes_up_no_stage_during_a_deletion_and_says_so(workspace, opened, caplog):
    finish_all(opened())
    listed = survey(workspace, ALL).garbage
    run = ExperimentRun(opened(), workspace.new_run("smoke", {}))
    taking = threading.Thread(target=lambda: run.execute("prepare_data", StageObserver()))
    with claiming(workspace, exclusive=True):
        taking.start()
        wait_until(lambda: "waiting" in caplog.text and "luffy gc" in caplog.text)
        assert taking.is_alive()
        assert "prepare_data" not in read_run(run.directory).stages
    taking.join(PATIENCE_S)
    (taken,) = directories(opened(), "prepare_data")
    assert "prepare_data" in read_run(run.directory).stages
    # It came into use after the listing.
    spared = dispose(workspace, ALL, listed)
    assert [(item.path, why) for item, why in spared] == [(taken, "needed by now, or gone")] and taken.is_dir()


def test_a_file_hard_linked_elsewhere_frees_nothing(tmp_path):
    a, b, c = folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 1000) if folder == a else os.link(a / "file", folder / "file")
    assert (measure(a), measure(b, c)) == (1000, 2000)
    assert (freed_bytes(a, b), freed_bytes(a, b, c)) == (0, 1000)


def test_runs_are_found_by_name_path_and_experiment(workspace, two):
    for name, found in (("smoke", "smoke-2"), (str(workspace.runs / "smoke-2"), "smoke-2"), ("smoke-1", "smoke-1")):
        assert find_run(workspace, name).name == found
    for odd in ("smoek", "**", "[", "~nobody-of-that-name"):
        with refused(f"{odd}: no such run", "smoke-2, smoke-1"):
            find_run(workspace, odd)
