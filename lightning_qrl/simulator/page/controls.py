"""The words of the page's controls and presets: what people see for a key of `Settings`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

REACH: Mapping[str, int] = MappingProxyType(
    {"max_staleness": 8, "batch": 32, "samplers": 16, "seed": 20}
)
"""How far the sliders go, where the page does not start with more."""
LARGEST: Mapping[str, int] = MappingProxyType({"max_staleness": 16, "batch": 64, "samplers": 32})
"""What the page can draw, and run again while a slider moves; any seed is as fast."""


@dataclass(frozen=True)
class Control:
    """One setting on the page.

    Attributes:
        key: of `Settings`.
        title: what it is called.
        about: what it does, in one short line.
        choices: words for the values; a number has none, and a switch has off and on.
        marks: values of a slider that the post offers.
    """

    key: str
    title: str
    about: str
    choices: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[int, ...] = ()


_SWITCH = {"false": "off", "true": "on"}
GROUPS: Mapping[str, tuple[Control, ...]] = MappingProxyType(
    {
        "Precision": (
            Control("precision", "Format", "Of the forward pass, on both sides.",
                    {"bf16": "BF16", "fp8": "FP8", "fp4": "FP4"}),
            Control("backward", "Backward pass", "What operands the gradients see.",
                    {"high_precision": "high precision", "dequantized": "dequantized"}),
            Control("bf16_tail", "BF16 tail", "The last 15% of the layers stay in BF16.", _SWITCH),
            Control("shared_experts", "Shared experts in BF16", "Every token passes through them.",
                    _SWITCH),
            Control("four_over_six", "Four over six", "FP4 blocks choose between two scales.",
                    _SWITCH),
        ),
        "System": (
            Control("max_staleness", "Staleness cap", "Versions behind before it is discarded."),
            Control("batch", "Batch", "Rollouts of an optimizer step.", marks=(4, 8, 16)),
            Control("samplers", "Samplers", "Each writes one rollout at a time."),
            Control("horizon", "Horizon", "How long rollouts are.",
                    {"short": "short", "med": "medium", "long": "long"}),
            Control("weight_sync", "Weight sync", "New weights are sent, in mid-rollout too.",
                    _SWITCH),
            Control("seed", "Seed", "0 is the post's run, the others other luck."),
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A preset in words.

    Attributes:
        title: what it is called.
        recipe: the recipe that it stands for.
    """

    title: str
    recipe: str


PRESET_WORDS: Mapping[str, Preset] = MappingProxyType(
    {
        "bf16": Preset("BF16", "bf16.yaml"),
        "fp8_hp": Preset("FP8, high-precision backward", "fp8.yaml without dequantized_backward, "
                         "with a BF16 tail"),
        "fp8_dq": Preset("FP8", "fp8.yaml with a BF16 tail"),
        "fp4_naive": Preset("FP4, naive", "nvfp4_naive.yaml"),
        "fp4_dq": Preset("+ dequantized backward", "nvfp4_naive.yaml with dequantized_backward"),
        "fp4_46_dq": Preset("+ four over six", "4bitter.yaml without bf16_tail and "
                            "sensitive_weights"),
        "fp4_46_dq_tail": Preset("+ BF16 tail", "4bitter.yaml without sensitive_weights"),
        "fp4_full": Preset("4-bitter, all of it", "4bitter_moe.yaml"),
    }
)  # fmt: skip
