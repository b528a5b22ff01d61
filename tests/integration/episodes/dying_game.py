"""The guessing game in a process that is killed once, in the middle of an episode."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from luffy.environments.guess_number import GuessingGame
from luffy.types import Message


class DyingGame(GuessingGame):
    """With `TEST_DIE_AT` (a file with a number of answers left), the answer after them is a SIGKILL."""

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if (name := os.environ.get("TEST_DIE_AT")) is not None and (file := Path(name)).exists():
            left = int(file.read_text())
            if left == 0:
                file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            file.write_text(str(left - 1))
        return await super().respond(conversation)
