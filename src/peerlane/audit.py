"""``peerlane audit``: read hosts, or files that somebody saved, and judge them."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import EvidenceSet, load, read_stream, save
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import SEVERITIES, Finding, Severity
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.redact import Redactor
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import audit_json
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.drift import compare_rows
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.join import JoinedFleet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.registry import Fleet
from peerlane import hosts, output, redaction
from peerlane.fleet import KEPT_CHARACTERS, Aside, FleetOfFiles

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
    # Snapshots and findings hold no cycles: the collector of these only goes through all of them, again and again.
    gc.set_threshold(50_000)
    # Only JSON is written host by host; for the other formats all of them are kept.
    fleet = FleetOfFiles(KEPT_CHARACTERS if arguments.format == "json" else None)
    for one in intake.hosts(files, stdin, problems):
        again = functools.partial(_again, one.folder, one.host, redactor) if one.folder else None
        if redactor is not None:
            one = redactor.evidence(one)
            if arguments.save:
                _keep(one, arguments.save.expanduser())
        fleet.add(one, again)
    for problem in problems:
        output.say(f"peerlane: {problem}")
    if arguments.format == "json" and len(fleet) > audit_json.INDENTED_HOSTS:
        return _stream(arguments, fleet)
    findings = engine.judge(fleet)
    text = _rendered(arguments, fleet, findings)
    output.write_result(text if text.endswith("\n") else text + "\n", arguments.output)
    return verdict_code(findings, arguments.fail_on)


def _again(folder: str, host: str, redactor: Redactor | None) -> EvidenceSet:
    try:
        evidence = replace(load(Path(folder)), host=host)
    except InputError as error:
        raise InputError(f"changed while the audit read it ({error.line()})", folder, "audit once more") from None
    return evidence if redactor is None else redactor.evidence(evidence)


def _stream(arguments: argparse.Namespace, fleet: FleetOfFiles) -> int:
    """Judge one group of hosts after the other, and write each host as soon as it is its turn."""
    joined = JoinedFleet(fleet, fleet.cards)
    group_of = {host: group for group in joined.groups() for host in group}
    summary = audit_json.Summary()
    codes = set()

    def hosts() -> Iterator[tuple[str, str]]:
        waiting = Aside()
        for host in sorted(fleet):
            text = waiting.take(host)
            if text is None:
                found = engine.judge_group(joined, group_of[host])
                codes.add(verdict_code(found, arguments.fail_on))
                for one, findings in found.items():
                    summary.add(one, findings)
                    waiting.put(one, audit_json.host_text(fleet[one], findings))
                fleet.release(found)
                text = waiting.take(host)
            yield host, text or ""

    drift = compare_rows(fleet.rows)
    output.write_result(audit_json.pieces(hosts(), summary, drift, _now()), arguments.output)
    return max(codes)


def _keep(evidence: EvidenceSet, place: Path) -> None:
    try:
        save(evidence, place / evidence.host)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", str(place), "choose another --save DIR") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _rendered(arguments: argparse.Namespace, fleet: Fleet, findings: Mapping[str, Sequence[Finding]]) -> str:
    now = _now()
    if arguments.format == "json":
        return audit_json.text(audit_json.document(fleet, findings, generated_at=now))
    if arguments.format == "html":
        # Each format brings its own imports; Jinja2's takes longer than most audits.
        from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import html

        return html.render(fleet, findings, generated_at=now)
    if arguments.format == "markdown":
        from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import markdown

        return markdown.render(fleet, findings, generated_at=now)
    from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import terminal

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
