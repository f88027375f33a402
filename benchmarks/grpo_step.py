"""A GRPO step on the CPU: ours beside TRL's, sampling beside transformers', and where time goes.

    pip install trl accelerate datasets      # the peer; without it the rest is measured
    python benchmarks/grpo_step.py
    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py --rounds 3 --json step.json

All train the embedded policy on 2-digit arithmetic in FP32: 32 prompts of 16 completions a step, at
most 8 new tokens, temperature 1, DAPO's loss, AdamW, one update a rollout, on the same prompts in
the same order. The learning rate is too small to change what is sampled, so that everybody's
completions are alike. They take turns, a few steps each, in one process; times are medians.

What TRL is given, for it to be as fast as it can be here: `use_cpu`, no BF16, no gradient
checkpointing, the whole batch at once, `beta=0` (no reference), nothing logged or saved, no workers
of the data loader, no pinning. Its vLLM needs a GPU. Ours runs as under `qrl fit`, without MLflow,
checkpoints, the live view and evaluations.

The tables:

1. a step, and its parts; ratios to our step without quantization. A part's time is its own:
   `batch` is tokenizing, decoding, advantages and padding, `forward` has the loss and the metrics
   in it, `optimizer` the clipping and the gradient norm, `loop` is what is left.
2. Lightning's share: the same module in a plain Python loop.
3. sampled tokens a second, with their log-probabilities: beside `generate` of transformers.
4. the log-probabilities of 4096 tokens over 50 000 entries, forward and backward: in chunks, and at
   once; each in a process of its own, whose peak memory is what is told.
5. the floor: what the multiplications of a step (matrices and attention, counted by torch) would
   take at the rate of a 1024 x 1024 x 1024 GEMM on this machine.
"""

import argparse
import importlib.util
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from _parties import GROUP, NEW_TOKENS, PARTS, TRL, Ours, Party, PlainLoop
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_qrl.logprobs import head_logprobs, token_logprobs
from lightning_qrl.reports.tables import text_table

RECIPES = {"ours, base": "base", "ours, bf16": "bf16", "ours, 4bitter": "4bitter"}
BASE, PEER, PLAIN = "ours, base", "TRL", "ours, in a plain loop"
HIDDEN = 256  # of the policy whose log-probabilities are taken over a large vocabulary
WAYS = ("chunked", "at once")
Row = dict[str, float]


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="turns that each takes")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="every part once, at a small size")
    parser.add_argument("--json", type=Path, help="write all numbers here too")
    parser.add_argument("--logprobs", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=2, default=[4096, 50_000], metavar=("N", "V"))
    args = parser.parse_args()
    if args.logprobs:
        return print(json.dumps(logprob_pass(args.logprobs, *args.size)))
    if args.quick:
        args.rounds, args.steps, args.prompts, args.size = 1, 1, 2, [256, 1000]
    quiet()
    ours = {name: Ours(recipe, args.prompts) for name, recipe in RECIPES.items()}
    parties: dict[str, Party] = {**ours, PLAIN: PlainLoop(ours[BASE])}
    if importlib.util.find_spec("trl"):
        parties[PEER] = peer(ours[BASE], args.rounds * args.steps + 1)
    take_turns(parties, args.rounds, args.steps)
    found: dict[str, dict[str, Row]] = {
        "step": {name: party.stopwatch.milliseconds() for name, party in parties.items()},
        "sampling": sampling(ours[BASE], args.rounds * args.steps),
        "logprobs": {way: in_its_own_process(way, args.size) for way in WAYS},
        "floor": {BASE: floor(ours[BASE])},
    }
    print(report(found, args))
    if PEER not in parties:
        print("TRL is not installed: pip install trl accelerate datasets")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return None


