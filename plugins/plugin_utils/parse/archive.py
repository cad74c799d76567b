"""Archives to folders in memory: tar, zip, and single compressed files. An archive is input, and may be hostile.

Nothing is ever written to disk. What leaves the archive (``..``, an absolute name, a link), what is no regular file and
what is locked is left out and named; what unpacks to too much ends the reading; of a cut archive all that can be read
is kept.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from ..core.evidence import HEAD_BYTES, TAIL_BYTES, Content

# Limits on what an archive may unpack to: bytes read, bytes kept in memory, files, and how much more than its own size.
MAX_UNPACKED_BYTES = 1024 * 1024 * 1024
MAX_KEPT_BYTES = 256 * 1024 * 1024
MAX_MEMBERS = 100_000
MAX_RATIO = 200
# Below this the ratio is no sign of anything: a log of one repeated line shrinks a thousandfold.
_RATIO_FROM_BYTES = 64 * 1024 * 1024

_CHUNK = 256 * 1024
_TAR_MAGIC_AT = 257
_EXAMPLES = 3
# What the modules that unpack raise on input that is cut or broken.
_BROKEN = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    struct.error,
    ValueError,
    NotImplementedError,
    RuntimeError,
)

_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"\xfd7zXZ", "xz"),
    (b"BZh", "bzip2"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_SUFFIXES = (".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst", ".tgz", ".txz", ".tar", ".zip", ".gz", ".xz", ".bz2", ".zst")


class TooMuchError(Exception):
    """The archive unpacks to more than the limits allow."""


@dataclass
class Unpacked:
    """What an archive gave: files by their path in it, or a single file's ``text``; ``problems`` are lines."""

    files: list[tuple[tuple[str, ...], Content]] = field(default_factory=list)
    text: Content | None = None
    problems: list[str] = field(default_factory=list)


