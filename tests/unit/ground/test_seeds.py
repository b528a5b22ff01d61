"""Seeds as pure functions."""

from luffy.seeds import derive_seed


def test_a_seed_never_changes_between_versions():
    assert derive_seed(0, "rollout", 1, "uid", 2) == 2160558809908254791
    assert 0 <= derive_seed(0) < 2**63


def test_every_part_and_its_type_counts():
    seeds = [derive_seed(1, 2), derive_seed(12), derive_seed("1", 2), derive_seed(2, 1), derive_seed(1, 2, 0)]
    assert len(set(seeds)) == len(seeds)
