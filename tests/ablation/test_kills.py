"""An ablation is killed at twenty random moments, and ends as if nothing had happened."""

import random
import signal
import subprocess
import time

import pytest
from ablations import Ablation, children_of, kill, make_ablation

KILLS = 20
STEPS = 200
WAYS = ("all", "parent", "child", "asked")
ARMS = {("full", 0), ("empty", 0), ("full", 1), ("empty", 1)}


def kill_somehow(way: str, process: subprocess.Popen[str], rng: random.Random) -> bool:
    """Kill what is said: SIGKILL, or SIGTERM if it is asked; False if there is nothing to kill."""
    children = children_of(process.pid)
    if process.poll() is not None or (way == "child" and not children):
        return False
    if way == "all":
        kill([process.pid, *children])
    elif way == "child":
        kill([rng.choice(children)])
    else:
        process.send_signal(signal.SIGTERM if way == "asked" else signal.SIGKILL)
    return True


def kill_at_random(ablation: Ablation, ways: list[str], seconds: float, rng: random.Random) -> None:
    """Start an ablation again and again; each time, kill it within so many seconds.

    Takes from the end of the list each way that met something to kill, until none is left or the
    ablation is over.
    """
    code = 1
    while ways and code:
        process = ablation.start()
        ends = time.monotonic() + rng.uniform(0.1, seconds)
        while ways and process.poll() is None:
            time.sleep(max(0.0, ends - time.monotonic()))
            if not kill_somehow(ways[-1], process, rng):
                ends = time.monotonic() + 1.0
                continue
            print(len(ways), ways[-1], flush=True)
            if ways.pop() != "child":
                break
            ends = time.monotonic() + rng.uniform(0.1, seconds)  # the others go on
        process.communicate()
        code = process.returncode


@pytest.mark.slow
def test_twenty_kills_change_no_weight(tmp_path, tiny_policy):
    options = ("--seeds", "2", "--jobs", "2")
    undisturbed = make_ablation(tmp_path / "whole", tiny_policy.name, *options, steps=STEPS)
    began = time.monotonic()
    code, said = undisturbed.finish()
    took = time.monotonic() - began
    assert code == 0, said
    weights = undisturbed.weights()
    assert len(set(weights.values())) == len(ARMS)
    rng = random.Random(6)
    ways = [WAYS[number % len(WAYS)] for number in range(KILLS)]
    rng.shuffle(ways)
    designs = 0
    while ways:  # a fast machine ends a design before it has been killed so often
        designs += 1
        folder = tmp_path / f"killed{designs}"
        killed = make_ablation(folder, tiny_policy.name, *options, steps=STEPS)
        kill_at_random(killed, ways, took / 5, rng)
        code, said = killed.finish()
        assert code == 0, said
        check(killed, weights)
    print(f"{KILLS} kills in {designs} designs, undisturbed {took:.0f} s")


def check(killed: Ablation, weights: dict[tuple[str, int], bytes]) -> None:
    """See that an ablation has ended as the undisturbed one did."""
    found = {key: run.info.status for key, run in killed.counting().items()}
    assert found == dict.fromkeys(ARMS, "FINISHED")
    assert killed.weights() == weights
    assert [run.info.status for run in killed.parents()] == ["FINISHED"]
    assert "RUNNING" not in {run.info.status for run in killed.runs()}
    print(f"runs redone {len(killed.runs()) - len(ARMS)}")
