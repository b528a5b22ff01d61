"""The command line of the flows: arguments, plan, Prefect's surroundings and exit codes."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol

from luffy.pipeline.plan import StagePlan
from luffy.pipeline.warm_start import WarmServer, can_start_warm

from flows.prefect_session import ApiServer, prefect_api, set_environment
from luffy.cli.commands.plan import show_plan_of, show_resources
from luffy.cli.console import show_error
from luffy.cli.main import parse_with_overrides
from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import EXIT_INTERRUPTED, EXIT_OK, LuffyError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace, find_workspace

_MIN_WARM_STAGES = 2
_EMBEDDED_RETRIES = 2
"""Of a request: after 2 s and 4 s."""
_PIPELINE_EXAMPLES = """\
  python flows/full_pipeline.py exp_configs/arithmetic.yaml
  python flows/full_pipeline.py exp_configs/arithmetic.yaml rl.steps=400 seed=1
  python flows/full_pipeline.py exp_configs/arithmetic.yaml --dry-run
"""
_EPILOG = """\
examples:
{examples}
The same command again reuses every finished stage, and resumes an interrupted one.
exit codes: 0 done, 1 failure, 2 mistake in the command, the configuration or the data, 130 interrupted
"""


class Asked(Protocol):
    """What a command line asks for."""

    @property
    def parameters(self) -> Mapping[str, object]:
        """What the flow is told beside what `Question.told` says."""
        ...

    def show_plan(self, workspace: Workspace, *, verify: bool) -> int:
        """Answer --dry-run; returns the exit code."""
        ...

    def check(self, workspace: Workspace) -> None:
        """Raise UserError where it cannot be begun."""
        ...

    def plans(self, workspace: Workspace, *, verify: bool) -> Sequence[StagePlan]:
        """What would be done with each stage; raises LuffyError where that cannot be known yet."""
        ...


@dataclass(frozen=True)
class Work:
    """An experiment, or a part of one."""

    config: ExperimentConfig
    sweep_steps: tuple[int, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)
    also_check: "Callable[[Work, Workspace], None]" = lambda work, workspace: None

    def show_plan(self, workspace: Workspace, *, verify: bool) -> int:
        return show_plan_of(self.config, workspace, verify=verify, sweep_steps=self.sweep_steps)

    def check(self, workspace: Workspace) -> None:
        if not self.sweep_steps:  # whose RL is done, and asks for no machine
            show_resources(self.config, estimate=False)
        # Finds missing files; the flow computes the keys.
        open_experiment(self.config, workspace, fingerprint=lambda stage: {}, sweep_steps=self.sweep_steps)
        self.also_check(self, workspace)

    def plans(self, workspace: Workspace, *, verify: bool) -> Sequence[StagePlan]:
        return open_experiment(self.config, workspace, verify=verify, sweep_steps=self.sweep_steps).plan()


def _whole_chain(options: argparse.Namespace) -> Work:
    return Work(load_experiment(options.config, options.overrides))


def _file_and_overrides(options: argparse.Namespace) -> dict[str, object]:
    return {"config_file": options.config, "overrides": options.overrides}


@dataclass(frozen=True)
class Question:
    """What a flow's command line has beside the experiment and the options of all flows."""

    examples: str = _PIPELINE_EXAMPLES
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    config_help: str = "an experiment's YAML, e.g. exp_configs/arithmetic.yaml"
    work: Callable[[argparse.Namespace], Asked] = _whole_chain
    """From the parsed options; raises UserError."""
    told: Callable[[argparse.Namespace], Mapping[str, object]] = _file_and_overrides
    """How the flow is told of the experiment: its parameters, `verify` excepted."""


_WHOLE_CHAIN = Question()


