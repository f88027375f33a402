"""`qrl doctor`: what this machine can do, and whether GRPO is sound on it."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from lightning_qrl.cli.quiet import quiet_imports


class Format(StrEnum):
    """How to say it."""

    text = "text"
    json = "json"


def doctor(
    format: Annotated[
        Format, typer.Option("--format", help="text, or json for scripts.")
    ] = Format.text,
    no_probes: Annotated[
        bool, typer.Option("--no-probes", help="Look at the machine alone.")
    ] = False,
) -> None:
    """Say what this machine computes natively and what is emulated, and probe GRPO on it.

    Five tiny worlds with known answers are trained in; one that fails says which part to suspect.
    Nothing is recorded. Exit code 1 if a probe fails, or something is broken that runs need.

    Example: qrl doctor --format json
    """
    from rich.console import Console
    from rich.text import Text

    with quiet_imports():
        from lightning_qrl.launch.doctor import examine, probe
        from lightning_qrl.reports import doctor as report

    console, as_text = Console(soft_wrap=True), format is Format.text

    def show(text: str, style: str = "") -> None:
        if as_text:
            console.print(Text(text, style))

    findings, verdicts = [], []
    with Console(stderr=True).status("looking"):
        for finding in examine():
            findings.append(finding)
            show(report.finding_text(finding), _style(finding.broken, bool(finding.remedy)))
        for verdict in () if no_probes else probe():
            verdicts.append(verdict)
            show(report.verdict_text(verdict), _style(not verdict.passed))
    if as_text:
        show(report.closing_text(findings, verdicts))
    else:
        import json

        print(json.dumps(report.doctor_json(findings, verdicts), indent=2))
    sys.exit(0 if report.is_well(findings, verdicts) else 1)


def _style(bad: bool, warned: bool = False) -> str:
    return "red" if bad else "yellow" if warned else ""
