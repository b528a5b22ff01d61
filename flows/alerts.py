"""The automations that `luffy serve` keeps on its Prefect server, and the notifications that they send.

Each is known by its exact name, which begins with `luffy: `. One that is absent is created, one whose definition has
changed is updated, and one that is no longer wanted is deleted. Automations with other names are not touched. Whether
an automation is enabled is the user's choice, which an update keeps.
"""

from dataclasses import dataclass
from typing import Any

import httpx

from luffy.errors import UserError
from luffy.flows.api_client import ApiClient
from luffy.tasks.alarms import AlarmKind, event_of

FLOWS = (
    "compare-methods",
    "evaluate-checkpoint",
    "full-pipeline",
    "pipeline-form",
    "prepare-data",
    "run-grid",
    "run-study",
)
"""Names of luffy's flows. Runs of other flows on the same server send no notification."""
_SILENT, _FAILED, _STALLED = (
    "luffy: a run without a sign of life has crashed",
    "luffy: a run has failed or crashed",
    "luffy: no progress for some time",
)
_ALARMS: dict[AlarmKind, str] = {
    "logp-gap": "luffy: log-probability gap over its bound",
    "zero-reward": "luffy: the reward fell to 0",
    "no-signal": "luffy: RL has no learning signal",
    "disk": "luffy: the disk is nearly full",
}
_OWN_NAMES = (_SILENT, _FAILED, _STALLED, *_ALARMS.values())
_MINUTE_S = 60.0
_ITS_FLOW = {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)}
# Runs of the pool whose server was ended are closed by `luffy serve`; this one finds the others, by their silence:
# a flow started by hand and killed, say. Three times the interval of heartbeats, so that no live run is hit.
_CRASH_SILENT_RUNS: dict[str, Any] = {
    "name": _SILENT,
    "trigger": {
        "type": "event",
        "posture": "Proactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {},
        "after": ["prefect.flow-run.heartbeat"],
        "expect": [
            "prefect.flow-run.heartbeat",
            "prefect.flow-run.Completed",
            "prefect.flow-run.Failed",
            "prefect.flow-run.Cancelled",
            "prefect.flow-run.Crashed",
        ],
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "within": 600.0,
    },
    "actions": [{"type": "change-flow-run-state", "state": "CRASHED", "message": "no sign of life for ten minutes"}],
}
_FAILED_BODY = """\
{{ flow_run.name }}: {{ flow_run.state.name }}
{{ flow_run.state.message }}
{{ flow_run|ui_url }}
{% if flow_run.deployment_id -%}
To resume it: prefect flow-run retry {{ flow_run.id }}
{%- else -%}
To resume it: the command that started it
{%- endif %}"""
_STALLED_BODY = """\
{{{{ flow_run.name }}}}: stage {{{{ event.payload.stage }}}} of {{{{ event.payload.run }}}} has made no progress for \
{minutes:g} minutes
last seen at step {{{{ event.payload.step }}}} of {{{{ event.payload.total }}}}; \
the run is {{{{ flow_run.state.name }}}}
{{{{ flow_run|ui_url }}}}"""

_ALARM_BODY = """\
{{ flow_run.name }}: stage {{ event.payload.stage }} of {{ event.payload.run }}: {{ event.payload.text }}
{{ flow_run|ui_url }}"""


@dataclass(frozen=True, slots=True)
class Alerts:
    """Which notifications `luffy serve` sends, and by which block of its server."""

    block: str | None = None
    """TYPE/NAME of a notification block, such as slack-webhook/lab; None sends nothing."""
    stall_minutes: float | None = None
    """Minutes without progress of a stage after which a notification is sent; None sends none."""

    def __post_init__(self) -> None:
        """Raise UserError for what is wrong on any server."""
        if self.block is not None:
            kind, _, name = self.block.partition("/")
            if not kind or not name or "/" in name:
                raise UserError(
                    f"--notify {self.block}: has the form TYPE/NAME of a notification block, such as slack-webhook/lab"
                )
        elif self.stall_minutes is not None:
            raise UserError(
                f"--stall-minutes {self.stall_minutes:g}: has no effect without --notify; add --notify TYPE/NAME"
            )


