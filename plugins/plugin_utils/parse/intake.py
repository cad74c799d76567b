"""Paths and pasted text to evidence: snapshot folders, fleets of them, folders of loose files, single files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..core.errors import InputError
from ..core.evidence import MANIFEST, Evidence, EvidenceSet, load
from .recognise import Recognised, is_silent, recognise

# A whole kernel log of months stays below this; beyond it a file is no output that somebody pasted.
MAX_FILE_BYTES = 64 * 1024 * 1024
STDIN_HOST = "stdin"
_SNIFF_BYTES = 8192
# gzip, zip, xz, zstd, bzip2
_ARCHIVES = (b"\x1f\x8b", b"PK\x03\x04", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"BZh")
_NO_ID = re.compile(r"[^A-Za-z0-9_.:+-]+")


def read(paths: Sequence[Path], stdin: str | None = None) -> list[EvidenceSet]:
    """Read every host that these paths hold, in their order; ``stdin`` is one more.

    A folder with a manifest is a snapshot; a folder of folders is a fleet; any other folder, and the files that are
    named one by one, are loose outputs of one host. Raises InputError for a path that can't be read at all, for
    input in which nothing is known, and for two hosts of one name.
    """
    hosts: list[tuple[str, EvidenceSet]] = []
    loose = [path for path in paths if path.is_file() and path.name != MANIFEST]
    for path in paths:
        if path.name == MANIFEST and path.is_file():
            hosts.append((str(path.parent), load(path.parent)))
        elif path.is_dir():
            hosts.extend(_folder(path))
        elif path not in loose:
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise InputError(what, str(path), "give a snapshot folder, a folder of saved outputs, or a file")
    if loose:
        hosts.append((str(loose[0]), _loose(_name_of(loose), loose)))
    if stdin is not None:
        hosts.append(("standard input", _pasted(stdin)))
    if not hosts:
        raise InputError("no input", "", "give a folder or a file with --from")
    _refuse_namesakes(hosts)
    sets = [evidence for _, evidence in hosts]
    if not any(evidence.entries for evidence in sets):
        reasons = [reason for evidence in sets for reason in evidence.unrecognised]
        where = hosts[0][0] if len(hosts) == 1 else "the input"
        raise InputError(
            f"holds nothing that Peerlane knows ({reasons[0] if reasons else 'it is empty'})",
            where,
            "save outputs such as `nvidia-smi -q`, `lspci -vvv`, `dmesg` or a VM's .conf, one a file",
        )
    return sets


def _refuse_namesakes(hosts: list[tuple[str, EvidenceSet]]) -> None:
    seen: dict[str, str] = {}
    for place, evidence in hosts:
        if evidence.host in seen:
            todo = "rename one folder, or the host in its manifest"
            raise InputError(
                f"is a second host named {evidence.host!r} (the first: {seen[evidence.host]})", place, todo
            )
        seen[evidence.host] = place


def _folder(folder: Path) -> list[tuple[str, EvidenceSet]]:
    if (folder / MANIFEST).is_file():
        return [(str(folder), load(folder))]
    children = _children(folder)
    hosts = []
    for child in children:
        if child.is_dir() and (child / MANIFEST).is_file():
            hosts.append((str(child), load(child)))
        elif child.is_dir() and (inside := [one for one in _children(child) if one.is_file()]):
            hosts.append((str(child), _loose(child.name, inside)))
    plain = [child for child in children if child.is_file()]
    if plain:
        own = _loose(folder.resolve().name, plain)
        # Beside snapshots, a stray file is no host of its own.
        if own.entries or not hosts:
            hosts.insert(0, (str(folder), own))
    if not hosts:
        raise InputError("is an empty folder", str(folder), "save outputs into it, or collect a snapshot")
    return hosts


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        todo = "check the path and its permissions"
        raise InputError(f"cannot be read: {error.strerror}", str(folder), todo) from None


def _name_of(files: Sequence[Path]) -> str:
    if len(files) == 1:
        return files[0].stem
    folders = {path.resolve().parent for path in files}
    return folders.pop().name or "pasted" if len(folders) == 1 else "pasted"


def _loose(host: str, files: Sequence[Path]) -> EvidenceSet:
    entries: dict[str, Evidence] = {}
    unrecognised: list[str] = []
    for path in files:
        if is_silent(path.name):
            continue
        text, reason = _text(path)
        if reason:
            unrecognised.append(f"{path.name}: {reason}")
            continue
        _add(entries, unrecognised, recognise(text, path.name), path.name, str(path))
    return EvidenceSet(host=host, entries=entries, unrecognised=tuple(unrecognised))


def _pasted(text: str) -> EvidenceSet:
    if not text.strip():
        raise InputError("is empty", "standard input", "pipe the output of a command into it")
    entries: dict[str, Evidence] = {}
    unrecognised: list[str] = []
    _add(entries, unrecognised, recognise(text, ""), STDIN_HOST, "")
    return EvidenceSet(host=STDIN_HOST, entries=entries, unrecognised=tuple(unrecognised))


def _add(entries: dict[str, Evidence], unrecognised: list[str], found: list[Recognised], name: str, path: str) -> None:
    if not found:
        unrecognised.append(f"{name}: is empty")
    for one in found:
        if not one.source:
            place = f"{name} (`{one.segment.command}`)" if one.segment.command else name
            unrecognised.append(f"{place}: {one.reason}")
            continue
        entry = Evidence(one.source, stdout=one.segment.text, command=one.segment.command, path=path)
        identity = _free_id(entries, one.source, Path(name).stem)
        entries[identity] = replace(entry, source=identity)


def _free_id(entries: dict[str, Evidence], source: str, stem: str) -> str:
    if source not in entries:
        return source
    named = f"{source}@{_NO_ID.sub('-', stem) or 'more'}"
    free, count = named, 2
    while free in entries:
        free, count = f"{named}-{count}", count + 1
    return free


def _text(path: Path) -> tuple[str, str]:
    """Return (text, "") or ("", the reason why there is none)."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            return "", f"has {size // 1024 // 1024} MiB, more than the {MAX_FILE_BYTES // 1024 // 1024} that are read"
        data = path.read_bytes()
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace"), ""
    if data.startswith(_ARCHIVES):
        return "", "is an archive: unpack it first"
    if b"\0" in data[:_SNIFF_BYTES]:
        return "", "is binary"
    return data.decode("utf-8", errors="replace"), ""
