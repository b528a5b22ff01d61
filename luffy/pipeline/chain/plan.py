"""The decision that a run would make for each stage, with its reason; starts and writes nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luffy.pipeline.chain.checkpoints import newest_checkpoint
from luffy.pipeline.chain.differences import why_not_reused
from luffy.pipeline.chain.graph import StageNode
from luffy.pipeline.chain.identity import Identity, read_identity
from luffy.pipeline.chain.manifest import consumed_digests, read_manifest
from luffy.pipeline.chain.reuse import examine
from luffy.pipeline.workspace import Workspace
from luffy.pipeline.workspace.lock import holder_of

Action = Literal["reuse", "depends", "resume", "continue", "run"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The decision for one stage."""

    node: StageNode
    identity: Identity
    directory: Path
    inputs: Mapping[str, Path]
    action: Action
    """`depends`: finished, and reused if its inputs turn out unchanged once they are made again."""
    reason: str = ""
    step: int = 0
    """The step at which `resume` and `continue` start."""
    extends: Path | None = None
    """The shorter run that `continue` starts from."""

    @property
    def headline(self) -> str:
        """The decision in words, without the reason."""
        if self.action == "resume":
            return f"resume from step {self.step}"
        if self.action == "continue" and self.extends is not None:
            return f"continue {self.extends.name} from step {self.step}"
        return {"reuse": "reused", "depends": "reused or run"}.get(self.action, "run")


def plan_graph(
    workspace: Workspace,
    experiment: str,
    nodes: Sequence[StageNode],
    identities: Mapping[str, Identity],
    *,
    verify: bool = False,
) -> tuple[StagePlan, ...]:
    """The decision for every stage of `experiment`, in the order of `nodes`."""
    plans: dict[str, StagePlan] = {}
    for node in nodes:
        pending = unfinished(plans.values())
        plans[node.name] = plan_stage(workspace, experiment, node, identities, pending, verify=verify)
    return tuple(plans.values())


def unfinished(plans: Iterable[StagePlan]) -> frozenset[str]:
    """Names of the stages whose decision is not `reuse`."""
    return frozenset(plan.node.name for plan in plans if plan.action != "reuse")


def plan_stage(
    workspace: Workspace,
    experiment: str,
    node: StageNode,
    identities: Mapping[str, Identity],
    pending: frozenset[str] = frozenset(),
    *,
    verify: bool = False,
) -> StagePlan:
    """The decision for `node`, while the upstream stages in `pending` have yet to be made."""
    identity = identities[node.name]
    directory = workspace.stage_directory(node.stage, identity.key)
    inputs = {
        name: workspace.stage_directory(identities[source].stage, identities[source].key)
        for name, source in node.inputs.items()
    }
    known = {name: path for name, path in inputs.items() if node.inputs[name] not in pending}
    awaited = sorted(set(node.inputs.values()) & pending)
    condition = examine(directory, identity.key, consumed_digests(known), verify=verify)

    def decide(action: Action, reason: str = "", step: int = 0, extends: Path | None = None) -> StagePlan:
        return StagePlan(node, identity, directory, inputs, action, reason, step, extends)

    if condition.reusable:
        return decide("depends", f"waits for {', '.join(awaited)}") if awaited else decide("reuse")
    reason = condition.reason or _why_not_finished(workspace, experiment, node, identity, directory)
    reason = _with_holder(directory, reason)
    if condition.step:
        return decide("resume", reason, condition.step)
    shorter = _shorter_run(workspace, identity, consumed_digests(known))
    if shorter is not None and not condition.reason:
        step, extended = shorter
        return decide("continue", _lengths(extended, identity), step, extended)
    return decide("run", reason)


def _why_not_finished(
    workspace: Workspace, experiment: str, node: StageNode, identity: Identity, directory: Path
) -> str:
    if read_identity(directory) is not None:
        return "interrupted" if newest_checkpoint(directory) else "interrupted before its first checkpoint"
    return why_not_reused(workspace.siblings(node.stage), experiment, node.name, identity, node.inputs)


def _with_holder(directory: Path, reason: str) -> str:
    holder = holder_of(directory)
    return f"{reason}; {holder} is working on it" if holder else reason


def _shorter_run(workspace: Workspace, identity: Identity, consumed: Mapping[str, str]) -> tuple[int, Path] | None:
    """The longest finished run of the same series that is shorter than this one."""
    if identity.series is None:
        return None
    found = []
    for directory in workspace.siblings(identity.stage):
        manifest, newest = read_manifest(directory), newest_checkpoint(directory)
        if manifest is None or newest is None or manifest.series != identity.series:
            continue
        fits = newest[0] < identity.length and examine(directory, manifest.key, consumed).reusable
        if fits:
            found.append((newest[0], directory))
    return max(found, default=None)


def _lengths(shorter: Path, identity: Identity) -> str:
    recorded = read_identity(shorter)
    before = recorded.identity.length if recorded else "?"
    return f"{identity.stage}.steps {before} -> {identity.length}"
