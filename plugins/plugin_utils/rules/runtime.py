"""Rules G1 to G11: what surrounds a running engine. Shared memory, limits, visible GPUs, containers, NCCL's files."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence

from ..core.finding import Excerpt, Fix
from ..core.runtime import Engine, P2pCache
from ..core.snapshot import Fact, Setting, Snapshot
from .common import driver_gpu_count, gpu_count, has_no_gpu, in_container, listed
from .knowledge import number, version, version_text, version_tuple
from .peers import few_gpus
from .registry import Fleet, Verdict, rule, verdict

_MIB = 1 << 20
_DOCKER_DEFAULT = 64 * _MIB
_CONTAINER_RISK = "The container is made anew: its service stops for that time."


def size(count: int) -> str:
    """Return bytes as people say them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", _MIB), ("KiB", 1024)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"


def _told(engine: Engine, *lines: str) -> Excerpt:
    return Excerpt(engine.source, "\n".join(line for line in (engine.origin, *lines) if line))


def _engines(snapshot: Snapshot) -> Sequence[Engine]:
    return snapshot.services.engines.value or ()


def not_told(snapshot: Snapshot, title: str, reason: str) -> Verdict:
    """Return ``unknown``, or ``not_applicable`` where no GPU is here, or no engine runs and none left a log."""
    engines = snapshot.services.engines
    if has_no_gpu(snapshot):
        return verdict(
            "not_applicable", "There is no NVIDIA GPU here", snapshot.pci.functions, reason="no GPU on the bus"
        )
    if engines.known and not engines.value and not snapshot.services.logs.value:
        return verdict("not_applicable", "No engine runs here", engines, reason="no engine process was found")
    return verdict("unknown", title, reason=reason)


def _no_engine(snapshot: Snapshot, what: str) -> Verdict:
    """Return the verdict of a host on which no engine tells anything about ``what``."""
    engines = snapshot.services.engines
    if engines.known and not engines.value:
        return verdict("not_applicable", "No engine runs here", engines, reason="no engine process was found")
    reason = engines.reason or f"no engine that was found tells {what}"
    return verdict("unknown", f"{what[0].upper()}{what[1:]} is not known", reason=reason)


def _gpus_of(snapshot: Snapshot, engine: Engine | None) -> int | None:
    """Return how many GPUs an engine uses: its own word, its visible ones, or those of the host."""
    if engine is not None:
        if engine.tensor_parallel is not None:
            return engine.tensor_parallel
        visible = engine.environment.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])
    return gpu_count(snapshot).value


# --- G1, G2: shared memory ------------------------------------------------------------------------------------------

_SHM_STEPS = (
    "# docker: --shm-size=16g, or --ipc=host",
    "# compose: shm_size: 16g, or ipc: host",
    "# Kubernetes: an emptyDir with medium: Memory on /dev/shm",
)
_SHM_WORDS = ("failed to extend /dev/shm", "while creating shared memory segment", "No space left on device")


