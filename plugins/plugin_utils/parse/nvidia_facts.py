"""What ``nvidia-smi`` told in all its calls: how it answered, the GPUs, what runs on them, their links."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ..core.evidence import Evidence
from ..core.snapshot import NOT_READ, Fact, Gpu, GpuProcess, GpuSample, NvidiaSmi, NvLinks
from ..core.values import changed
from . import gpus as gpu_list
from . import nvidia_query, nvidia_smi, nvlink
from .facts import Reading, Sources
from .nvidia_query import Query
from .text import EXCERPT_LINES, RefusedError, first_line, shorten

# Any of these may say how nvidia-smi ended; the plain call comes first.
_SMI_CALLS = tuple(f"nvidia_smi{call}" for call in ("", ".q", ".qx", ".L", ".query_gpu", ".topo_m", ".nvlink_s"))
# Failures that hold for the whole driver, whichever call met them.
_SMI_FAILURES = ("no_driver", "version_mismatch", "unknown_error", "no_permission", "lost_gpu", "no_devices")


def smi(sources: Sources) -> Fact[NvidiaSmi]:
    """Say how nvidia-smi answered. A failure in any call counts; versions come from the first call that names them."""
    answers: list[tuple[Evidence, NvidiaSmi]] = []
    for entry in sources.asked(*_SMI_CALLS):
        plain = entry.source.split("@")[0] == "nvidia_smi"
        try:
            answer = nvidia_smi.answer(entry.text or (entry.reason if plain else ""), entry.rc)
        except RefusedError:
            # A call with other contents (a matrix, a CSV) says nothing of how the driver is.
            continue
        if plain or answer.state == "ok" or answer.state in _SMI_FAILURES:
            answers.append((entry, answer))
    if not answers:
        return sources.missing("nvidia_smi")
    entry, chosen = next((one for one in answers if one[1].state in _SMI_FAILURES), answers[0])
    for _, other in answers:
        chosen = changed(
            chosen,
            driver_version=chosen.driver_version or other.driver_version,
            cuda_version=chosen.cuda_version or other.cuda_version,
        )
    lost = {bus: why for _, one in answers for bus, why in zip(one.lost, one.lost_reasons, strict=True)}
    chosen = changed(chosen, lost=tuple(lost), lost_reasons=tuple(lost.values()))
    excerpt = chosen.message or first_line(entry.text[:4096], r"NVIDIA-SMI \d|Driver Version|^GPU \d+: ")
    return Fact(chosen, entry.source, excerpt)


@dataclass(frozen=True)
class Told:
    """What all calls of ``nvidia-smi`` told of the GPUs, each output read once."""

    gpus: Fact[tuple[Gpu, ...]]
    attached: Fact[int] = NOT_READ
    processes: Fact[tuple[GpuProcess, ...]] = NOT_READ
    samples: Fact[tuple[GpuSample, ...]] = NOT_READ


def _table(text: str) -> Query:
    return Query(nvidia_smi.table(text), processes=nvidia_smi.processes(text))


def _list(text: str) -> Query:
    return Query(nvidia_smi.gpu_list(text))


_READERS: tuple[tuple[str, Callable[[str], Query], re.Pattern[str]], ...] = (
    ("nvidia_smi.q", nvidia_query.read_text, re.compile(r"\n[ \t]*(?:GPU [0-9A-F]{4}|Product Name).*")),
    ("nvidia_smi.qx", nvidia_query.read_xml, re.compile(r"\n[ \t]*(?:<gpu id|<product_name>).*")),
    ("nvidia_smi.query_gpu", nvidia_query.read_csv, re.compile(r"\n[^\n,]+,.*")),
    ("nvidia_smi", _table, re.compile(r"\n\|[ \t]*\d+[ \t].*")),
    ("nvidia_smi.L", _list, re.compile(r"\n[ \t]*(?:GPU \d+:|MIG ).*")),
)
_PROCESS_ROW = re.compile(r"\n[ \t]*(?:Process(?:es|[ ]ID)\s*:|<pid>|\|[ \t]+\d+[ \t].*MiB \||\|[ \t]+No running).*")


def told(sources: Sources, smi: Fact[NvidiaSmi]) -> Told:
    """Join every listing of GPUs. "No devices were found" is a listing too: an empty one."""
    readings: list[tuple[str, tuple[Gpu, ...]]] = []
    attached: Fact[int] = sources.missing("nvidia_smi.q")
    processes: Fact[tuple[GpuProcess, ...]] = sources.missing("nvidia_smi.q")
    samples: Fact[tuple[GpuSample, ...]] = sources.missing("nvidia_smi.dmon")
    excerpt, refusal = "", ""
    for source, read, telling in _READERS:
        for entry in sources.entries(source):
            try:
                query = read(entry.text)
            except RefusedError as error:
                refusal = refusal or f"{entry.source}: {error}"
                continue
            if query.gpus:
                readings.append((entry.source, query.gpus))
                excerpt = excerpt or _rows(entry.text, telling)
            if query.attached is not None and not attached.known:
                attached = Fact(query.attached, entry.source, f"Attached GPUs: {query.attached}")
            if query.processes is not None and not processes.known:
                processes = Fact(query.processes, entry.source, _rows(entry.text, _PROCESS_ROW))
            if query.samples and not samples.known:
                samples = Fact(query.samples, entry.source, _rows(entry.text, telling))
    return Told(
        _gpus(sources, smi, readings, excerpt, refusal),
        attached,
        processes if processes.known else sources.fact(_compute_apps, "nvidia_smi.compute_apps"),
        samples if samples.known else sources.fact(_dmon, "nvidia_smi.dmon"),
    )


def _gpus(
    sources: Sources, smi: Fact[NvidiaSmi], readings: list[tuple[str, tuple[Gpu, ...]]], excerpt: str, refusal: str
) -> Fact[tuple[Gpu, ...]]:
    if readings:
        return Fact(gpu_list.merge(readings), readings[0][0], excerpt)
    if smi.value and smi.value.state == "no_devices":
        return Fact((), smi.source, smi.excerpt)
    if smi.value and smi.value.message:
        return sources.missing("nvidia_smi", refusal=f"{smi.source}: {smi.value.message}")
    return sources.missing("nvidia_smi.q", refusal=refusal)


def _rows(text: str, telling: re.Pattern[str]) -> str:
    """Return the first lines that a pattern finds; a list of hundreds is not gone through to its end.

    A pattern starts with the line end before the line, which is found far sooner than a start of a line.
    """
    found = islice(telling.finditer(f"\n{text}"), EXCERPT_LINES)
    return "\n".join(one[0].strip()[:200] for one in found)


def _compute_apps(text: str) -> Reading[tuple[GpuProcess, ...]]:
    found = nvidia_query.compute_apps(text)
    return found, shorten([f"{one.gpu} {one.pid} {one.program} {one.memory_mib} MiB" for one in found])


def _dmon(text: str) -> Reading[tuple[GpuSample, ...]]:
    return nvidia_smi.dmon(text), shorten([row.strip()[:200] for row in text.split("\n") if row.strip()])


def nvlinks(sources: Sources) -> Fact[tuple[NvLinks, ...]]:
    """Read ``nvidia-smi nvlink -s``."""

    def read(text: str) -> Reading[tuple[NvLinks, ...]]:
        rows = [row.strip()[:200] for row in text.split("\n") if row.strip()]
        return nvlink.parse(text), shorten(rows) or "(no output)"

    return sources.fact(read, "nvidia_smi.nvlink_s")
