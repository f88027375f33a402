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


def kill_at_random(ablation: Ablation, kills: int, seconds: float) -> dict[str, int]:
    """Start an ablation again and again; each time, kill it within so many seconds.

    Returns:
        How often each way of killing met something to kill.
    """
    rng = random.Random(6)
    met = dict.fromkeys(WAYS, 0)
    ways = [WAYS[number % len(WAYS)] for number in range(kills)]
    rng.shuffle(ways)
    while ways:
        process = ablation.start()
        ends = time.monotonic() + rng.uniform(0.1, seconds)
        while ways and process.poll() is None:
            time.sleep(max(0.0, ends - time.monotonic()))
            if not kill_somehow(ways[-1], process, rng):
                ends = time.monotonic() + 1.0
                continue
            met[ways[-1]] += 1
            print(sum(met.values()), ways[-1], flush=True)
            if ways.pop() != "child":
                break
            ends = time.monotonic() + rng.uniform(0.1, seconds)  # the others go on
        said, _ = process.communicate()
        assert process.returncode, f"over after {met}: {said}"
    return met


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
    killed = make_ablation(tmp_path / "killed", tiny_policy.name, *options, steps=STEPS)
    met = kill_at_random(killed, KILLS, took / 5)
    assert sum(met.values()) == KILLS
    code, said = killed.finish()
    assert code == 0, said
    assert {key: run.info.status for key, run in killed.counting().items()} == dict.fromkeys(
        ARMS, "FINISHED"
    )
    assert killed.weights() == weights
    assert [run.info.status for run in killed.parents()] == ["FINISHED"]
    assert "RUNNING" not in {run.info.status for run in killed.runs()}
    redone = len(killed.runs()) - len(ARMS)
    print(f"kills {met}, runs redone {redone}, undisturbed {took:.0f} s")
