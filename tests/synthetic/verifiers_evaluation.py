"""What an environment's own evaluation makes of given turns, by way of a server of OpenAI's protocol.

    PYTHON verifiers_evaluation.py < CASES      # run by the interpreter that has verifiers

The input is a line of JSON: the environment, its arguments, and for each case a split, a row and the turns of the
policy as OpenAI's messages. The output is the reward and the metrics of each case.
"""

import asyncio
import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

script: list[dict] = []
"""The policy's turns in the case at hand."""


class Policy(BaseHTTPRequestHandler):
    """Says the n-th turn after n - 1 turns."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = script[sum(message["role"] == "assistant" for message in request["messages"])]
        reason = "tool_calls" if turn.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **turn}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        content = {"id": "x", "object": "chat.completion", "created": 0, "model": "x", "usage": usage}
        body = json.dumps({**content, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def client_of(vf: object, url: str) -> object:
    """A client for the server, of the class that this version takes."""
    import os

    os.environ["A_KEY"] = "none"
    try:
        from verifiers.types import ClientConfig
        from verifiers.utils.client_utils import setup_client
    except ImportError:
        from verifiers.types import ClientConfig

        return ClientConfig(api_key_var="A_KEY", api_base_url=url, client_type="openai_chat_completions")
    return setup_client(ClientConfig(api_key_var="A_KEY", api_base_url=url))


def result_of(outputs: dict) -> dict:
    """Reward and metrics of the only rollout."""
    if "outputs" in outputs:
        (found,) = outputs["outputs"]
        return {"reward": found["reward"], "metrics": dict(found["metrics"])}
    metrics = {name: values[0] for name, values in outputs["metrics"].items()}
    return {"reward": outputs["reward"][0], "metrics": metrics}


def main() -> None:
    import numpy
    import verifiers as vf

    asked = json.loads(sys.stdin.readline())
    out, sys.stdout = sys.stdout, sys.stderr
    random.seed(0)  # as the host does
    numpy.random.seed(0)
    env = vf.load_environment(asked["environment"], **asked["arguments"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = client_of(vf, f"http://127.0.0.1:{server.server_port}/v1")
    results = []
    for case in asked["cases"]:
        script[:] = case["turns"]
        rows = env.get_dataset() if case["split"] == "train" else env.get_eval_dataset()
        inputs = rows.select([case["row"]]).to_list()
        results.append(result_of(asyncio.run(env.generate(inputs, client, "x"))))
    print(json.dumps(results), file=out, flush=True)


if __name__ == "__main__":
    main()
