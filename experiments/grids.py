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


Pairs = tuple[tuple[str, str], ...]  # slugs: an arm and its control


@dataclass(frozen=True)
class Arm:
    """A recipe with its overrides.

    Attributes:
        name: in the table.
        recipe: of the package, or a file.
        overrides: as on the command line.
        without: callbacks to leave out.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Its name as a file's."""
        return slug(self.name)


@dataclass(frozen=True)
class Experiment:
    """Arms, what they have in common, and what the tables show.

    Attributes:
        arms: a row each.
        common: overrides of all.
        columns: of the table of arms.
        contrasts: by label, arms and their controls, pooled.
        differences: columns whose differences to the control are shown.
        ratios: columns whose ratios to it are.
    """

    arms: list[Arm]
    common: list[str]
    columns: list[str]
    contrasts: dict[str, Pairs]
    differences: list[str] = field(default_factory=lambda: ["held-out reward"])
    ratios: list[str] = field(default_factory=lambda: ["largest grad norm"])


def slug(name: str) -> str:
    """A name as a file's."""
    return "-".join(name.replace(",", "").replace("/", "").lower().split())


PRECISIONS = ("bf16", "fp8", "nvfp4_naive", "4bitter")
LAGS = (0, 2, 8)
HEALTH = ["held-out reward", "reward, all steps", "mean |Δlogprob|", "effective sample size",
          "largest grad norm", "spikes", "diverged"]  # fmt: skip


def cell(recipe: str, lag: int, cure: str) -> str:
    """Name of an arm of the experiment ``staleness``."""
    return f"{recipe}, staleness {lag}, {cure}"


def _staleness() -> Experiment:
    """Precision x staleness x cure; `reinforce`, so that without a cure nothing is corrected."""
    arms = [
        Arm(cell(recipe, lag, cure), recipe, (f"rollout.max_staleness={lag}", *callbacks))
        for recipe in PRECISIONS
        for lag in LAGS
        for cure, callbacks in CURES.items()
    ]

    def pairs(this: tuple[int, str], other: tuple[int, str]) -> Pairs:
        return tuple((slug(cell(r, *this)), slug(cell(r, *other))) for r in PRECISIONS)

    contrasts: dict[str, Pairs] = {}
    for lag in LAGS[1:]:
        contrasts[f"staleness {lag} − 0, no cure"] = pairs((lag, "none"), (0, "none"))
    for recipe in PRECISIONS[1:]:
        for lag in LAGS:
            pair = slug(cell(recipe, lag, "none")), slug(cell("bf16", lag, "none"))
            contrasts[f"{recipe} − bf16, staleness {lag}, no cure"] = (pair,)
    for cure in list(CURES)[1:]:
        for lag in LAGS:
            name = f"{cure} − none, staleness {lag}, all precisions"
            contrasts[name] = pairs((lag, cure), (lag, "none"))
    differences = ["held-out reward", "mean |Δlogprob|", "effective sample size"]
    common = [*SHORT, "grpo.loss=reinforce"]
    return Experiment(arms, common, HEALTH, contrasts, differences)


STALE = "rollout.max_staleness=8"
FURTHER = {
    "none": (),
    "MIS": ("callbacks.masked_importance_sampling={}",),
    "rejection of completions": ("callbacks.rejection_sampling={level: sequence}",),
    "TIS and score centering": (*CURES["TIS"], *CURES["score centering"]),
    "VCPO and sequence TIS": (
        "callbacks.vcpo={}",
        "callbacks.truncated_importance_sampling={level: sequence, cap: 8.0}",
    ),
    "clip": ("grpo.loss=dapo",),
}


def _cures() -> Experiment:
    """The other cures, and the clip of the recipes' loss, whose ratio is against the sampler."""
    recipes = ("4bitter",)
    arms = [
        Arm(f"{recipe}, {cure}", recipe, (STALE, "grpo.loss=reinforce", *given))
        for recipe in recipes
        for cure, given in FURTHER.items()
    ]
    contrasts = {
        f"{cure} − none": tuple((slug(f"{r}, {cure}"), slug(f"{r}, none")) for r in recipes)
        for cure in list(FURTHER)[1:]
    }
    differences = ["held-out reward", "mean |Δlogprob|", "effective sample size"]
    return Experiment(arms, SHORT, HEALTH, contrasts, differences)


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
    contrasts: dict[str, Pairs] = {
        f"{arm.name} − all three": ((arm.slug, "all-three"),) for arm in arms[1:]
    }
    columns = ["held-out reward", "mean |Δlogprob|", "largest grad norm", "spikes", "diverged"]
    common = [*SHORT, STALE, "grpo.loss=reinforce"]
    return Experiment(arms, common, columns, contrasts)


def _fixed(name: str, kept: list[str]) -> Arm:
    gone = [FIX[fix] for fix in FIX if fix not in kept]
    without = tuple(callback for callbacks, _ in gone for callback in callbacks)
    overrides = tuple(override for _, given in gone for override in given)
    return Arm(name, "4bitter_moe", overrides, without)


def _replay() -> Experiment:
    """Router replay on the mixture, where the sampler differs by precision and by age."""
    sampler = ("callbacks.forward_quantization.side=rollout",)
    cases = {
        "NVFP4 sampler": ("nvfp4_naive", sampler),
        "4bitter_moe, staleness 8": ("4bitter_moe", (STALE,)),
    }
    arms: list[Arm] = []
    contrasts: dict[str, Pairs] = {}
    for name, (recipe, given) in cases.items():
        own = ("policy.name=embedded-moe", *given)
        live = Arm(f"{name}, live", recipe, own)
        replayed = Arm(f"{name}, replayed", recipe, (*own, "callbacks.router_replay={}"))
        arms += [live, replayed]
        contrasts[f"replayed − live, {name}"] = ((replayed.slug, live.slug),)
    columns = ["held-out reward", "mean |Δlogprob|", "k3 KL", "extreme tokens",
               "largest grad norm", "spikes"]  # fmt: skip
    ratios = ["k3 KL", "extreme tokens", "largest grad norm"]
    steps = [override.replace("max_steps=60", "max_steps=30") for override in SHORT]
    return Experiment(arms, steps, columns, contrasts, ratios=ratios)


def _noise() -> Experiment:
    """QeRL's noise on the sampler, with 4-bit weights as theirs and without."""
    arms: list[Arm] = []
    contrasts: dict[str, Pairs] = {}
    for recipe in ("bf16", "nvfp4_w4a16"):
        quiet = Arm(f"{recipe}, no noise", recipe)
        noisy = ("callbacks.adaptive_quantization_noise={sigma_start: 0.05, sigma_end: 0.0005}",)
        noise = Arm(f"{recipe}, noise", recipe, noisy)
        arms += [quiet, noise]
        contrasts[f"noise − none, {recipe}"] = ((noise.slug, quiet.slug),)
    columns = ["held-out reward", "sampler's entropy", "entropy, all steps",
               "entropy, last steps", "mean |Δlogprob|"]  # fmt: skip
    differences = columns[:-1]
    return Experiment(arms, SHORT, columns, contrasts, differences, ratios=[])


EXPERIMENTS = {
    "staleness": _staleness(),
    "cures": _cures(),
    "five-arms": _five_arms(),
    "replay": _replay(),
    "noise": _noise(),
}
