"""Runs a whole experiment whose values come from a form in the Prefect UI instead of a file.

The stages are the same as those of a file with these values. `working_directory` and `form_values` are build steps of
`prefect.yaml`, which fill in values when the deployments are made.
"""

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.config.form import ExperimentForm, experiment_of_form, form_of_file
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


def working_directory() -> dict[str, str]:
    """`directory`: the folder in which the deployment is made, and in which its runs work."""
    return {"directory": str(Path.cwd())}


def form_values(config_file: str) -> dict[str, object]:
    """`experiment`: the values of a form that is equivalent to the file."""
    return {"experiment": form_of_file(config_file)}
