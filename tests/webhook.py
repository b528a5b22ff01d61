"""A notification block whose messages arrive here: Prefect's custom-webhook, and a small web server."""

import json
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from luffy.flows.api_client import ApiClient


@contextmanager
def _listening() -> Iterator[tuple[str, "queue.Queue[dict[str, str]]"]]:
    """The address of a web server, and the queue of the JSON bodies that it gets."""
    received: queue.Queue[dict[str, str]] = queue.Queue()

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", received
        server.shutdown()


def make_block(api: ApiClient, kind: str, name: str, data: Mapping[str, object]) -> None:
    """Store a block of the type."""
    block_type = api.ask("GET", f"block_types/slug/{kind}").raise_for_status().json()["id"]
    (schema, *_) = api.rows("block_schemas", {"block_schemas": {"block_type_id": {"any_": [block_type]}}})
    body = {"name": name, "data": dict(data), "block_type_id": block_type, "block_schema_id": schema["id"]}
    api.ask("POST", "block_documents/", body).raise_for_status()


@contextmanager
def messages_to(api: ApiClient, name: str) -> Iterator["queue.Queue[dict[str, str]]"]:
    """Make the block `custom-webhook/<name>`, and yield the queue of the messages that are sent to it."""
    with _listening() as (url, received):
        data = {"name": name, "url": url, "json_data": {"subject": "{{subject}}", "body": "{{body}}"}}
        make_block(api, "custom-webhook", name, data)
        yield received
