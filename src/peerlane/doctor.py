"""``peerlane doctor``: is each host fit, before anything on it is changed?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from peerlane import hosts, output, passwords, playbook

_MARKS = {"ok": "ok  ", "warn": "WARN", "stop": "STOP", "unknown": "?   "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    hosts.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check each host and return the exit code: 1 where a host is not fit."""
    target = hosts.target(arguments)
    outcome = playbook.run(
        "doctor",
        target,
        extra=target.extra,
        verbose=arguments.verbose,
        become_password=passwords.ask(arguments.ask_become_pass),
    )
    answered = {
        name: result["ansible_facts"]["preflight"]
        for name, result in outcome.results.get("preflight", {}).items()
        if "preflight" in (result.get("ansible_facts") or {})
    }
    for name in sorted(answered):
        output.write_result(report(name, answered[name]))
        if outcome.hosts[name].state == "failed":
            # The verdict is in the report already, and an unfit host is a finding, no failure of the doctor.
            outcome.hosts[name].lines, outcome.hosts[name].blocked = (), True
    outcome.complain()
    return outcome.exit_code()


def report(name: str, facts: Mapping[str, Any]) -> str:
    """Return the checks of one host, one line each."""
    verdict = "fit" if facts["fit"] else "not fit"
    lines = [f"{name}: {verdict}"]
    for one in facts["checks"]:
        todo = f"; {one['todo']}" if one["todo"] and one["state"] != "ok" else ""
        lines.append(f"  {_MARKS[one['state']]}  {one['text']}{todo}")
    return "\n".join(lines) + "\n\n"
