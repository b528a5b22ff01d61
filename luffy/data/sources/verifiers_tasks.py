"""Tasks of an environment of the package verifiers, in the order of its data set.

`extra_info.verifiers_task` identifies a task: its split, its row, and a digest of its content.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from luffy.config.data import VerifiersSource
from luffy.data.prompt_identity import prompt_uid
from luffy.data.sources.trace_source import QuarantinedRow, Row
from luffy.errors import DataError
from luffy.hosted.verifiers_process import shared_process
from luffy.types import Message, Prompt

_AT_ONCE = 256
_SCORED = "(scored by the environment)"
"""Reference of a task that has none."""


class VerifiersTasks:
    """The first `num_prompts` tasks of a split."""

    kind = "verifiers"
    is_light = False

    def __init__(self, source: VerifiersSource, purpose: str, seed: int) -> None:
        self._source = source
        self._where = f"data.{purpose}"

    def inputs(self) -> dict[str, str]:
        """The digests of all tasks."""
        digests = [task["digest"] for task in self._tasks()]
        return {"tasks": hashlib.sha256(json.dumps(digests).encode()).hexdigest()}

    def rows(self) -> Iterator[Row]:
        """One prompt for each task; one without messages is quarantined."""
        name = f"verifiers/{self._source.environment}"
        for row, task in enumerate(self._tasks()):
            messages = tuple(Message(each["role"], each["content"]) for each in task["messages"])
            if not any(message.content.strip() for message in messages):
                yield QuarantinedRow(name, row + 1, "prompt", "is empty")
                continue
            place = {"split": self._source.split, "row": row, "digest": task["digest"]}
            yield Prompt(
                uid=prompt_uid(f"{name}/{json.dumps(place)}", messages),  # different games may have equal prompts
                data_source=name,
                messages=messages,
                ground_truth=task["answer"].strip() or _SCORED,
                ability=task["task"] or "environment",
                extra_info={"info": task["info"], "verifiers_task": place},
                grader=self._source.grader,
            )

    def _tasks(self) -> Iterator[Mapping[str, Any]]:
        process, split = shared_process(self._source), self._source.split
        sizes = process.description.tasks
        if not sizes.get(split):
            raise DataError(
                f"{self._where}.split: the environment {self._source.environment} has no tasks in {split}; "
                f"there are {', '.join(f'{name} ({size})' for name, size in sizes.items())}"
            )
        stop = min(sizes[split], self._source.num_prompts or sizes[split])
        for start in range(0, stop, _AT_ONCE):
            found = process.call("tasks", split=split, start=start, stop=min(stop, start + _AT_ONCE))
            yield from cast(list[Mapping[str, Any]], found)
