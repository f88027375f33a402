"""Number formats, emulated bit for bit in plain PyTorch.

A format turns a tensor into few-bit element codes, the scale of each block of them, and at most
one FP32 scale outside of the blocks::

    x ~ (element code * block scale) * outer scale
      = Scaled.values                * Scaled.outer

The product in parentheses has few significant bits, so it is exact in BF16: a layer multiplies the
values on BF16 units with FP32 accumulation and applies the outer scales to the result, which is
the arithmetic of the FP8 and FP4 units themselves.

One format family is one file here. To add one, add a file with a frozen dataclass that extends
`Format` (or `BlockFormat`) and names itself; `get_format` finds it, and
`tests/formats/test_every_format.py` tests it.
"""

from lightning_qrl.formats.base import Format, Operand
from lightning_qrl.formats.quantized import Quantized
from lightning_qrl.formats.registry import format_names, get_format
from lightning_qrl.formats.scaled import Scaled

__all__ = ["Format", "Operand", "Quantized", "Scaled", "format_names", "get_format"]
