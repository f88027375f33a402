"""What `qrl doctor` shows: a line for each finding, and under it what to do about it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_qrl.probes import Verdict

LABEL = 16  # columns of what a finding is about


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: what it is.
        value: what it is like.
        remedy: what to do about it; empty where there is nothing to do.
        broken: whether no run can do without.
    """

    what: str
    value: str
    remedy: str = ""
    broken: bool = False


def finding_text(finding: Finding) -> str:
    """Its line, and one for the remedy."""
    return _lines(finding.what, finding.value, [finding.remedy] if finding.remedy else [])


def verdict_text(verdict: Verdict) -> str:
    """A line for a probe; where it failed, what came and what to suspect too."""
    probe = verdict.probe
    if verdict.passed:
        return _lines(probe.name, f"passed in {verdict.seconds:.1f} s  {probe.what}", [])
    failed = [f"{c.what}: {c.found}" for c in verdict.checks if not c.passed]
    value = f"FAILED in {verdict.seconds:.1f} s  {probe.what}"
    return _lines(probe.name, value, [*failed, f"suspect {probe.suspect}"])


def closing_text(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> str:
    """All in one line."""
    broken = [finding.what for finding in findings if finding.broken]
    failed = [verdict.probe.name for verdict in verdicts if not verdict.passed]
    said = [f"broken: {', '.join(broken)}"] if broken else []
    if failed:
        begin = f"; begin with {failed[0]}, the others stand on it" if failed[1:] else ""
        said.append(f"probes failed: {', '.join(failed)}{begin}")
    return "; ".join(said) or "all is well"


def is_well(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> bool:
    """Whether nothing is broken and no probe failed."""
    return not any(f.broken for f in findings) and all(v.passed for v in verdicts)


def doctor_json(findings: Sequence[Finding], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "well": is_well(findings, verdicts),
        "machine": [asdict(finding) for finding in findings],
        "probes": [
            {
                "name": verdict.probe.name,
                "passed": verdict.passed,
                "seconds": round(verdict.seconds, 3),
                "checks": [asdict(check) for check in verdict.checks],
                "suspect": "" if verdict.passed else verdict.probe.suspect,
            }
            for verdict in verdicts
        ],
    }


def _lines(label: str, value: str, more: Sequence[str]) -> str:
    return "\n".join([f"{label:{LABEL}}{value}", *(f"{'':{LABEL}}> {line}" for line in more)])
