"""Random numbers that are the same in every language: the reference model's.

x <- (1664525 x + 1013904223) mod 2**32, the value is x / 2**32, drawn after the update: the
generator of Numerical Recipes, as the post's simulator has it. The durations, kicks and reward
noise of a run have a stream each.
"""

from collections.abc import Iterator


def uniform(state: int) -> Iterator[float]:
    """Uniform numbers in [0, 1) of a linear congruential generator, drawn after each update."""
    while True:
        state = (1664525 * state + 1013904223) % 2**32
        yield state / 2**32


def first_state(own: int, seed: int) -> int:
    """State that a stream starts in: its own with seed 0, else its own and a hash of both.

    The generator's numbers lie on a lattice, so that states which are merely apart would give
    streams that go together. The hash is the finalizer of MurmurHash3, which maps 0 to 0.
    """
    x = own * seed % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return (own + (x ^ x >> 16)) % 2**32
