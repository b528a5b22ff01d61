"""Loading large libraries: without garbage collection, which would walk over their objects again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """For a program's imports: what is loaded within the block is never collected, and later collections skip it, too.

    Prefect's server then takes about a sixth less CPU time to load (`tests/benchmarks/library_loading.py`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
