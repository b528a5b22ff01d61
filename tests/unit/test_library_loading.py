"""Imports without garbage collection."""

import gc

import pytest

from luffy.library_loading import without_collections


def test_nothing_is_collected_within_the_block_and_what_it_made_is_frozen() -> None:
    frozen = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        kept = [[] for _ in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() - frozen >= len(kept)


def test_a_failed_import_leaves_collection_on_and_a_program_that_had_it_off_keeps_it_off() -> None:
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
