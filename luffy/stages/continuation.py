"""A longer RL run continues a finished shorter one of the same series; the shorter one stays as it is."""

import shutil
from pathlib import Path

from luffy.files import link_or_copy

_HISTORY = ("metrics.jsonl", "samples.jsonl")


def adopt_shorter_run(finished: Path, out: Path) -> None:
    """Bring the history, the journal and the newest checkpoint of `finished` into `out`.

    The checkpoint comes last and by one rename: a kill before it leaves a directory that starts anew, never one that
    believes to be further than it is.
    """
    for name in _HISTORY:
        if (finished / name).exists():
            shutil.copy2(finished / name, out / name)
    shutil.copytree(finished / "journal", out / "journal", copy_function=link_or_copy, dirs_exist_ok=True)
    newest = max((finished / "checkpoints").glob("step_*/COMPLETE")).parent
    incoming = out / "checkpoints" / f"incoming_{newest.name}"
    shutil.rmtree(incoming, ignore_errors=True)
    shutil.copytree(newest, incoming, copy_function=link_or_copy)
    incoming.replace(out / "checkpoints" / newest.name)
