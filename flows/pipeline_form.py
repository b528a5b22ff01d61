"""Runs a whole experiment whose values come from a form in the Prefect UI instead of a file.

The stages are the same as those of a file with these values.
"""

from prefect import flow
from prefect.runtime import flow_run

from luffy.config.form import ExperimentForm, experiment_of_form
from luffy.flows.full_pipeline import run_chain


def _run_name() -> str:
    """Name of the run in the UI: experiment and method; a form has no overrides."""
    values = flow_run.get_parameters()["experiment"]
    return " ".join(str(values[key]) for key in ("name", "method", "chain") if values.get(key))


@flow(name="pipeline-form", flow_run_name=_run_name, retries=0, persist_result=False)
def pipeline_form(experiment: ExperimentForm, verify: bool = False) -> None:
    """Run an experiment.

    Args:
        experiment: The contents of an experiment's file.
        verify: Compare full hashes of earlier results before they are reused.
    """
    run_chain(experiment_of_form(experiment), verify=verify)
