"""Facts of the run time: measurements, NCCL's settings and logs, engines with their limits, stored P2P verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..core.evidence import Evidence
from ..core.measurement import Measurement
from ..core.runtime import Engine, EngineLog, NcclLog, NcclTopology, P2pCache
from ..core.snapshot import Fact, Limits, Nccl, Services, Setting
from ..measure import nccl_tests, nvbandwidth, p2p_samples
from . import engine_log, engines, nccl_log, nccl_topology
from . import nccl as nccl_text
from .facts import Reading, Sources
from .text import RefusedError, files, lines, shorten

_NCCL_LOGS = ("nccl.log", "nccl_tests", "engine.log")
_CONF_FILES = ("etc.nccl.conf", "home.nccl.conf")
_ENGINE_SOURCES = ("engines", "docker.inspect", "systemd.unit", "launch.script")


class RuntimeFacts:
    """What the run time sources of one host tell, each log read once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._logs: dict[str, NcclLog] = {}
        for entry in sources.entries(*_NCCL_LOGS):
            found = nccl_log.parse(entry.text, entry.source)
            if found is not None:
                self._logs[entry.source] = found
        self._engines = self._read_engines()

    # --- NCCL ---------------------------------------------------------------------------------------------------

    def nccl(self) -> Nccl:
        """Read NCCL's settings from files, units, processes and logs, its version, its logs and its topology."""
        logs = tuple(self._logs.values())
        origin = logs[0].source if logs else ""
        excerpt = shorten([line for log in logs for line in _telling(log)])
        return Nccl(
            settings=self._settings(),
            version=self._version(),
            logs=Fact(logs, origin, excerpt) if logs else self.sources.missing("nccl.log"),
            topology=self.sources.fact(_topology, "nccl.topology"),
            topology_file=self.sources.fact(_topology, "nccl.topology_file"),
        )

    def _settings(self) -> Fact[tuple[Setting, ...]]:
        settings: list[Setting] = []
        origin, rows = "", []
        for entry in self.sources.asked(*_CONF_FILES, "peerlane.services", "systemd.unit"):
            kind = entry.source.split("@")[0]
            if kind == "etc.nccl.conf":
                found = nccl_text.conf(entry.stdout, "/etc/nccl.conf")
            elif kind == "home.nccl.conf":
                found = tuple(one for path, text in files(entry.stdout) for one in nccl_text.conf(text, path or kind))
            else:
                found = nccl_text.services(entry.stdout)
            # A file that is not there, and a log that names no variable, differ: the first says that nothing is set.
            absent = kind == "etc.nccl.conf" and bool(self.sources.absent(kind))
            if found or absent or (entry.usable and kind != "home.nccl.conf"):
                origin = origin or entry.source
                settings.extend(found)
        for engine in self._engines.value or ():
            taken = [
                Setting(*pair, engine.origin) for pair in engine.environment.items() if pair[0].startswith("NCCL_")
            ]
            if taken or engine.environment_known:
                origin = origin or engine.source
                settings.extend(taken)
        for source, log in self._logs.items():
            if log.settings:
                origin = origin or source
                settings.extend(Setting(name, value, "environment, by the log") for name, value in log.settings)
        settings = list(dict.fromkeys(settings))
        rows = [f"{one.origin}: {one.name}={one.value}" for one in settings]
        return Fact(tuple(settings), origin, shorten(rows)) if origin else self.sources.missing("etc.nccl.conf")

    def _version(self) -> Fact[str]:
        for source, log in self._logs.items():
            if log.version:
                return Fact(log.version, source, f"NCCL version {log.version}")
        return self.sources.fact(_version, *_NCCL_LOGS)

    # --- engines ------------------------------------------------------------------------------------------------

    def services(self) -> Services:
        """Read engines, their logs, and the P2P verdicts that they stored."""
        logs: list[EngineLog] = []
        rows: list[str] = []
        for entry in self.sources.entries("engine.log"):
            for unit, text in _by_unit(entry.text):
                log = engine_log.read(text, entry.source, unit)
                logs.append(log)
                rows += [log.cause.line] if log.cause else []
        found = self.sources.entries("engine.log")
        return Services(
            engines=self._engines,
            logs=Fact(tuple(logs), found[0].source, shorten(rows)) if logs else self.sources.missing("engine.log"),
            p2p_caches=self.sources.fact(_caches, "p2p_caches"),
        )

    def _read_engines(self) -> Fact[tuple[Engine, ...]]:
        found: list[Engine] = []
        origin = ""
        for entry in self.sources.entries(*_ENGINE_SOURCES):
            kind = entry.source.split("@")[0]
            try:
                read = _READERS[kind](entry.text, entry.source)
            except RefusedError:
                continue
            if read or kind == "engines":
                origin = origin or entry.source
                found.extend(read)
        if not origin:
            return self.sources.missing("engines")
        return Fact(tuple(found), origin, shorten([f"{one.origin}: {one.command}"[:300] for one in found]))

    # --- limits -------------------------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """Read the limits that belong to no engine, the host's shared memory, a container's device rules."""
        return Limits(
            values=self.sources.fact(_limits, "proc.limits"),
            shm_bytes=self.sources.fact(engines.shm_bytes, "df.shm"),
            device_rules=self.sources.fact(_rules, "cgroup.devices"),
        )

    # --- measurements -------------------------------------------------------------------------------------------

    def measurements(self) -> Mapping[str, tuple[Measurement, ...]]:
        """Return the measurements of every recorded benchmark, by kind."""
        by_kind: dict[str, tuple[Measurement, ...]] = {}
        for one in self._measured():
            by_kind[one.kind] = (*by_kind.get(one.kind, ()), one)
        return by_kind

    def _measured(self) -> Iterator[Measurement]:
        for entry in self.sources.entries("p2p_bandwidth_latency", "simple_p2p", "cuda_samples", "nvbandwidth"):
            rows = lines(entry.text)
            for read in (p2p_samples.bandwidth_latency, p2p_samples.simple_p2p, p2p_samples.samples_summary):
                yield from _sourced(read(rows), entry, entry.text)
            for one in nvbandwidth.text(rows):
                yield from _sourced(one, entry, entry.text)
        for entry in self.sources.entries("nvbandwidth.json"):
            for one in nvbandwidth.from_json(entry.text):
                yield from _sourced(one, entry, entry.text)
        for entry in self.sources.entries("nccl_tests"):
            log = self._logs.get(entry.source)
            yield from _sourced(nccl_tests.text(lines(entry.text), log, _p2p_off(entry)), entry, entry.text)
        for entry in self.sources.entries("nccl_tests.json"):
            yield from _sourced(nccl_tests.from_json(entry.text), entry, entry.text)


