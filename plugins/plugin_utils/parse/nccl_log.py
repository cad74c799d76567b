"""NCCL's log (``NCCL_DEBUG=INFO``, 2.7 to 2.32) and PyTorch's watchdog in it: paths, settings, failures, hangs."""

from __future__ import annotations

import re
from collections import Counter

from ..core.runtime import HungCollective, NcclFailure, NcclLog
from .nccl import log_version
from .text import lines

# An engine writes these lines once per rank; a log that repeats one for days is cut here.
_MOST = 64
_LONGEST = 2000

_SAID = re.compile(r"NCCL (?:INFO|WARN|TRACE) (.*)")
_VIA = re.compile(r"(?:Channel|Connected|Ring|Tree)\b.*? via (\S+(?: pointer)?)")
_PATH = re.compile(r"(P2P|SHM|NET)/(direct pointer|[A-Za-z]+)")
_SETTING = re.compile(r"(NCCL_[A-Z0-9_]+) set by environment to (\S+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):")
_SOCKETS = re.compile(r"NET/Socket ?: Using (.*)")
_INTERFACE = re.compile(r"\[\d+\]([^:\s]+):")
_NETWORK = re.compile(r"Using network (\S+)")
_CUDA = re.compile(r"cudaDriverVersion (\d+)")
_COMM = re.compile(r"nranks (\d+).*?busId ([0-9a-fA-F]+)")
_DIRECT = re.compile(r"Check P2P Type isAllDirectP2p ([01])(?: directMode [01])?(?: isAllCudaP2p ([01]))?")
_CHANNELS = re.compile(r"(\d+) coll channels")
_GRAPH = re.compile(r"Pattern \d+, crossNic \d+, nChannels \d+.*")
_CHOICE = re.compile(r"(?:\w+: )?\d+ Bytes -> Algo .*")
_REFUSED = re.compile(r"P2P is disabled between connected GPUs|Could not enable P2P between|Legacy IPC not supported")
_SHARED = re.compile(r"ncclMaxSharedMem (\d+) exceeds device/fn maxSharedMem (\d+)")
_WHERE = re.compile(r"(\S+\.(?:cc|cu|h|cpp)):(\d+)\s*(?:NCCL WARN|->)")
_CUDA_ERROR = re.compile(r"Cuda failure (\d+)?")
_TIMEOUT = re.compile(
    r"\[Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), "
    r"(?:NumelIn=(\d+), NumelOut=\d+, )?.*?Timeout\(ms\)=(\d+)\)"
)
_COMPLETED = re.compile(r"Rank (\d+)\].*?last completed NCCL work: (-?\d+)")


def parse(text: str, source: str = "") -> NcclLog | None:
    """Read every line of NCCL and of PyTorch's watchdog in a text; None where there is none."""
    if "NCCL" not in text:
        return None
    found = _Reader(source)
    for row in lines(text):
        if "NCCL" in row and len(row) <= _LONGEST:
            found.take(row)
    return found.result(text) if found.seen else None


