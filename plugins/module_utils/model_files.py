# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model's files: what a folder must hold to be a model, its manifest, and the bringing of what is missing.

A file is written beside its place as ``NAME.part``, checked, and renamed. The manifest comes last: a folder without one
is not complete. Everything here can be called again at any time and goes on where it stopped.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

from ansible_collections.peerlane.gpu.plugins.module_utils.weight_files import weight_complaint

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "peerlane.model/1"
PART = ".part"
CHUNK_BYTES = 4 * 1024 * 1024

# ioctl of linux/fs.h: share the blocks of another file, on file systems that can (btrfs, xfs).
FICLONE = 0x40049409

# Files of a model hub that no engine reads.
IGNORED = (".gitattributes", ".git/", ".cache/", ".huggingface/")


class ModelError(Exception):
    """Something that a user can act on, in one line."""


@dataclass(frozen=True)
class ModelFile:
    """One file of a model, as its source describes it.

    ``path`` is relative, with ``/``. ``sha256`` is empty where the source does not say it; ``git_sha1`` is the git blob
    id, which a hub gives for its small files.
    """

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""


# --- what is a model -------------------------------------------------------------------------------------------------


def model_format(paths: Iterable[str]) -> str:
    """Return ``gguf`` or ``safetensors`` for these relative paths, or "" where they are no model."""
    names = [path for path in paths if "/" not in path]
    if any(name.endswith(".gguf") for name in names):
        return "gguf"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    return ""


def safe_path(path: str) -> bool:
    """Whether this relative path stays inside its folder, and is none of the names that are used here."""
    parts = path.split("/")
    return bool(path) and not path.startswith("/") and ".." not in parts and "" not in parts and path != MANIFEST


def wanted(path: str) -> bool:
    """Whether a file of a source belongs to the model."""
    return not path.startswith(IGNORED) and not path.endswith(PART) and path != MANIFEST


def list_folder(folder: str) -> list[ModelFile]:
    """Return the files below a folder (or the one file), with sizes, sorted by path.

    Raises ModelError where it cannot be read or is no model.
    """
    if os.path.isfile(folder):
        found = [ModelFile(os.path.basename(folder), os.path.getsize(folder))]
    elif os.path.isdir(folder):
        found = []
        for base, folders, names in os.walk(folder):
            folders.sort()
            for name in names:
                full = os.path.join(base, name)
                path = os.path.relpath(full, folder)
                if wanted(path) and os.path.isfile(full):
                    found.append(ModelFile(path, os.path.getsize(full)))
        found.sort(key=lambda one: one.path)
    else:
        raise ModelError("{0} does not exist".format(folder))
    if not model_format(one.path for one in found):
        raise ModelError(
            "{0} is no model: it holds neither a *.gguf file nor a config.json with *.safetensors".format(folder)
        )
    for one in found:
        full = folder if os.path.isfile(folder) else os.path.join(folder, one.path)
        complaint = weight_complaint(full)
        if complaint:
            raise ModelError("{0} {1}; get the file again".format(full, complaint))
    return found


# --- manifest --------------------------------------------------------------------------------------------------------


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a model folder, or {} where there is none that can be used."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as stream:
            manifest = json.load(stream)
    except (OSError, ValueError):
        return {}
    if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
        return {}
    return manifest


def damage(folder: str, manifest: dict[str, Any], full: bool) -> dict[str, str]:
    """Return {path: what is wrong} for the files that the manifest names.

    A changed time with the right size is settled by the hash; with ``full`` every file is hashed.
    """
    wrong = {}
    for row in manifest.get("files", []):
        path = os.path.join(folder, row["path"])
        try:
            state = os.stat(path)
        except OSError:
            wrong[row["path"]] = "is missing"
            continue
        if state.st_size != row["size"]:
            kind = "is truncated" if state.st_size < row["size"] else "is too long"
            wrong[row["path"]] = "{0}: {1} of {2} bytes".format(kind, state.st_size, row["size"])
        elif (full or state.st_mtime_ns != row["mtime_ns"]) and sha256_of(path) != row["sha256"]:
            wrong[row["path"]] = "was altered: its sha256 differs from the manifest"
    return wrong