_READERS = {
    "engines": engines.processes,
    "docker.inspect": engines.docker_inspect,
    "systemd.unit": engines.unit_file,
    "launch.script": engines.script,
}
# A switched-off arm is often told by the command in front of the output, or by the name of its file alone.
_OFF_COMMAND = re.compile(r"\bNCCL_P2P_DISABLE=1\b")
_OFF_NAME = re.compile(r"p2p[-_. ]?(?:disabled?|off)\b|no[-_. ]?p2p\b", re.IGNORECASE)


def _by_unit(text: str) -> list[tuple[str, str]]:
    """Split the collector's ``# ==> unit X <==`` parts; a pasted log is one part of no unit."""
    if not text.lstrip().startswith("# ==> unit "):
        return [("", text)]
    return [(path.removeprefix("unit "), part) for path, part in files(text) if path]


def _p2p_off(entry: Evidence) -> bool | None:
    name = entry.path.rpartition("/")[2]
    return True if _OFF_COMMAND.search(entry.command) or _OFF_NAME.search(name) else None


def _sourced(found: Measurement | None, entry: Evidence, text: str) -> Iterator[Measurement]:
    if found is not None:
        excerpt = found.excerpt or shorten([row.strip()[:160] for row in lines(text[:4000]) if row.strip()][:4])
        yield replace(found, source=entry.source, excerpt=excerpt)


def _telling(log: NcclLog) -> list[str]:
    rows = [log.transport_line, log.p2p_refused, log.socket_line, log.shared_memory_line]
    return [row for row in (*rows, *(one.excerpt for one in log.failures), *(one.excerpt for one in log.hung)) if row]


def _version(text: str) -> Reading[str]:
    found = nccl_text.log_version(text)
    return None if found is None else (found, f"NCCL {found}")


def _topology(text: str) -> Reading[NcclTopology]:
    path = next((path for path, _ in files(text[:4000]) if path), "")
    found = nccl_topology.parse(text, path)
    rows = [row.strip()[:160] for row in text[:20000].split("\n") if "<cpu" in row or 'link_speed=""' in row]
    return found, shorten(rows[:6])


def _caches(text: str) -> Reading[tuple[P2pCache, ...]]:
    found = engines.p2p_caches(text)
    return found, shorten([f"{one.path} modified {one.modified}" for one in found])


def _limits(text: str) -> Reading[Mapping[str, int]]:
    found = engines.limits(text)
    return (
        (found, shorten([row.strip() for row in lines(text) if re.match(r"\s*[Mm]ax |\s*stack|\s*open", row)]))
        if found
        else None
    )


def _rules(text: str) -> Reading[tuple[str, ...]]:
    found = engines.device_rules(text)
    return (found, "\n".join(found[:6])) if found else None
