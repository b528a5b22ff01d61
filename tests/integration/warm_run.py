"""Runs `python -m MODULE` under supervision, forked from a warm server without libraries: `warm_run.py DIR MODULE`."""

import sys
from pathlib import Path

from luffy.pipeline.supervise import supervise
from luffy.pipeline.warm_start import WarmServer


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    server = WarmServer(directory / "server.log", libraries=())
    say(f"server {server.pid}")
    with server.use():
        supervise([sys.executable, "-m", *sys.argv[2:]], directory, on_event=lambda event: None, on_line=say)
