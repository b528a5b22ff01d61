"""Real stage processes, started cold or forked from a warm server: what is passed on, how they end, and that nothing
outlives its supervisor."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from campaigns.random_kills import promised_of
from flow_process import UNDISTURBED
from support.patience import PATIENCE_S, lives, wait_until
from toy_run import Recorder, toy_run

from luffy.config import load_experiment
from luffy.errors import EXIT_FAILURE, StageFailed
from luffy.pipeline import supervise as supervision
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.lock import holder_of
from luffy.pipeline.supervise import supervise
from luffy.pipeline.warm_start import WarmServer, can_start_warm, current_warm_server
from luffy.pipeline.workspace import Workspace
from luffy.processes import marked_processes

ROOT = Path(__file__).parents[2]
SUPERVISOR = str(ROOT / "tests/integration/toy_run.py")
SLEEP = "import time; time.sleep(7200)"
FAMILY = """
import importlib.util, os, subprocess, sys, time
has_titles = importlib.util.find_spec("setproctitle") is not None
def titled(text):  # as vLLM's workers are; it would overwrite the mark by which they are found
    return f"from setproctitle import setproctitle; setproctitle('{text}');" if has_titles else ""
def child(code):
    code += "import time; print('ready', flush=True); time.sleep(7200)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process.pid
def forked(code):  # no exec: its environment in /proc is the stage's, or the server's
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        exec(code)
        os.write(writing, b"ready")
        time.sleep(7200)
    os.read(reading, 5)
    return pid
deaf = "import signal; signal.signal(15, signal.SIG_IGN);"
started = child(deaf), forked(""), child(titled("VLLM::Worker_TP0")), forked(titled("VLLM::EngineCore"))
print("pids", os.getpid(), *started)
time.sleep(7200)
"""


def pids_in(text):
    return [int(pid) for pid in re.findall(r"\d+", text)]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes the module `warm_probe`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return lambda code: (tmp_path / "warm_probe.py").write_text(code)


@contextmanager
def warm_server(directory, libraries=()):
    """A server in use. Not a fixture, since pytest changes the environment between a test's setup and the test."""
    server = WarmServer(directory / "server.log", libraries)
    with server.use():
        yield server


@pytest.fixture
def never_cold(monkeypatch):
    monkeypatch.delattr(supervision, "_start_cold")


@pytest.fixture(params=["cold", "warm"])
def way(request, tmp_path):
    """Opens a block in which stages are started cold, or one in which they cannot be."""
    if request.param == "cold":
        return nullcontext
    request.getfixturevalue("never_cold")
    return lambda: warm_server(tmp_path)


def run(directory, *arguments, on_line=lambda line: None):
    command = [sys.executable, "-m", "warm_probe", *arguments]
    supervise(command, directory, on_event=lambda event: None, on_line=on_line)
    return (directory / "log.txt").read_text()


