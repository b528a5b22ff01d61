"""The settings of notifications: mistakes that are known before a server starts; and which flows are watched."""

import re
from pathlib import Path

import httpx
import pytest

from luffy.cli.main import main
from luffy.errors import UserError
from luffy.flows import alerts
from luffy.flows.alerts import FLOWS, Alerts, keep_automations
from luffy.flows.api_client import ApiClient


class StoredAutomations(ApiClient):
    """A server that returns one automation as it is stored, and records what it is asked to change."""

    def __init__(self, stored):
        super().__init__("http://nowhere/api")
        self.stored, self.changes = stored, []

    def rows(self, table, filters=None):
        return [self.stored]

    def ask(self, method, path, body=None):
        self.changes.append((method, path, body))
        return httpx.Response(200, request=httpx.Request(method, "http://nowhere"))


def stored(**trigger):
    """The automation of silent runs as Prefect returns it: with identifiers, and with its sets in another order."""
    own = alerts._CRASH_SILENT_RUNS
    expect = list(reversed(own["trigger"]["expect"]))
    its_trigger = {**own["trigger"], "id": "1", "expect": expect, **trigger}
    return {**own, "id": "0", "enabled": True, "tags": ["mine"], "trigger": its_trigger}


def test_every_flow_of_luffy_is_watched():
    sources = [path.read_text() for path in Path("flows").glob("*.py")]
    assert sorted(FLOWS) == sorted(name for source in sources for name in re.findall(r'@flow\(name="([^"]+)"', source))


@pytest.mark.parametrize("block", ["slack-webhook", "slack-webhook/", "/lab", "slack-webhook/lab/more", ""])
def test_a_block_without_type_or_name_is_refused_before_a_server_starts(block, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["serve", f"--notify={block}"]) == 2
    said = capsys.readouterr().err
    assert "has the form TYPE/NAME of a notification block, such as slack-webhook/lab" in said
    assert said.count("\n") == 1


def test_stalled_stages_cannot_be_reported_to_nobody():
    with pytest.raises(UserError, match="--stall-minutes 30: has no effect without --notify"):
        Alerts(stall_minutes=30)


def test_an_automation_that_says_the_same_is_not_written_again():
    api = StoredAutomations(stored())
    keep_automations(api, Alerts())
    assert api.changes == []


@pytest.mark.parametrize("differs", [{"within": 60.0}, {"expect": []}, {"match_related": {"a": "b"}}])
def test_an_automation_that_differs_is_updated_in_place(differs):
    api = StoredAutomations(stored(**differs))
    keep_automations(api, Alerts())
    ((method, path, body),) = api.changes
    assert (method, path, body["tags"]) == ("PUT", "automations/0", ["mine"])
    assert body["trigger"] == alerts._CRASH_SILENT_RUNS["trigger"]
