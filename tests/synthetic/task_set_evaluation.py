"""What verifiers 0.4.0 itself makes of given turns: its harness `null`, and a server of OpenAI's protocol as the model.

    PYTHON task_set_evaluation.py < CASES      # run by the interpreter that has verifiers; the harness needs `uv`

The input is a line of JSON: the environment, its configuration, and for each case the position of a task and the turns
of the policy as OpenAI's messages. The output is the reward, and the score of every reward and metric, of each case.
"""

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

script: list[dict] = []
"""The policy's turns in the case at hand."""


class Policy(BaseHTTPRequestHandler):
    """Says the n-th turn after n - 1 turns, as a stream of one piece."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = script[sum(message["role"] == "assistant" for message in request["messages"])]
        calls = [{**call, "index": place} for place, call in enumerate(turn.get("tool_calls") or [])]
        delta = {"role": "assistant", "content": turn["content"], **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "delta": delta}
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "x", "choices": [choice]}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None: ...


async def evaluate(asked: dict, url: str) -> list[dict]:
    import verifiers.v1 as vf
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    config = {**asked["configuration"], asked["role"]: seat}
    config["taskset"] = {**config.get("taskset", {}), "id": asked["environment"]}
    env = load_environment(resolve_env_config(config))
    wanted = [case["row"] for case in asked["cases"]]
    tasks = {task.data.idx: task for task in env.taskset.include(idx=wanted)}
    results = []
    async with env.serving():
        for case in asked["cases"]:
            script[:] = case["turns"]
            client = EvalClientConfig(base_url=url, api_key_var="A_KEY")
            episode = await env.run_episode(tasks[case["row"]], ModelContext("policy", client, vf.SamplingConfig()))
            (trace,) = episode.traces
            assert episode.ok, (episode.errors, trace.errors)
            scores = {name: reward.score for name, reward in trace.rewards.items()}
            results.append({"reward": trace.reward, **scores, **trace.metrics})
    return results


def main() -> None:
    os.environ["A_KEY"] = "none"
    asked = json.loads(sys.stdin.readline())
    out, sys.stdout = sys.stdout, sys.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    results = asyncio.run(evaluate(asked, f"http://127.0.0.1:{server.server_port}/v1"))
    print(json.dumps(results), file=out)


if __name__ == "__main__":
    main()
