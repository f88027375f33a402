"""The simulator's page, moved as a person does, and what Python says that it shows."""

from typing import Any

from lightning_qrl.simulator.reference import simulate
from lightning_qrl.simulator.settings import Settings
from lightning_qrl.simulator.summary import summarize


def move(page: Any, key: str, value: Any) -> None:
    """Set a control as a person does: an event, not an assignment."""
    if isinstance(value, bool):
        page.locator(f"#{key}").set_checked(value)
    elif isinstance(value, str):
        page.locator(f"input[name={key}][value={value}]").check(force=True)
    else:
        page.locator(f"#{key}").fill(str(value))


def until(page: Any, holds: str) -> None:
    """Wait for what JavaScript says; the page's policy bars playwright's own way to."""
    for _ in range(600):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came: {holds}")


def shown(page: Any) -> dict[str, str]:
    return page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('#outcome dd[data-outcome]')]"
        ".map((cell) => [cell.dataset.outcome, cell.textContent]))"
    )


def wanted(settings: Settings) -> dict[str, str]:
    trace = simulate(settings)
    of = summarize(trace)
    verdict = "stable" if of.diverged_at_step is None else f"diverged at {of.diverged_at_step}"
    return {
        "final_reward": f"{of.final_reward:.3f}",
        "verdict": "no step" if of.why_no_step else verdict,
        "final_drift": f"{of.final_drift:.2f}",
        "optimizer_steps": str(of.optimizer_steps),
        "mean_staleness": f"{of.mean_staleness:.2f}",
        "discarded": str(of.discarded),
        "quantization_floor": f"{of.quantization_floor:.4f}",
        "sampler_utilization": f"{100 * trace.sampler_utilization:.0f}%",
        "trainer_utilization": f"{100 * trace.trainer_utilization:.0f}%",
    }
