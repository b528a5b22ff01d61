"""Methods compared under one budget, with several seeds: one page with intervals, tests, learning curves and costs.

What all arms share (data, base policy, its evaluation, a seed's SFT start) is made once. A failed run is shown as
failed and the others go on; the same command again tries it once more and reuses the rest.
`python flows/compare_methods.py CONFIG` is `luffy compare CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("compare")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import show_report_path, text_table, wide_terminal
from luffy.config.comparison import load_comparison
from luffy.errors import LuffyError
from luffy.evaluation.method_comparison.findings import Findings
from luffy.pages.method_comparison_page import accuracy_table, cost_table, difference_table
from luffy.pages.tables import plain_table
from luffy.pages.tuning_section import tries_table, tuning_costs
from luffy.pipeline.machine.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.comparison import PAGE_FILE, conclude, open_comparison, run_arms
from luffy.tasks.stages import make_chain


def _run_name() -> str:
    """Name of the run in the UI: the comparison and its overrides."""
    parameters = flow_run.get_parameters()
    return " ".join([Path(parameters["config_file"]).stem, *(parameters["overrides"] or [])])


@flow(name="compare-methods", flow_run_name=_run_name, retries=0, persist_result=False)
def compare_methods(config_file: str, overrides: list[str] | None = None, verify: bool = False) -> None:
    """Run the comparison in `config_file` with `overrides` (`key.path=value`), in the workspace of LUFFY_WORKSPACE."""
    comparison = load_comparison(config_file, overrides or [])
    for name in comparison.config.arms:
        check_resources(comparison.runs_of(name)[0].config)
    with open_comparison(comparison, find_workspace(), verify=verify) as running:
        shared = make_chain(running.session)  # data, base policy and its evaluation
        reported = run_arms(running, comparison, shared)  # tuned before, where they have grids
        findings = conclude(running, comparison, reported, shared["evaluate_base"])
        _show(findings)
        show_report_path(running.folder / PAGE_FILE)
        if findings.failures:
            failed = f"{len(findings.failures)} of {comparison.num_runs} runs have failed"
            raise LuffyError("\n".join([f"{failed}; the same command tries them again:", *findings.failures]))


def _show(findings: Findings) -> None:
    out = wide_terminal()
    for decoding in findings.decodings:
        title = f"\nAccuracy in %, {decoding}: mean with its interval (each seed)"
        out.print(text_table(*plain_table(accuracy_table(findings, decoding)), title=title))
        if (differences := difference_table(findings, decoding)) is not None:
            out.print(
                text_table(*plain_table(differences), title="\nPercentage points, p-values after Holm's correction")
            )
    out.print(text_table(*plain_table(cost_table(findings)), title="\nCosts of a seed, mean over seeds"))
    for line in findings.off_budget:
        out.print(line)
    if findings.tuning is not None:
        out.print(text_table(*plain_table(tries_table(findings.tuning)), title="\nWhat was tried, accuracy in %"))
        out.print(text_table(*plain_table(tuning_costs(findings.tuning)), title="\nCosts of tuning"))
        for line in findings.tuning.warnings:
            out.print(line)
