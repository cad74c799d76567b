"""`peerlane lab`: arguments in, exit code out. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from . import faults, operations, scenarios
from .image import DEFAULT_DISTRO, DISTROS
from .state import KINDS, USERS, Paths
from .system import LabError, Progress, install_requirements

EXIT_OK, EXIT_USAGE, EXIT_FAILED = 0, 2, 3
DESCRIPTION = (
    "Disposable hosts on this machine to try Peerlane on: containers with real systemd, SSH, apt and reboots, without "
    "a GPU; or virtual machines with simulated ones. State: $PEERLANE_LAB_DIR (default ~/.cache/peerlane/lab)."
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `lab` to an argparse subparsers object and return its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lab", help="disposable hosts on this machine to try Peerlane on", description=DESCRIPTION
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the lab's verbs to a parser."""
    verbs = parser.add_subparsers(dest="lab_verb", required=True, metavar="VERB")

    verb = verbs.add_parser("up", help="start hosts; makes them, and the base image, where needed")
    verb.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(operations.DEFAULT_NAMES)}")
    verb.add_argument("--distro", choices=sorted(DISTROS), help=f"default: {DEFAULT_DISTRO}")
    verb.add_argument(
        "--kind",
        choices=KINDS,
        help="container (default); proxmox: one with simulated Proxmox VE files; vm: QEMU with simulated GPUs",
    )
    verb.add_argument(
        "--scenario",
        choices=list(scenarios.SCENARIOS),
        metavar="SCENARIO",
        help=f"of a vm: {', '.join(scenarios.SCENARIOS)} (default: {scenarios.DEFAULT}); see `scenarios`",
    )
    verb.add_argument("--user", choices=USERS, help="login in the inventory: root (default), or admin with sudo")
    verb.add_argument("--install", action="store_true", help="first install what the lab needs on this machine")

    verb = verbs.add_parser("down", help="remove hosts and all they hold; the base images stay")
    verb.add_argument("names", nargs="*", metavar="NAME")
    verb.add_argument("--all", action="store_true", help="every host of this lab")
    verb.add_argument("--if-exists", action="store_true", help="a host that is not there is no error")
    verb.add_argument("--purge", action="store_true", help="with --all: also the base images and the lab's folder")

    verbs.add_parser("scenarios", help="what the virtual machines (--kind vm) can be")
    verbs.add_parser("status", help="name, release, address, state and starting time of each host")

    verb = verbs.add_parser("ssh", help="log in, or run a command")
    verb.add_argument("--user", choices=USERS)
    verb.add_argument("name", metavar="NAME")
    verb.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")

    kinds = "\n".join(f"  {kind:<9} {text}" for kind, text in faults.KINDS.items())
    verb = verbs.add_parser(
        "fault",
        help="give a host a fault, or take it away",
        description=f"Faults:\n{kinds}\nFor `power` the words mean what they say: off is without power.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("name", metavar="NAME")
    verb.add_argument("fault", choices=list(faults.KINDS), metavar="KIND", help=", ".join(faults.KINDS))
    verb.add_argument("switch", choices=("on", "off"))
    verb.add_argument("--for", type=float, dest="for_s", metavar="SECONDS", help="wait that long, then switch back")
    plain = faults.Options()
    verb.add_argument("--path", default=plain.path, help=f"disk: directory in the host (default {plain.path})")
    verb.add_argument("--free-mib", type=int, default=plain.free_mib, help=f"disk: default {plain.free_mib}")
    verb.add_argument("--delay-ms", type=int, default=plain.delay_ms, help=f"slow: default {plain.delay_ms}")
    verb.add_argument("--rate-kbit", type=int, default=plain.rate_kbit, help=f"slow: default {plain.rate_kbit}")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; returns 0, 2 (bad usage) or 3 (a host failed)."""
    try:
        return _run(args)
    except LabError as error:
        print(f"peerlane lab: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(args: argparse.Namespace) -> int:
    paths, progress = Paths.from_environment(), Progress()
    if args.lab_verb == "up":
        if args.install:
            install_requirements(progress)
        names = args.names or operations.DEFAULT_NAMES
        wish = operations.Wish(args.distro, args.kind, args.user, args.scenario)
        return _report(operations.up(paths, names, wish, progress))
    if args.lab_verb == "scenarios":
        for name, scenario in scenarios.SCENARIOS.items():
            print(f"{name:<20}{scenario.text}")
        return EXIT_OK
    if args.lab_verb == "down":
        return _down(args, paths, progress)
    if args.lab_verb == "status":
        print(status_table(operations.status(paths, faults.active)))
        return EXIT_OK
    if args.lab_verb == "fault":
        return _fault(args, paths, progress)
    operations.ssh(paths, args.name, args.words, args.user)


def _down(args: argparse.Namespace, paths: Paths, progress: Progress) -> int:
    if bool(args.names) == args.all or (args.purge and not args.all):
        print("peerlane lab: say `down NAME...`, `down --all` or `down --all --purge`", file=sys.stderr)
        return EXIT_USAGE
    existing = operations.existing_names(paths)
    names = sorted(existing) if args.all else [name for name in args.names if name in existing or not args.if_exists]
    code = _report(operations.down(paths, names, progress))
    if args.purge and code == EXIT_OK:
        operations.purge(paths, progress)
    return code


def _fault(args: argparse.Namespace, paths: Paths, progress: Progress) -> int:
    options = faults.Options(args.path, args.free_mib, args.delay_ms, args.rate_kbit)
    on = args.switch == "on"
    faults.switch(paths, args.name, args.fault, on, options, progress)
    if args.for_s is not None:
        try:
            time.sleep(max(args.for_s, 0))
        finally:
            faults.switch(paths, args.name, args.fault, not on, options, progress)
    return EXIT_OK


def status_table(rows: Sequence[operations.Row]) -> str:
    """Return the rows as an aligned table."""
    if not rows:
        return "no lab hosts; `peerlane lab up` makes one"
    table = [("NAME", "DISTRO", "KIND", "ADDRESS", "STATE", "SINCE", "FAULTS")]
    for row in rows:
        kind = "proxmox (simulated)" if row.kind == "proxmox" else row.kind
        kind = f"vm {row.scenario} (simulated GPUs)" if row.kind == "vm" else kind
        table.append((row.name, row.distro, kind, row.address, row.state, row.since, " ".join(row.faults) or "-"))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _report(errors: Sequence[str]) -> int:
    for line in errors:
        print(f"peerlane lab: {line}", file=sys.stderr)
    return EXIT_FAILED if errors else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lab's command line on its own."""
    parser = argparse.ArgumentParser(prog="peerlane lab", description=DESCRIPTION)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except KeyboardInterrupt:
        return 130
