"""The nouns of a serving host at run time: engines with their containers and limits, and what logs tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Container:
    """The container of an engine, as far as ``docker inspect`` tells. None: not told."""

    name: str = ""
    identity: str = ""  # the first twelve hex digits
    ipc_mode: str | None = None
    pid_mode: str | None = None
    runtime: str | None = None
    shm_bytes: int | None = None
    capabilities: tuple[str, ...] = ()
    ulimits: Mapping[str, int] = field(default_factory=dict)  # soft limits; -1: unlimited


@dataclass(frozen=True)
class Engine:
    """One serving engine: a process, or what a unit or a script starts.

    ``command`` has its API keys masked. ``environment`` holds the names that Peerlane lists, no others.
    ``environment_known`` is False where it could not be read (not root). ``limits``: name as in ``/proc/PID/limits`` to
    soft limit, -1 for unlimited. ``shm_bytes``: the size of its own ``/dev/shm``.
    """

    name: str  # vllm, sglang, llama_cpp
    origin: str  # unit NAME, container NAME, process PID, FILE
    pid: int | None = None
    command: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_known: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    shm_bytes: int | None = None
    shm_private: bool | None = None  # whether its /dev/shm is another one than the host's
    container: Container | None = None
    source: str = ""

    @property
    def tensor_parallel(self) -> int | None:
        """Return the tensor parallel size of its command line, or None where it does not say."""
        for option in ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"):
            value = self.options.get(option, "")
            if value.isdigit():
                return int(value)
        return None

    @property
    def port(self) -> int | None:
        """Return the port of its command line, or None where it does not say."""
        value = self.options.get("--port", "")
        return int(value) if value.isdigit() else None


@dataclass(frozen=True)
class P2pCache:
    """A P2P verdict that vLLM or SGLang stored. ``modified`` is a time in seconds since 1970, None where not told."""

    path: str
    modified: int | None = None
    access: Mapping[tuple[str, str], bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """Why an engine ended: the telling line (or a statement from its exit), advice where there is some, the class."""

    line: str
    advice: str = ""
    kind: str = "other"

    def text(self) -> str:
        """Return both in one line."""
        return f"{self.line}; {self.advice}" if self.advice else self.line


@dataclass(frozen=True)
class EngineLog:
    """What one engine log tells. Empty strings and None: not told.

    ``custom_all_reduce``: no_p2p (switched off: no peer access or a failed test), many_pcie (switched off: more than
    two GPUs without NVLink), failed (it ended the engine). ``listening``: its start-up is complete, which comes before
    the bind in some releases. ``serving``: a line shows that it took its address or answered.
    """

    source: str
    cause: Cause | None = None
    stage: str = ""
    listening: bool = False
    serving: bool = False
    component: str = ""
    unknown_arguments: tuple[str, ...] = ()
    port: int | None = None
    address: str = ""
    port_owner: str = ""
    custom_all_reduce: str = ""
    custom_all_reduce_line: str = ""
    p2p_cache: str = ""
    p2p_cache_line: str = ""
    cuda_error: int | None = None
    driver_cuda: str = ""
    tensor_parallel_ranks: tuple[int, ...] = ()
    pid: int | None = None
    prefix: str = ""  # what stands before the telling line: a container's name, a time, a place in the source
    unit: str = ""

    @property
    def subject(self) -> str:
        """Return what the log is of: its unit, or else its source."""
        return f"unit {self.unit}" if self.unit else self.source


@dataclass(frozen=True)
class NcclFailure:
    """One ``NCCL WARN`` line: where NCCL stood, what it said, CUDA's error number where it names one."""

    text: str
    file: str = ""
    line: int | None = None
    cuda_error: int | None = None
    excerpt: str = ""


@dataclass(frozen=True)
class HungCollective:
    """One rank's report that a collective did not end in time. ``last_completed`` -1: none ever did."""

    rank: int
    operation: str
    sequence: int
    elements: int | None
    timeout_ms: int
    last_completed: int | None = None
    excerpt: str = ""


@dataclass(frozen=True)
class NcclLog:
    """What one log of NCCL (2.7 to 2.32) tells. ``transports`` counts the ``via`` lines by path."""

    source: str = ""
    version: str | None = None
    cuda_driver_version: int | None = None
    bootstrap_interface: str = ""
    network: str = ""
    socket_interfaces: tuple[str, ...] = ()
    socket_line: str = ""
    ranks: int | None = None
    bus_ids: tuple[str, ...] = ()
    init_complete: bool = False
    transports: Mapping[str, int] = field(default_factory=dict)
    transport_line: str = ""
    all_direct_p2p: bool | None = None
    all_cuda_p2p: bool | None = None
    p2p_refused: str = ""
    coll_channels: int | None = None
    graphs: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    shared_memory: tuple[int, int] | None = None
    shared_memory_line: str = ""
    failures: tuple[NcclFailure, ...] = ()
    hung: tuple[HungCollective, ...] = ()

    @property
    def path(self) -> str:
        """Return p2p, shm, net, mixed, or "" where the log says nothing of its paths."""
        kinds = {name.partition("/")[0].lower() for name in self.transports}
        return next(iter(kinds)) if len(kinds) == 1 else "mixed" if kinds else ""


@dataclass(frozen=True)
class NcclTopology:
    """The machine as an NCCL topology file has it: bus ids, and how many places it has no speed or node for."""

    path: str = ""
    bus_ids: tuple[str, ...] = ()
    gpu_bus_ids: tuple[str, ...] = ()
    numa_unknown: int = 0
    links_unknown: int = 0
    gpus_on_cpu: int = 0
