"""Runs a stage that is killed in the middle of a validation, after BATCHES graded batches:
`killed_validation.py STAGE BATCHES OUT DATA MODEL`.
"""

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_validation import OF_RL, OF_SFT, run_stage_of

from luffy.stages.answers.store import AnswerStore, ModelAnswer

if __name__ == "__main__":
    stage, batches, out, data, model = sys.argv[1:]
    add, left = AnswerStore.add, iter(range(int(batches)))

    def add_or_die(store: AnswerStore, answers: Iterable[tuple[str, ModelAnswer]]) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        add(store, answers)

    AnswerStore.add = add_or_die  # type: ignore[method-assign]
    run_stage_of(stage, Path(out), {"data": Path(data), "model": Path(model)}, OF_RL, OF_SFT)
