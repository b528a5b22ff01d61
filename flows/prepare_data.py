"""Prepares only the data of an experiment: sources are read, graded, filtered, split and tokenized.

A run of the whole experiment reuses the result. `python flows/prepare_data.py CONFIG` is
`luffy prepare CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("prepare")

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.card_summary import summarise_card
from luffy.cli.console import terminal, text_table, wide_terminal
from luffy.config import load_experiment
from luffy.config.derived import data_alone
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.session import open_session, run_name
from luffy.tasks.stages import make_chain


def _run_name() -> str:
    """Name of the run in the UI: the experiment and its overrides."""
    parameters = flow_run.get_parameters()
    return f"data of {run_name(parameters['config_file'], parameters['overrides'] or [])}"


# Named differently from the task that it calls.
@flow(name="prepare-data", flow_run_name=_run_name, retries=0, persist_result=False)
def prepare_data_alone(config_file: str, overrides: list[str] | None = None, verify: bool = False) -> None:
    """Prepare the data of an experiment, in the workspace of LUFFY_WORKSPACE.

    Args:
        config_file: YAML file of an experiment, or the name of a shipped one.
        overrides: Values that differ from the file, each as `key.path=value`, such as `rl.steps=200`.
        verify: Compare full hashes of earlier results before they are reused.
    """
    config = data_alone(load_experiment(config_file, overrides or []))
    with open_session(config, find_workspace(), verify=verify) as session:
        data = make_chain(session)["prepare_data"]
    summary = summarise_card(data.directory)
    wide_terminal().print(text_table(summary.header, summary.rows, title="\nRows by source"))
    for note in summary.notes:
        terminal().print(note, markup=False, soft_wrap=True)
