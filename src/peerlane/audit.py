"""``peerlane audit``: read hosts, or files that somebody saved, and judge them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import read_stream
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import SEVERITIES, Finding, Severity
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import audit_json, terminal
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from peerlane import hosts, output

FORMATS = ("text", "json")
LATER_FORMATS = ("html", "markdown")

# A report is for people: wider lines are hard to read, and a pipe has no width.
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    hosts.add_arguments(parser, required=False)
    parser.add_argument(
        "--from",
        dest="paths",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="judge saved files instead: snapshot folders, files with pasted output, or - for stdin",
    )
    parser.add_argument("--format", default="text", metavar="FORMAT", help="text (default) or json")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result to a file")
    parser.add_argument(
        "--fail-on",
        choices=[*SEVERITIES, "never"],
        default="high",
        metavar="SEVERITY",
        help="exit with 1 from this severity on: critical, high (default), medium, low, info, never",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the snapshot of each host, for --from")


def run(arguments: argparse.Namespace) -> int:
    """Audit, print, and return the exit code."""
    if arguments.format in LATER_FORMATS:
        raise InputError("comes with a later release", f"--format {arguments.format}", "use text or json")
    if arguments.format not in FORMATS:
        raise InputError("there is no such format", f"--format {arguments.format}", "use text or json")
    if arguments.paths and (arguments.inventory or arguments.save):
        raise InputError("--from reads files only", "", "leave out -i and --save")
    if arguments.paths:
        return _report(arguments, [Path(path) for path in arguments.paths])
    if not arguments.inventory:
        raise InputError("nothing to audit", "", "give -i INVENTORY for hosts, or --from PATH for saved files")
    return _live(arguments)


def _live(arguments: argparse.Namespace) -> int:
    from peerlane import passwords, playbook

    target = hosts.target(arguments, read_only=True)
    folder = playbook.run_folder("audit")
    place = arguments.save.expanduser().resolve() if arguments.save else folder / "snapshots"
    _make(place)
    outcome = playbook.run(
        "audit",
        target,
        extra={**target.extra, "peerlane_save_to": str(place)},
        verbose=arguments.verbose,
        become_password=passwords.ask(arguments.ask_become_pass),
        folder=folder,
    )
    outcome.complain()
    # Only what this run read: the folder may hold older snapshots of other hosts.
    read = [place / name for name in outcome.results.get("host_evidence", {}) if (place / name).is_dir()]
    code = outcome.exit_code()
    if not read or outcome.interrupted:
        return code or output.EXIT_FAILED
    verdict = _report(arguments, read)
    if arguments.save:
        output.say(f"peerlane: snapshots are in {place}; judge them again with: peerlane audit --from {place}")
    return code or verdict


def _make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", str(place), "choose another --save DIR") from None


def _report(arguments: argparse.Namespace, paths: Sequence[Path]) -> int:
    stdin = read_stream(sys.stdin.buffer) if Path("-") in paths else None
    files = [path for path in paths if path != Path("-")]
    problems: list[str] = []
    # One host at a time: of ten thousand snapshots only what was read from them is kept, not their text.
    fleet = {one.host: snapshot.build(one) for one in intake.hosts(files, stdin, problems)}
    for problem in problems:
        output.say(f"peerlane: {problem}")
    findings = engine.judge(fleet)
    if arguments.format == "json":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        document = audit_json.document(fleet, findings, generated_at=now)
        text = json.dumps(document, indent=1, sort_keys=False, allow_nan=False) + "\n"
    else:
        to_terminal = arguments.output is None and sys.stdout is not None and sys.stdout.isatty()
        width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
        color = to_terminal and not os.environ.get("NO_COLOR")
        text = terminal.render(fleet, findings, verbose=arguments.verbose, color=color, width=width)
    output.write_result(text if text.endswith("\n") else text + "\n", arguments.output)
    return verdict_code(findings, arguments.fail_on)


def verdict_code(findings: Mapping[str, Sequence[Finding]], fail_on: str) -> int:
    """Return 1 where a finding of this severity or a worse one blocks."""
    if fail_on == "never":
        return output.EXIT_OK
    blocking = any(engine.blocking(of_host, cast(Severity, fail_on)) for of_host in findings.values())
    return output.EXIT_BLOCKING if blocking else output.EXIT_OK
