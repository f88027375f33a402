"""Seeds derived from names, so that no random state has to be saved or restored.

Every random choice of a run (prompts, samples, shuffles) comes from a fresh generator seeded by
(the run's seed, what the choice is for, how often it was made before). A resumed run therefore
draws what the uninterrupted one draws, and evaluating more often does not change training.
"""

import hashlib


def derive_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for one purpose.

    Args:
        seed: the run's seed.
        path: what the seed is for, e.g. ``("rollout", phase, rank)``.
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