# Cold or warm


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "failed with exit code 3"),
        ("1 / 0", "failed with exit code 1(.|\n)*ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", None),
    ],
)
def test_the_exit_of_a_stage_is_reported_and_the_next_one_starts(program, tmp_path, way, code, message):
    program(code)
    with way():
        if message:
            with pytest.raises(StageFailed, match=message):
                run(tmp_path)
        else:
            assert run(tmp_path).endswith("late\n")
        program("import os; print('WARNING one'); print('two')")
        lines = []
        assert run(tmp_path, on_line=lines.append).endswith("WARNING one\ntwo\n")
        assert lines == ["WARNING one", "two"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_stopping_the_supervisor_ends_all_stage_processes_but_no_warm_server(program, tmp_path, way, error):
    program(FAMILY)
    pids = []

    def stop(line):
        pids.extend(pids_in(line))
        raise error

    with way() as warm:
        with pytest.raises(error):
            supervise([sys.executable, "-m", "warm_probe"], tmp_path, on_event=print, on_line=stop, grace_s=0.5)
        assert len(pids) == 5 and not any(lives(pid) for pid in pids[:3])
        wait_until(lambda: not any(lives(pid) for pid in pids))  # one with a title that is dying has no mark any more
        if warm is not None:
            assert [process.pid for process in marked_processes(warm.mark)] == [warm.pid]
            program("print('next')")
            assert run(tmp_path).endswith("next\n")


# Toy stages of an experiment


@pytest.fixture
def toy(monkeypatch):
    """Sets the TOY_* variables of toy_stage.py; None takes one away."""

    def toy(**settings):
        for name, value in settings.items():
            monkeypatch.delenv(f"TOY_{name}") if value is None else monkeypatch.setenv(f"TOY_{name}", value)

    return toy


def test_progress_arrives_from_first_to_last(tmp_path):
    recorder = Recorder()
    manifest = toy_run(tmp_path).execute("prepare_data", recorder)
    progress = recorder.texts("progress")
    assert (progress[0], progress[-1]) == ("1/3", "3/3")
    assert [kind for kind, _ in recorder.told][-1] == "done"
    assert manifest.metrics == {"loss": 0.5}
    assert not list(tmp_path.glob("stages/*/*/shards"))


@pytest.mark.parametrize(
    ("mode", "exit_code", "message"),
    [
        ("mistake", 2, r"^train\.jsonl:3: prompt: missing; add it$"),
        ("quota", 2, r"^[^\n]*: no space left; [^\n]* the stage resumes$"),
        ("crash", 1, r"prepare_data failed with exit code 1: RuntimeError: the matrix is not finite(.|\n)*Traceback"),
    ],
)
def test_a_failure_keeps_its_line_and_exit_code_and_a_crash_the_end_of_its_log(tmp_path, toy, mode, exit_code, message):
    toy(MODE=mode)
    with pytest.raises(StageFailed, match=message) as caught:
        toy_run(tmp_path).execute("prepare_data", Recorder())
    assert (caught.value.exit_code, caught.value.temporary) == (exit_code, False), "Prefect does not retry it"
    if mode == "quota":  # it could not write its error, and resumes
        toy(MODE=None)
        assert toy_run(tmp_path).execute("prepare_data", Recorder()).resumed_from == 2


CHECKPOINT = "stages/prepare_data/*/checkpoints/step_000002/COMPLETE"


@pytest.mark.slow
def test_a_time_limit_ends_all_stage_processes_and_the_next_run_resumes(tmp_path, toy, monkeypatch):
    toy(MODE="family", HANGS_AT="3")
    recorder = Recorder()
    limit_s = 86400.0
    passes = SimpleNamespace(
        sleep=time.sleep, monotonic=lambda: time.monotonic() + limit_s * any(tmp_path.glob(CHECKPOINT))
    )
    monkeypatch.setattr("luffy.pipeline.supervise.time", passes)
    limit = f"execution.time_limits_s={{prepare_data: {limit_s}}}"
    with pytest.raises(StageFailed, match="prepare_data has reached its time limit; the same command") as caught:
        toy_run(tmp_path, limit).execute("prepare_data", recorder)
    assert caught.value.exit_code == 1
    (child,) = re.findall(r"child (\d+)", "\n".join(recorder.texts("line")))
    assert not lives(int(child))
    assert toy_run(tmp_path).experiment.plan_node("prepare_data").action == "resume"


@pytest.mark.slow
def test_another_run_of_the_stage_does_not_change_the_execution_settings_of_the_one_at_work(tmp_path, toy):
    toy(FAULT="killed")
    run, other = (toy_run(tmp_path, f"execution.num_threads={threads}") for threads in (1, 2))
    with pytest.raises(StageFailed) as caught:
        run.execute("prepare_data", Recorder())
    assert caught.value.temporary
    plan = other.experiment.plan_node("prepare_data")

    class Meddling(Recorder):
        def planned(self, plan):
            write_job(plan.directory / JOB_FILE, other.experiment.job(plan))

    write_job(plan.directory / JOB_FILE, other.experiment.job(plan))
    manifest = run.execute("prepare_data", Meddling())
    assert (manifest.resumed_from, manifest.execution.num_threads) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "said"), [("family", r"child (\d+)"), ("deaf", "progress")])
