"""Which flows fork their stages from a warm server."""

import signal
from types import SimpleNamespace

import pytest

from luffy.flows import launch as launching
from luffy.pipeline.warm_start import can_start_warm, current_warm_server
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace


@pytest.mark.skipif(not can_start_warm(), reason="needs no GPU")
@pytest.mark.parametrize(
    ("actions", "is_warm"),
    [(["run", "reuse"], False), (["run", "resume"], True), (["reuse"] * 8, False), (None, True)],
    ids=["one stage", "two stages", "a cached run", "a flow of many runs"],
)
def test_a_flow_with_several_stages_to_make_has_a_warm_server(actions, is_warm, tmp_path, monkeypatch):
    found = []
    monkeypatch.setenv(WORKSPACE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(launching, "set_environment", lambda home, debug: None)
    monkeypatch.setattr(launching, "prefect_api", lambda home: None)
    monkeypatch.setattr(launching, "call_flow", lambda flow, parameters, server: found.append(current_warm_server()))
    plans = None if actions is None else lambda: [SimpleNamespace(action=action) for action in actions]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launching.launch("json:loads", {}, Workspace(tmp_path), plans, debug=False) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [server is not None for server in found] == [is_warm]
