"""The whole experiment, given value by value instead of as a file: a form in the Prefect UI.

It makes and reuses the very stages that flows/full_pipeline.py makes of a file with these values.
"""

import sys

if __name__ == "__main__":
    from luffy.flows.form_choice import QUESTION
    from luffy.flows.front import begin

    # Answers --help and --dry-run, and points Prefect at the workspace, before Prefect is imported.
    front = begin(__doc__, QUESTION)

from prefect import flow
from prefect.runtime import flow_run

from luffy.flows.full_pipeline import run_chain
from luffy.config.form import ExperimentForm, experiment_of_form


def _run_name() -> str:
    """What the run is called in the UI: experiment and method; a form has no overrides."""
    values = flow_run.get_parameters()["experiment"]
    return " ".join(str(values[key]) for key in ("name", "method", "chain") if values.get(key))


@flow(name="pipeline-form", flow_run_name=_run_name, retries=0, persist_result=False)
def pipeline_form(experiment: ExperimentForm, verify: bool = False) -> None:
    """Run an experiment.

    Args:
        experiment: What an experiment's file would say.
        verify: Compare full hashes of earlier results before they are reused.
    """
    run_chain(experiment_of_form(experiment), verify=verify)


if __name__ == "__main__":
    sys.exit(front.run(pipeline_form))
