"""The whole experiment: data, base policy, SFT, mixed-policy RL, evaluation of every checkpoint, report.

Each stage is a cached, restartable program; a second run reuses what is finished.
`python flows/full_pipeline.py CONFIG` is `luffy run CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("run")

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import show_report_path, terminal, text_table
from luffy.cli.results import by_suite, read_accuracies
from luffy.config import ExperimentConfig, load_experiment
from luffy.pipeline.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.session import open_session, run_name
from luffy.tasks.stages import FinishedStage, base, difficulty, evaluate, prepare_data, report, train_rl, train_sft


def _run_name() -> str:
    """What the run is called in the UI: experiment, method, and what was changed for it."""
    parameters = flow_run.get_parameters()
    return run_name(parameters["config_file"], parameters["overrides"] or [])


@flow(name="full-pipeline", flow_run_name=_run_name, retries=0, persist_result=False)
def full_pipeline(config_file: str, overrides: list[str] | None = None, verify: bool = False) -> None:
    """Run the experiment in `config_file` with `overrides` (`key.path=value`), in the workspace of LUFFY_WORKSPACE."""
    run_chain(load_experiment(config_file, overrides or []), verify=verify)


def run_chain(config: ExperimentConfig, *, verify: bool) -> None:
    """Make the stages of `config`, or reuse them, and show what came of it; to be called inside a flow."""
    check_resources(config)
    with open_session(config, find_workspace(), verify=verify) as session:
        data = prompts = prepare_data(session)
        model = base(session, data)
        checkpoints = [model]
        if config.measured_policy == "base":
            prompts = difficulty(session, data, model)
        if "sft" in config.stages:
            model = train_sft(session, data, model)
            checkpoints.append(model)
            if config.measured_policy == "sft":
                prompts = difficulty(session, data, model)
        if "rl" in config.stages:
            model = train_rl(session, prompts, model)
            checkpoints.append(model)
        evaluations: list[FinishedStage] = []
        if "evaluate" in config.stages:
            evaluations = [evaluate(session, data, checkpoint) for checkpoint in checkpoints]
        page = None
        if "report" in config.stages:
            report(session, [data, prompts, *checkpoints, *evaluations])
            page = session.run.directory / "report.html"
    if evaluations:
        header, rows = by_suite(read_accuracies(stage.directory for stage in evaluations))
        terminal().print(text_table(header, rows, title="\nAccuracy in % with its interval"))
    if page is not None:
        show_report_path(page)
