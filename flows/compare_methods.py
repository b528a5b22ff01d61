"""Compares methods under one budget, with several seeds; one page with intervals, tests, learning curves and costs.

Stages that arms share (data, base policy and its evaluation, a seed's SFT start) are made once. A failed run does not
stop the others; the same command tries it again and reuses the rest.
`python flows/compare_methods.py CONFIG` is `luffy compare CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("compare")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import say, show_report_path, show_table
from luffy.config.many_runs.comparison import load_comparison
from luffy.evaluation.method_comparison.findings import Findings
from luffy.pipeline.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.report.sweep_pages import accuracy_table, cost_table, difference_table, tries_table, tuning_costs
from luffy.tasks.comparison import PAGE_FILE, conclude, open_comparison, run_arms
from luffy.tasks.many_runs import raise_failures
from luffy.tasks.stages import make_chain


def _run_name() -> str:
    """Name of the run in the UI: the comparison and its overrides."""
    parameters = flow_run.get_parameters()
    return " ".join([Path(parameters["config_file"]).stem, *(parameters["overrides"] or [])])


@flow(name="compare-methods", flow_run_name=_run_name, retries=0, persist_result=False)
def compare_methods(config_file: str, overrides: list[str] | None = None, verify: bool = False) -> None:
    """Compare methods under one budget with several seeds, in the workspace of LUFFY_WORKSPACE.

    Args:
        config_file: YAML file of a comparison, or the name of a shipped one.
        overrides: Values that differ from the file, each as `key.path=value`, such as `rl.steps=200`.
        verify: Compare full hashes of earlier results before they are reused.
    """
    comparison = load_comparison(config_file, overrides or [])
    for name in comparison.config.arms:
        check_resources(comparison.runs_of(name)[0].config)
    with open_comparison(comparison, find_workspace(), verify=verify) as running:
        shared = make_chain(running.session)  # data, base policy and its evaluation
        reported = run_arms(running, comparison, shared)  # arms with a grid are tuned first
        findings = conclude(running, comparison, reported, shared["evaluate_base"])
        _show(findings)
        show_report_path(running.folder / PAGE_FILE)
        raise_failures(findings.failures, comparison.num_runs)


def _show(findings: Findings) -> None:
    for decoding in findings.decodings:
        show_table(accuracy_table(findings, decoding), f"Accuracy in %, {decoding}: mean with its interval (each seed)")
        if (differences := difference_table(findings, decoding)) is not None:
            show_table(differences, "Percentage points, p-values after Holm's correction")
    show_table(cost_table(findings), "Costs of a seed, mean over seeds")
    for line in findings.off_budget:
        say(line)
    if findings.tuning is not None:
        show_table(tries_table(findings.tuning), "What was tried, accuracy in %")
        show_table(tuning_costs(findings.tuning), "Costs of tuning")
        for line in findings.tuning.warnings:
            say(line)
