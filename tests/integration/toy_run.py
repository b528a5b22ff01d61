"""Runs stages of smoke.yaml with the toy program and says what happens: `python toy_run.py WORKSPACE NODE ...`."""

import sys
from pathlib import Path

from luffy.config import load_experiment
from luffy.pipeline.experiment import ExperimentRun, open_experiment
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
            sys.stdout.write(f"{kind}: {text}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    started = toy_run(Path(sys.argv[1]))
    for name in sys.argv[2:]:
        started.execute(name, Recorder(echo=True))