def keep_automations(api: ApiClient, alerts: Alerts) -> None:
    """Make the server's automations of luffy equal to those that `alerts` asks for.

    Raises UserError, before any change, where the block of `alerts` is not a notification block of the server, and
    httpx.HTTPError.
    """
    wanted = [_CRASH_SILENT_RUNS]
    if alerts.block is not None:
        block = _notification_block(api, alerts.block)
        wanted += [_of_failed_runs(block), *(_of_alarms(block, kind, name) for kind, name in _ALARMS.items())]
        if alerts.stall_minutes is not None:
            wanted.append(_of_stalled_stages(block, alerts.stall_minutes))
    definitions = {definition["name"]: definition for definition in wanted}
    found = api.rows("automations", {"automations": {"name": {"any_": list(_OWN_NAMES)}}})
    for name in _OWN_NAMES:
        _keep(api, definitions.get(name), [automation for automation in found if automation["name"] == name])


def _keep(api: ApiClient, definition: dict[str, Any] | None, found: list[dict[str, Any]]) -> None:
    """Leave one automation with the definition, or none; `found` are those that have its name."""
    kept = found[:1] if definition else []
    if definition and not kept:
        api.ask("POST", "automations/", definition).raise_for_status()
    for automation in kept:
        if not _states(automation, definition):
            chosen = {name: automation[name] for name in ("enabled", "tags")}
            api.ask("PUT", f"automations/{automation['id']}", {**(definition or {}), **chosen}).raise_for_status()
    for automation in found[len(kept) :]:
        deleted = api.ask("DELETE", f"automations/{automation['id']}")
        if deleted.status_code != httpx.codes.NOT_FOUND:
            deleted.raise_for_status()


def _states(stored: Any, wanted: Any) -> bool:
    """Whether `stored` has everything in `wanted`; it has identifiers and defaults besides, and sets in any order."""
    if isinstance(wanted, dict):
        # An empty specification matches everything, a longer one does not.
        return isinstance(stored, dict) and (
            all(key in stored and _states(stored[key], value) for key, value in wanted.items())
            if wanted
            else not stored
        )
    if isinstance(wanted, list) and isinstance(stored, list):
        if all(isinstance(value, str) for value in wanted):
            return sorted(stored) == sorted(wanted)
        return len(stored) == len(wanted) and all(map(_states, stored, wanted))
    return bool(stored == wanted)


def _notification_block(api: ApiClient, block: str) -> str:
    """The identifier of the server's block TYPE/NAME."""
    kind, _, name = block.partition("/")
    notifying = {"block_schemas": {"block_capabilities": {"all_": ["notify"]}}}
    documents = api.rows("block_documents", notifying)
    known = {f"{document['block_type']['slug']}/{document['name']}": document["id"] for document in documents}
    if (found := known.get(f"{kind}/{name}")) is not None:
        return str(found)
    there = f"it has {', '.join(sorted(known))}" if known else "it has none"
    raise UserError(
        f"--notify {block}: this server has no such notification block ({there}); start luffy serve without --notify "
        "and make the block in the UI under Blocks"
    )


def _of_failed_runs(block: str) -> dict[str, Any]:
    return {
        "name": _FAILED,
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": _ITS_FLOW,
            "after": [],
            "expect": ["prefect.flow-run.Failed", "prefect.flow-run.Crashed"],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": 0.0,
        },
        "actions": [_notification(block, "luffy: {{ flow_run.name }} {{ flow_run.state.name|lower }}", _FAILED_BODY)],
    }


def _of_stalled_stages(block: str, minutes: float) -> dict[str, Any]:
    """A stage is watched from its first progress, so that neither its start nor a queue for GPUs is counted."""
    return {
        "name": _STALLED,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": "luffy.stage.*"},
            "match_related": _ITS_FLOW,
            "after": ["luffy.stage.progress"],
            "expect": ["luffy.stage.progress", "luffy.stage.ended"],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": minutes * _MINUTE_S,
        },
        "actions": [
            _notification(block, "luffy: {{ flow_run.name }} makes no progress", _STALLED_BODY.format(minutes=minutes))
        ],
    }


def _of_alarms(block: str, kind: AlarmKind, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "match": {"prefect.resource.id": "luffy.stage.*"},
            "match_related": _ITS_FLOW,
            "after": [],
            "expect": [event_of(kind)],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": 0.0,
        },
        "actions": [_notification(block, f"{name} ({{{{ flow_run.name }}}})", _ALARM_BODY)],
    }


def _notification(block: str, subject: str, body: str) -> dict[str, Any]:
    return {"type": "send-notification", "block_document_id": block, "subject": subject, "body": body}
