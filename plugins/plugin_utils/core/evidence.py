"""Evidence: what a machine really answered, before anybody judged it.

On disk a snapshot is a folder: ``manifest.json`` and one plain file per source, so that a person can read, redact
or write one by hand. Text that was pasted without a manifest becomes evidence too (room ``parse``, module
``recognise``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import InputError

EVIDENCE_SCHEMA = "peerlane.evidence/1"
MANIFEST = "manifest.json"

# A source id becomes a file name, so it may hold nothing that a file system or a shell treats specially.
_SOURCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:+-]*")


@dataclass(frozen=True)
class Evidence:
    """One source that was read on one machine.

    ``rc`` is the exit status of a command, or None for a file and for something that could not be run.
    ``reason`` says why there is no usable ``stdout``: empty where there is one.
    """

    source: str
    stdout: str = ""
    stderr: str = ""
    rc: int | None = None
    command: str = ""
    path: str = ""
    elapsed_ms: int = 0
    truncated: bool = False
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether there is text to read. A command that failed can still have said something worth reading."""
        return bool(self.stdout.strip()) or (not self.reason and self.rc in (0, None))

    @property
    def text(self) -> str:
        """Return what a person would have seen in a terminal: the output, then the complaints."""
        return f"{self.stdout}\n{self.stderr}" if self.stderr.strip() else self.stdout


@dataclass(frozen=True)
class EvidenceSet:
    """All evidence of one host."""

    host: str
    collected_at: str = ""
    privileged: bool | None = None
    entries: Mapping[str, Evidence] = field(default_factory=dict)
    unrecognised: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Evidence]:
        return iter(self.entries.values())

    def get(self, source: str) -> Evidence | None:
        """Return the evidence of this source, or None where it was never asked for."""
        return self.entries.get(source)

    def family(self, prefix: str) -> dict[str, Evidence]:
        """Return the entries named ``prefix.*``, keyed by what follows the prefix."""
        start = prefix + "."
        return {name[len(start) :]: entry for name, entry in self.entries.items() if name.startswith(start)}

    def why_missing(self, source: str) -> str:
        """Say in words why this source cannot be used."""
        entry = self.entries.get(source)
        if entry is None:
            return f"{source} was not collected"
        if entry.reason:
            return f"{source}: {entry.reason}"
        if entry.rc not in (0, None):
            last = entry.stderr.strip().splitlines()[-1:] or entry.stdout.strip().splitlines()[-1:] or [""]
            return f"{source} ended with {entry.rc}: {last[0]}"
        return f"{source} is empty"


def from_module(host: str, result: Mapping[str, Any]) -> EvidenceSet:
    """Build the evidence of a host from what the module ``host_evidence`` returned."""
    entries = {}
    for raw in result.get("evidence") or []:
        entry = Evidence(**{key: value for key, value in raw.items() if key in Evidence.__dataclass_fields__})
        entries[entry.source] = entry
    return EvidenceSet(
        host=host,
        collected_at=str(result.get("collected_at") or ""),
        privileged=result.get("privileged"),
        entries=entries,
    )


def save(evidence: EvidenceSet, folder: Path) -> None:
    """Write a snapshot folder. Files of an earlier snapshot in the same folder are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for entry in sorted(evidence, key=lambda one: one.source):
        if not _SOURCE_ID.fullmatch(entry.source):
            raise InputError(f"{entry.source!r} cannot name a file", str(folder))
        row = {key: value for key, value in asdict(entry).items() if key != "stdout"}
        if entry.stdout:
            row["file"] = f"{entry.source}.txt"
            with (folder / row["file"]).open("w", encoding="utf-8", newline="") as stream:
                stream.write(entry.stdout)
        rows.append(row)
    manifest = {
        "schema": EVIDENCE_SCHEMA,
        "host": evidence.host,
        "collected_at": evidence.collected_at,
        "privileged": evidence.privileged,
        "evidence": rows,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> EvidenceSet:
    """Read a snapshot folder that has a manifest.

    Raises InputError where the manifest is no manifest. A file that it names and that is gone leaves its source
    without text, with the reason.
    """
    place = folder / MANIFEST
    try:
        manifest = json.loads(place.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", str(place), "check the path and its permissions"
        ) from None
    except ValueError as error:
        raise InputError(f"is no JSON: {error}", str(place), "collect the snapshot again") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != EVIDENCE_SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise InputError(f"has schema {found!r}, not {EVIDENCE_SCHEMA!r}", str(place), "use a matching Peerlane")
    entries = {}
    for row in manifest.get("evidence") or []:
        if not isinstance(row, dict) or not isinstance(row.get("source"), str):
            raise InputError("has an evidence row without a source", str(place), "collect the snapshot again")
        name = row.get("file")
        known = {key: value for key, value in row.items() if key in Evidence.__dataclass_fields__}
        entry = Evidence(**known)
        if isinstance(name, str):
            # A manifest is input: it must not name a file outside its own folder.
            target = folder / Path(name).name
            try:
                with target.open(encoding="utf-8", errors="replace", newline="") as stream:
                    entry = replace(entry, stdout=stream.read())
            except OSError as error:
                entry = replace(entry, reason=f"{target.name} cannot be read: {error.strerror}")
        entries[entry.source] = entry
    return EvidenceSet(
        host=str(manifest.get("host") or folder.name),
        collected_at=str(manifest.get("collected_at") or ""),
        privileged=manifest.get("privileged"),
        entries=entries,
    )
