"""One model, or the kept checkpoints of an RL run, evaluated by the suites and the protocol of an experiment.

--model takes any Hugging Face folder or hub id, or api:NAME for a model that others serve at --url by OpenAI's
protocol; --steps the checkpoints of the experiment's own RL run, which one engine evaluates in turn. Results are cached
and restartable, as those of the whole experiment are.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from flows.checkpoint_choice import QUESTION
    from flows.front import begin

    # Answers --help and --dry-run, and points Prefect at the workspace, before Prefect is imported.
    front = begin(__doc__, QUESTION)

from prefect import flow
from prefect.runtime import flow_run
from pydantic import JsonValue

from flows.checkpoint_choice import check_checkpoints, choose
from luffy.cli.console import show_report_path, terminal, text_table
from luffy.cli.results import by_suite, read_accuracies
from luffy.config import load_experiment
from luffy.pipeline.workspace import find_workspace
from tasks.artifacts import evaluated_folders
from tasks.session import open_session
from tasks.stages import make_chain


def _run_name() -> str:
    """What the run is called in the UI: the experiment, and what was evaluated."""
    parameters = flow_run.get_parameters()
    steps = ", ".join(map(str, parameters["steps"] or []))
    return f"{Path(parameters['config_file']).stem} {parameters['model'] or f'steps {steps}'}"


@flow(name="evaluate-checkpoint", flow_run_name=_run_name, retries=0, persist_result=False)
def evaluate_checkpoint(
    config_file: str,
    overrides: list[str] | None = None,
    verify: bool = False,
    model: str | None = None,
    steps: list[int] | None = None,
    chat_template: str | None = None,
    urls: list[str] | None = None,
    request: dict[str, JsonValue] | None = None,
) -> None:
    """Evaluate `model`, or the RL run's checkpoints of `steps`, as the experiment in `config_file` says.

    `urls` and `request` are --url and --request, of a model `api:NAME`.
    """
    config = load_experiment(config_file, overrides or [])
    work = choose(config, model, tuple(steps or ()), chat_template, urls or (), request)
    check_checkpoints(work, find_workspace())
    with open_session(work.config, find_workspace(), verify=verify, sweep_steps=work.sweep_steps) as session:
        stages = make_chain(session)
    header, rows = by_suite(read_accuracies(evaluated_folders(stage.directory for stage in stages.values())))
    terminal().print(text_table(header, rows, title="\nAccuracy in % with its interval"))
    assert session.page is not None, "a report, or a sweep's curve"
    show_report_path(session.page)


if __name__ == "__main__":
    sys.exit(front.run(evaluate_checkpoint))
