"""A Prefect flow over toy stages: `python toy_flow.py WORKSPACE FORCED OVERRIDE ...`; prints each task's last state.

The server is that of PREFECT_API_URL; FORCED are names of stages, separated by commas.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from toy_run import Recorder, toy_command, toy_experiment

from luffy.flows.prefect_api import set_environment
from luffy.pipeline.workspace import WORKSPACE_VARIABLE

root, forced, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
os.environ[WORKSPACE_VARIABLE] = str(root)
set_environment(root / "prefect", debug=False)

from prefect import flow, task  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.client.orchestration import get_client  # noqa: E402
from prefect.client.schemas.filters import FlowRunFilter  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402

from luffy.errors import LuffyError  # noqa: E402
from luffy.pipeline.experiment import start_run  # noqa: E402
from luffy.tasks.artifacts import Publisher  # noqa: E402
from luffy.tasks.session import Session, _writer  # noqa: E402
from luffy.tasks.stages import make_chain  # noqa: E402


@flow(name="toy", retries=0, persist_result=False)
def toy() -> str:
    """Make the chain; returns the identifier of the flow run."""
    with (
        start_run(toy_experiment(root, *overrides), command=toy_command) as run,
        Publisher(_writer(flow_run.get_id(), [])) as publisher,
    ):
        session = Session(run, Recorder(echo=True), publisher, force=filter(None, forced.split(",")))
        if "TOY_NESTED" in os.environ:  # as the runs of a comparison make their stages
            with suppress(LuffyError):
                whole_run(session, fails=True)
            whole_run(session, fails=False)
            sys.exit(0)
        make_chain(session)
    return flow_run.get_id()


@task(cache_policy=NO_CACHE, persist_result=False)
def whole_run(session: Session, *, fails: bool) -> None:
    """A task that makes a chain by tasks of its own."""
    make_chain(session)
    print(f"records: {len([*root.glob('stages/*/*/record.json')])}")
    if fails:
        raise LuffyError("an arm has failed")


def say_states(identifier: str, num_tasks: int) -> None:
    """`state base: Cached`, for each task run, once the server has taken note of all."""
    found, of_run = [], FlowRunFilter(id={"any_": [identifier]})
    with get_client(sync_client=True) as client:
        while sum(each.state is not None and each.state.is_final() for each in found) != num_tasks:
            time.sleep(0.1)
            found = client.read_task_runs(flow_run_filter=of_run)
    for task_run in found:
        print(f"state {task_run.name}: {task_run.state_name} after {task_run.run_count}")


if __name__ == "__main__":
    say_states(toy(), len(toy_experiment(root, *overrides).nodes))
