"""Responses of an endpoint, saved so that a resumed evaluation does not pay for them twice."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from luffy.types import FinishReason


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """A generated response as text."""

    text: str
    num_tokens: int
    """Completion tokens as the endpoint counts them, reasoning included."""
    finish_reason: FinishReason
    prompt_tokens: int | None = None
    """Prompt tokens as the endpoint counts them; None: it does not say."""
    is_refusal: bool = False
    """Whether the endpoint's content filter ended it, or the model declined in the protocol's own field."""


class TextAnswers:
    """Completions by request key, appended to a file as they arrive.

    They survive a killed process. An incomplete line and everything after it are dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, TextCompletion] = {}
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(self._read())

    def find(self, key: str) -> TextCompletion | None:
        """The completion saved under `key`."""
        return self._known.get(key)

    def add(self, key: str, completion: TextCompletion) -> None:
        """Save a completion."""
        self._known[key] = completion
        self._file.write(json.dumps({"key": key, **asdict(completion)}, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file, once the results are saved elsewhere."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _read(self) -> int:
        """Read the file up to the first invalid line; returns its offset."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                try:
                    fields = json.loads(line)
                    key, reason = fields["key"], FinishReason(fields["finish_reason"])
                    completion = TextCompletion(
                        fields["text"],
                        fields["num_tokens"],
                        reason,
                        fields.get("prompt_tokens"),
                        fields.get("is_refusal", False),
                    )
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self._known[key] = completion
                end += len(line)
        return end
