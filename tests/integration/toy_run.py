"""Runs stages of smoke.yaml with the toy program and says what happens: `python toy_run.py WORKSPACE NODE ...`.

`python toy_run.py DIR --warm MODULE` runs `python -m MODULE`, forked from a warm server without libraries.
"""

import sys
from pathlib import Path

from luffy.config import load_experiment
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.supervise import supervise
from luffy.pipeline.warm_start import WarmServer
from luffy.pipeline.workspace import Workspace

HERE = Path(__file__).parent


def toy_command(stage: str, directory: Path, job: Path) -> list[str]:
    return [sys.executable, str(HERE / "toy_stage.py"), stage, "--config", str(job), "--out", str(directory)]


def toy_experiment(root: Path, *overrides: str):
    config = load_experiment(HERE.parents[1] / "exp_configs" / "smoke.yaml", overrides)
    return open_experiment(config, Workspace(root), code=lambda kind, rooms: {})


def toy_run(root: Path, *overrides: str) -> ExperimentRun:
    experiment = toy_experiment(root, *overrides)
    return ExperimentRun(experiment, experiment.workspace.new_run("toy", {}), toy_command)


class Recorder:
    """Observer that keeps (or prints) what it is told."""

    def __init__(self, echo: bool = False) -> None:
        self.told: list[tuple[str, str]] = []
        self.echo = echo

    def planned(self, plan):
        self._tell("planned", plan.headline)

    def event(self, plan, event):
        self._tell(event.kind, event.text or f"{event.step}/{event.total}")

    def line(self, plan, text):
        self._tell("line", text)

    def finished(self, plan, manifest):
        self._tell("done", manifest.digest)

    def failed(self, plan, error):
        self._tell("error", str(error))

    def texts(self, kind):
        return [text for told, text in self.told if told == kind]

    def _tell(self, kind, text):
        self.told.append((kind, text))
        if self.echo:
            print(f"{kind}: {text}", flush=True)


def run_warm(directory: Path, module: str) -> None:
    server = WarmServer(directory / "server.log", libraries=())
    print(f"server {server.pid}", flush=True)
    with server.use():
        command = [sys.executable, "-m", module]
        supervise(command, directory, on_event=lambda event: None, on_line=lambda line: print(line, flush=True))


if __name__ == "__main__":
    place, names = Path(sys.argv[1]), sys.argv[2:]
    if names[0] == "--warm":
        run_warm(place, names[1])
    else:
        started = toy_run(place)
        for name in names:
            started.execute(name, Recorder(echo=True))
