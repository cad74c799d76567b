"""The command ``peerlane``: arguments in, exit code out. The work is in one small module for each verb."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from peerlane import __version__
from peerlane.output import EXIT_INTERRUPTED, EXIT_USAGE, say

# Only the module of the verb in use is imported: an audit of files must not wait for Ansible.
VERBS = (
    ("audit", "peerlane.audit", "read hosts or saved files; say what is wrong, why, and what to do"),
    ("provision", "peerlane.provision", "turn hosts into serving ones: driver, engine, model, service"),
    ("doctor", "peerlane.doctor", "check SSH, sudo, Python, space and more before anything is changed"),
    ("collect", "peerlane.collect", "print a shell script that makes a snapshot on a machine without Ansible"),
    ("models", "peerlane.models", "what each model needs: shapes, flags for each engine, how many GPUs it fits on"),
    ("rules", "peerlane.rules", "what each rule looks at, why, and what its fix risks"),
    ("init", "peerlane.init", "write a commented inventory to start from"),
    ("lab", "peerlane.lab.cli", "disposable hosts on this machine to try Peerlane on"),
)

EXIT_CODES = (
    "exit codes: 0 fine, 1 blocking findings or a host that is not fit, 2 bad usage or input, 3 a host failed, "
    "4 a host is unreachable, 130 interrupted"
)


class _Formatter(argparse.HelpFormatter):
    """Help with room for the longest option beside its text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        arguments = _parser(words).parse_args(words)
        return int(arguments.run(arguments))
    except InputError as error:
        for line in error.line().splitlines():
            say(f"peerlane: {line}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        say("peerlane: interrupted")
        return EXIT_INTERRUPTED


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peerlane",
        description="From a bare multi-GPU machine to a verified, serving one.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"peerlane {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), "")
    for name, module_name, summary in VERBS:
        verb = verbs.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=EXIT_CODES
        )
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    return parser