class _Reader:
    """Collects what single lines say."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.seen = False
        self.transports: Counter[str] = Counter()
        self.one: dict[str, str] = {}
        self.number: dict[str, int] = {}
        self.lists: dict[str, dict[str, None]] = {"sockets": {}, "graphs": {}, "choices": {}, "buses": {}}
        self.settings: dict[tuple[str, str], None] = {}
        self.failures: list[NcclFailure] = []
        self.hung: dict[tuple[int, int], HungCollective] = {}
        self.completed: dict[int, int] = {}
        self.shared: tuple[int, int] | None = None

    def take(self, row: str) -> None:
        """Take one line that has NCCL in it."""
        said = _SAID.search(row)
        if said:
            self.seen = True
            self._said(said[1], row)
            if "NCCL WARN" in row:
                self._failure(said[1], row)
        elif "NCCL version" in row:
            self.seen = True
        elif "WorkNCCL(" in row:
            self._timeout(row)
        elif "last completed NCCL work" in row:
            done = _COMPLETED.search(row)
            if done:
                self.seen = True
                self.completed[int(done[1])] = int(done[2])

    def _said(self, text: str, row: str) -> None:
        via = _VIA.search(text)
        if via:
            path = _PATH.match(text, via.start(1))
            self.transports[f"{path[1]}/{path[2]}" if path else via[1]] += 1
            self.one.setdefault("transport_line", row.strip())
        elif setting := _SETTING.search(text):
            self.settings[setting[1], setting[2].rstrip(".")] = None
        elif found := _BOOTSTRAP.match(text):
            self.one.setdefault("bootstrap", found[1])
        elif found := _SOCKETS.match(text):
            self._add("sockets", *_INTERFACE.findall(found[1]))
            self.one.setdefault("socket_line", row.strip())
        elif found := _NETWORK.match(text):
            self.one.setdefault("network", found[1])
        elif found := _CUDA.match(text):
            self.number.setdefault("cuda", int(found[1]))
        elif found := _DIRECT.search(text):
            self.number["direct"] = min(int(found[1]), self.number.get("direct", 1))
            if found[2]:
                self.number["cuda_p2p"] = min(int(found[2]), self.number.get("cuda_p2p", 1))
        elif found := _SHARED.search(text):
            self.shared = self.shared or (int(found[1]), int(found[2]))
            self.one.setdefault("shared_line", row.strip())
        elif _REFUSED.search(text):
            self.one.setdefault("refused", row.strip())
        elif found := _COMM.search(text):
            self.number["ranks"] = int(found[1])
            self._add("buses", found[2].lower())
            if "Init COMPLETE" in text:
                self.number["complete"] = 1
        elif found := _CHANNELS.search(text):
            self.number.setdefault("channels", int(found[1]))
        elif found := _GRAPH.search(text):
            self._add("graphs", found[0][:200])
        elif found := _CHOICE.search(text):
            self._add("choices", found[0][:200])

    def _add(self, name: str, *values: str) -> None:
        for value in values:
            if len(self.lists[name]) < _MOST:
                self.lists[name][value] = None

    def _failure(self, text: str, row: str) -> None:
        if len(self.failures) >= _MOST or any(one.text == text for one in self.failures):
            return
        where, error = _WHERE.search(row), _CUDA_ERROR.search(text)
        self.failures.append(
            NcclFailure(
                text.strip(),
                where[1] if where else "",
                int(where[2]) if where else None,
                int(error[1]) if error and error[1] else None,
                row.strip(),
            )
        )

    def _timeout(self, row: str) -> None:
        found = _TIMEOUT.search(row)
        if found and len(self.hung) < _MOST:
            self.seen = True
            rank, sequence, operation, elements, timeout = found.groups()
            self.hung[int(rank), int(sequence)] = HungCollective(
                int(rank),
                operation,
                int(sequence),
                int(elements) if elements else None,
                int(timeout),
                excerpt=row.strip(),
            )

    def result(self, text: str) -> NcclLog:
        """Return what all lines together say."""
        return NcclLog(
            source=self.source,
            version=log_version(text),
            cuda_driver_version=self.number.get("cuda"),
            bootstrap_interface=self.one.get("bootstrap", ""),
            network=self.one.get("network", ""),
            socket_interfaces=tuple(self.lists["sockets"]),
            socket_line=self.one.get("socket_line", ""),
            ranks=self.number.get("ranks"),
            bus_ids=tuple(self.lists["buses"]),
            init_complete="complete" in self.number,
            transports=dict(self.transports),
            transport_line=self.one.get("transport_line", ""),
            all_direct_p2p=bool(self.number["direct"]) if "direct" in self.number else None,
            all_cuda_p2p=bool(self.number["cuda_p2p"]) if "cuda_p2p" in self.number else None,
            p2p_refused=self.one.get("refused", ""),
            coll_channels=self.number.get("channels"),
            graphs=tuple(self.lists["graphs"]),
            choices=tuple(self.lists["choices"]),
            settings=tuple(self.settings),
            shared_memory=self.shared,
            shared_memory_line=self.one.get("shared_line", ""),
            failures=tuple(self.failures),
            hung=tuple(
                HungCollective(
                    one.rank,
                    one.operation,
                    one.sequence,
                    one.elements,
                    one.timeout_ms,
                    self.completed.get(one.rank),
                    one.excerpt,
                )
                for one in self.hung.values()
            ),
        )
