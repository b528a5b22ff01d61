"""The command line of the flows: arguments, plan, Prefect's surroundings and exit codes."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType, TracebackType

from flows.prefect_session import ApiServer, prefect_api, set_environment
from luffy.cli.console import show_error
from luffy.cli.main import parse_with_overrides, show_plan_of, show_resources
from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import EXIT_INTERRUPTED, EXIT_OK, LuffyError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.warm_start import WarmServer, can_start_warm
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace, find_workspace

_MIN_WARM_STAGES = 2
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


@dataclass(frozen=True)
class Work:
    """What a command line asks for."""

    config: ExperimentConfig
    sweep_steps: tuple[int, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)
    """What the flow is told beside the experiment's file and overrides."""


@dataclass(frozen=True)
class Question:
    """What a flow's command line has beside the experiment and the options of all flows."""

    examples: str = _PIPELINE_EXAMPLES
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    work: Callable[[argparse.Namespace, ExperimentConfig], Work] = lambda options, config: Work(config)
    """From the parsed options and the loaded experiment; raises UserError."""
    check: Callable[[Work, Workspace], None] = lambda work, workspace: None
    """Raises UserError where the work cannot be begun."""


_WHOLE_CHAIN = Question()


@dataclass(frozen=True)
class Front:
    """A checked command line, with a Prefect API on its way up."""

    config_file: str
    overrides: list[str]
    verify: bool
    debug: bool
    parameters: Mapping[str, object]
    server: ApiServer | None
    warm: WarmServer | None

    def run(self, flow: Callable[..., object]) -> int:
        """Run `flow` to its end; returns the exit code."""
        return _exit_code(lambda: self._run(flow), debug=self.debug)

    def _run(self, flow: Callable[..., object]) -> int:
        # Imported here, after its environment is set.
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        if self.server is not None:
            self.server.wait()
        # Nobody listens to an embedded server's heartbeats, and stopping them takes a second.
        with (
            temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None} if self.server else {}),
            self.warm.use() if self.warm else nullcontext(),
        ):
            flow(self.config_file, self.overrides, self.verify, **self.parameters)
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
    work = _work(options, question)
    return Front(
        options.config,
        options.overrides,
        options.verify,
        options.debug,
        work.parameters,
        prefect_api(),
        _warm_server(options, work),
    )


def _work(options: argparse.Namespace, question: Question) -> Work:
    return question.work(options, load_experiment(options.config, options.overrides))


def _check(options: argparse.Namespace, question: Question) -> int:
    workspace, work = find_workspace(options.workspace), _work(options, question)
    if options.dry_run:
        return show_plan_of(work.config, workspace, verify=options.verify, sweep_steps=work.sweep_steps)
    if not work.sweep_steps:  # whose RL is done, and asks for no machine
        show_resources(work.config, estimate=False)
    # Finds missing files; the flow computes the keys.
    open_experiment(work.config, workspace, fingerprint=lambda stage: {}, sweep_steps=work.sweep_steps)
    question.check(work, workspace)
    workspace.prepare()
    os.environ[WORKSPACE_VARIABLE] = str(workspace.root)
    set_environment(workspace.prefect_home, debug=options.debug)
    return EXIT_OK


def _warm_server(options: argparse.Namespace, work: Work) -> WarmServer | None:
    """A warm server on its way up, unless too little is left to do for it to pay."""
    workspace = find_workspace(options.workspace)
    try:
        plans = open_experiment(work.config, workspace, verify=options.verify, sweep_steps=work.sweep_steps).plan()
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
    parser.add_argument("config", help="an experiment's YAML, e.g. exp_configs/arithmetic.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override any field of the experiment")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, its reasons and the GPUs' memory")
    parser.add_argument("--workspace", help="where results go (default: $LUFFY_WORKSPACE, else ./workspace)")
    parser.add_argument("--verify", action="store_true", help="compare full hashes before a result is reused")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and Prefect's warnings")
    return parser
