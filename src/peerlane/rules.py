"""``peerlane rules``: what each rule looks at, why, and what its fix risks."""

from __future__ import annotations

import argparse
import difflib
import textwrap

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import RUNGS
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine  # noqa: F401  loads every rule
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.registry import RULES, Rule
from peerlane import output

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("id", nargs="?", metavar="ID", help="show this rule only, with all that it says about itself")


def run(arguments: argparse.Namespace) -> int:
    """Print the rules and return the exit code."""
    if arguments.id is None:
        width = max(len(name) for name in RULES)
        rows = [f"{one.id:{width}}  {one.severity:8}  {one.title}" for one in RULES.values()]
        output.write_result("\n".join(rows) + "\n")
        return output.EXIT_OK
    by_name = {name.upper(): one for one in RULES.values() for name in (one.id, one.name)}
    rule = by_name.get(arguments.id.upper())
    if rule is None:
        near = difflib.get_close_matches(arguments.id.upper(), list(by_name), n=1)
        todo = f"did you mean {by_name[near[0]].id}?" if near else "list them with: peerlane rules"
        raise InputError(f"there is no rule {arguments.id}", "", todo)
    output.write_result(describe(rule))
    return output.EXIT_OK


def describe(rule: Rule) -> str:
    """Return all that a rule says about itself, as text."""
    rows = [
        ("why", rule.why),
        ("machines", ", ".join(rule.roles)),
        ("severity", rule.severity),
        ("looks at", ", ".join(rule.looks_at)),
        ("rung", f"{rule.rung} ({RUNGS[rule.rung]})" if rule.rung is not None else ""),
        ("fix needs", rule.restart.replace("_", " ") if rule.restart != "none" else "no restart"),
        ("automation", rule.automation),
        ("risk", rule.risk),
        ("seen gain", f"{rule.gain.value} {rule.gain.unit} ({rule.gain.source})" if rule.gain else ""),
        ("verify", rule.verify),
        ("sources", ", ".join(rule.sources)),
    ]
    lines = [f"{rule.id} {rule.name}: {rule.title}"]
    for name, text in rows:
        if text:
            lead = f"  {name:10}  "
            lines.append(textwrap.fill(text, _WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead)))
    return "\n".join(lines) + "\n"