def test_kill_9_of_the_supervisor_of_a_cold_stage_leaves_nothing_behind(tmp_path, toy, mode, said):
    """Also of a stage that ignores SIGTERM: it notices that it is orphaned."""
    toy(MODE=mode, STEP_S="60")
    command = [sys.executable, SUPERVISOR, str(tmp_path), "prepare_data"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    started = map(int, next(filter(None, (re.search(said, line) for line in process.stdout))).groups())
    (stage,) = (tmp_path / "stages" / "prepare_data").iterdir()
    left = [int(re.search(r"pid (\d+)", holder_of(stage))[1]), *started]
    assert all(map(lives, left))
    process.kill()
    wait_until(lambda: not any(map(lives, left)))


@pytest.mark.slow
def test_kill_9_of_the_stage_ends_its_children_and_the_next_run_resumes(tmp_path, toy):
    toy(MODE="family", HANGS_AT="4", STEP_S="0.3", STEPS="8")  # so far apart that each step's event is written
    killed = []

    class Killer(Recorder):
        def event(self, plan, event):
            super().event(plan, event)
            if event.step == 4 and not killed:
                killed.append(event.pid)
                os.kill(event.pid, signal.SIGKILL)

    recorder = Killer()
    with pytest.raises(StageFailed, match="prepare_data was ended by SIGKILL"):
        toy_run(tmp_path).execute("prepare_data", recorder)
    child = int(re.search(r"child (\d+)", "\n".join(recorder.texts("line")))[1])
    assert not lives(child)
    toy(MODE=None, HANGS_AT=None)
    again = Recorder()
    manifest = toy_run(tmp_path).execute("prepare_data", again)
    assert again.texts("planned") == ["resume from step 3"]
    assert (again.texts("progress")[0], manifest.resumed_from) == ("4/8", 3)


# Warm servers


def test_a_warm_stage_sees_the_same_process_state_as_a_cold_one(program, tmp_path):
    program(
        "import os, sys\n"
        "mark = 'LUFFY_STAGE_RUN' in os.environ, int(os.environ['LUFFY_SUPERVISOR_PID']) == os.getppid()\n"
        "print(__name__, sys.argv, sys.stdin.read(), mark, os.getsid(0) == os.getpid(), os.getcwd())\n"
        "print(sorted(os.listdir('/proc/self/fd')), sys.path, sys.modules['__main__'].__spec__.name)\n"
        "print(sorted(os.environ), file=sys.stderr)\n"
        "print(os.getppid())\n"
    )
    with warm_server(tmp_path) as warm:
        *found, parent = run(tmp_path, "--one", "two words").splitlines()
    assert int(parent) == warm.pid
    (tmp_path / "log.txt").unlink()
    assert run(tmp_path, "--one", "two words").splitlines() == [*found, str(os.getpid())]


def test_variables_of_a_launcher_reach_no_warm_stage_and_start_none_cold(program, tmp_path, monkeypatch, never_cold):
    for name in ("RANK", "PYTHONOPTIMIZE"):
        monkeypatch.setenv(name, "2")
    program("import os, sys; print('RANK' in os.environ, sys.flags.optimize)")
    with warm_server(tmp_path):
        assert run(tmp_path) == "False 0\n"


def test_edited_code_is_never_stale(program, tmp_path, monkeypatch, never_cold):
    """Neither a program nor a module of the package, which the server has loaded with the settings of the stages."""
    package = shutil.copytree(ROOT / "luffy", tmp_path / "luffy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    code = "import sys; print('luffy.config.settings' in sys.modules, end=' '); import luffy.errors as errors; "
    program(f"{code} print(errors.__file__, 'first')")
    errors = package / "errors.py"
    with warm_server(tmp_path):
        assert run(tmp_path) == f"True {errors} first\n"
        program(f"{code} print(hasattr(errors, 'EDITED'), 'second')")
        assert run(tmp_path).endswith("True False second\n")
        errors.write_text(errors.read_text() + "EDITED = True\n")
        assert run(tmp_path).endswith("False True second\n")


def test_stages_at_the_same_time_have_servers_of_their_own_which_outlive_the_threads(program, tmp_path, never_cold):
    program(
        "import os, sys, time\nprint(os.getppid(), flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    )

    def at_once(name):
        """The servers of two stages that run at the same time, each in a thread that ends with it."""
        servers, both = [], tmp_path / name

        def seen(line):
            servers.append(int(line))
            if len(servers) == 2:
                both.touch()

        folders = [tmp_path / f"{name}-{number}" for number in range(2)]
        with ThreadPoolExecutor() as threads:
            for folder in folders:
                folder.mkdir()
            running = [threads.submit(copy_context().run, run, one, str(both), on_line=seen) for one in folders]
        assert all(one.exception() is None for one in running)
        return set(servers)

    with warm_server(tmp_path) as warm:
        found = at_once("first")
        assert warm.pid in found and len(found) == 2
        assert at_once("second") == found
    assert not any(lives(pid) for pid in found)


def test_in_another_environment_or_where_no_further_server_starts_a_stage_starts_cold(program, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("no more processes")

    program("import os; print(os.getppid(), os.environ.get('OMP_NUM_THREADS'))")
    with warm_server(tmp_path) as warm:
        assert run(tmp_path).startswith(f"{warm.pid} ")
        with pytest.MonkeyPatch.context() as patch, warm._ordering:  # busy with another stage
            patch.setattr("luffy.pipeline.warm_start.start_marked", refuse)
            assert run(tmp_path).splitlines()[-1].startswith(f"{os.getpid()} ")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        assert run(tmp_path).endswith(f"{os.getpid()} 7\n")


@pytest.mark.parametrize(
    ("library", "logged"),
    [
        ("no_such_library", "No module named 'no_such_library'"),
        ("pyarrow", "no fork with several threads"),
        ("threaded_library", "no fork with several threads"),
    ],
)
def test_a_server_that_cannot_load_or_has_a_second_thread_never_forks(program, tmp_path, library, logged):
    code = "import threading, time; threading.Thread(target=time.sleep, args=(7200,), daemon=True).start()"
    (tmp_path / "threaded_library.py").write_text(code)
    program("import os; print(os.getppid())")
    with warm_server(tmp_path, [library]):
        assert int(run(tmp_path)) == os.getpid()
    assert logged in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_kill_9_of_supervisor_or_server_leaves_nothing_behind(program, tmp_path, victim):
    program(f"import os; print('stage', os.getpid()); {SLEEP}")
    command = [sys.executable, SUPERVISOR, str(tmp_path), "--warm", "warm_probe"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server, stage = (pids_in(driver.stdout.readline())[0] for _ in range(2))
    assert psutil.Process(stage).ppid() == server
    os.kill(server if victim == "server" else driver.pid, signal.SIGKILL)
    wait_until(lambda: not lives(server) and not lives(stage))
    _, complaint = driver.communicate(timeout=PATIENCE_S)
    assert victim == "supervisor" or "the warm server that started it died" in complaint


def test_after_the_death_of_the_server_stages_start_cold(program, tmp_path):
    program(f"print('stage', flush=True); {SLEEP}")
    with warm_server(tmp_path) as warm:
        with pytest.raises(StageFailed, match="the same command resumes it") as caught:
            run(tmp_path, on_line=lambda line: os.kill(warm.pid, signal.SIGKILL))
        assert (caught.value.exit_code, caught.value.is_interruption) == (EXIT_FAILURE, False)  # as when killed itself
        assert caught.value.temporary
        program("import os; print(os.getppid())")
        assert run(tmp_path).endswith(f"\n{os.getpid()}\n")


@pytest.mark.slow
@pytest.mark.skipif(not can_start_warm(), reason="needs a machine without a GPU")
def test_warm_and_cold_training_are_equal_bit_for_bit(undisturbed, tmp_path):
    """RL of the finished run, whose flow has forked it from a warm server, and made again cold."""
    workspace = shutil.copytree(undisturbed[0], tmp_path / "workspace", symlinks=True)
    assert (workspace / "warm_server.log").exists() and current_warm_server() is None
    experiment = open_experiment(load_experiment(ROOT / UNDISTURBED[0], UNDISTURBED[1:]), Workspace(workspace))
    directory = experiment.plan_node("rl").directory
    warm = promised_of(directory)
    shutil.rmtree(directory)
    ExperimentRun(experiment, experiment.workspace.new_run("cold", {})).execute("rl", recorder := Recorder())
    assert recorder.texts("planned") == ["run"]
    assert promised_of(directory) == warm
