"""Loading large libraries: without garbage collection, which would walk over their objects again and again, and without
MLflow, which DeepSpeed's autotuner loads wherever it is installed: two seconds, and a thread that forbids a fork.

    with without_collections():
        ...                                         # imports

    python -m luffy.library_loading MODULE ARGUMENT ...

The second is `python -m MODULE ARGUMENT ...` for programs that import their libraries at the top and call `loaded`
when they begin to work.
"""

import gc
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def without_collections(*, freeze: bool = True) -> Iterator[None]:
    """For imports. With `freeze` what exists after the block is never collected, and later collections skip it.

    Pass `freeze=False` in the middle of a program, whose garbage may hold large tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    if freeze:
        _hide_mlflow()
    try:
        yield
    finally:
        if freeze:
            _show_mlflow()
            gc.freeze()
        if was_enabled:
            gc.enable()


def loaded() -> None:
    """Begin to collect garbage, where loading has stopped it; what is loaded is never collected."""
    _show_mlflow()
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `module` as `python -m` would, without collections until it calls `loaded`."""
    gc.disable()
    _hide_mlflow()
    sys.argv[1:] = arguments
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _hide_mlflow() -> None:
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # what makes an import of it fail


def _show_mlflow() -> None:
    if sys.modules.get("mlflow", gc) is None:
        del sys.modules["mlflow"]


if __name__ == "__main__":
    run_module(sys.argv[1], sys.argv[2:])