@rule(
    "G1",
    "shm-size",
    title="The shared memory of an engine is large enough for its GPUs",
    severity="high",
    looks_at=("engines", "docker.inspect", "df.shm", "nccl.log"),
    why="Without P2P, NCCL sends everything through /dev/shm, and vLLM keeps its queues there. Docker gives 64 MiB.",
    restart="service",
    automation="ask",
    risk=_CONTAINER_RISK,
    verify="df -h /dev/shm   # inside of the container",
    sources=("NCCL user guide, troubleshooting", "vLLM documentation"),
    without_role=True,
)
def _shm(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    fix = Fix("Give the container more shared memory", _SHM_STEPS)
    judged = False
    for log in snapshot.nccl.logs.value or ():
        for failure in log.failures:
            if any(word in failure.text for word in _SHM_WORDS):
                judged = True
                yield verdict(
                    "fail",
                    "NCCL found no room in /dev/shm",
                    Excerpt(log.source, failure.excerpt),
                    subject=log.source,
                    fix=fix,
                    explains=("S1",),
                )
                break
    for engine in _engines(snapshot):
        found = _shm_of(engine)
        if found is not None:
            judged = True
            yield _judge_shm(
                found, _gpus_of(snapshot, engine), engine.origin, fix, _told(engine, f"shm_bytes: {found}")
            )
    own = snapshot.limits.shm_bytes
    if own.value is not None and not judged:
        judged = True
        place = "this container" if in_container(snapshot) else "this machine"
        yield _judge_shm(own.value, _gpus_of(snapshot, None), place, fix, Excerpt(own.source, own.excerpt))
    if not judged:
        yield _no_engine(snapshot, "the size of an engine's shared memory")


def _shm_of(engine: Engine) -> int | None:
    if engine.shm_bytes is not None:
        return engine.shm_bytes
    return engine.container.shm_bytes if engine.container and engine.container.ipc_mode != "host" else None


def _judge_shm(found: int, gpus: int | None, place: str, fix: Fix, evidence: Excerpt) -> Verdict:
    shown = f"The shared memory of {place} holds {size(found)}"
    if gpus is not None and gpus < 2:
        return verdict("not_applicable", f"{shown}: one GPU needs no more", evidence, subject=place, reason="one GPU")
    if found < number("runtime.shm_least_mib") * _MIB:
        if gpus is None:
            return verdict(
                "unknown", f"{shown}: enough for one GPU only", evidence, subject=place,
                reason="how many GPUs are used is not known",
            )  # fmt: skip
        return verdict("fail", f"{shown}, too little for {gpus} GPUs", evidence, subject=place, fix=fix)
    if gpus is not None and gpus >= 8 and found < number("runtime.shm_eight_gpus_mib") * _MIB:
        return verdict("warn", f"{shown}, which is little for {gpus} GPUs", evidence, subject=place, fix=fix)
    return verdict("pass", shown, evidence, subject=place)


@rule(
    "G2",
    "docker-ipc",
    title="A container with several GPUs shares memory as its engine needs it",
    severity="medium",
    looks_at=("engines", "docker.inspect"),
    why=(
        "The workers of one engine pass data through shared memory. A container has its own small one, unless it uses "
        "the host's. Ranks in different containers need --ipc=host and one PID namespace."
    ),
    restart="service",
    automation="ask",
    risk=_CONTAINER_RISK,
    verify="docker inspect --format '{{.HostConfig.IpcMode}} {{.HostConfig.ShmSize}}' CONTAINER",
    sources=("vLLM documentation, docker", "NCCL user guide, troubleshooting"),
    without_role=True,
)
def _ipc(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    judged = False
    for engine in _engines(snapshot):
        container = engine.container
        if container is None or (container.ipc_mode is None and container.shm_bytes is None):
            continue
        judged = True
        gpus = _gpus_of(snapshot, engine)
        evidence = _told(engine, f"IpcMode: {container.ipc_mode}", f"ShmSize: {container.shm_bytes}")
        small = container.shm_bytes is not None and container.shm_bytes <= _DOCKER_DEFAULT
        if container.ipc_mode == "host":
            yield verdict("pass", f"{engine.origin} uses the host's shared memory", evidence, subject=engine.origin)
        elif small and gpus is not None and gpus > 1:
            yield verdict(
                "fail",
                f"{engine.origin} has its own shared memory of docker's default size for {gpus} GPUs",
                evidence,
                subject=engine.origin,
                fix=Fix("Use the host's shared memory, or a larger one", _SHM_STEPS),
                explains=("G1",),
            )
        elif small:
            state = "not_applicable" if gpus is not None else "unknown"
            yield verdict(
                state,  # type: ignore[arg-type]
                f"{engine.origin} has docker's default shared memory",
                evidence,
                subject=engine.origin,
                reason="one GPU" if gpus is not None else "how many GPUs it uses is not known",
            )
        else:
            yield verdict("pass", f"{engine.origin} has shared memory of its own size", evidence, subject=engine.origin)
    if judged:
        return
    if any(engine.container is None and engine.pid is not None for engine in _engines(snapshot)):
        yield verdict(
            "not_applicable", "No engine runs in a docker container", snapshot.services.engines, reason="host processes"
        )
    else:
        yield _no_engine(snapshot, "how a container shares memory")


# --- G3, G4, G10: limits --------------------------------------------------------------------------------------------


def _limited(
    snapshot: Snapshot, name: str, ulimit: str, judge: Callable[[int, str, Excerpt], Verdict]
) -> Iterator[Verdict]:
    """Judge one limit of each engine, or of the machine where no engine tells it."""
    judged = False
    for engine in _engines(snapshot):
        value = engine.limits.get(name)
        if value is None and engine.container is not None:
            value = engine.container.ulimits.get(ulimit)
        if value is not None:
            judged = True
            yield judge(value, engine.origin, _told(engine, f"{name}: {_limit(value)}"))
    own = snapshot.limits.values
    if not judged and own.value is not None and name in own.value:
        judged = True
        yield judge(own.value[name], "the shell or process", Excerpt(own.source, own.excerpt))
    if not judged:
        yield _no_engine(snapshot, f"the limit '{name[4:]}' of an engine")


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def has_rdma(snapshot: Snapshot) -> bool:
    """Whether the host has a network card that does RDMA, as far as outputs show."""
    topology = snapshot.topology.value
    if topology is not None and any(topology.nics):
        return True
    if any(one.class_code == "0207" for one in (snapshot.pci.functions.value or {}).values()):
        return True
    return any(log.network.startswith("IB") for log in snapshot.nccl.logs.value or ())


@rule(
    "G3",
    "memlock",
    title="An engine may lock the memory that its transfers need",
    severity="medium",
    looks_at=("engines", "proc.limits"),
    why="Pinned buffers and RDMA registrations count against the limit of locked memory.",
    restart="service",
    automation="yes",
    risk="Restarts the service.",
    verify="grep 'Max locked memory' /proc/PID/limits",
    sources=("NCCL user guide, troubleshooting", "systemd.exec(5)"),
    without_role=True,
)
def _memlock(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    rdma = has_rdma(snapshot)

    def judge(value: int, place: str, evidence: Excerpt) -> Verdict:
        fix = Fix(
            "Lift the limit of locked memory",
            ("# in the unit: LimitMEMLOCK=infinity", "# docker: --ulimit memlock=-1"),
        )
        if value < 0:
            return verdict("pass", f"{place} may lock all memory", evidence, subject=place)
        if rdma:
            return verdict(
                "fail",
                f"{place} may lock {size(value)} only, and this host has RDMA",
                evidence,
                subject=place,
                severity="high",
                fix=fix,
            )
        if value < number("runtime.memlock_least_mib") * _MIB:
            return verdict(
                "warn", f"{place} may lock {size(value)} only", evidence, subject=place, severity="medium", fix=fix
            )
        return verdict("pass", f"{place} may lock {size(value)}", evidence, subject=place)

    yield from _limited(snapshot, "Max locked memory", "memlock", judge)


@rule(
    "G4",
    "stack-unlimited",
    title="The stack of an engine is limited",
    severity="low",
    looks_at=("engines", "proc.limits"),
    why="With an unlimited stack glibc gives threads a small one; NCCL's guide warns of it.",
    restart="service",
    automation="yes",
    risk="Restarts the service.",
    verify="grep 'Max stack size' /proc/PID/limits",
    sources=("NCCL user guide, troubleshooting",),
    without_role=True,
)
def _stack(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    def judge(value: int, place: str, evidence: Excerpt) -> Verdict:
        if value < 0:
            return verdict(
                "warn",
                f"The stack of {place} is unlimited",
                evidence,
                subject=place,
                fix=Fix(
                    "Give it a limit", ("# in the unit: LimitSTACK=8M", "# docker: --ulimit stack=67108864:67108864")
                ),
            )
        return verdict("pass", f"The stack of {place} is limited to {size(value)}", evidence, subject=place)

    yield from _limited(snapshot, "Max stack size", "stack", judge)


@rule(
    "G10",
    "ulimit-nofile",
    title="An engine may open enough files",
    severity="low",
    looks_at=("engines", "proc.limits"),
    why="Each client is an open file, and so is each shard; engines raise the limit as far as they may.",
    restart="service",
    automation="yes",
    risk="Restarts the service.",
    verify="grep 'Max open files' /proc/PID/limits",
    sources=("vLLM 0.32.0 start-up log",),
    without_role=True,
)
def _nofile(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    def judge(value: int, place: str, evidence: Excerpt) -> Verdict:
        if 0 <= value < number("runtime.nofile_least"):
            return verdict(
                "warn",
                f"{place} may open {value} files only",
                evidence,
                subject=place,
                fix=Fix(
                    "Lift the limit of open files",
                    ("# in the unit: LimitNOFILE=1048576", "# docker: --ulimit nofile=1048576:1048576"),
                ),
            )
        return verdict("pass", f"{place} may open {_limit(value)} files", evidence, subject=place)

    yield from _limited(snapshot, "Max open files", "nofile", judge)


# --- G5: cuMem host memory ------------------------------------------------------------------------------------------


@rule(
    "G5",
    "nccl-cumem-host",
    title="NCCL can allocate its host buffers",
    severity="medium",
    looks_at=("nccl.log", "engine.log", "engines"),
    why=(
        f"From {version_text('nccl.cumem_host_default')} on NCCL allocates host buffers through cuMem, which needs "
        "NUMA calls that containers forbid and some guests lack, and peer rights that not every GPU has. From "
        f"{version_text('nccl.cumem_host_falls_back')} on it falls back by itself in most cases."
    ),
    restart="service",
    automation="ask",
    risk="Restarts the service. P2P settings stay as they are.",
    verify="NCCL_DEBUG=INFO: no `Cuda failure` from transport/shm.cc",
    sources=("NCCL user guide, troubleshooting", "NVIDIA/nccl #1838"),
    without_role=True,
)
def _cumem(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    off = [one for one in snapshot.nccl.settings.value or () if one.name == "NCCL_CUMEM_HOST_ENABLE"]
    fix = Fix(
        "Switch cuMem host memory off; leave P2P settings alone",
        ("# in the unit or the container: NCCL_CUMEM_HOST_ENABLE=0", "# or, for docker: --cap-add SYS_NICE"),
    )
    failed = False
    for log in snapshot.nccl.logs.value or ():
        for failure in log.failures:
            if failure.file.endswith("shm.cc") and (failure.cuda_error or "uda failure" in failure.text):
                failed = True
                number_ = f" {failure.cuda_error}" if failure.cuda_error else ""
                yield verdict(
                    "fail",
                    f"NCCL could not share host memory: CUDA error{number_} in {failure.file}:{failure.line}",
                    Excerpt(log.source, failure.excerpt),
                    subject=log.source,
                    severity="critical",
                    why="It happens in the shared memory transport, so it is no fault of a peer path: host memory "
                    "shared through cuMem needs rights that these GPUs or this container do not grant.",
                    fix=fix,
                    explains=("S1",),
                )
                break
    if failed:
        return
    if any(one.value.strip() == "0" for one in off):
        yield verdict("pass", "NCCL's cuMem host memory is switched off", _settings(off))
        return
    release = snapshot.nccl.version
    if not release.known:
        yield not_told(snapshot, "How NCCL allocates host buffers is not known", release.reason)
        return
    found = version_tuple(release.value or "")
    boxed = [one for one in _engines(snapshot) if one.container and "SYS_NICE" not in one.container.capabilities]
    first, fixed = version("nccl.cumem_host_default"), version("nccl.cumem_host_falls_back")
    if first <= found < fixed and (boxed or in_container(snapshot)):
        yield verdict(
            "warn",
            f"NCCL {release.value} allocates host buffers through cuMem, which a container without SYS_NICE forbids",
            release,
            severity="medium",
            fix=fix,
        )
    elif first <= found < fixed and not snapshot.machine.container.known:
        yield verdict(
            "unknown",
            f"Whether NCCL {release.value} may allocate its host buffers here is not known",
            release,
            reason="it needs NUMA calls that a container may forbid; whether this is one was not read",
        )
    else:
        yield verdict("pass", f"NCCL {release.value} finds its way to host buffers here", release)


def _settings(found: Sequence[Setting]) -> Excerpt:
    return Excerpt(found[0].origin, "\n".join(f"{one.name}={one.value}   ({one.origin})" for one in found))


# --- G6, G7: which GPUs ---------------------------------------------------------------------------------------------

_NONE_VISIBLE = ("", "-1", "NoDevFiles", "none", "void")


@rule(
    "G6",
    "cuda-visible-devices",
    title="An engine sees the GPUs that it is to use",
    severity="high",
    looks_at=("engines", "docker.inspect", "nvidia_smi.L"),
    why="CUDA stops reading the list at the first entry that is not there: later GPUs vanish without a word.",
    restart="service",
    automation="never",
    risk="Restarts the service.",
    verify="CUDA_VISIBLE_DEVICES of the process; nvidia-smi -L",
    sources=("CUDA programming guide, environment variables", "NVIDIA container toolkit"),
    without_role=True,
)
def _visible(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    judged = False
    for engine in _engines(snapshot):
        names = [one for one in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") if one in engine.environment]
        for name in names:
            judged = True
            yield _judge_visible(snapshot, engine, name, engine.environment[name])
        if not names and engine.environment_known:
            judged = True
            yield verdict("pass", f"{engine.origin} sees every GPU", _told(engine), subject=engine.origin)
    if not judged:
        yield _no_engine(snapshot, "which GPUs an engine sees")


def _judge_visible(snapshot: Snapshot, engine: Engine, name: str, value: str) -> Verdict:
    evidence = _told(engine, f"{name}={value}", engine.command[:200])
    entries = [one.strip() for one in value.split(",")]
    wrong = _what_is_wrong(snapshot, engine, entries) if value not in ("all", "nvidia.com/gpu=all") else ""
    if wrong:
        return verdict(
            "fail",
            f"{name}={value} of {engine.origin}: {wrong}",
            evidence,
            subject=engine.origin,
            fix=Fix(
                "Name each GPU once, by an index or UUID of nvidia-smi -L", ("nvidia-smi -L", f"# then set {name}")
            ),
        )
    count = driver_gpu_count(snapshot)
    if count is None and value != "all":
        return verdict(
            "unknown",
            f"Whether {name}={value} of {engine.origin} names GPUs that are there is not known",
            evidence,
            subject=engine.origin,
            reason="the GPUs of this host were not listed",
        )
    return verdict("pass", f"{engine.origin} sees {len(entries) if value != 'all' else 'all'} GPUs", evidence,
                   subject=engine.origin)  # fmt: skip


def _what_is_wrong(snapshot: Snapshot, engine: Engine, entries: Sequence[str]) -> str:
    if entries[0] in _NONE_VISIBLE:
        return "no GPU is visible"
    if len(set(entries)) < len(entries):
        return "a GPU is named twice"
    needs = engine.tensor_parallel
    if needs is not None and len(entries) < needs:
        return f"{len(entries)} GPUs for a tensor parallel size of {needs}"
    if needs is not None and needs > 1 and any(one.startswith("MIG-") for one in entries):
        return "parts of a GPU (MIG) cannot be used together"
    count = driver_gpu_count(snapshot)
    high = [one for one in entries if one.isdigit() and count is not None and int(one) >= count]
    if high:
        return f"there is no GPU {listed(high)}, and CUDA stops reading there ({count} GPUs)"
    uuids = [gpu.uuid for gpu in snapshot.gpus.value or () if gpu.uuid]
    lost = [one for one in entries if one.startswith("GPU-") and not any(uuid.startswith(one) for uuid in uuids)]
    if uuids and count == len(uuids) and lost:
        return f"{listed(lost, 2)} is not in nvidia-smi -L"
    return ""


@rule(
    "G7",
    "cuda-device-order",
    title="CUDA numbers the GPUs as nvidia-smi does, where it matters",
    severity="medium",
    looks_at=("engines", "nvidia_smi.L"),
    why="Without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA puts the fastest GPU first: with different models indices differ.",
    restart="service",
    automation="yes",
    risk="Restarts the service.",
    verify="CUDA_DEVICE_ORDER of the process",
    sources=("CUDA programming guide, environment variables", "rtx6kpro"),
    without_role=True,
)
def _order(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    models = {gpu.name for gpu in snapshot.gpus.value or () if gpu.name}
    known = [one for one in _engines(snapshot) if one.environment_known]
    if not snapshot.gpus.known:
        yield few_gpus(snapshot) or not_told(
            snapshot, "Whether the GPUs are of one model is not known", snapshot.gpus.reason
        )
    elif len(models) < 2:
        yield verdict("not_applicable", "The GPUs are of one model", snapshot.gpus, reason="any order is the same")
    elif not known:
        yield _no_engine(snapshot, "the order of the GPUs in an engine")
    for engine in known if len(models) > 1 else ():
        order = engine.environment.get("CUDA_DEVICE_ORDER", "")
        if order == "PCI_BUS_ID":
            yield verdict("pass", f"{engine.origin} numbers GPUs by bus", _told(engine), subject=engine.origin)
            continue
        yield verdict(
            "warn",
            f"{engine.origin} numbers {len(models)} models of GPU by speed, nvidia-smi by bus",
            _told(engine, f"CUDA_DEVICE_ORDER={order}"),
            snapshot.gpus,
            subject=engine.origin,
            severity="medium",
            fix=Fix("Number them by bus", ("# in the unit: Environment=CUDA_DEVICE_ORDER=PCI_BUS_ID",)),
        )


# --- G8: a container that lost its GPUs -----------------------------------------------------------------------------


@rule(
    "G8",
    "container-lost-gpus",
    title="A container still has the GPUs that it started with",
    severity="critical",
    looks_at=("nvidia_smi", "cgroup.devices"),
    why=(
        "With systemd as cgroup driver, each daemon-reload writes the device rules of running containers anew, without "
        "the NVIDIA nodes: NVML then answers Unknown Error, while the host sees its GPUs."
    ),
    restart="service",
    automation="ask",
    risk=f"{_CONTAINER_RISK} Every daemon-reload (also one of a package upgrade) takes the GPUs again until this is "
    "cured.",
    verify="nvidia-smi -L inside of the container, after a systemctl daemon-reload on the host",
    sources=("NVIDIA/nvidia-container-toolkit #1227", "NVIDIA/nvidia-container-toolkit #48"),
    without_role=True,
)
def _lost(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    smi, rules = snapshot.driver.smi, snapshot.limits.device_rules
    boxed = in_container(snapshot)
    taken = rules.value is not None and not any("195:" in one and "r" in one.rpartition(" ")[2] for one in rules.value)
    listed_ = bool(snapshot.gpus.value)
    if smi.value is not None and smi.value.state == "unknown_error" and (boxed or taken or listed_):
        yield verdict(
            "fail",
            "A container has lost its GPUs: NVML answers Unknown Error"
            + (f" while {len(snapshot.gpus.value or ())} GPUs are there on the host" if listed_ and not boxed else ""),
            smi,
            rules,
            fix=Fix(
                "Start the container again, and keep a daemon-reload from taking its devices",
                (
                    "docker restart CONTAINER",
                    "# once on the host: nvidia-ctk system create-dev-char-symlinks --create-all",
                    "# or pass the GPUs by CDI (--device nvidia.com/gpu=all), or use the cgroup driver cgroupfs",
                    "# before a daemon-reload on a host with GPU containers: see what runs (docker ps)",
                ),
            ),
            explains=("F1",),
        )
    elif (
        smi.value is not None
        and smi.value.state == "ok"
        and (boxed or any(one.container for one in _engines(snapshot)))
    ):
        yield verdict("pass", "nvidia-smi answers", smi)
    elif smi.value is not None and snapshot.machine.container.value == "none":
        yield verdict("not_applicable", "This is no container", snapshot.machine.container, reason="not a container")
    else:
        reason = smi.reason or "whether this is a container is not known"
        yield not_told(snapshot, "Whether a container lost its GPUs is not known", reason)


# --- G9: stored P2P verdicts ----------------------------------------------------------------------------------------


@rule(
    "G9",
    "vllm-p2p-cache-stale",
    title="No engine believes a P2P verdict of an earlier machine",
    severity="medium",
    looks_at=("p2p_caches", "engine.log", "proc.stat"),
    why=(
        "vLLM and SGLang store which GPUs reach each other, under the numbers of the GPUs alone. A change of slots, "
        "driver, firmware or VM configuration does not change the name of the file."
    ),
    restart="service",
    automation="yes",
    risk="The engine tests again at its next start, which takes seconds.",
    verify="a new file after the next start",
    sources=("vLLM custom_all_reduce_utils.py", "club-3090 #787"),
    without_role=True,
)
def _stale(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    caches, booted = snapshot.services.p2p_caches, snapshot.machine.booted_at
    for cache in caches.value or ():
        yield _judge_cache(cache, caches, booted)
    used = {log.p2p_cache: log for log in snapshot.services.logs.value or () if log.p2p_cache}
    for path, log in used.items():
        if any(cache.path == path for cache in caches.value or ()):
            continue
        yield verdict(
            "info",
            f"The engine used the stored P2P verdict {path}: delete it after a change of driver, firmware or slots",
            Excerpt(log.source, log.p2p_cache_line),
            subject=path,
        )
    if not caches.value and not used:
        if caches.known or caches.reason.endswith("no stored P2P verdict was found"):
            yield verdict(
                "not_applicable", "No engine stored a P2P verdict", caches, reason=caches.reason or "none found"
            )
        else:
            yield verdict("unknown", "Whether an engine stored a P2P verdict is not known", reason=caches.reason)


def _judge_cache(cache: P2pCache, fact: Fact[tuple[P2pCache, ...]], booted: Fact[int]) -> Verdict:
    evidence = Excerpt(fact.source, f"{cache.path} modified {cache.modified}")
    if cache.modified is None or booted.value is None:
        reason = booted.reason if cache.modified is not None else "the time of the file was not read"
        return verdict(
            "unknown", f"Whether {cache.path} is older than this boot is not known", evidence, subject=cache.path,
            reason=reason,
        )  # fmt: skip
    if cache.modified < booted.value:
        return verdict(
            "warn",
            f"{cache.path} is older than this boot ({_day(cache.modified)}): driver or slots may have changed",
            evidence,
            Excerpt(booted.source, booted.excerpt),
            subject=cache.path,
            severity="medium",
            fix=Fix("Delete it; the engine tests anew", (f"rm '{cache.path}'", "# then restart the service")),
        )
    return verdict("pass", f"{cache.path} was written since this boot", evidence, subject=cache.path)


def _day(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d")


# --- G11: NCCL's own files ------------------------------------------------------------------------------------------

_WEIGHTY = ("NCCL_P2P_", "NCCL_SHM_", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_", "NCCL_NET", "NCCL_TOPO_FILE", "NCCL_CUMEM")


@rule(
    "G11",
    "nccl-conf-files",
    title="NCCL's files and the engines agree",
    severity="info",
    looks_at=("etc.nccl.conf", "home.nccl.conf", "engines", "peerlane.services"),
    why=(
        "NCCL reads the environment first, then NCCL_CONF_FILE or ~/.nccl.conf, then /etc/nccl.conf, letter by letter: "
        "blanks, quotes and comments behind a value become part of it. A container does not see the host's file."
    ),
    restart="service",
    automation="never",
    risk="Restarts the service.",
    verify="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV: `set by environment to`",
    sources=("NCCL 2.32.3, tried with its own parser", "NCCL user guide, environment variables"),
    without_role=True,
)
def _conf_files(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    settings = snapshot.nccl.settings
    if settings.value is None:
        yield verdict("unknown", "What NCCL's files hold is not known", reason=settings.reason)
        return
    written = [one for one in settings.value if one.origin.startswith("/")]
    literal = [one for one in written if one.name != one.name.strip() or one.value != one.value.strip("\"' ")
               or " #" in one.value]  # fmt: skip
    for one in literal:
        yield verdict(
            "warn",
            f"{one.origin}: `{one.name}={one.value}` is taken letter by letter, blanks, quotes and comments included",
            _settings([one]),
            subject=f"{one.origin} {one.name.strip()}",
            severity="medium",
            fix=Fix(
                "Write NAME=value without blanks, quotes and comments",
                (f"sed -n '/{one.name.strip()}/p' {one.origin}",),
            ),
        )
    weighty = [one for one in written if one not in literal and one.name.startswith(_WEIGHTY)]
    clashes = [
        (one, other)
        for one in weighty
        for other in settings.value
        if other.name == one.name and other.value != one.value and not other.origin.startswith("/")
    ]
    for one, other in clashes:
        yield verdict(
            "warn",
            f"{one.name} is {one.value} in {one.origin}, but {other.value} in {other.origin}: the environment wins",
            _settings([one, other]),
            subject=one.name,
            fix=Fix("Keep one of both", (f"grep -n {one.name} {one.origin}", f"# and look at {other.origin}")),
        )
    rest = [one for one in weighty if not any(one is first for first, _ in clashes)]
    if rest:
        yield verdict(
            "info",
            f"NCCL's files set {listed([f'{one.name}={one.value} ({one.origin})' for one in rest])}",
            _settings(rest),
        )
    elif not literal and not clashes and not settings.source.startswith("etc.nccl.conf"):
        yield verdict("unknown", "What NCCL's files hold is not known", settings, reason="/etc/nccl.conf was not read")
    elif not literal and not clashes:
        yield verdict("pass", "No file of NCCL changes paths, algorithms or protocols", settings)
