"""Paths and pasted text to evidence: snapshot folders, fleets of them, archives, folders of loose files, single files.

Nothing that can be read is lost because something beside it can't: what is left out becomes a line of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.errors import InputError
from ..core.evidence import HEAD_BYTES, MANIFEST, Content, Evidence, EvidenceSet, from_manifest
from . import archive
from .apart import apart
from .text import NARROWEST
from .tree import File, Folder, Listing, disk_file, in_memory, on_disk

STDIN_HOST = "stdin"
# Of one output: a log tells the boot in its head and the trouble in its tail, anything else stands in its head.
MAX_TEXT = 4 * 1024 * 1024
_LOG_HEAD = 1024 * 1024
_LOGS = ("kernel_log", "engine.log", "nccl.log", "qemu.log", "apt.history", "dkms.log", "initramfs.log")
# Loose files of one host: more are no outputs that somebody saved.
MAX_LOOSE_FILES = 5000
_MAX_LISTED = 100
# Columns of a terminal that breaks lines; a longest line below that was not broken.
_NARROWEST = 60
_SNIFF_BYTES = 8192
_NO_ID = re.compile(r"[^A-Za-z0-9_.:+-]+")
_ABSENT = "No such file or directory"
# A folder with one of these below is one host, as support tools pack it, and not a fleet.
_SYSTEM_FOLDERS = frozenset({"proc", "etc", "sys", "var", "boot", "usr", "sos_commands"})
# Files that describe other files; their words would pass for outputs.
_SILENT = re.compile(r"readme.*|case\.ya?ml|.*\.(?:toml|py|rst)|license.*|changelog.*", re.IGNORECASE)
_SAVE = "save outputs such as `nvidia-smi -q`, `lspci -vvv`, `dmesg` or a VM's .conf, one a file"


def is_silent(name: str) -> bool:
    """Whether a file of this name describes others and is passed over without a word."""
    return bool(_SILENT.fullmatch(name))


def read(
    paths: Sequence[Path], stdin: str | Content | None = None, problems: list[str] | None = None
) -> list[EvidenceSet]:
    """Read every host that these paths hold; see ``hosts``."""
    return list(hosts(paths, stdin, [] if problems is None else problems))


def hosts(paths: Sequence[Path], stdin: str | Content | None, problems: list[str]) -> Iterator[EvidenceSet]:
    """Yield every host that these paths hold, one at a time; ``stdin`` is one more.

    A folder with a manifest is a snapshot; a folder of folders is a fleet; an archive is what it holds; any other
    folder, and the files that are named one by one, are loose outputs of one host. What can't be read, what unpacks
    to too much, and a name that comes twice go to ``problems``, one line each. Raises InputError with these lines
    where there is no host at all.
    """
    intake = _Intake(problems)
    taken: dict[str, str] = {}
    for place, evidence in intake.all(paths, stdin):
        yield _named_once(evidence, place, taken, problems)
    if not taken:
        raise InputError("\n".join(problems) or InputError("no input", "", "give a path with --from").line())


def _named_once(evidence: EvidenceSet, place: str, taken: dict[str, str], problems: list[str]) -> EvidenceSet:
    name, count = evidence.host, 2
    while name in taken:
        name, count = f"{evidence.host}-{count}", count + 1
    if name != evidence.host:
        first = taken[evidence.host]
        problems.append(f"{place}: is a second host named {evidence.host!r} (the first: {first}); shown as {name!r}")
    taken[name] = place
    return evidence if name == evidence.host else replace(evidence, host=name)


class _Intake:
    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def all(self, paths: Sequence[Path], stdin: str | Content | None) -> Iterator[tuple[str, EvidenceSet]]:
        loose: list[File] = []
        for path in paths:
            place = str(path)
            if path.name == MANIFEST and path.is_file():
                yield from self._hosts_in(on_disk(str(path.parent)))
            elif path.is_dir():
                yield from self._hosts_in(on_disk(place))
            elif not path.is_file():
                what = "is neither a file nor a folder" if path.exists() else "does not exist"
                self._tell(what, place, "give a snapshot folder, a folder of saved outputs, or a file")
            else:
                folder, files = self._opened(disk_file(place))
                loose += files
                if folder:
                    yield from self._hosts_in(folder)
        if loose:
            yield from self._loose_host(_name_of(loose), loose[0].place, loose, ())
        if stdin is not None:
            yield from self._pasted(Content(stdin.encode()) if isinstance(stdin, str) else stdin)

    def _tell(self, what: str, where: str, todo: str = "") -> None:
        self.problems.append(InputError(what, where, todo).line())

    # --- folders

    def _snapshot(self, folder: Folder, manifest: Content) -> Iterator[tuple[str, EvidenceSet]]:
        """Yield the host of a snapshot folder, or say why there is none."""
        try:
            evidence = from_manifest(manifest, folder.file, folder.name, f"{folder.place}/{MANIFEST}")
            yield folder.place, evidence if folder.packed else replace(evidence, folder=folder.place)
        except InputError as error:
            self.problems.append(error.line())

    def _hosts_in(self, folder: Folder, nested: bool = False) -> Iterator[tuple[str, EvidenceSet]]:
        """Yield the hosts of a folder that may be a snapshot, a fleet, or loose files, or all of them.

        ``nested``: it lies in such a folder; loose files then make all that lies in it one host.
        """
        manifest = folder.file(MANIFEST)
        if manifest.reason != _ABSENT:
            yield from self._snapshot(folder, manifest)
            return
        listing = self._listing(folder)
        if listing is None:
            return
        whole = nested and listing.files and not _holds_snapshots(listing)
        if whole or _SYSTEM_FOLDERS & {below.name for below in listing.folders}:
            yield from self._whole(folder)
            return
        plain, below = self._sorted(listing)
        count = 0
        own, *others = self._loose(folder.name, plain)
        if own.entries:
            for machine in (own, *others):
                count += 1
                yield folder.place, machine
        for one in below:
            for host in self._hosts_in(one, nested=True):
                count += 1
                yield host
        if own.entries:
            return
        if count:
            # Beside snapshots, a stray file is no host of its own.
            self.problems += [f"{folder.place}/{line}" for line in own.unrecognised]
        elif plain:
            self._nothing_known(folder.place, own)
        elif not below:
            self._tell("is an empty folder", folder.place, "save outputs into it, or collect a snapshot")

    def _whole(self, folder: Folder) -> Iterator[tuple[str, EvidenceSet]]:
        """Yield all that lies in a folder, however deep, as one host."""
        files: list[File] = []
        waiting = [("", folder)]
        while waiting and len(files) <= MAX_LOOSE_FILES:
            above, one = waiting.pop(0)
            listing = self._listing(one)
            if listing is None:
                continue
            plain, below = self._sorted(listing)
            files += [replace(file, name=above + file.name) for file in plain]
            waiting += [(f"{above}{sub.name}/", sub) for sub in below]
        cut: tuple[str, ...] = ()
        if len(files) > MAX_LOOSE_FILES:
            cut = (f"holds more than {MAX_LOOSE_FILES} files: the others are not read",)
        yield from self._loose_host(folder.name, folder.place, files[:MAX_LOOSE_FILES], cut)

    def _listing(self, folder: Folder) -> Listing | None:
        try:
            listing = folder.list()
        except InputError as error:
            self.problems.append(error.line())
            return None
        self.problems += listing.problems
        return listing

    def _sorted(self, listing: Listing) -> tuple[list[File], list[Folder]]:
        """Return the plain files, and the folders with the archives among the files, which are opened."""
        plain: list[File] = []
        below = list(listing.folders)
        for file in listing.files.values():
            folder, files = self._opened(file) if archive.looks_packed(file.name) else (None, [file])
            plain += files
            below += [folder] if folder else []
        return plain, below

    # --- files

    def _opened(self, file: File) -> tuple[Folder | None, list[File]]:
        """Return what an archive holds as a folder, or a file as it is (one that was only compressed: unpacked)."""
        kind = archive.kind_of(file.read_head())
        if not kind:
            return None, [file]
        if file.packed:
            self._tell("is an archive in an archive", file.place, "unpack the outer one first")
            return None, []
        try:
            with Path(file.place).open("rb") as stream:
                size = Path(file.place).stat().st_size
                return self._folder_of(archive.unpack(stream, size, file.place, kind), file.name, file.place)
        except OSError as error:
            self._tell(f"cannot be read: {error.strerror}", file.place)
            return None, []

    def _folder_of(self, found: archive.Unpacked, name: str, place: str) -> tuple[Folder | None, list[File]]:
        self.problems += found.problems
        stem = archive.stem(name)
        if found.text is not None:
            text = found.text
            return None, [File(stem, place, lambda: text)]
        if not found.files:
            if not found.problems:
                self._tell("is an empty archive", place, "pack a snapshot folder, or saved outputs")
            return None, []
        return in_memory(stem, place, found.files), []

    def _loose_host(
        self, name: str, place: str, files: Sequence[File], cut: tuple[str, ...]
    ) -> Iterator[tuple[str, EvidenceSet]]:
        evidence, *others = self._loose(name, files)
        evidence = replace(evidence, unrecognised=evidence.unrecognised + cut)
        if evidence.entries:
            yield place, evidence
            for other in others:
                yield place, other
        elif files:
            self._nothing_known(place, evidence)

    def _nothing_known(self, place: str, evidence: EvidenceSet) -> None:
        reasons = [line for line in evidence.unrecognised if line] or ["it only describes others"]
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        self._tell(f"holds nothing that Peerlane knows ({reasons[0]}{more})", place, _SAVE)

    def _loose(self, host: str, files: Sequence[File]) -> list[EvidenceSet]:
        """Return the host that the files tell of, and the guest whose outputs lie among them, where there is one."""
        found = Found()
        for file in files:
            if not is_silent(file.name.rpartition("/")[2]):
                found.take(file.read(), file.name, file.place)
        return apart(found.evidence(host), found.names, found.prompts)

    def _pasted(self, content: Content) -> Iterator[tuple[str, EvidenceSet]]:
        place = "standard input"
        kind = archive.kind_of(content.head)
        if kind:
            if content.truncated:
                self._tell(f"is an archive of more than {HEAD_BYTES // 1024 // 1024} MiB", place, "give its path")
                return
            found = archive.unpack(io.BytesIO(content.head), len(content.head), place, kind)
            folder, files = self._folder_of(found, STDIN_HOST, place)
            if folder:
                yield from self._hosts_in(folder)
            elif files:
                yield from self._loose_host(STDIN_HOST, place, files, ())
        elif not content.head.strip():
            self._tell("is empty", place, "pipe the output of a command into it")
        else:
            yield from self._loose_host(STDIN_HOST, place, [File("", place, lambda: content)], ())


def _is_snapshot(folder: Folder) -> bool:
    return folder.file(MANIFEST).reason != _ABSENT


def _holds_snapshots(listing: Listing, depth: int = 0) -> bool:
    if depth > 3:
        return False
    for folder in listing.folders:
        if _is_snapshot(folder):
            return True
        try:
            if _holds_snapshots(folder.list(), depth + 1):
                return True
        except InputError:
            continue
    return False


def _name_of(files: Sequence[File]) -> str:
    if len(files) == 1:
        return Path(files[0].name).stem
    folders = {Path(file.place).resolve().parent for file in files}
    return folders.pop().name or "pasted" if len(folders) == 1 else "pasted"


# --- one host's loose outputs ---------------------------------------------------------------------------------------


class Found:
    """What was recognised of one host, and what was not."""

    def __init__(self) -> None:
        self.entries: dict[str, Evidence] = {}
        self.unrecognised: list[str] = []
        self.names: dict[str, str] = {}  # by entry: the file's name, and the host of the prompt in front of it
        self.prompts: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def evidence(self, host: str) -> EvidenceSet:
        """Return all of it as the evidence of a host."""
        listed = self.unrecognised[:_MAX_LISTED]
        if len(self.unrecognised) > _MAX_LISTED:
            listed.append(f"... and {len(self.unrecognised) - _MAX_LISTED} more")
        return EvidenceSet(host=host, entries=self.entries, unrecognised=tuple(listed))

    def take(self, content: Content, name: str, path: str) -> None:
        """Recognise one file."""
        shown = name or STDIN_HOST
        text, reason = _text(content)
        if reason:
            self.unrecognised.append(f"{shown}: {reason}")
            return
        if not text.strip():
            self.unrecognised.append(f"{shown}: is empty")
            return
        text, dropped = (text, False) if content.truncated else _whole_lines(text)
        if dropped:
            why = "its last line has no line end, so it may be cut and is not judged: add a line end if it is whole"
            self.unrecognised.append(f"{shown}: {why}")
        # Only loose files need it, and its patterns take longer to compile than a snapshot to judge.
        from .recognise import recognise

        found = recognise(text, name)
        for one in found:
            if not one.source:
                place = f"{shown}:{one.segment.line}" if one.segment.line else shown
                place = f"{place} (`{one.segment.command}`)" if one.segment.command else place
                self.unrecognised.append(f"{place}: {one.reason}")
                continue
            body, left_out = one.segment.text, 0
            tail = content.tail.decode("utf-8", errors="replace") if one is found[-1] else ""
            if tail or len(body) > MAX_TEXT:
                body, left_out = _shortened(body, tail, one.source.partition("@")[0] in _LOGS)
            if one is found[-1]:
                left_out += content.size - len(content.head) - len(content.tail) if content.truncated else 0
            if left_out:
                self.unrecognised.append(
                    f"{shown}: is large: {len(body.encode()) / 1048576:.0f} MiB of it are judged, "
                    f"{left_out / 1048576:.0f} MiB in the middle or at the end are not"
                )
            identity = self._free_id(one.source, Path(name).stem)
            self.names[identity] = name
            if one.segment.host:
                self.prompts[identity] = one.segment.host
            self.entries[identity] = Evidence(
                identity,
                stdout=body,
                command=one.segment.command,
                path=path,
                truncated=bool(left_out),
                pasted=True,
            )

    def _free_id(self, source: str, stem: str) -> str:
        if source not in self.entries:
            return source
        named = f"{source}@{_NO_ID.sub('-', stem) or 'more'}"
        free = named
        while free in self.entries:
            self._counts[named] = self._counts.get(named, 1) + 1
            free = f"{named}-{self._counts[named]}"
        return free


def _shortened(body: str, tail: str, is_log: bool) -> tuple[str, int]:
    """Return what is judged of a large text, cut at line ends, and how many characters are left out."""
    whole = len(body) + len(tail)
    if not is_log:
        kept = body if len(body) <= MAX_TEXT else body[: body.rfind("\n", 0, MAX_TEXT) + 1]
        return kept, whole - len(kept)
    if whole <= MAX_TEXT:
        return body + tail, 0
    end = (body + tail)[-(MAX_TEXT - _LOG_HEAD) :] if len(tail) < MAX_TEXT - _LOG_HEAD else tail[_LOG_HEAD - MAX_TEXT :]
    kept = body[: body.rfind("\n", 0, _LOG_HEAD) + 1] + end[end.find("\n") + 1 :]
    return kept, whole - len(kept)


def _whole_lines(text: str) -> tuple[str, bool]:
    """Return the text without a last line that has no end, and whether there was one.

    A tool ends its last line. Where the end is missing, the text was cut, and half a line says another thing than the
    whole one: ``hidden=1`` is gone, ``iommu=pt`` is ``iommu=p``. JSON and XML tell their end themselves.
    """
    if text.endswith("\n") or (text.rstrip()[-1:], text.lstrip()[:1]) in (("}", "{"), ("]", "["), (">", "<")):
        return text, False
    rows = text.split("\n")[:-1]
    # A line that a terminal broke is as wide as the terminal, and goes on in the one that was dropped.
    width = max(map(len, rows), default=0)
    while rows and len(rows[-1]) == width >= NARROWEST:
        rows.pop()
    return "".join(f"{row}\n" for row in rows), True


def _text(content: Content) -> tuple[str, str]:
    """Return (text, "") or ("", the reason why there is none)."""
    if content.reason:
        return "", f"cannot be read: {content.reason}"
    data = content.head
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace"), ""
    if archive.kind_of(data):
        return "", "is an archive: give it by its own name"
    if b"\0" in data[:_SNIFF_BYTES]:
        return "", "is binary"
    return content.text(), ""
