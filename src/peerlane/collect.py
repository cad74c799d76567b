"""``peerlane collect --script``: print the collector for a machine that has neither Ansible nor Python."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import MAX_BYTES, SOURCES, TIMEOUT_S
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import EVIDENCE_SCHEMA
from peerlane import output

TEMPLATE = "collector.sh"
_PROBE = re.compile(r"^probe_(\w+)\(\)", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("--script", action="store_true", help="print a POSIX shell script that makes a snapshot folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the script to a file")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    if not arguments.script:
        todo = "give --script for a machine without Ansible, or use `peerlane audit -i INVENTORY --save DIR`"
        raise InputError("nothing to do", "", todo)
    output.write_result(script(), arguments.output)
    return output.EXIT_OK


def script() -> str:
    """Return the script: the sources of the Ansible module, read by a POSIX shell."""
    template = (resources.files("peerlane") / TEMPLATE).read_text(encoding="utf-8")
    known = set(_PROBE.findall(template))
    calls = "\n".join(_call(source, known) for source in SOURCES)
    filled = template.replace("# @SOURCES@", calls).replace("@SCHEMA@", EVIDENCE_SCHEMA)
    filled = re.sub(r"(?m)^max_bytes=\d+$", f"max_bytes={MAX_BYTES}", filled)
    return re.sub(r"(?m)^timeout_s=\d+$", f"timeout_s={TIMEOUT_S}", filled)


def _call(source: dict[str, Any], known: set[str]) -> str:
    name, where = shlex.quote(source["source"]), source.get("where", "any")
    kind = source["kind"]
    if kind == "command":
        return f"command_source {name} {where} {shlex.join(source['argv'])}"
    if kind == "file":
        return f"file_source {name} {where} {shlex.quote(source['path'])}"
    if kind in ("files", "each"):
        # The pattern twice: as it is, and for the shell to fill in.
        return f"{kind}_source {name} {where} {shlex.quote(source['path'])} {source['path']}"
    if source["probe"] in known:
        return f"probe_source {name} {where} {source['probe']}"
    return f"absent {name} '' 'not read by the script: it needs Ansible'"
