"""Random numbers that are pure functions of what they are for."""

from luffy.seeds import derive_seed


def uniform(*parts: int | str) -> float:
    """A number in [0, 1) for the purpose that `parts` name; 53 bits, so that it is exact and never rounds to 1."""
    return (derive_seed(*parts) >> 10) * 2.0**-53
