"""Stateless random numbers: pure functions of a seed and a purpose."""

from luffy.seeds import derive_seed


def uniform(*parts: int | str) -> float:
    """A uniform number in [0, 1) that depends on `parts` alone; with 53 bits, so that it never rounds to 1."""
    return (derive_seed(*parts) >> 10) * 2.0**-53
