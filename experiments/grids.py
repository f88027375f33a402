"""The grids of `ledger.py`: which arms an experiment has."""

from dataclasses import dataclass, field

CURES = {
    "none": [],
    "TIS": ["callbacks.truncated_importance_sampling={}"],
    "score centering": ["callbacks.score_centering={}"],
}
SHORT = [
    "trainer.max_steps=60",
    "grpo.prompts_per_rollout=8",
    "callbacks.held_out_evaluation={prompts: 1024, every_n_steps: 1000}",
]


@dataclass(frozen=True)
class Arm:
    """A recipe with its overrides.

    Attributes:
        name: in the table.
        recipe: of the package, or a file.
        overrides: as on the command line.
        without: callbacks to leave out.
        control: slug of the arm that it is compared with.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    control: str = ""

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        return "-".join(self.name.replace(",", "").replace("/", "").lower().split())


@dataclass(frozen=True)
class Experiment:
    """Arms, what they have in common, and what the table shows."""

    arms: list[Arm]
    common: list[str]
    columns: list[str] = field(default_factory=list)


def _staleness() -> Experiment:
    arms = []
    for recipe in ("bf16", "fp8", "nvfp4_naive", "4bitter"):
        for lag in (0, 2, 8):
            for cure, callbacks in CURES.items():
                name = f"{recipe}, staleness {lag}, {cure}"
                control = "" if cure == "none" else f"{recipe}-staleness-{lag}-none"
                overrides = (f"rollout.max_staleness={lag}", *callbacks)
                arms.append(Arm(name, recipe, overrides, control=control))
    columns = ["held-out reward", "reward, all steps", "mean |Δlogprob|", "effective sample size",
               "largest grad norm", "spikes", "diverged"]  # fmt: skip
    return Experiment(arms, [*SHORT, "grpo.loss=reinforce"], columns)


def _clip() -> Experiment:
    arms = []
    for recipe in ("bf16", "nvfp4_naive", "4bitter"):
        for lag in (0, 8):
            lagged = f"rollout.max_staleness={lag}"
            arms.append(Arm(f"{recipe}, staleness {lag}, dapo", recipe, (lagged,)))
    return Experiment(arms, SHORT, _staleness().columns)


FIX = {
    "four-over-six": ((), ("callbacks.forward_quantization.four_over_six=none",)),
    "dequantized backward": (("dequantized_backward",), ()),
    "selective BF16": (("bf16_tail", "sensitive_weights"), ()),
}


def _five_arms() -> Experiment:
    """None of the three, each two of them, all: the figure of the 4-bitter post."""
    arms = [_fixed("all three", list(FIX))]
    arms += [_fixed(f"without {out}", [fix for fix in FIX if fix != out]) for out in FIX]
    arms.append(_fixed("none of the three", []))
    columns = ["held-out reward", "mean |Δlogprob|", "largest grad norm", "spikes", "diverged"]
    return Experiment(arms, [*SHORT, "rollout.max_staleness=8", "grpo.loss=reinforce"], columns)


def _fixed(name: str, kept: list[str]) -> Arm:
    gone = [FIX[fix] for fix in FIX if fix not in kept]
    without = tuple(callback for callbacks, _ in gone for callback in callbacks)
    overrides = tuple(override for _, given in gone for override in given)
    control = "" if name == "all three" else "all-three"
    return Arm(name, "4bitter_moe", overrides, without, control)


def _replay() -> Experiment:
    arms = []
    for name, recipe, side in (
        ("bf16", "bf16", ()),
        ("4bitter_moe", "4bitter_moe", ()),
        ("nvfp4 sampler", "nvfp4_naive", ("callbacks.forward_quantization.side=rollout",)),
    ):
        moe = ("policy.name=embedded-moe", *side)
        control = f"{name}-live".replace(" ", "-")
        arms.append(Arm(f"{name}, live", recipe, moe))
        replayed = (*moe, "callbacks.router_replay={}")
        arms.append(Arm(f"{name}, replayed", recipe, replayed, control=control))
    columns = ["held-out reward", "mean |Δlogprob|", "k3 KL", "largest grad norm", "spikes"]
    return Experiment(arms, [*SHORT], columns)


def _noise() -> Experiment:
    arms = []
    for recipe in ("bf16", "nvfp4_w4a16"):
        arms.append(Arm(f"{recipe}, no noise", recipe))
        noisy = ("callbacks.adaptive_quantization_noise={}",)
        arms.append(Arm(f"{recipe}, noise", recipe, noisy, control=f"{recipe}-no-noise"))
    columns = ["held-out reward", "entropy, all steps", "entropy, last steps", "mean |Δlogprob|"]
    return Experiment(arms, [*SHORT], columns)


EXPERIMENTS = {
    "staleness": _staleness(),
    "clip": _clip(),
    "five-arms": _five_arms(),
    "replay": _replay(),
    "noise": _noise(),
}
