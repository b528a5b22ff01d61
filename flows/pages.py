"""Serves the HTML pages of finished stages and runs on the loopback address, since browsers follow no links to files.

The pages have no password, so they are never served to other machines, whatever address Prefect's server has. Only
pages directly inside the directory of a stage or a run are served, read-only.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from luffy.errors import UserError
from luffy.files import write_atomic
from luffy.flows.own_pages import ServerNames
from luffy.pipeline.workspace import Workspace

_PAGE = re.compile(r"/(stages/[a-z_]+/[0-9a-f]+|runs/[a-z0-9][a-z0-9_.-]*)/[A-Za-z0-9_-]+\.html")


@contextmanager
def served_pages(workspace: Workspace, port: int, names: ServerNames) -> Iterator[None]:
    """Serve at `port` and write the address into `workspace`; raises UserError if the port is taken."""
    handler = type("PageHandler", (_Handler,), {"workspace": workspace, "names": names})
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise UserError(f"port {port} (for the reports, one above --port): {error.strerror}; give another") from None
    threading.Thread(target=server.serve_forever, name="pages", daemon=True).start()
    write_atomic(workspace.pages_address, f"http://127.0.0.1:{port}\n")
    try:
        yield
    finally:
        workspace.pages_address.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    workspace: Workspace
    names: ServerNames

    def do_GET(self) -> None:
        # The Host header is checked against DNS rebinding: a foreign page must not reach it under its own name.
        known = _PAGE.fullmatch(self.path) and self.names.knows(self.headers.get("Host", ""))
        page = self.workspace.root / self.path[1:]
        if not known or not page.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = page.read_bytes()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Log no requests."""
