"""Packages: what dpkg has, what apt did and refuses to do, what is held, Secure Boot."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..core.snapshot import AptChange, AptOutput, Package, Unmet
from .text import lines

# desired action, status, error flag: `ii `, `hi `, `iF `, `rc `.
_DPKG = re.compile(r"([uihrp][ncHUFWti][R ]?)\s+([a-z0-9][a-z0-9+.-]+)(?::[a-z0-9]+)?\s+(\S+)")
_NVIDIA = re.compile(r"nvidia|cuda|nccl|libnv|libxnvctrl", re.IGNORECASE)
_HISTORY_ITEM = re.compile(r"([a-z0-9][a-z0-9+.-]*(?::[a-z0-9]+)?) \(([^()]*)\)")
_DEPENDS = re.compile(r"(?:(\S+) : )?(Depends|PreDepends|Breaks|Conflicts): (\S+?)(?: \(([^)]*)\))?(?: but (.*))?$")
_SECTION = re.compile(r"The following (.*?):?$")


def dpkg(text: str, held: Iterable[str] = ()) -> dict[str, Package]:
    """Read dpkg's list, tab separated or as ``dpkg -l`` prints it.

    Held packages have the state ``hi`` (a filter on ``ii`` misses them) or are in ``held``.
    """
    pinned = set(held)
    found = {}
    for row in lines(text):
        hit = _DPKG.match(row) if len(row) < 600 else None
        if hit:
            state, name, version = hit[1].strip(), hit[2], hit[3]
            found[name] = Package(name, version, state, held=state.startswith("h") or name in pinned)
    return found


def holds(text: str) -> tuple[str, ...]:
    """Read ``apt-mark showhold``: names without their architecture."""
    return tuple(row.strip().partition(":")[0] for row in lines(text) if row.strip() and " " not in row.strip())


def apt_history(text: str) -> tuple[AptChange, ...]:
    """Read ``/var/log/apt/history.log``: the transactions that touched NVIDIA packages, oldest first."""
    found = []
    started = command = ""
    changes: list[tuple[str, str, str]] = []
    for row in [*lines(text), "Start-Date:"]:
        key, _, rest = row.partition(":")
        if key == "Start-Date":
            if changes:
                found.append(AptChange(started, command, tuple(changes)))
            started, command, changes = " ".join(rest.split()), "", []
        elif key == "Commandline":
            command = rest.strip()
        elif key in ("Install", "Upgrade", "Downgrade", "Reinstall", "Remove", "Purge"):
            changes.extend(_changes(key, rest) if _NVIDIA.search(rest) else [])
    return tuple(found)


def _changes(action: str, rest: str) -> list[tuple[str, str, str]]:
    changes = []
    for name, inside in _HISTORY_ITEM.findall(rest):
        if not _NVIDIA.search(name):
            continue
        versions = [word.strip() for word in inside.split(",") if word.strip() != "automatic"]
        first, last = (versions[0], versions[-1]) if versions else ("", "")
        if action in ("Upgrade", "Downgrade"):
            changes.append((name, first, last if len(versions) > 1 else ""))
        elif action in ("Remove", "Purge"):
            changes.append((name, first, ""))
        else:
            changes.append((name, "", first))
    return changes


def apt_output(text: str, command: str = "") -> AptOutput:
    """Read the output of ``apt install``, ``upgrade`` or ``purge``. ``*`` behind a name means purge.

    ``command`` is the call, where a prompt in front of the output names it.
    """
    unmet: list[Unmet] = []
    not_found: list[str] = []
    named: dict[str, list[str]] = {"additional": [], "REMOVED": [], "NEW": []}
    section: list[str] | None = None
    package = ""
    for row in lines(text):
        bare = row.strip()
        head = _SECTION.match(bare)
        if head:
            section = next((names for word, names in named.items() if word in head[1]), None)
        elif section is not None and row[:2] == "  ":
            section.extend(word.rstrip("*") for word in bare.split())
        else:
            section = None
        needs = _DEPENDS.match(bare) if len(bare) < 600 else None
        if needs:
            package = needs[1] or package
            instead = (needs[5] or "").removesuffix(" is to be installed").removesuffix(" is installed")
            unmet.append(Unmet(package, needs[3], needs[4] or "", instead))
        lost = re.match(r"E: Unable to locate package (\S+)", bare)
        if lost:
            not_found.append(lost[1])
    return AptOutput(
        command,
        tuple(unmet),
        tuple(not_found),
        tuple(named["additional"]),
        tuple(named["REMOVED"]),
        tuple(named["NEW"]),
    )


_TELLING = re.compile(
    r"\s*\S+ : (?:Pre)?Depends: |E: |The following (?:NEW|additional)? ?packages will be|\s*Depends: "
)


def apt_excerpt(text: str) -> list[str]:
    """Return the lines of an output of apt that say what is wrong or what it would do."""
    rows = lines(text)
    return [
        row.strip()[:300]
        for at, row in enumerate(rows)
        if _TELLING.match(row) or (at and row[:2] == "  " and _SECTION.match(rows[at - 1]))
    ]


def secure_boot(mokutil: str) -> tuple[str, str] | None:
    """Return (``enabled``, ``disabled`` or ``unsupported``, the line) of ``mokutil --sb-state``."""
    for row in lines(mokutil):
        found = re.match(r"SecureBoot (enabled|disabled)", row.strip())
        if found:
            return found[1], row.strip()
        if "doesn't support Secure Boot" in row or "EFI variables are not supported" in row:
            return "unsupported", row.strip()
    return None


def secure_boot_of_firmware(boot: str) -> tuple[str, str] | None:
    """Return the same from the source ``boot``: the firmware's own variables."""
    flag = re.search(r"^secure_boot: ([01])$", boot, re.MULTILINE)
    if flag:
        return ("enabled" if flag[1] == "1" else "disabled"), flag[0]
    if re.search(r"^efi: no$", boot, re.MULTILINE):
        return "unsupported", "efi: no"
    return None
