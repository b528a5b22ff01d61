"""The runs of a workspace as Prometheus metrics on the loopback address, read from their files at each scrape.

luffy serve --metrics 9464        luffy watch --all --metrics 9464
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from luffy.cli.workspace_watch import StageStatus, WorkspaceWatch
from luffy.errors import UserError
from luffy.pipeline.workspace.disk import free_bytes

_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
_CONDITIONS = ("running", "finished", "failed", "interrupted", "killed")
_FIGURES = {
    "reward": "Mean reward of the newest step",
    "accuracy": "Accuracy on held-out problems, newest measurement",
    "loss": "Loss of the newest step",
    "logp_gap": "Mean difference of the engine's and the trainer's log-probabilities, nats per token",
    "tokens_per_s": "Tokens per second",
}


def metrics_text(watch: WorkspaceWatch) -> bytes:
    """All metrics in Prometheus' text format."""
    registry, statuses = CollectorRegistry(), watch.look()
    free = Gauge("luffy_workspace_free_bytes", "Free bytes on the workspace's disk", registry=registry)
    free.set(free_bytes(watch.workspace.root))
    state = Gauge("luffy_run_state", "1 for the state that a run is in", ["run", "state"], registry=registry)
    for status in statuses:
        for condition in _CONDITIONS:
            state.labels(status.run, condition).set(status.condition == condition)
    labels = ["run", "stage"]
    gauges = {name: Gauge(f"luffy_stage_{name}", text, labels, registry=registry) for name, text in _FIGURES.items()}
    gauges["step"] = Gauge("luffy_stage_step", "Steps that are done", labels, registry=registry)
    gauges["steps"] = Gauge("luffy_stage_steps", "Steps in all", labels, registry=registry)
    gauges["left"] = Gauge("luffy_stage_seconds_left", "Estimated time left", labels, registry=registry)
    gauges["silent"] = Gauge(
        "luffy_stage_seconds_since_progress", "Seconds since the stage last made progress", labels, registry=registry
    )
    for status in statuses:
        for name, value in _values(status):
            gauges[name].labels(status.run, status.stage).set(value)
    return generate_latest(registry)


@contextmanager
def served_metrics(watch: WorkspaceWatch, port: int) -> Iterator[None]:
    """Serve `/metrics` at `port`; raises UserError where it is taken."""
    handler = type("ScrapeHandler", (_ScrapeHandler,), {"watch": watch, "looking": threading.Lock()})
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise UserError(f"--metrics {port}: {error.strerror}; give another port") from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _values(status: StageStatus) -> Iterator[tuple[str, float]]:
    if not status.stage:
        return
    yield from ((name, status.figures[name]) for name in _FIGURES if name in status.figures)
    if status.total:
        yield "step", status.step
        yield "steps", status.total
    if status.condition == "running" and status.silent_s is not None:
        yield "silent", status.silent_s
    if status.seconds_left is not None:
        yield "left", status.seconds_left


class _ScrapeHandler(BaseHTTPRequestHandler):
    watch: WorkspaceWatch
    looking: threading.Lock

    def do_GET(self) -> None:
        # The Host header is checked against DNS rebinding: a foreign page must not reach it under its own name.
        if self.path != "/metrics" or not _HOST.fullmatch(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with self.looking:
            content = metrics_text(self.watch)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Log nothing: a scrape comes every few seconds."""
