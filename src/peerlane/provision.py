"""``peerlane provision``: the plan, the roles, and what came of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from peerlane import hosts, output, passwords, playbook


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    hosts.add_arguments(parser)
    parser.add_argument("--check", action="store_true", help="change nothing, and say what would be changed")
    parser.add_argument("--diff", action="store_true", help="show the differences in files")


def run(arguments: argparse.Namespace) -> int:
    """Provision and return the exit code."""
    target = hosts.target(arguments)
    if set(target.hosts) == set(target.hypervisors):
        what = "nothing to provision: every host is in the group hypervisors, which is only audited"
        raise InputError(what, ", ".join(target.inventory), "add the hosts that shall serve to another group")
    folder = playbook.run_folder("provision")
    flags = [flag for flag, wanted in (("--check", arguments.check), ("--diff", arguments.diff)) if wanted]
    outcome = playbook.run(
        "provision",
        target,
        extra={"peerlane_save_to": str(folder / "snapshots"), **target.extra},
        flags=flags,
        verbose=arguments.verbose,
        become_password=passwords.ask(arguments.ask_become_pass),
        folder=folder,
        live_results=frozenset({"provision_summary.plan"}),
    )
    for name, result in sorted(outcome.results.get("provision_summary.summary", {}).items()):
        changes = outcome.hosts[name].changed
        output.write_result(report(str(result.get("msg") or name), changes, arguments.check))
    outcome.complain()
    return outcome.exit_code()


def report(text: str, changed: Mapping[str, int], check: bool) -> str:
    """Return the summary of one host with its changed tasks by role after the host's name."""
    counts: dict[str, Any] = {role: count for role, count in changed.items() if count}
    told = ", ".join(f"{role} {count}" for role, count in counts.items()) or "nothing"
    label = "would change" if check else "changed"
    head, _, rest = text.partition("\n")
    return f"{head}\n  {label:15}  {told}\n{rest}\n\n"
