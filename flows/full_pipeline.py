"""Runs a whole experiment; its `stages` select from this protocol:

    prepare_data    verified prompts with traces, the evaluation suites, the tokenizer
    base            the starting policy
    difficulty      the prompts that this policy (or that of SFT) solves neither too rarely nor too often
    sample          answers of this policy, or of teachers, to the training prompts; correct ones become traces
    sft             supervised fine-tuning on traces
    rl              mixed-policy reinforcement learning, from the newest policy
    evaluate        every policy on the same problems
    report          one page with accuracies, learning curves and samples

Each stage is a cached, restartable program; a second run reuses what is finished.
`python flows/full_pipeline.py CONFIG` is `luffy run CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("run")

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.run_view import show_card, show_results
from luffy.config import load_experiment
from luffy.pipeline.graph import build_graph, select_nodes
from luffy.pipeline.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.session import open_session, run_name
from luffy.tasks.stages import make_chain


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    return run_name(parameters["config_file"], parameters["overrides"] or [])


@flow(name="full-pipeline", flow_run_name=_run_name, retries=0, persist_result=False)
def full_pipeline(
    config_file: str,
    overrides: list[str] | None = None,
    verify: bool = False,
    only: list[str] | None = None,
    force: list[str] | None = None,
    adopt: bool = False,
) -> None:
    """Run an experiment from its data to its report, in the workspace of LUFFY_WORKSPACE.

    Args:
        config_file: YAML file of an experiment, or the name of a shipped one.
        overrides: Values that differ from the file, each as `key.path=value`, such as `rl.steps=200`.
        verify: Compare full hashes of earlier results before they are reused.
        only: Stages to make; those that they are made from have to be finished.
        force: Stages to make again from the beginning although they are finished.
        adopt: Take over results that differ from those wanted in the code that made them alone, which is assumed to
            make the same.
    """
    config = load_experiment(config_file, overrides or [])
    nodes = build_graph(config)
    chosen = select_nodes(nodes, only or (), "--only")
    check_resources(config, [node for node in nodes if node.name in chosen] or None)
    with open_session(config, find_workspace(), verify=verify, force=force or (), adopts=adopt) as session:
        stages = make_chain(session, chosen)
    if stages.keys() == {"prepare_data"}:
        show_card(stages["prepare_data"].directory)
    show_results((stage.directory for stage in stages.values()), session.page)