@dataclass(frozen=True)
class Front:
    """A checked command line, with a Prefect API on its way up."""

    parameters: Mapping[str, object]
    debug: bool
    server: ApiServer | None
    warm: WarmServer | None

    def run(self, flow: Callable[..., object]) -> int:
        """Run `flow` to its end; returns the exit code."""
        return _exit_code(lambda: self._run(flow), debug=self.debug)

    def _run(self, flow: Callable[..., object]) -> int:
        # Imported here, after its environment is set.
        from httpx import TransportError
        from prefect.settings import (
            PREFECT_CLIENT_MAX_RETRIES,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            temporary_settings,
        )

        # Nobody listens to an embedded server's heartbeats, and stopping them takes a second. One that has died does
        # not come back: Prefect would wait a minute for it at every request.
        embedded = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_CLIENT_MAX_RETRIES: _EMBEDDED_RETRIES}
        if self.server is not None:
            self.server.wait()
        with (
            temporary_settings(embedded if self.server else {}),
            self.warm.use() if self.warm else nullcontext(),
        ):
            try:
                flow(**self.parameters)
            except TransportError as error:
                raise LuffyError(
                    f"the Prefect server does not answer any more ({type(error).__name__}), and was not told how the "
                    "run ended; what is finished is kept, the same command goes on"
                ) from error
        return EXIT_OK


def begin(description: str, question: Question = _WHOLE_CHAIN, arguments: Sequence[str] | None = None) -> Front:
    """The checked command line. Exits at once for `--help`, `--dry-run` and the user's mistakes.

    To be called before `prefect` is imported: it sets Prefect's environment and starts its server.
    """
    options = parse_with_overrides(_parser(description, question), arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.excepthook = _last_words
    code = _exit_code(lambda: _check(options, question), debug=options.debug)
    if code != EXIT_OK or options.dry_run:
        sys.exit(code)
    work = question.work(options)
    parameters = {**question.told(options), "verify": options.verify, **work.parameters}
    front = Front(parameters, options.debug, prefect_api(), _warm_server(options, work))
    _import_prefect()
    return front


def _import_prefect() -> None:
    """Import Prefect's tasks without pandas, which they load for data frames as arguments: no task here takes one.

    It is a quarter of what they take.
    """
    if "pandas" not in sys.modules:
        sys.modules["pandas"] = None  # type: ignore[assignment]  # whoever asks for it is told that it is not there
        try:
            import prefect.tasks  # noqa: F401
        finally:
            del sys.modules["pandas"]


def _check(options: argparse.Namespace, question: Question) -> int:
    workspace, work = find_workspace(options.workspace), question.work(options)
    if options.dry_run:
        return work.show_plan(workspace, verify=options.verify)
    work.check(workspace)
    workspace.prepare()
    os.environ[WORKSPACE_VARIABLE] = str(workspace.root)
    set_environment(workspace.prefect_home, debug=options.debug)
    return EXIT_OK


def _warm_server(options: argparse.Namespace, work: Asked) -> WarmServer | None:
    """A warm server on its way up, unless too little is left to do for it to pay."""
    workspace = find_workspace(options.workspace)
    try:
        plans = work.plans(workspace, verify=options.verify)
    except LuffyError:
        return None  # the flow will meet it, and report it
    to_make = [plan for plan in plans if plan.action not in ("reuse", "depends")]
    if len(to_make) < _MIN_WARM_STAGES or not can_start_warm():
        return None
    return WarmServer(workspace.warm_log)


def _exit_code(action: Callable[[], int], *, debug: bool) -> int:
    try:
        return action()
    except LuffyError as error:
        if debug:
            raise
        show_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        show_error("interrupted; the same command resumes")
        return EXIT_INTERRUPTED


def _last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C between here and the flow, while Prefect is imported, is no reason for a traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser(description: str, question: Question) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=_EPILOG.format(examples=question.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    question.add_options(parser)
    parser.add_argument("config", help=question.config_help)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override any field of the experiment")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, its reasons and the GPUs' memory")
    parser.add_argument("--workspace", help="where results go (default: $LUFFY_WORKSPACE, else ./workspace)")
    parser.add_argument("--verify", action="store_true", help="compare full hashes before a result is reused")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and Prefect's warnings")
    return parser
