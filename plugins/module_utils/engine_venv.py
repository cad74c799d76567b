# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What building an engine's venv needs besides running pip: names, texts, and causes out of an installer's output."""

from __future__ import annotations

import re

RECORD = "engine.json"
RECORD_SCHEMA = "peerlane.engine/1"
LAUNCHER = "bin/peerlane-serve"
LOCK = "requirements.lock"
BUILDING = ".building-"

# (pattern in the output of pip or uv, what it means for a person). The first that is found wins.
_CAUSES = (
    (
        r"THESE PACKAGES DO NOT MATCH THE HASHES|[Hh]ash mismatch",
        "a downloaded package does not match the hash in the lock: the index or a proxy altered it",
    ),
    (r"No space left on device", "the disk is full"),
    (
        r"CERTIFICATE_VERIFY_FAILED|invalid peer certificate|self.signed certificate",
        "the certificate of the package index is not trusted by this host",
    ),
    (
        r"[Tt]emporary failure in name resolution|[Nn]ame or service not known|dns error|failed to lookup address",
        "the name of the package index can't be resolved: no network or no DNS on this host",
    ),
    (
        r"[Cc]onnection refused|[Nn]etwork is unreachable|NewConnectionError|No route to host|tcp connect error",
        "the package index can't be reached from this host",
    ),
    (r"[Rr]ead timed out|ConnectTimeout|operation timed out|[Tt]imed out", "the package index did not answer in time"),
    (r"40[137] (?:Client Error|Unauthorized|Forbidden|Proxy)", "the package index or a proxy refuses access"),
    (
        r"[Cc]ould not find a version that satisfies the requirement (\S+)|No matching distribution found for (\S+)"
        r"|Because (\S+) was not found|there is no version of (\S+)",
        "the package index has no {0} for this machine and Python",
    ),
)


def install_cause(output: str) -> str:
    """Return in words why pip or uv failed, or its last line where the reason is not known."""
    for pattern, meaning in _CAUSES:
        found = re.search(pattern, output)
        if found:
            names = [group for group in found.groups() if group]
            return meaning.format(names[0].strip("`'\",()") if names else "")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)error", line)]
    return (errors or lines or ["the installer said nothing"])[-1]


def relocated(script: bytes, building: str, home: str) -> bytes:
    """Return a script of ``bin/`` with the venv's last place in it."""
    return script.replace(building.encode("utf-8"), home.encode("utf-8"))


def older(found: tuple[int, int], oldest: str) -> bool:
    """Whether a Python (major, minor) is older than ``3.10``."""
    major, minor = oldest.split(".")[:2]
    return found < (int(major), int(minor))


def missing_flags(cpuinfo: str, wanted: list[str]) -> list[str]:
    """Return which CPU features a ``/proc/cpuinfo`` text lacks; none where it lists none, as on other CPUs than x86."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return [flag for flag in wanted if flag not in found.group(1).split()] if found else []
