"""Build steps of `prefect.yaml`: what its deployments take from where and when they are made."""

from pathlib import Path

from luffy.config.form import form_of_file


def working_directory() -> dict[str, str]:
    """`directory`: the folder in which the deployment is made, and in which its runs work."""
    return {"directory": str(Path.cwd())}


def form_values(config_file: str) -> dict[str, object]:
    """`experiment`: the values of a form that says what the file says."""
    return {"experiment": form_of_file(config_file)}
