"""``peerlane audit``: read hosts, or files that somebody saved, and judge them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import EvidenceSet, read_stream, save
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import SEVERITIES, Finding, Severity
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.redact import Redactor
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import audit_json, markdown, terminal
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.registry import Fleet
from peerlane import hosts, output, redaction

FORMATS = ("text", "json", "html", "markdown")
_BY_SUFFIX = {".json": "json", ".html": "html", ".htm": "html", ".md": "markdown", ".markdown": "markdown"}

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
    parser.add_argument("--format", metavar="FORMAT", help="text, json, html or markdown (default: by -o, else text)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result to a file")
    parser.add_argument(
        "--fail-on",
        choices=[*SEVERITIES, "never"],
        default="high",
        metavar="SEVERITY",
        help="exit with 1 from this severity on: critical, high (default), medium, low, info, never",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the snapshot of each host, for --from")
    parser.add_argument(
        "--redact",
        action="store_true",
        help="put masks in place of UUIDs, serial numbers, host names and addresses, in the report and with --save",
    )
    parser.add_argument(
        "--redact-key",
        metavar="KEY",
        help="words or @FILE that give the masks (default: a key of your own, made once); the same key, the same masks",
    )


def run(arguments: argparse.Namespace) -> int:
    """Audit, print, and return the exit code."""
    arguments.format = arguments.format or _format_of(arguments.output)
    if arguments.format not in FORMATS:
        raise InputError("there is no such format", f"--format {arguments.format}", "use text, json, html or markdown")
    if arguments.output is not None:
        # Before hosts are read: a result that cannot be kept is no reason to make somebody wait.
        output.check_place(arguments.output)
    if arguments.redact_key is not None and not arguments.redact:
        raise InputError("--redact-key needs --redact", "", "add --redact")
    if arguments.paths and (arguments.inventory or (arguments.save and not arguments.redact)):
        raise InputError("--from reads files only", "", "leave out -i and --save")
    masks = redaction.key(arguments.redact_key) if arguments.redact else None
    if arguments.paths:
        return _report(arguments, [Path(path) for path in arguments.paths], masks)
    if not arguments.inventory:
        raise InputError("nothing to audit", "", "give -i INVENTORY for hosts, or --from PATH for saved files")
    return _live(arguments, masks)


def _format_of(place: Path | None) -> str:
    return _BY_SUFFIX.get(place.suffix.lower(), "text") if place is not None else "text"


def _live(arguments: argparse.Namespace, masks: bytes | None) -> int:
    from peerlane import passwords, playbook

    target = hosts.target(arguments, read_only=True)
    folder = playbook.run_folder("audit")
    wanted = arguments.save.expanduser().resolve() if arguments.save else None
    # What has not been redacted yet is for nobody else's eyes.
    place = wanted if wanted and masks is None else folder / "snapshots"
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
    verdict = _report(arguments, read, masks)
    if wanted:
        output.say(f"peerlane: snapshots are in {wanted}; judge them again with: peerlane audit --from {wanted}")
    return code or verdict


def _make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", str(place), "choose another --save DIR") from None


def _report(arguments: argparse.Namespace, paths: Sequence[Path], masks: bytes | None) -> int:
    stdin = read_stream(sys.stdin.buffer) if Path("-") in paths else None
    files = [path for path in paths if path != Path("-")]
    problems: list[str] = []
    redactor = None
    if masks is not None:
        redactor = Redactor(masks)
        for one in intake.hosts(files, stdin, []):
            redactor.learn(one)
    fleet = {}
    # One host at a time: of ten thousand snapshots only what was read from them is kept, not their text.
    for one in intake.hosts(files, stdin, problems):
        if redactor is not None:
            one = redactor.evidence(one)
            if arguments.save:
                _keep(one, arguments.save.expanduser())
        fleet[one.host] = snapshot.build(one)
    for problem in problems:
        output.say(f"peerlane: {problem}")
    findings = engine.judge(fleet)
    text = _rendered(arguments, fleet, findings)
    output.write_result(text if text.endswith("\n") else text + "\n", arguments.output)
    return verdict_code(findings, arguments.fail_on)


def _keep(evidence: EvidenceSet, place: Path) -> None:
    try:
        save(evidence, place / evidence.host)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", str(place), "choose another --save DIR") from None


def _rendered(arguments: argparse.Namespace, fleet: Fleet, findings: Mapping[str, Sequence[Finding]]) -> str:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if arguments.format == "json":
        return audit_json.text(audit_json.document(fleet, findings, generated_at=now))
    if arguments.format == "html":
        # Only this format needs Jinja2, whose import takes longer than most audits.
        from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import html

        return html.render(fleet, findings, generated_at=now)
    if arguments.format == "markdown":
        return markdown.render(fleet, findings, generated_at=now)
    to_terminal = arguments.output is None and sys.stdout is not None and sys.stdout.isatty()
    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
    color = to_terminal and not os.environ.get("NO_COLOR")
    return terminal.render(fleet, findings, verbose=arguments.verbose, color=color, width=width)


def verdict_code(findings: Mapping[str, Sequence[Finding]], fail_on: str) -> int:
    """Return 1 where a finding of this severity or a worse one blocks."""
    if fail_on == "never":
        return output.EXIT_OK
    blocking = any(engine.blocking(of_host, cast(Severity, fail_on)) for of_host in findings.values())
    return output.EXIT_BLOCKING if blocking else output.EXIT_OK
