"""``nvidia-smi`` without options, with ``-L`` and as ``dmon``: banner, failures, table, processes, list, samples."""

from __future__ import annotations

import re
from typing import Any

from ..core.snapshot import Gpu, GpuProcess, GpuSample, MigInstance, NvidiaSmi
from ..core.values import changed
from .nvidia_values import mode, number, program, value, whole
from .text import RefusedError, address, lines

# Beyond this a line is no line of the table; it keeps the row patterns from long searches.
_LONGEST_ROW = 300
# Banner and failures stand at the start; `-q` of eight GPUs is longer.
_HEAD_CHARACTERS = 16 * 1024
_START_CHARACTERS = 1024

_BANNER = re.compile(r"NVIDIA-SMI\s+\d[\w.]*")
_DRIVER = re.compile(r"(?:\b(?:Driver|KMD) Version\s*:\s*|<driver_version>)([\w./]+)")
_CUDA = re.compile(r"(?:\bCUDA (?:UMD )?Version\s*:\s*|<cuda_version>)([\w./]+)")
_LIBRARY = re.compile(r"NVML library version:\s*([\d.]+)")
_LOST = re.compile(r"Unable to determine the device handle for GPU\s*(?:\d{1,3}:\s+)?([0-9A-Fa-f:.]+?):?\s+(\S[^\n]*)")
_NO_COMMAND = re.compile(r"nvidia-smi\S*:? (?:command )?not found|not found on PATH|not installed|No such file", re.I)

# Texts of section 7.1 of the catalogue, most specific first, blanks and line breaks folded to one blank.
_FAILURES = (
    ("no_driver", re.compile(r"NVIDIA-SMI has failed because it couldn.{1,3}t communicate with the NVIDIA driver")),
    ("no_driver", re.compile(r"[Ff]ailed to initialize NVML: Driver Not Loaded")),
    ("version_mismatch", re.compile(r"[Ff]ailed to initialize NVML: Driver/")),
    ("unknown_error", re.compile(r"[Ff]ailed to initialize NVML: Unknown Error")),
    ("no_permission", re.compile(r"[Ff]ailed to initialize NVML: Insufficient Permissions")),
    ("lost_gpu", re.compile(r"Unable to determine the device handle for GPU")),
    ("no_devices", re.compile(r"\bNo devices were found")),
    ("error", re.compile(r"[Ff]ailed to initialize NVML: [^\n]*")),
)
_FAILURE_WORDS = ("failed", "NVML", "Unable", "devices")
# What nvidia-smi's manual says of its return values, for output without a text that says it better.
_BY_RC = {6: "no_devices", 9: "no_driver", 4: "no_permission", 15: "lost_gpu", 18: "version_mismatch"}

_LISTED = re.compile(r"GPU (\d+): (.+?)(?: \(UUID: ([^)]*)\)?)?$")
_LISTED_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+):")

_ROW_NAME = re.compile(
    r"\|\s*(\d+)\s+(\S.*?)\s+(On|Off|N/A)\s*\|\s*([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"
    r"\s+\S+\s*\|\s*(\S+)\s*\|"
)
_ROW_STATE = re.compile(
    r"\|\s*(\S+)\s+(\S+)\s+(\S+)\s+(\S+)\s*/\s*(\S+)\s*\|\s*(\S+)\s*/\s*(\S+)\s*\|\s*(\S+)\s+(\S.*?)\s*\|"
)
_ROW_MIG = re.compile(r"\|\s+\|\s+\|\s*(\S+)\s*\|")
# A driver version needs a dot to be one; a paste may be cut inside it.
_VERSION = re.compile(r"\d+\.\d[\d.]*")


def answer(text: str, rc: int | None = None) -> NvidiaSmi:
    """Say how any call of ``nvidia-smi`` ended: worked, or failed in a way that has a name."""
    head = text[:_HEAD_CHARACTERS]
    if rc in (None, 0) and not any(word in head for word in _FAILURE_WORDS):
        # Almost every text: the banner, or the first lines of -q, and nothing that sounds like a failure.
        start = _versions("\n".join(lines(text[:_START_CHARACTERS].rpartition("\n")[0])))
        if start.driver_version and start.cuda_version:
            return changed(start, state="ok", rc=rc)
    rows = lines(head)
    clean = "\n".join(rows)
    versions = _versions(clean)
    # A few words in front of eight patterns: almost every text is an answer, not a failure.
    failed = any(word in clean for word in _FAILURE_WORDS)
    folded = " ".join(clean.split()) if failed or not versions.driver_version else ""
    for state, pattern in _FAILURES if failed else ():
        found = pattern.search(folded)
        if found:
            lost = {hit[1]: _reason(hit[2]) for hit in _LOST.finditer(clean)} if state == "lost_gpu" else {}
            library = _LIBRARY.search(folded)
            message = next((row.strip() for row in rows if found[0][:24] in row), found[0])
            version = library[1] if library else None
            return changed(
                versions,
                state=state,
                rc=rc,
                message=message,
                library_version=version,
                lost=tuple(lost),
                lost_reasons=tuple(lost.values()),
            )
    lower = folded.lower()
    absent = any(words in lower for words in ("not found", "not installed", "no such file"))
    if absent and not versions.driver_version and _NO_COMMAND.search(folded) and not _BANNER.search(clean):
        return NvidiaSmi("not_found", rc, next((row.strip() for row in rows if row.strip()), ""))
    if rc not in (None, 0):
        message = next((row.strip() for row in reversed(rows) if row.strip()), "")
        return changed(versions, state=_BY_RC.get(rc, "error"), rc=rc, message=message)
    if not (
        versions.driver_version
        or _BANNER.search(clean)
        or any(_LISTED.match(row) for row in rows if len(row) < _LONGEST_ROW)
    ):
        raise RefusedError("holds no nvidia-smi banner and no known failure text")
    return changed(versions, state="ok", rc=rc)


