"""Read what DKMS prints and logs: which module is built for which kernel, and why a build failed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..core.snapshot import DkmsState

# dkms 3: "nvidia/580.95.05, 6.8.0-60-generic, x86_64: installed (WARNING! ...)"; dkms 2 has a comma for the slash.
_STATUS = re.compile(
    r"^(?P<module>[^,/\s]+)(?:/|, ?)(?P<version>[^,:\s]+)"
    r"(?:, ?(?P<kernel>[^,\s]+), ?(?P<machine>[^:\s]+))?: ?(?P<state>[a-z-]+)(?P<note>.*)$"
)
_BUILD_FAILED = re.compile(r"Error! +Bad return status for module build on kernel: +(\S+) ")
_NO_HEADERS = re.compile(r"Error! +Your kernel headers for kernel +(\S+) cannot be found")
_NO_HEADERS_OLD = re.compile(r"Module build for kernel +(\S+) was skipped since the\s+kernel headers for this kernel")
_LOG = re.compile(r"Consult (/\S+?/make\.log)")
_COMPILER = re.compile(r"(?:^|\s)(\S+?:\d+(?::\d+)?: (?:fatal )?error: .+)$", re.M)
_OTHERS = (
    re.compile(r"^(.*(?:No space left on device|Cannot allocate memory).*)$", re.M),
    re.compile(r"^(.*(?:modpost|ERROR: modpost): .+)$", re.M),
    re.compile(r"^(.*(?:command not found|No such file or directory).*)$", re.M),
    re.compile(r"^(make(?:\[\d+\])?: \*\*\* .+)$", re.M),
)


def status(text: str) -> tuple[DkmsState, ...]:
    """Parse ``dkms status``. Lines that are no status are skipped: dkms mixes warnings in."""
    found = []
    for line in text.splitlines():
        match = _STATUS.match(line.strip())
        if match:
            note = match["note"].strip(" ()")
            found.append(DkmsState(match["module"], match["version"], match["kernel"] or "", match["state"], note))
    return tuple(found)


def cause(make_log: str) -> str:
    """Return the line of a ``make.log`` that says why the build failed, without the build folder; "" if none does."""
    match = _COMPILER.search(make_log)
    if match is None:
        match = next((hit for pattern in _OTHERS if (hit := pattern.search(make_log))), None)
    if match is None:
        return ""
    return re.sub(r"/var/lib/dkms/[^/\s]+/[^/\s]+/build/", "", match[1].strip())


def failures(output: str) -> dict[str, str]:
    """Return kernel -> reason from what dkms, apt or NVIDIA's installer printed during an installation."""
    found = dict.fromkeys(_NO_HEADERS.findall(output) + _NO_HEADERS_OLD.findall(output), "no kernel headers")
    logs = _LOG.findall(output)
    for position, kernel in enumerate(_BUILD_FAILED.findall(output)):
        found[kernel] = f"see {logs[min(position, len(logs) - 1)]}" if logs else "build failed"
    return found


def log_of(logs: Mapping[str, str], module: str, version: str, kernel: str) -> tuple[str, str]:
    """Return path and text of the build log that belongs to a failed build, or two empty strings.

    DKMS keeps the log of a failed build under ``<module>/<version>/build``, and of a finished one under the kernel. The
    first names its kernel in its head.
    """
    start = f"/var/lib/dkms/{module}/{version}/"
    for path, text in logs.items():
        if path.startswith(start) and (f"/{kernel}/" in path or kernel in text[:2000]):
            return path, text
    return "", ""
