"""Folders and files to read evidence from, on disk or in an archive, so that both are walked in one way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import InputError
from ..core.evidence import Content, read_file

# A tree that goes deeper is no snapshot, and no fleet of them.
MAX_DEPTH = 12


@dataclass(frozen=True)
class File:
    """A file: its own name, what a complaint calls it, and how it is read. ``packed``: it lies in an archive."""

    name: str
    place: str
    read: Callable[[], Content]
    packed: bool = False

    def read_head(self) -> bytes:
        """Return the first bytes; none where the file can't be read."""
        return self.read().head[:1024] if self.packed else _first_bytes(self.place)


def _first_bytes(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1024)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Listing:
    """What a folder holds, in the order of names; ``problems`` are the entries that are not read, one line each."""

    files: Mapping[str, File] = field(default_factory=dict)
    folders: tuple[Folder, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A folder that is listed when it is asked; ``file`` reads one of its files by name, without a listing.

    ``packed``: it lies in an archive.
    """

    name: str
    place: str
    list: Callable[[], Listing]
    file: Callable[[str], Content]
    packed: bool = False


def on_disk(path: str) -> Folder:
    """Return a folder on disk. Links out of it, and links to folders, are not followed."""
    inside = os.path.realpath(path)
    return _disk_folder(Path(inside).name or "root", path, inside, 0)


def _disk_folder(name: str, path: str, inside: str, depth: int) -> Folder:
    return Folder(name, path, lambda: _disk_listing(path, inside, depth), lambda file: read_file(f"{path}/{file}"))


def _disk_listing(path: str, inside: str, depth: int) -> Listing:
    try:
        with os.scandir(path) as scan:
            entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda one: one.name)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path, "check the path and its permissions") from None
    files: dict[str, File] = {}
    folders: list[Folder] = []
    problems: list[str] = []
    for entry in entries:
        link = entry.is_symlink()
        if link and not os.path.realpath(entry.path).startswith(inside + os.sep):
            problems.append(f"{entry.path}: is a link that leaves the folder, and is not followed")
        elif not link and entry.is_dir():
            if depth < MAX_DEPTH:
                folders.append(_disk_folder(entry.name, entry.path, inside, depth + 1))
            else:
                problems.append(f"{entry.path}: is more than {MAX_DEPTH} folders deep, and is not read")
        elif entry.is_file():
            files[entry.name] = disk_file(entry.path, follow=link)
        elif not link:
            problems.append(f"{entry.path}: is no regular file, and is not read")
    return Listing(files, tuple(folders), tuple(problems))


def disk_file(path: str, follow: bool = True) -> File:
    """Return a file on disk."""
    return File(Path(path).name, path, lambda: read_file(path, follow=follow))


@dataclass
class _Branch:
    files: dict[str, Content] = field(default_factory=dict)
    folders: dict[str, _Branch] = field(default_factory=dict)


def in_memory(name: str, place: str, contents: Iterable[tuple[tuple[str, ...], Content]]) -> Folder:
    """Return a folder of files that are named by their path in it. A name that is both file and folder is a folder."""
    root = _Branch()
    for path, content in contents:
        branch = root
        for part in path[:-1]:
            branch = branch.folders.setdefault(part, _Branch())
        branch.files[path[-1]] = content
    return _memory_folder(name, place, root)


def _memory_folder(name: str, place: str, branch: _Branch) -> Folder:
    def listing() -> Listing:
        files = {
            one: File(one, f"{place}/{one}", lambda content=content: content, packed=True)  # type: ignore[misc]
            for one, content in sorted(branch.files.items())
            if not one.startswith(".") and one not in branch.folders
        }
        folders = [
            _memory_folder(one, f"{place}/{one}", below)
            for one, below in sorted(branch.folders.items())
            if not one.startswith(".") and one != "__MACOSX"
        ]
        return Listing(files, tuple(folders))

    absent = Content(reason="No such file or directory")
    return Folder(name, place, listing, lambda file: branch.files.get(file, absent), packed=True)
