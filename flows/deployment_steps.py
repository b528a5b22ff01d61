"""Build steps of `prefect.yaml`, which fill in values when the deployments are made."""

from pathlib import Path

from luffy.config.form import form_of_file


def working_directory() -> dict[str, str]:
    """`directory`: the folder in which the deployment is made, and in which its runs work."""
    return {"directory": str(Path.cwd())}


def form_values(config_file: str) -> dict[str, object]:
    """`experiment`: the values of a form that is equivalent to the file."""
    return {"experiment": form_of_file(config_file)}
