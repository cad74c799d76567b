"""Evidence: what a machine really answered, before anybody judged it.

On disk a snapshot is a folder: ``manifest.json`` and one plain file per source, so that a person can read, redact
or write one by hand. Text that was pasted without a manifest becomes evidence too (room ``parse``, module
``recognise``).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from .errors import InputError
from .values import fast_init

EVIDENCE_SCHEMA = "peerlane.evidence/1"
MANIFEST = "manifest.json"

# A source id becomes a file name, so it may hold nothing that a file system or a shell treats specially.
_SOURCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:+-]*")


@fast_init
@dataclass(frozen=True)
class Evidence:
    """One source that was read on one machine.

    ``rc`` is the exit status of a command, or None for a file and for something that could not be run.
    ``reason`` says why there is no usable ``stdout``: empty where there is one.
    ``pasted``: a person saved it, so it may be a part: what it does not show proves nothing.
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
    pasted: bool = False

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
    inventory: Mapping[str, str] = field(default_factory=dict)  # hypervisor, vmid: where the inventory says it runs
    # The snapshot folder that it was read from, where that lies on disk; the same evidence from elsewhere is equal.
    folder: str = field(default="", compare=False)

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


# What of a larger file is read: the start, where a log tells the boot, and the end, where it tells the trouble.
HEAD_BYTES = 16 * 1024 * 1024
TAIL_BYTES = 4 * 1024 * 1024


@fast_init
@dataclass(frozen=True)
class Content:
    """The bytes of a file, or the ``reason`` why there are none. Of a large file: its head and its tail."""

    head: bytes = b""
    tail: bytes = b""
    size: int = 0
    reason: str = ""

    @property
    def truncated(self) -> bool:
        """Whether the middle was left out."""
        return self.size > len(self.head) + len(self.tail)

    def text(self) -> str:
        """Return the head as text."""
        return self.head.decode("utf-8", errors="replace")


def read_file(path: str, follow: bool = False) -> Content:
    """Read a regular file, of a large one head and tail. A link is refused, unless ``follow``; a pipe always is."""
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        return Content(reason="is a link" if error.errno == errno.ELOOP else error.strerror or "cannot be opened")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return Content(reason="is no regular file")
        # One read is enough for a file that has the size it says; those of /proc and /sys say none.
        head = os.read(descriptor, min(status.st_size + 1, HEAD_BYTES))
        if len(head) != status.st_size or not head:
            head += _up_to(descriptor, HEAD_BYTES - len(head))
        size = max(status.st_size, len(head))
        if size <= len(head) or len(head) < HEAD_BYTES:
            return Content(head, size=len(head))
        os.lseek(descriptor, max(size - TAIL_BYTES, len(head)), os.SEEK_SET)
        return Content(head, _up_to(descriptor, TAIL_BYTES), size)
    except OSError as error:
        return Content(reason=error.strerror or "cannot be read")
    finally:
        os.close(descriptor)


def read_stream(stream: IO[bytes]) -> Content:
    """Read a stream to its end, and keep head and tail."""
    head = stream.read(HEAD_BYTES)
    size, tail = len(head), b""
    while part := stream.read(1024 * 1024):
        size += len(part)
        tail = (tail + part)[-TAIL_BYTES:]
    return Content(head, tail, size)


def _up_to(descriptor: int, most: int) -> bytes:
    parts = []
    while most > 0 and (part := os.read(descriptor, min(most, 1024 * 1024))):
        parts.append(part)
        most -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
        inventory=result.get("inventory") or {},
    )


def save(evidence: EvidenceSet, folder: Path) -> None:
    """Write a snapshot folder. Files of an earlier snapshot in the same folder are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for entry in sorted(evidence, key=lambda one: one.source):
        if not _SOURCE_ID.fullmatch(entry.source):
            raise InputError(f"{entry.source!r} cannot name a file", str(folder))
        row = {key: value for key, value in asdict(entry).items() if key != "stdout" and (key != "pasted" or value)}
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
        **({"inventory": dict(evidence.inventory)} if evidence.inventory else {}),
        "evidence": rows,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(folder: Path) -> EvidenceSet:
    """Read a snapshot folder that has a manifest.

    Raises InputError where the manifest is no manifest. A file that it names and that is gone, or that is a link,
    leaves its source without text, with the reason.
    """
    place = str(folder)
    manifest = read_file(f"{place}/{MANIFEST}")
    return from_manifest(manifest, lambda name: read_file(f"{place}/{name}"), folder.name, f"{place}/{MANIFEST}")


def from_manifest(manifest: Content, read: Callable[[str], Content], name: str, place: str) -> EvidenceSet:
    """Build the evidence of a host from its manifest and a function that reads a file beside it.

    ``name`` is the host's name where the manifest has none; ``place`` is what a complaint names.
    """
    if manifest.reason:
        raise InputError(f"cannot be read: {manifest.reason}", place, "check the path and its permissions")
    try:
        shape = json.loads(manifest.text())
    except (ValueError, RecursionError) as error:
        raise InputError(f"is no JSON: {error}", place, "collect the snapshot again") from None
    if not isinstance(shape, dict) or shape.get("schema") != EVIDENCE_SCHEMA:
        found = shape.get("schema") if isinstance(shape, dict) else type(shape).__name__
        raise InputError(f"has schema {found!r}, not {EVIDENCE_SCHEMA!r}", place, "use a matching Peerlane")
    rows = shape.get("evidence") or []
    if not isinstance(rows, list):
        raise InputError("has no list of evidence", place, "collect the snapshot again")
    entries = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("source"), str):
            raise InputError("has an evidence row without a source", place, "collect the snapshot again")
        file = row.get("file")
        text: str | None = None
        reason = row.get("reason")
        truncated = row.get("truncated") is True
        if isinstance(file, str):
            # A manifest is input: it must not name a file outside its own folder.
            beside = file.rpartition("/")[2]
            content = read(beside) if beside not in ("", ".", "..") else Content(reason="No such file or directory")
            if content.reason:
                reason = f"{beside} cannot be read: {content.reason}"
            else:
                text = content.text()
                truncated = truncated or content.truncated
        entries[row["source"]] = _entry(row, text, reason, truncated)
    privileged, inventory = shape.get("privileged"), shape.get("inventory")
    return EvidenceSet(
        host=str(shape.get("host") or name),
        collected_at=str(shape.get("collected_at") or ""),
        privileged=privileged if isinstance(privileged, bool) else None,
        entries=entries,
        inventory={str(key): str(value) for key, value in inventory.items()} if isinstance(inventory, dict) else {},
    )


def _entry(row: Mapping[str, Any], text: str | None, reason: Any, truncated: bool) -> Evidence:
    """Make evidence of a row that a person may have written: a value of the wrong kind counts as not given."""
    rc, elapsed_ms = row.get("rc"), row.get("elapsed_ms")
    return Evidence(
        row["source"],
        _word(row.get("stdout")) if text is None else text,
        _word(row.get("stderr")),
        rc if type(rc) is int else None,
        _word(row.get("command")),
        _word(row.get("path")),
        elapsed_ms if type(elapsed_ms) is int else 0,
        truncated,
        _word(reason),
        row.get("pasted") is True,
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""
