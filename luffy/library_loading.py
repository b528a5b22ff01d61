"""Loading large libraries: without garbage collection, which would walk over their objects again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """For a program's imports: what is loaded within the block stays, and later collections do not walk over it either.

    Loading Prefect's server takes a fifth less CPU time so (5.2 s instead of 6.8).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
