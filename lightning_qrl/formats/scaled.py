"""A quantized tensor as numbers, ready for a matrix product."""

from dataclasses import dataclass

from torch import Tensor

from lightning_qrl.formats.hadamard import Hadamard, rotate_back


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A quantized tensor ready for a matrix product: x ~ values * outer, rotated back.

    Attributes:
        values: FP32 of x's shape, element times block scale, each exact in BF16 (see the format).
            In the rotated basis, and filled up to whole rotations, where there is a rotation.
        outer: FP32 that broadcasts against x: [] for one scale a tensor, [..., 1] for one a row;
            None where the format has none.
        rotation: size of the Hadamard rotation that the values are in.
        length: n, of the last axis of x; None where it is that of the values.
    """

    values: Tensor
    outer: Tensor | None
    rotation: Hadamard = "none"
    length: int | None = None

    def product(self) -> Tensor:
        """The quantized x: values * outer, rotated back, FP32 of x's shape."""
        product = self.values if self.outer is None else self.values * self.outer
        return rotate_back(product, self.rotation, self._length)

    def unrotated(self) -> "Scaled":
        """The same numbers outside of the rotated basis; their values need all of FP32's bits."""
        if self.rotation == "none":
            return self
        return Scaled(rotate_back(self.values, self.rotation, self._length), self.outer)

    @property
    def _length(self) -> int:
        return self.values.shape[-1] if self.length is None else self.length