def make_manifest(folder: str, about: dict[str, Any], hashes: dict[str, str]) -> dict[str, Any]:
    """Return the manifest of a complete folder: ``hashes`` is {path: sha256}, ``about`` name, revision, source."""
    rows: list[dict[str, Any]] = []
    for path in sorted(hashes):
        state = os.stat(os.path.join(folder, path))
        rows.append({"path": path, "size": state.st_size, "sha256": hashes[path], "mtime_ns": state.st_mtime_ns})
    manifest: dict[str, Any] = {"schema": MANIFEST_SCHEMA, "format": model_format(hashes), "files": rows}
    manifest["total_bytes"] = sum(int(row["size"]) for row in rows)
    manifest["created_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest.update(about)
    return manifest


def write_manifest(folder: str, manifest: dict[str, Any]) -> None:
    """Put the manifest in place by rename, after everything else reached the disk."""
    temporary = os.path.join(folder, MANIFEST + PART)
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(temporary, 0o644)
    os.rename(temporary, os.path.join(folder, MANIFEST))


# --- hashes, space ---------------------------------------------------------------------------------------------------


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def git_sha1_of(path: str) -> str:
    """Return the git blob id of a file, in hex."""
    digest = hashlib.sha1(b"blob %d\0" % os.path.getsize(path))  # noqa: S324  git's own name for the content
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def existing_parent(path: str) -> str:
    """Return the nearest folder above (or at) this path that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    return path


def needed_bytes(folder: str, files: Sequence[ModelFile]) -> int:
    """Return how many bytes must still be written for these files; a partial file counts for what it holds."""
    total = 0
    for one in files:
        part = os.path.join(folder, one.path + PART)
        held = os.path.getsize(part) if os.path.exists(part) else 0
        total += max(one.size - held, 0)
    return total


def space_complaint(folder: str, needed: int, reserve: int) -> str:
    """Say in one line that the disk is too small, or "" where it is not. All in bytes."""
    place = existing_parent(folder)
    free = shutil.disk_usage(place).free
    if needed + reserve <= free:
        return ""
    return "not enough space for {0}: {1} needed, {2} free below {3} ({4} is kept free)".format(
        folder, in_units(needed), in_units(free), place, in_units(reserve)
    )


def in_units(count: int) -> str:
    """Return bytes in the unit that a person would use (1 GB is 1e9 bytes)."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return "{0:.1f} {1}".format(count / size, unit)
    return "{0} bytes".format(count)


# --- bringing --------------------------------------------------------------------------------------------------------


def place_file(folder: str, one: ModelFile) -> str:
    """Check a finished ``.part`` file, rename it into place and return its SHA-256.

    Raises ModelError, and removes the part, where it is not what its source described.
    """
    final = os.path.join(folder, one.path)
    part = final + PART
    size = os.path.getsize(part)
    found = sha256_of(part)
    complaint = ""
    if size != one.size:
        complaint = "has {0} of {1} bytes".format(size, one.size)
    elif one.sha256 and found != one.sha256:
        complaint = "has sha256 {0}, its source says {1}".format(found, one.sha256)
    elif one.git_sha1 and not one.sha256 and git_sha1_of(part) != one.git_sha1:
        complaint = "differs from the git id that its source says ({0})".format(one.git_sha1)
    else:
        complaint = weight_complaint(part, one.path)
    if complaint:
        os.unlink(part)
        raise ModelError("{0} {1}; it was removed, run again to fetch it".format(one.path, complaint))
    os.chmod(part, 0o644)
    os.rename(part, final)
    return found


def copy_file(source: str, folder: str, one: ModelFile, method: str, keep_going: Callable[[], bool]) -> bool:
    """Bring one file from a local path into ``NAME.part``. Return whether it is complete.

    ``method``: ``copy`` (shares blocks where the file system can), ``hardlink``, ``move``. A copy stops when
    ``keep_going`` says so, and goes on from there in the next call.
    """
    part = os.path.join(folder, one.path + PART)
    os.makedirs(os.path.dirname(part), exist_ok=True)
    if method in ("hardlink", "move"):
        if os.path.exists(part):
            os.unlink(part)
        try:
            if method == "hardlink":
                os.link(source, part)
            else:
                os.rename(source, part)
            return True
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            if method == "hardlink":
                raise ModelError(
                    "{0} cannot be linked into {1}: two file systems; use the method copy".format(source, folder)
                ) from None
    with open(source, "rb") as reader, open(part, "ab") as writer:
        if writer.tell() == 0 and _share_blocks(reader.fileno(), writer.fileno()):
            return True
        if writer.tell() > one.size:
            writer.truncate(0)
        reader.seek(writer.tell())
        while writer.tell() < one.size:
            if not keep_going():
                return False
            chunk = reader.read(CHUNK_BYTES)
            if not chunk:
                raise ModelError("{0} became shorter while it was copied".format(source))
            writer.write(chunk)
    return True


def _share_blocks(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, FICLONE, reader)
    except OSError:
        return False
    return True


def remove_strangers(folder: str, keep: Iterable[str]) -> list[str]:
    """Remove what lies in a model folder and is not of this model; return the relative paths."""
    kept = set(keep) | {MANIFEST}
    removed = []
    for base, _folders, names in os.walk(folder):
        for name in names:
            path = os.path.relpath(os.path.join(base, name), folder)
            if path not in kept:
                os.unlink(os.path.join(base, name))
                removed.append(path)
    return sorted(removed)
