"""DKMS: its own list of modules, and the failures that installers, apt and make.log tell of."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..core.snapshot import DkmsState
from .text import lines

# `nvidia/595.58.03, 6.17.13-2-pve, x86_64: installed (WARNING! ...)`; before DKMS 3 `nvidia, 470.86, 5.4.0, ...`.
_STATUS = re.compile(
    r"([\w.+-]{1,60})(?:/|, )([\w.+~:-]{1,60}?)(?:, ([\w.+~-]{1,80}), (?:x86_64|aarch64|i686))?: "
    r"(added|built|installed|broken)\b\s*(.*)"
)
_NO_HEADERS = re.compile(r"Your kernel headers for kernel (\S+) cannot be found")
_BUILD_CALL = re.compile(
    r"dkms (?:build|install)[^`\n]* -m (\S+) -v (\S+?)[`'\s]*(?: -k (\S+?)[`'\s:]*)?$", re.MULTILINE
)
_BAD_STATUS = re.compile(r"Bad return status for module build on kernel: (\S+)")
_MAKE_LOG = re.compile(r"/var/lib/dkms/([^/\s]+)/([^/\s]+)/(?:build|[^/\s]+/[^/\s]+/log)/make\.log")
_EXIT_STATUS = re.compile(r"exit status: (\d{1,3})\b")
_BUILD_FOLDER = re.compile(r"/var/lib/dkms/[^/\s]+/[^/\s]+/build/")
_LOG_HEAD = re.compile(r"DKMS make\.log for (.+)-(\d[\w.+~]*) for kernel (\S+)")
_AUTOINSTALL = re.compile(r"dkms autoinstall on (\S+?)/\S+ failed for ([\w.-]+)\(\d+\)")
# From the line that names the cause to the one that only says that something failed.
_CAUSES = (
    re.compile(r"\berror: \S"),
    re.compile(r"No space left on device|Cannot allocate memory"),
    re.compile(r"ERROR: modpost: "),
    re.compile(r"No rule to make target|command not found"),
    re.compile(r"make(?:\[\d+\])?: \*\*\* |'make'.*exit status|bad exit status: \d+"),
    re.compile(r"Bad return status for module build"),
)


def status(text: str) -> tuple[DkmsState, ...]:
    """Read ``dkms status``. A warning stays with its line as the note."""
    states = []
    for row in lines(text):
        found = _STATUS.match(row.strip()) if len(row) < 600 else None
        if found:
            module, version, kernel, state, note = found.groups()
            states.append(DkmsState(module, version, kernel or "", state, note.strip().strip("()")))
    return tuple(states)


def failures(text: str) -> tuple[DkmsState, ...]:
    """Read build failures out of the output of an installer, of apt or dkms, or out of a make.log.

    ``note`` is the line that names the cause: the compiler's first error, else the last thing that is known.
    """
    rows = [row.strip() for row in lines(text) if row.strip()]
    clean = "\n".join(rows)
    states = [
        DkmsState("", "", kernel, "headers_missing", _row_with(rows, f"headers for kernel {kernel} "))
        for kernel in dict.fromkeys(_NO_HEADERS.findall(clean))
    ]
    head, call, log = _LOG_HEAD.search(clean), _BUILD_CALL.search(clean), _MAKE_LOG.search(clean)
    bad, automatic = _BAD_STATUS.search(clean), _AUTOINSTALL.search(clean)
    failed = bad or automatic or (_first_cause(rows) if head or call else "")
    if not failed:
        return tuple(states)
    module, version = (
        (head[1], head[2]) if head else (call[1], call[2]) if call else (log[1], log[2]) if log else ("", "")
    )
    if not module and automatic:
        module = automatic[2]
    kernels = (head and head[3], bad and bad[1], call and call[3], automatic and automatic[1])
    kernel = next((name for name in kernels if name), "")
    status_ = _EXIT_STATUS.search(clean)
    return (
        *states,
        DkmsState(
            module,
            version,
            kernel,
            "failed",
            _first_cause(rows),
            exit_status=int(status_[1]) if status_ else None,
            log=log[0] if log else "",
        ),
    )


def cause(text: str) -> str:
    """Return the line of a ``make.log`` that says why the build failed, without the build folder; "" if none does."""
    return _BUILD_FOLDER.sub("", _first_cause([row.strip() for row in lines(text)]))


def log_of(logs: Mapping[str, str], module: str, version: str, kernel: str) -> tuple[str, str]:
    """Return path and text of the build log that belongs to a failed build, or two empty strings.

    ``logs``: path -> text. DKMS keeps the log of a failed build under ``<module>/<version>/build``, and of a finished
    one under the kernel. The first names its kernel in its head.
    """
    start = f"/var/lib/dkms/{module}/{version}/"
    for path, text in logs.items():
        if path.startswith(start) and (f"/{kernel}/" in path or kernel in text[:2000]):
            return path, text
    return "", ""


def _first_cause(rows: list[str]) -> str:
    for pattern in _CAUSES:
        for row in rows:
            if pattern.search(row):
                return row
    return ""


def _row_with(rows: list[str], part: str) -> str:
    return next((row for row in rows if part in row), "")
