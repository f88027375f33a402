"""A linear layer in FP32, also where autocast computes the rest of the model in 16 bits.

    Y = X W^T,  all three in FP32, and so are dX and dW

Under autocast `nn.Linear` casts both operands to 16 bits and returns 16 bits: of a head, logits
with 8 significant bits (BF16), whose rounding is different in sampler and trainer. Here the input
is cast to FP32 and the output stays so. Without autocast it is `nn.Linear`, bit for bit.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_qrl.precision.linear import LinearPrecision, QuantLinear

FP32 = LinearPrecision(fp32=True)


class FP32Linear(QuantLinear):
    """`nn.Linear` in FP32, in training as in sampling; its weight is FP32 as all master weights."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[..., I] in any floating-point dtype to [..., O] in float32."""
        with torch.autocast(input.device.type, enabled=False):
            return nn.Linear.forward(self, input.float())
