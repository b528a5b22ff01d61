"""Seeds as pure functions of their purpose, so that no generator's state has to survive a restart."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) for the purpose named by `parts`, e.g. `derive_seed(seed, "rollout", step, uid, sample)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniform(*parts: int | str) -> float:
    """A uniform number in [0, 1) that depends on `parts` alone; with 53 bits, so that it never rounds to 1."""
    return (derive_seed(*parts) >> 10) * 2.0**-53
