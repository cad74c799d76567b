"""The NVIDIA fabric manager: what systemd, its journal and its own log say of its state and versions."""

from __future__ import annotations

import re

from ..core.snapshot import FabricReport
from .text import lines

_VERSION = r"(\d+\.\d+(?:\.\d+)*)"
# The apostrophe comes in every form that word processors give it; a cut may take the second version.
_MISMATCH = re.compile(rf"driver interface version {_VERSION} (?:don.{{1,3}}t match with driver version {_VERSION})?")
_OWN_VERSION = re.compile(rf"[Ff]abric ?[Mm]anager version(?: is)?\s*:?\s*{_VERSION}")
_ACTIVE = re.compile(r"\s*Active: (active|inactive|failed|activating)\b")
_NO_UNIT = re.compile(r"Unit nvidia-fabricmanager\S* could not be found|nvidia-fabricmanager\S*: not-found")
_EXITED = re.compile(r"fabricmanager.*process exited, code=exited, status=(\d{1,3})")
_NOTHING = re.compile(r"NV_WARN_NOTHING_TO_DO|no NVSwitch|[Nn]othing to do")
_LONGEST_ROW = 600


def reports(text: str, source: str) -> tuple[FabricReport, ...]:
    """Read one report for each pair of versions that the text names, or one for the state alone."""
    pairs: list[tuple[str, str]] = []
    state = version = ""
    nothing = False
    for row in lines(text):
        if len(row) > _LONGEST_ROW:
            continue
        if found := _MISMATCH.search(row):
            pairs.append((found[1], found[2] or ""))
        if found := _OWN_VERSION.search(row):
            version = found[1]
        if found := _EXITED.search(row):
            state = f"exited {found[1]}"
        elif (found := _ACTIVE.match(row)) and not state:
            state = found[1]
        elif _NO_UNIT.search(row):
            state = "not-found"
        nothing = nothing or bool(_NOTHING.search(row))
    if not pairs and (version or state or nothing):
        pairs = [(version, "")]
    return tuple(FabricReport(own, driver, state, nothing, source) for own, driver in dict.fromkeys(pairs))


_UNIT_KEY = re.compile(r"(Id|LoadState|ActiveState)=(\S*)")


def unit_states(text: str) -> dict[str, str]:
    """Read ``systemctl show UNIT...``: unit without its ending -> active, inactive, failed, or not-found."""
    states: dict[str, str] = {}
    told: dict[str, str] = {}
    for row in [*lines(text), ""]:
        found = _UNIT_KEY.fullmatch(row.strip())
        if found:
            told[found[1]] = found[2]
        elif not row.strip() and told.get("Id"):
            missing = told.get("LoadState") == "not-found"
            states[told["Id"].removesuffix(".service")] = "not-found" if missing else told.get("ActiveState", "")
            told = {}
    return {unit: state for unit, state in states.items() if state}
