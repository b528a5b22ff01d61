"""A real HTTP server in a thread that speaks OpenAI's protocol, well or badly, for what asks models elsewhere."""

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Reply:
    """What a request gets; no status: the connection is closed without a word."""

    status: int = 200
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False
    """Whether the connection breaks in the middle of the body."""


def completion(
    text: str, finish_reason: str = "stop", num_tokens: int = 7, prompt_tokens: int | None = None, **choice: object
) -> Reply:
    """As a server answers to a chat; some servers do not count the prompt."""
    message = {"role": "assistant", "content": text, **choice}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    counted = {} if prompt_tokens is None else {"prompt_tokens": prompt_tokens}
    return Reply(body={"choices": choices, "usage": {"completion_tokens": num_tokens, **counted}})


def text_completion(text: str, finish_reason: str = "stop", **choice: object) -> Reply:
    """As a server continues a text."""
    choices = [{"index": 0, "text": text, "finish_reason": finish_reason, **choice}]
    return Reply(body={"choices": choices, "usage": {"completion_tokens": 7}})


def refusal(status: int, message: str, **headers: str) -> Reply:
    """An error in OpenAI's words."""
    return Reply(
        status, {"error": {"message": message}}, {name.replace("_", "-"): text for name, text in headers.items()}
    )


def by_seed(path: str, body: dict) -> Reply:
    """A response that depends on what was asked and on the seed alone."""
    asked = json.dumps([body.get("messages"), body.get("prompt"), body.get("seed")])
    digest = int(hashlib.sha256(asked.encode()).hexdigest(), 16)
    text = f"\\boxed{{{digest % 20}}}"
    return completion(text) if path == CHAT else text_completion(text)


Answer = Callable[[str, dict], Reply | None]


def mortal(answers: int, answer: Answer, last_words: Reply) -> Answer:
    """A model that answers so many requests, however many come at once, and every later one with `last_words`."""
    asked = itertools.count()  # its steps are atomic
    return lambda path, body: answer(path, body) if next(asked) < answers else last_words


class Endpoint:
    """`answer` says what a request gets; `paths` are those that there are, asked with `key` where there is one."""

    def __init__(self, answer: Answer = by_seed, paths: tuple[str, ...] = (CHAT, TEXT), key: str | None = None) -> None:
        self.answer = answer
        self.paths = paths
        self.key = key
        self.asked: list[tuple[str, dict]] = []
        """Requests with a prompt."""
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _reply(self, path: str, body: dict | None, key: str | None) -> Reply | None:
        if self.key is not None and key != f"Bearer {self.key}":
            return refusal(401, f"Incorrect API key provided: {key}")
        if path not in self.paths:
            return Reply(404, {"detail": "Not Found"})
        if body is None:
            return self.answer(path, {})
        if "messages" not in body and "prompt" not in body:
            return refusal(400, "neither messages nor prompt")
        with self._lock:
            self.asked.append((path, body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answer(path, body)
        finally:
            with self._lock:
                self._at_once -= 1

    def _handler(endpoint) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(endpoint._reply(self.path, body, self.headers.get("Authorization")))

            def _send(self, reply: Reply | None) -> None:
                if reply is None:
                    self.close_connection = True
                    return
                said = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, text in reply.headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.close_connection = self.close_connection or reply.is_cut
                self.wfile.write(said[: len(said) // 2] if reply.is_cut else said)

            def do_GET(self) -> None:
                self._send(endpoint._reply(self.path, None, self.headers.get("Authorization")))

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is nothing to report."""
