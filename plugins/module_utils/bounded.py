# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a command or read a file with limits on time and size, and say in words why nothing came."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from typing import IO, Any

# Where tools live that a service account's PATH often lacks.
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/nvidia/bin:/opt/bin"


class Text(str):
    """What a probe returns that has more to say: that it was cut, and notes for a person, such as what needs root."""

    truncated = False
    notes = ""


def text(value: str, truncated: bool = False, notes: str = "") -> Text:
    """Return a probe's text with what else is to be said of it."""
    told = Text(value)
    told.truncated, told.notes = truncated, notes
    return told


def run(argv: list[str], timeout_s: int, max_bytes: int, ends: bool = False) -> dict[str, Any]:
    """Run one command in the C locale, in its own process group, without a terminal and without input.

    Of an output that is too large the head is kept; with ``ends`` a quarter of it is the head and the rest the tail,
    cut at line ends: a log tells the boot in its head and the trouble in its tail.

    Returns a dict with ``command, rc, stdout, stderr, elapsed_ms, truncated, reason``. ``rc`` is None and ``reason``
    says why where the command could not be run or did not end within ``timeout_s`` seconds; its whole group is killed
    then.
    """
    result = _empty(command=" ".join(argv))
    search = os.environ.get("PATH", "") + ":" + SEARCH_PATH
    tool = shutil.which(argv[0], path=search)
    if tool is None:
        result["reason"] = "{0}: command not found".format(argv[0])
        return result
    environment = {"PATH": search, "LC_ALL": "C", "LANG": "C", "HOME": os.environ.get("HOME", "/"), "TERM": "dumb"}
    started = time.monotonic()
    # Files, not pipes: a grandchild that keeps a pipe open after its parent's end would hold the reader for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [tool] + list(argv[1:]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            result["reason"] = "{0}: {1}".format(tool, error.strerror)
            return result
        try:
            result["rc"] = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            result["reason"] = "no answer within {0} s".format(timeout_s)
            _kill_group(process)
        result["stdout"], cut_out = _ends(out, max_bytes) if ends else _head(out, max_bytes)
        result["stderr"], cut_err = _head(err, 64 * 1024)
    result["truncated"] = cut_out or cut_err
    result["elapsed_ms"] = int((time.monotonic() - started) * 1000)
    return result


def read(path: str, max_bytes: int) -> dict[str, Any]:
    """Read a text file; the same dict as ``run``, with ``path`` in place of ``command`` and ``rc`` None."""
    result = _empty(path=path)
    started = time.monotonic()
    try:
        with open(path, "rb") as stream:
            result["stdout"], result["truncated"] = _head(stream, max_bytes, rewind=False)
    except OSError as error:
        result["reason"] = "{0}: {1}".format(path, error.strerror)
    result["elapsed_ms"] = int((time.monotonic() - started) * 1000)
    return result


def value(path: str) -> str | None:
    """Return the stripped text of a small file such as a sysfs attribute, or None where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(65536).decode("utf-8", "replace").replace("\0", "").strip()
    except OSError:
        return None


def _empty(command: str = "", path: str = "") -> dict[str, Any]:
    return {
        "command": command,
        "path": path,
        "rc": None,
        "stdout": "",
        "stderr": "",
        "elapsed_ms": 0,
        "truncated": False,
        "reason": "",
    }


def _head(stream: IO[bytes], max_bytes: int, rewind: bool = True) -> tuple[str, bool]:
    if rewind:
        stream.seek(0)
    data = stream.read(max_bytes + 1)
    return data[:max_bytes].decode("utf-8", "replace"), len(data) > max_bytes


def _ends(stream: IO[bytes], max_bytes: int) -> tuple[str, bool]:
    size = stream.seek(0, os.SEEK_END)
    if size <= max_bytes:
        return _head(stream, max_bytes)
    stream.seek(0)
    head = stream.read(max_bytes // 4)
    stream.seek(size - (max_bytes - len(head)))
    tail = stream.read()
    kept = head[: head.rfind(b"\n") + 1] + tail[tail.find(b"\n") + 1 :]
    return kept.decode("utf-8", "replace"), True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except OSError:
            return
        try:
            process.wait(timeout=1)
            return
        except subprocess.TimeoutExpired:
            continue
    # A process in uninterruptible sleep (a GPU that fell off the bus) survives SIGKILL: leave it, say so, go on.