def _reason(words: str) -> str:
    """Return the reason alone: ``GPU is lost`` of ``GPU is lost.  Reboot the system to recover this GPU``."""
    return words.partition(".")[0].strip()


def _versions(clean: str) -> NvidiaSmi:
    driver, cuda = _DRIVER.search(clean), _CUDA.search(clean)
    return NvidiaSmi(
        state="",
        driver_version=_version(driver[1] if driver else None),
        cuda_version=_version(cuda[1] if cuda else None),
    )


def _version(text: str | None) -> str | None:
    given = value(text)
    return given if given and _VERSION.fullmatch(given) else None


def gpu_list(text: str) -> tuple[Gpu, ...]:
    """Read ``nvidia-smi -L``."""
    gpus: list[Gpu] = []
    for row in lines(text):
        listed = _LISTED.match(row) if len(row) < _LONGEST_ROW else None
        if listed:
            gpus.append(Gpu(index=int(listed[1]), name=listed[2], uuid=listed[3] or "", mig_devices=None))
        elif gpus and (part := _LISTED_MIG.match(row)):
            instances = (*gpus[-1].mig_instances, MigInstance(int(part[2]), part[1]))
            gpus[-1] = changed(gpus[-1], mig="Enabled", mig_devices=len(instances), mig_instances=instances)
    if not gpus:
        raise RefusedError("lists no GPU")
    return tuple(gpus)


def table(text: str) -> tuple[Gpu, ...]:
    """Read the GPUs of the table below the banner. A long name is cut there (``NVIDIA RTX PRO 6000 Blac...``)."""
    gpus: list[Gpu] = []
    rows = [row for row in lines(text) if len(row) < _LONGEST_ROW]
    for position, row in enumerate(rows):
        named = _ROW_NAME.match(row)
        if named is None:
            continue
        told: dict[str, Any] = {"persistence": mode(named[3]), "ecc": _ecc(named[5])}
        state = _ROW_STATE.match(rows[position + 1]) if position + 1 < len(rows) else None
        if state:
            told.update(
                temperature_c=whole(state[2]),
                pstate=value(state[3]),
                power_draw_w=number(state[4]),
                power_limit_w=number(state[5]),
                memory_used_mib=whole(state[6]),
                memory_total_mib=whole(state[7]),
                utilization_percent=whole(state[8]),
                compute_mode=value(state[9]),
            )
        mig = _ROW_MIG.match(rows[position + 2]) if position + 2 < len(rows) else None
        if mig:
            told["mig"] = mode(mig[1])
        # The columns of the table that hold no value.
        blank = frozenset(name for name, given in told.items() if given is None)
        gpus.append(Gpu(index=int(named[1]), name=named[2], bus_id=address(named[4]) or "", blank=blank, **told))
    return tuple(gpus)


_PROCESSES = re.compile(r"\|\s*Processes:")
# `|    0   N/A  N/A   3203007      C   ...ests/all_reduce_perf        788MiB |`; before R450 without GI and CI.
_PROCESS_ROW = re.compile(
    r"\|\s+(\d{1,3})\s+(?:(?:N/A|\d{1,3})\s+(?:N/A|\d{1,3})\s+)?(\d{1,10})\s+(C\+G|M\+C|[CGM])\s+(\S.*?)\s+"
    r"(\d{1,9}MiB|N/A)\s*\|"
)
_NO_PROCESS = re.compile(r"\|\s+No running (?:compute )?processes found")


def processes(text: str) -> tuple[GpuProcess, ...] | None:
    """Read the box of processes below the table; None where it is not there or was cut before its first line."""
    rows = lines(text)
    start = next((at for at, row in enumerate(rows) if _PROCESSES.match(row)), None)
    if start is None:
        return None
    found = []
    for row in rows[start + 1 :]:
        if len(row) > _LONGEST_ROW:
            continue
        if _NO_PROCESS.match(row):
            return ()
        hit = _PROCESS_ROW.match(row)
        if hit:
            found.append(GpuProcess(hit[1], int(hit[2]), hit[3], program(hit[4]), whole(hit[5])))
    return tuple(found) or None


def dmon(text: str) -> tuple[GpuSample, ...]:
    """Read ``nvidia-smi dmon``: one line a GPU and second (more with ``-d``, so the times are lower bounds)."""
    rows = [row.split() for row in lines(text) if row.strip() and len(row) < _LONGEST_ROW]
    header = next((row[1:] for row in rows if row[:1] == ["#"] and "gpu" in row and "pwr" in row), None)
    if header is None:
        raise RefusedError("has no header `# gpu  pwr ...`")
    found, turns = [], dict[str, int]()
    for row in rows:
        if row[0].startswith("#") or len(row) != len(header):
            continue
        told = dict(zip(header, row, strict=True))
        turn = turns[told["gpu"]] = turns.get(told["gpu"], -1) + 1
        found.append(
            GpuSample(
                told["gpu"],
                float(turn),
                whole(told.get("sm")),
                number(told.get("pwr")),
                whole(told.get("pclk")),
            )
        )
    if not found:
        raise RefusedError("has a header and no row")
    return tuple(found)


def _ecc(cell: str) -> str | None:
    # The column shows the count of errors where ECC is on, and "Off" where it is off.
    return "Enabled" if cell.isdigit() else mode(cell)
