"""What an endpoint has answered in an evaluation that is not finished: nothing that was paid for is asked for twice."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from luffy.types import FinishReason


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """What was generated, as text."""

    text: str
    num_tokens: int
    """As the endpoint counts them, reasoning included."""
    finish_reason: FinishReason


class TextAnswers:
    """Completions by the key of their request, appended to a file as they come.

    They survive a kill of the process. A torn line, and what is behind it, is forgotten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, TextCompletion] = {}
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(self._read())

    def find(self, key: str) -> TextCompletion | None:
        """The completion that was kept under `key`."""
        return self._known.get(key)

    def add(self, key: str, completion: TextCompletion) -> None:
        """Keep a completion."""
        self._known[key] = completion
        self._file.write(json.dumps({"key": key, **asdict(completion)}, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def remove(self) -> None:
        """Forget them: what they came to is kept elsewhere now."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _read(self) -> int:
        """Read the file up to the first line that is none; returns where that is."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                try:
                    fields = json.loads(line)
                    key, reason = fields["key"], FinishReason(fields["finish_reason"])
                    completion = TextCompletion(fields["text"], fields["num_tokens"], reason)
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self._known[key] = completion
                end += len(line)
        return end