def kind_of(head: bytes) -> str:
    """Return gzip, zip, xz, bzip2, zstd or tar by the first bytes of a file; "" for anything else."""
    told = next((kind for magic, kind in _MAGIC if head.startswith(magic)), "")
    return told or ("tar" if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar" else "")


def looks_packed(name: str) -> bool:
    """Whether a file of this name is an archive or a compressed file, if its content says so too."""
    return name.lower().endswith(_SUFFIXES)


def stem(name: str) -> str:
    """Return the name without what says how it is packed."""
    suffix = next((one for one in _SUFFIXES if name.lower().endswith(one)), "")
    return name[: len(name) - len(suffix)] or name


def unpack(stream: IO[bytes], size: int, place: str, kind: str) -> Unpacked:
    """Read an archive of ``size`` bytes. What is wrong with its content becomes a line that names ``place``."""
    out = Unpacked()
    try:
        _Reader(stream, size, place, out).read(kind)
    except TooMuchError as error:
        out.problems.append(f"{place}: {error}; only what came before is judged")
    except _BROKEN as error:
        if out.files and not out.files[-1][1].size:
            out.files.pop()  # it was cut before its first byte
        got = "what could be read is judged" if out.files or out.text else "nothing could be read"
        out.problems.append(f"{place}: is cut or broken ({_words(error)}); {got}")
    return out


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class _Metered:
    """A stream that counts what it gives, and stops where the archive grows beyond all measure."""

    def __init__(self, stream: _Readable, meter: _Reader) -> None:
        self.stream, self.meter = stream, meter
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes."""
        data = self.stream.read(size if 0 <= size < _CHUNK else _CHUNK)
        self.meter.count(len(data))
        self.last = (self.last + data)[-512:]
        return data


class _Reader:
    def __init__(self, stream: IO[bytes], size: int, place: str, out: Unpacked) -> None:
        self.stream, self.size, self.place, self.out = stream, size, place, out
        self.unpacked = self.kept = 0
        self.refused: dict[str, list[str]] = {}

    def count(self, number: int) -> None:
        self.unpacked += number
        if self.unpacked > MAX_UNPACKED_BYTES:
            raise TooMuchError(f"unpacks to more than {MAX_UNPACKED_BYTES // 1024 // 1024} MiB")
        if self.unpacked > _RATIO_FROM_BYTES and self.unpacked > MAX_RATIO * self.size:
            raise TooMuchError(f"unpacks to more than {MAX_RATIO} times its size, as a zip bomb does")

    def read(self, kind: str) -> None:
        try:
            if kind == "zip":
                self._zip()
            else:
                self._stream(kind)
        finally:
            self._tell_refused()

    # --- tar and single files

    def _stream(self, kind: str) -> None:
        plain = _Metered(_decompressed(self.stream, kind), self)
        if kind == "tar":
            self._tar(plain, b"")
            return
        head = b""
        while len(head) < 512:
            part = plain.read(512 - len(head))
            if not part:
                break
            head += part
        if kind_of(head) == "tar" or (len(head) == 512 and not head.strip(b"\0")):  # zeros: the end of an empty tar
            self._tar(plain, head)
        else:
            self.out.text = Content()
            self.out.text = self._content(plain, head)

    def _tar(self, plain: _Metered, head: bytes) -> None:
        source: Any = _Prefixed(head, plain)
        with tarfile.open(fileobj=source, mode="r|", errorlevel=0, encoding="utf-8", errors="replace") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                path = self._path(member.name, _kind(member))
                if path:
                    data = archive.extractfile(member)
                    self._keep(path, data or io.BytesIO(), member.size)
        if plain.last.strip(b"\0"):
            raise EOFError("its end is missing")

    # --- zip

    def _zip(self) -> None:
        try:
            archive = zipfile.ZipFile(self.stream)
        except zipfile.BadZipFile:
            self.stream.seek(0)
            for name, mode, data in _local_entries(self.stream):
                path = self._path(name, mode)
                if path:
                    self._keep(path, _Metered(data, self), None)
            raise EOFError("its table of contents, at its end, is missing") from None
        with archive:
            for member in archive.infolist():
                link = stat.S_ISLNK(member.external_attr >> 16)
                what = "is a link" if link else "is locked with a password" if member.flag_bits & 1 else ""
                path = self._path(member.filename, what or ("folder" if member.is_dir() else ""))
                if path is None:
                    continue
                try:
                    with archive.open(member) as data:
                        self._keep(path, _Metered(data, self), None)
                except _BROKEN as error:
                    self.refused.setdefault(f"cannot be unpacked ({_words(error)})", []).append("/".join(path))

    # --- members

    def _path(self, name: str, what: str) -> tuple[str, ...] | None:
        """Return the path of a member that may be read, or None where it is refused or holds nothing."""
        if len(self.out.files) >= MAX_MEMBERS:
            raise TooMuchError(f"holds more than {MAX_MEMBERS} files")
        name = name.replace("\\", "/")
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if name.startswith("/") or ".." in parts or name[1:2] == ":":
            what = "leaves the archive"
        if what == "folder" or (not parts and not what):
            return None
        if what:
            self.refused.setdefault(what, []).append(name)
            return None
        return parts

    def _keep(self, path: tuple[str, ...], data: _Readable, size: int | None) -> None:
        self.out.files.append((path, Content()))
        content = self._content(data, b"")
        if size is not None and content.size < size:
            raise EOFError(f"it ends inside {'/'.join(path)}")

    def _content(self, data: _Readable, head: bytes) -> Content:
        """Read a member to its end; keep head and tail. What was read before an error is kept too."""
        parts, size, tail = [head], len(head), b""
        in_head = len(head)
        content = Content(head, size=size)
        try:
            while part := data.read(_CHUNK):
                size += len(part)
                if in_head < HEAD_BYTES:
                    parts.append(part[: HEAD_BYTES - in_head])
                    in_head += len(parts[-1])
                    part = part[len(parts[-1]) :]
                tail = (tail + part)[-TAIL_BYTES:] if part else tail
                if self.kept + in_head + len(tail) > MAX_KEPT_BYTES:
                    raise TooMuchError(f"holds more than {MAX_KEPT_BYTES // 1024 // 1024} MiB of text")
        finally:
            content = Content(b"".join(parts), tail, size)
            self.kept += len(content.head) + len(tail)
            if self.out.files and self.out.text is None:
                self.out.files[-1] = (self.out.files[-1][0], content)
            else:
                self.out.text = content
        return content

    def _tell_refused(self) -> None:
        for what, members in self.refused.items():
            shown = ", ".join(repr(one)[1:-1] for one in members[:_EXAMPLES])
            more = f" and {len(members) - _EXAMPLES} more" if len(members) > _EXAMPLES else ""
            self.out.problems.append(f"{self.place}: {what}, and is left out: {shown}{more}")


class _Prefixed:
    """What was read already, then the rest of a stream."""

    def __init__(self, head: bytes, rest: _Readable) -> None:
        self.head, self.rest = head, rest

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; fewer at the end only, as a tar reader wants it."""
        parts = [self.head[:size]]
        self.head = self.head[size:]
        wanted = size - len(parts[0])
        while wanted > 0 and (part := self.rest.read(wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)


class _Piecewise:
    """A decompressed stream, read as it comes: a read that waits for more loses what it has where the end is cut."""

    def __init__(self, stream: gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File) -> None:
        self.stream = stream

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes."""
        return self.stream.read1(size)


def _decompressed(stream: IO[bytes], kind: str) -> _Readable:
    if kind == "gzip":
        return _Piecewise(gzip.GzipFile(fileobj=stream))
    if kind == "xz":
        return _Piecewise(lzma.LZMAFile(stream))
    if kind == "bzip2":
        return _Piecewise(bz2.BZ2File(stream))
    if kind == "zstd":
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
        except ImportError:
            raise ValueError("this Python cannot read zstd; unpack it with `tar --zstd -xf` or `unzstd`") from None
        reader: _Readable = zstd.ZstdFile(stream)
        return reader
    return stream


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "is a link"
    if member.isdir():
        return "folder"
    if member.issparse():
        return "is a file with holes"  # they would unpack to any size, and are not counted
    return "" if member.isreg() else "is a device or a pipe"


def _local_entries(stream: IO[bytes]) -> Iterator[tuple[str, str, _Readable]]:
    """Yield the members of a zip archive whose table of contents, at its end, was cut off."""
    while True:
        header = stream.read(30)
        if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
            return
        _, _, flags, method, _, _, _, packed, _, name_size, extra_size = struct.unpack("<4s5H3L2H", header)
        name = stream.read(name_size).decode("utf-8", errors="replace")
        stream.read(extra_size)
        if flags & 1 or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return
        if method == zipfile.ZIP_STORED and flags & 8:
            return  # its size stands behind it, so its end can't be found
        member = _Inflated(stream, packed if not flags & 8 else None, method == zipfile.ZIP_DEFLATED)
        yield name, "folder" if name.endswith("/") else "", member
        while member.read(_CHUNK):
            pass
        if flags & 8:
            mark = stream.read(4)
            stream.read(12 if mark == b"PK\x07\x08" else 8)


class _Inflated:
    """One member at the place where the stream stands; ``size`` None: it ends where its own data says."""

    def __init__(self, stream: IO[bytes], size: int | None, deflated: bool) -> None:
        self.stream, self.left = stream, size
        self.inflate = zlib.decompressobj(-15) if deflated else None

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes."""
        if self.inflate is None:
            part = self.stream.read(min(size, self.left or 0))
            self.left = (self.left or 0) - len(part)
            return part
        while not self.inflate.eof:
            packed = self.inflate.unconsumed_tail
            if not packed:
                packed = self.stream.read(_CHUNK if self.left is None else min(_CHUNK, self.left))
                if not packed:
                    return b""
                self.left = None if self.left is None else self.left - len(packed)
            data = self.inflate.decompress(packed, size)
            if self.inflate.eof and self.inflate.unused_data:
                self.stream.seek(-len(self.inflate.unused_data), io.SEEK_CUR)
            if data:
                return data
        return b""
