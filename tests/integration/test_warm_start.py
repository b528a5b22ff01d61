"""Stages forked from a warm server: everything is as when they are started cold, whoever dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path

import psutil
import pytest
from campaigns.random_kills import promised_of
from flow_process import UNDISTURBED
from support.patience import PATIENCE_S, lives, wait_until
from toy_run import Recorder

from luffy.config import load_experiment
from luffy.errors import EXIT_FAILURE, StageFailed
from luffy.pipeline import supervise as supervision
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.supervise import supervise
from luffy.pipeline.warm_start import WarmServer, can_start_warm, current_warm_server
from luffy.pipeline.workspace import Workspace
from luffy.processes import marked_processes

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("warm_run.py")
SLEEP = "import time; time.sleep(7200)"
FAMILY = """
import os, subprocess, sys, time
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(9999)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
fork = os.fork()  # no exec: its environment in /proc is the server's
if fork == 0:
    os.setsid()
    time.sleep(7200)
print("pids", os.getpid(), child.pid, fork)
time.sleep(7200)
"""

TITLED = """
import os, subprocess, sys, time
from setproctitle import setproctitle
worker = "from setproctitle import setproctitle; setproctitle('VLLM::Worker_TP0'); print('titled', flush=True)"
worker += "; import time; time.sleep(7200)"
child = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
reading, writing = os.pipe()
fork = os.fork()  # no exec: its environment in /proc is the stage's, or the server's
if fork == 0:
    os.setsid()
    setproctitle("VLLM::EngineCore")
    os.write(writing, b"titled")
    time.sleep(7200)
os.read(reading, 6)
print("pids", child.pid, fork)
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


def run(directory, *arguments, on_line=lambda line: None):
    command = [sys.executable, "-m", "warm_probe", *arguments]
    supervise(command, directory, on_event=lambda event: None, on_line=on_line)
    return (directory / "log.txt").read_text()


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


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "failed with exit code 3"),
        ("1 / 0", "failed with exit code 1(.|\n)*ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", None),
    ],
)
def test_the_exit_of_a_warm_stage_is_reported_and_the_next_one_starts(program, tmp_path, never_cold, code, message):
    program(code)
    with warm_server(tmp_path):
        if message:
            with pytest.raises(StageFailed, match=message):
                run(tmp_path)
        else:
            assert run(tmp_path).endswith("late\n")
        program("print('next')")
        assert run(tmp_path).endswith("next\n")


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


def test_where_no_further_server_starts_the_stage_starts_cold(program, tmp_path, monkeypatch):
    program("import os; print(os.getppid())")
    with warm_server(tmp_path) as warm, warm._ordering:  # busy with another stage

        def refuse(*arguments, **options):
            raise OSError("no more processes")

        monkeypatch.setattr("luffy.pipeline.warm_start.start_marked", refuse)
        assert int(run(tmp_path)) == os.getpid()


def test_another_environment_means_a_cold_start(program, tmp_path, monkeypatch):
    program("import os; print(os.getppid(), os.environ.get('OMP_NUM_THREADS'))")
    with warm_server(tmp_path) as warm:
        assert run(tmp_path).startswith(f"{warm.pid} ")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        assert run(tmp_path).endswith(f"{os.getpid()} 7\n")


def test_a_server_that_cannot_load_means_a_cold_start(program, tmp_path):
    program("import os; print(os.getppid())")
    with warm_server(tmp_path, ["no_such_library"]):
        assert int(run(tmp_path)) == os.getpid()
    assert "No module named 'no_such_library'" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("library", ["pyarrow", "threaded_library"])
def test_a_server_with_a_second_thread_never_forks(program, tmp_path, library):
    code = "import threading, time; threading.Thread(target=time.sleep, args=(7200,), daemon=True).start()"
    (tmp_path / "threaded_library.py").write_text(code)
    program("import os; print(os.getppid())")
    with warm_server(tmp_path, [library]):
        assert int(run(tmp_path)) == os.getpid()
    assert "no fork with several threads" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_stopping_the_supervisor_ends_all_stage_processes_but_not_the_server(program, tmp_path, never_cold, error):
    program(FAMILY)
    pids = []

    def stop(line):
        pids.extend(pids_in(line))
        raise error

    with warm_server(tmp_path) as warm:
        with pytest.raises(error):
            supervise([sys.executable, "-m", "warm_probe"], tmp_path, on_event=print, on_line=stop, grace_s=0.5)
        assert len(pids) == 3
        assert not any(lives(pid) for pid in pids)
        assert [process.pid for process in marked_processes(warm.mark)] == [warm.pid]
        program("print('next')")
        assert run(tmp_path).endswith("next\n")


@pytest.mark.parametrize("is_warm", [True, False])
def test_processes_that_give_themselves_a_title_end_with_the_stage(program, tmp_path, is_warm):
    """As vLLM's workers do; the title would overwrite the mark by which they are found."""
    pytest.importorskip("setproctitle", reason="needs the package setproctitle")
    program(TITLED)
    pids = []

    def stop(line):
        pids.extend(pids_in(line))
        raise KeyboardInterrupt

    with warm_server(tmp_path) if is_warm else nullcontext(), pytest.raises(KeyboardInterrupt):
        supervise([sys.executable, "-m", "warm_probe"], tmp_path, on_event=print, on_line=stop, grace_s=0.5)
    assert len(pids) == 2
    wait_until(lambda: not any(lives(pid) for pid in pids))  # one that is dying has no mark any more


@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_kill_9_of_supervisor_or_server_leaves_nothing_behind(program, tmp_path, victim):
    program(f"import os; print('stage', os.getpid()); {SLEEP}")
    command = [sys.executable, str(DRIVER), str(tmp_path), "warm_probe"]
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
