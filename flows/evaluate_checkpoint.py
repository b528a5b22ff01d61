"""One model, or the kept checkpoints of an RL run, evaluated by the suites and the protocol of an experiment.

A model is a Hugging Face folder, a hub id, or `api:NAME` behind OpenAI's protocol; one engine evaluates all checkpoints
of an RL run in turn. Results are cached and restartable, as those of the whole experiment are.
`python flows/evaluate_checkpoint.py CONFIG` is `luffy evaluate CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("evaluate")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from pydantic import JsonValue

from luffy.cli.console import show_report_path, terminal, text_table
from luffy.cli.results import by_suite, read_accuracies
from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.pipeline.swept_checkpoints import check_checkpoints
from luffy.pipeline.workspace import find_workspace, link
from luffy.tasks.session import Session, open_session
from luffy.tasks.stages import (
    FinishedStage,
    base,
    difficulty,
    evaluate,
    prepare_data,
    report,
    sweep,
    train_rl,
    train_sft,
)

_PAGE = "curve.html"


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

    `urls` and `request` belong to a model `api:NAME`: its servers, and further fields of each request.
    """
    wanted = EvaluatedModel(model, tuple(steps or ()), chat_template, tuple(urls or ()), request or {})
    config = evaluated(load_experiment(config_file, overrides or []), wanted)
    check_checkpoints(config, wanted.steps, find_workspace())
    with open_session(config, find_workspace(), verify=verify, sweep_steps=wanted.steps) as session:
        data = prepare_data(session)
        policy = base(session, data)
        if wanted.steps:
            results, page = _sweep(session, data, policy)
        else:
            results, page = _one(session, data, policy)
    header, rows = by_suite(read_accuracies(results))
    terminal().print(text_table(header, rows, title="\nAccuracy in % with its interval"))
    show_report_path(page)


def _one(session: Session, data: FinishedStage, policy: FinishedStage) -> tuple[list[Path], Path]:
    """The evaluation of the policy itself: where its results are, and the page."""
    evaluated = evaluate(session, data, policy)
    report(session, [data, policy, evaluated])
    return [evaluated.directory], session.run.directory / "report.html"


def _sweep(session: Session, data: FinishedStage, policy: FinishedStage) -> tuple[list[Path], Path]:
    """The evaluations of the RL run's checkpoints: where their results are, and the page with the curve."""
    config, prompts = session.run.experiment.config, data
    if config.measured_policy == "base":
        prompts = difficulty(session, data, policy)
    if "sft" in config.stages:
        policy = train_sft(session, data, policy)
        if config.measured_policy == "sft":
            prompts = difficulty(session, data, policy)
    swept = sweep(session, data, train_rl(session, prompts, policy))
    link(swept.directory / _PAGE, session.run.directory / _PAGE)
    return sorted(swept.directory.glob("step_*")), session.run.directory / _PAGE
