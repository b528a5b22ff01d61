"""Evaluates one model, or the kept checkpoints of an RL run, with the suites and the protocol of an experiment.

A model is a Hugging Face folder, a hub id, or `api:NAME` on an OpenAI-compatible server; one engine evaluates all
checkpoints of an RL run in turn. Results are cached and restartable, like those of a whole experiment.
`python flows/evaluate_checkpoint.py CONFIG` is `luffy evaluate CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("evaluate")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from pydantic import JsonValue

from luffy.cli.run_view import show_results
from luffy.config.derived import EvaluatedModel, evaluation
from luffy.pipeline.experiment import check_checkpoints
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.session import open_session
from luffy.tasks.stages import make_chain


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    steps = ", ".join(map(str, parameters["steps"] or []))
    return f"{Path(parameters['config_file'] or 'evaluation').stem} {parameters['model'] or f'steps {steps}'}"


@flow(name="evaluate-checkpoint", flow_run_name=_run_name, retries=0, persist_result=False)
def evaluate_checkpoint(
    config_file: str | None = None,
    overrides: list[str] | None = None,
    verify: bool = False,
    model: str | None = None,
    steps: list[int] | None = None,
    chat_template: str | None = None,
    urls: list[str] | None = None,
    request: dict[str, JsonValue] | None = None,
    suites: list[str] | None = None,
) -> None:
    """Evaluate a model, or checkpoints of an experiment's RL run, by the experiment's protocol.

    Args:
        config_file: YAML file of an experiment, or the name of a shipped one; empty where model and suites suffice.
        overrides: Values that differ from the file, each as `key.path=value`, such as `rl.steps=200`.
        verify: Compare full hashes of earlier results before they are reused.
        model: Model folder, hub id, or `api:NAME` for one on a server; empty for checkpoints of the RL run.
        steps: RL steps whose checkpoints are evaluated, where no model is given.
        chat_template: Template file to use instead of the model's own.
        urls: Servers of a model `api:NAME`.
        request: Further fields of each request to a model `api:NAME`.
        suites: Files, benchmarks or environments to evaluate on in place of the experiment's suites.
    """
    wanted = EvaluatedModel(
        model, tuple(steps or ()), chat_template, tuple(urls or ()), request or {}, tuple(suites or ())
    )
    config = evaluation(config_file, overrides or [], wanted)
    check_checkpoints(config, wanted.steps, find_workspace())
    with open_session(config, find_workspace(), verify=verify, sweep_steps=wanted.steps) as session:
        stages = make_chain(session)
    show_results((stage.directory for stage in stages.values()), session.page, config)
