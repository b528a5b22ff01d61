"""`luffy eval` with a model behind an endpoint: its stages in this process, a table and a transcript."""

import json

import pytest
from synthetic.endpoint import CHAT, Endpoint, Reply, completion

from luffy.cli.main import main

pytestmark = pytest.mark.slow


def calling(path: str, body: dict) -> Reply:
    """Calls the calculator with the last problem, unless a result has come: then it answers with that."""
    asked, *results = (turn["content"] for turn in body["messages"] if turn["role"] == "user")
    if results:
        return completion(f"\\boxed{{{results[-1].split(chr(10))[1]}}}")
    call = json.dumps({"name": "calculator", "arguments": {"expression": asked.splitlines()[0].removesuffix("=")}})
    return completion(f"<tool_call>\n{call}\n</tool_call>")


def test_a_quick_look_prints_accuracy_measures_and_transcripts(capsys: pytest.CaptureFixture[str]) -> None:
    server = Endpoint(calling, (CHAT,))
    command = ["eval", "calculator", "--model", "api:gpt-x", "--url", f"{server.url}/v1", "-n", "3", "--show", "1"]
    assert main(command) == 0
    server.close()
    shown = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-1] for line in shown.splitlines() if "  " in line}
    assert rows["episodes"] == "3"
    assert rows["turns"] == "2"
    assert rows["tool_calls/calculator"] == "1"
    assert shown.count("--- environment ---") == 1
    assert '"name": "calculator"' in shown  # the tools are described to the model
    assert main(["eval", "nothing", "--model", "api:x", "--url", "http://127.0.0.1:1/v1"]) == 2