def quiet() -> None:
    """Let nobody write into the tables."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def peer(ours: Ours, steps: int) -> TRL:
    """TRL with the prompts that ours is given."""
    prompts = [prompt for phase in range(steps) for prompt in ours.data.phase_prompts(phase)]
    module = ours.module
    return TRL(module.policy, module.task, prompts, ours.data.prompts_per_rollout)


def take_turns(parties: dict[str, Party], rounds: int, steps: int) -> None:
    """Everybody warms up, then trains a few steps in turn."""
    for party in parties.values():
        party.segment(1)
        party.stopwatch.steps.clear()
    for _ in range(rounds):
        for party in parties.values():
            party.segment(steps)


def sampling(ours: Ours, rounds: int) -> dict[str, Row]:
    """Milliseconds and tokens a second of the engine and of `generate`, on one step's prompts."""
    module = ours.module
    prompts = [module.policy.encode(p.text) for p in ours.data.phase_prompts(0)]
    engine, model, policy = module.engine, module.model.eval(), module.policy
    engine.sync(model, 0)
    width = max(map(len, prompts))
    ids = torch.tensor([[policy.pad_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def engine_tokens(seed: int) -> int:
        return sum(len(c.token_ids_N) for c in engine.generate(prompts, samples=GROUP, seed=seed))

    @torch.no_grad()
    def generate_tokens(seed: int) -> int:
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=GROUP,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=policy.pad_id,
            eos_token_id=policy.eos_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[:, width:]
        token_logprobs(torch.stack(output.logits, dim=1), tokens)
        ended = (tokens == policy.eos_id).int()
        return int((ended.cumsum(dim=1) - ended == 0).sum())

    times: dict[str, list[tuple[float, int]]] = {"ours": [], "transformers": []}
    for seed in range(1 + rounds):
        for name, sample in (("ours", engine_tokens), ("transformers", generate_tokens)):
            start = time.perf_counter()
            tokens = sample(seed)
            times[name].append((time.perf_counter() - start, tokens))
    return {
        name: {
            "ms": 1e3 * statistics.median(s for s, _ in measured[1:]),
            "tokens a second": statistics.median(n / s for s, n in measured[1:]),
        }
        for name, measured in times.items()
    }


def logprob_pass(way: str, tokens: int, vocabulary: int) -> Row:
    """Time and peak memory of the log-probabilities of a batch, forward and backward."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    before, start = peak_mib(), time.perf_counter()
    if way == "chunked":
        logprobs, entropy, *_ = head_logprobs(hidden, head, vocabulary, targets)
    else:
        all_logprobs = head(hidden).log_softmax(dim=-1)
        logprobs = all_logprobs.gather(-1, targets[:, None])
        with torch.no_grad():
            entropy = torch.special.entr(all_logprobs.exp()).sum(dim=-1)
    logprobs.sum().backward()
    seconds = time.perf_counter() - start
    assert hidden.grad is not None
    assert head.weight.grad is not None
    return {
        "ms": 1e3 * seconds,
        "peak MiB": peak_mib() - before,
        "sum of log-probabilities": float(logprobs.detach().double().sum()),
        "sum of entropies": float(entropy.double().sum()),
        "norm of the head's gradient": float(head.weight.grad.double().norm()),
        "norm of the input's gradient": float(hidden.grad.double().norm()),
    }


def peak_mib() -> float:
    """The most memory that this process has held; `getrusage` would count its parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def in_its_own_process(way: str, size: list[int]) -> Row:
    """`logprob_pass`, where nothing else has raised the peak."""
    command = [sys.executable, __file__, "--logprobs", way, "--size", *map(str, size)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: Row = json.loads(output.splitlines()[-1])
    return row


def floor(ours: Ours) -> Row:
    """What a step multiplies, and how long that takes at the best rate of this machine."""
    with FlopCounterMode(display=False) as counter:
        PlainLoop(ours).segment(0)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    rate = 2 * 1024**3 / statistics.median(times)
    flops = counter.get_total_flops()
    return {"GFLOP": flops / 1e9, "GFLOP/s": rate / 1e9, "ms": 1e3 * flops / rate}


def report(found: dict[str, dict[str, Row]], args: argparse.Namespace) -> str:
    """All tables."""
    step, threads = found["step"], torch.get_num_threads()
    ms = {name: row["step"] for name, row in step.items()}
    lines = [
        f"{args.prompts} x {GROUP} completions a step, {threads} threads, torch "
        f"{torch.__version__}; medians of {args.rounds} turns of {args.steps} steps, in ms\n",
        text_table(
            ["step", "ms", "x base", *PARTS],
            [
                [
                    name,
                    f"{row['step']:.0f}",
                    f"{row['step'] / ms[BASE]:.2f}",
                    *(f"{row[part]:.0f}" if name != PLAIN else "" for part in PARTS),
                ]
                for name, row in step.items()
            ],
        ),
        f"Lightning's share of a step: {1 - ms[PLAIN] / ms[BASE]:.1%}\n",
        table("sampling", found["sampling"]),
        table(f"log-probabilities, {args.size[0]} x {args.size[1]}", found["logprobs"]),
        table("multiplications alone", found["floor"]),
    ]
    return "\n".join(lines)


def table(title: str, rows: dict[str, Row]) -> str:
    """Rows of the same measures."""
    measures: list[Any] = list(next(iter(rows.values())))
    texts = [[name, *(f"{row[m]:,.7g}" for m in measures)] for name, row in rows.items()]
    return text_table([title, *measures], texts)


if __name__ == "__main__":
    main()
