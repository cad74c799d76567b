"""Rules S1 to S7: engines that ended, collectives that were wrong or hung, NCCL's release and interfaces, unit files.

The catalogue is silent on these; the family continues it for what logs of engines and of NCCL tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..core.finding import RUNG_REDUCED, Excerpt, Fix
from ..core.measurement import Measurement
from ..core.runtime import Engine, EngineLog, HungCollective, NcclLog
from ..core.snapshot import Snapshot
from .common import listed
from .knowledge import gpu_model, gpu_model_by_name, names, version, version_text, version_tuple
from .peers import delivery_test, excerpt, few_gpus
from .registry import Fleet, Verdict, rule, verdict
from .runtime import not_told

# --- S1: why an engine ended ----------------------------------------------------------------------------------------

# class of the cause -> (title, what a reader should know, what to do, steps)
_ENDED: Mapping[str, tuple[str, str, str, tuple[str, ...]]] = {
    "no_kernel_image": (
        "has no code for this GPU",
        "The installed build was made without kernels for the GPU's compute capability. It is no fault of driver or "
        "memory.",
        "Install a build of the engine and of PyTorch made for this GPU (sm_120: CUDA 12.8 or newer)",
        (
            "nvidia-smi --query-gpu=name,compute_cap --format=csv",
            "python -c 'import torch; print(torch.version.cuda, torch.cuda.get_arch_list())'   # in the engine's venv",
        ),
    ),
    "driver_too_old": (
        "needs a newer driver than this host has",
        "The CUDA runtime of the engine is newer than the driver supports. Forward compatibility (error 804) works on "
        "data-centre GPUs only.",
        "Update the driver of the host, or take a build for an older CUDA",
        ("nvidia-smi   # `CUDA Version` is the newest that the driver supports",),
    ),
    "cache_memory": (
        "has no memory left for its KV cache",
        "The share of GPU memory that it may use is spent on weights and on the profiled peak. It is no CUDA "
        "out-of-memory error and not another process.",
        "Give it a larger share, or less context",
        ("# raise --gpu-memory-utilization, or lower --max-model-len or --max-num-seqs",),
    ),
    "gpu_memory": (
        "ran out of GPU memory",
        "Weights, cache and activations together do not fit.",
        "Use more GPUs, a smaller share, or less context",
        ("nvidia-smi", "# lower --gpu-memory-utilization or --max-model-len; raise --tensor-parallel-size"),
    ),
    "gpu_memory_taken": (
        "finds less free GPU memory than it is told to use",
        "Another process holds memory of the GPU.",
        "End the other process, or lower the share",
        ("nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv",),
    ),
    "host_memory": ("ran out of memory", "An allocation of host memory failed.", "Give the machine more memory",
                    ("free -h", "journalctl -k | grep -i oom")),
    "arguments": (
        "does not know an argument that it was given",
        "Argument errors do not heal by a restart: RestartPreventExitStatus=2 or a start limit keeps the unit from "
        "trying for ever. An argument with a blank inside was given as one word where two belong.",
        "Compare the arguments with the installed release before the next start",
        ("vllm serve --help=all | grep -E '^ +--'   # or: python -m sglang.launch_server --help",
         "# in the unit: RestartPreventExitStatus=2"),
    ),
    "port_in_use": (
        "found its port taken",
        "`Application startup complete.` comes before the bind: only an answer of /health shows readiness.",
        "Free the port, or choose another one",
        ("ss -ltnp", "# then choose another --port, or end the process that holds it"),
    ),
    "internal_port_in_use": (
        "found an address between its own processes taken",
        "That is not --port: releases of mid 2024 bind the fixed address tcp://127.0.0.1:5570 between front end and "
        "engine, so a second instance on the host cannot start.",
        "Update the engine, or start it with --disable-frontend-multiprocessing",
        ("ss -ltnp | grep 5570", "# --disable-frontend-multiprocessing, or a newer release"),
    ),
    "build_tools": (
        "could not build its kernels at start",
        "Kernels are compiled at the first start. nvcc, a C compiler and ninja must be on the PATH of the unit, which "
        "is not that of a login shell.",
        "Install the tools, and put them on the PATH of the unit",
        ("apt install gcc ninja-build", "systemctl show -p Environment UNIT",
         "# in the unit: Environment=CUDA_HOME=/usr/local/cuda PATH=/usr/local/cuda/bin:...:/usr/bin:/bin"),
    ),
    "custom_all_reduce": (
        "ended in its own all-reduce",
        "Its kernel needs peer access between the GPUs, which the driver denies. It is no error of NCCL.",
        "Start it without its own all-reduce",
        ("# append to the arguments: --disable-custom-all-reduce",),
    ),
    "gpu_busy": (
        "was refused by a GPU",
        "Compute mode Exclusive_Process lets one process in; or another process holds the GPU.",
        "See who holds the GPU, and the compute mode",
        ("nvidia-smi -q -d COMPUTE", "nvidia-smi --query-compute-apps=pid,process_name --format=csv",
         "nvidia-smi -c DEFAULT"),
    ),
    "no_gpu": ("sees no GPU", "The process has no visible GPU.", "Look at the driver and at what is visible",
               ("nvidia-smi -L", "# CUDA_VISIBLE_DEVICES of the unit: rule G6")),
    "gpu_error": (
        "ended in an error of CUDA",
        "The kernel log may hold an Xid of the same time; later lines of CUDA may name the wrong place.",
        "Compare with the kernel log",
        ("journalctl -k | grep -E 'NVRM|Xid'",),
    ),
    "nccl": (
        "ended in an error of NCCL",
        "The first rank that failed has the cause; the others say that a peer went away.",
        "Run it with NCCL_DEBUG=INFO and look at the first failing rank",
        ("# in the unit: Environment=NCCL_DEBUG=INFO", "# then audit the log: NCCL WARN lines"),
    ),
    "collective_timeout": (
        "waited in vain for a collective",
        "One rank was missing, or the path between the GPUs carries no data.",
        "See rule S4",
        delivery_test(None),
    ),
    "weights": ("could not read its model", "A file of the model is missing, cut or of another kind.",
                "Bring the weights again, and check them", ("# the role model_weights verifies sizes and sums",)),
    "model_unknown": ("does not know this model", "The release is older than the architecture.",
                      "Update the engine", ("vllm --version",)),
    "venv": ("lacks a part of its environment", "A module cannot be imported.", "Install the engine's venv anew",
             ("python -m pip check   # in the engine's venv",)),
    "permission": ("may not read or write a file", "The user of the service has no right to it.",
                   "Give the service user the right", ("systemctl show -p User UNIT", "namei -l PATH")),
    "other": ("ended with an error", "The line is the most telling one of its log.", "Look at the lines around it",
              ("journalctl -u UNIT -n 200 --no-pager",)),
}  # fmt: skip


@rule(
    "S1",
    "engine-ended",
    title="No engine ended with an error",
    severity="critical",
    looks_at=("engine.log",),
    why=(
        "The last line of an engine's log is seldom the cause, and `Engine core initialization failed. See root cause "
        "above` never is. The first telling line of a worker is."
    ),
    restart="service",
    automation="never",
    risk="Restarts the service.",
    verify="the start-up log of the engine, then an answer to a known prompt",
    sources=("vLLM 0.32.0", "SGLang 0.5.23", "vLLM #14452, #10439, #18538, #4940, #9225, #7196"),
    without_role=True,
)
def _ended(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    logs = snapshot.services.logs
    if not logs.value:
        yield not_told(snapshot, "Whether an engine ended is not known", logs.reason)
        return
    for log in logs.value:
        if log.cause is not None:
            yield _judge_end(snapshot, log)
        elif log.serving:
            yield verdict(
                "pass", "The engine says that it serves", Excerpt(log.source, log.stage or "listening"),
                subject=log.subject,
            )  # fmt: skip
        elif log.listening:
            yield verdict(
                "unknown",
                "The engine started up; whether it serves is not known",
                Excerpt(log.source, "Application startup complete."),
                subject=log.subject,
                reason="the start-up line comes before the bind: ask /health, then a known prompt",
            )
        else:
            stage = f"; it was at: {log.stage}" if log.stage else ""
            yield verdict(
                "unknown",
                f"The log shows neither an end nor that the engine serves{stage}",
                Excerpt(log.source, log.stage) if log.stage else logs,
                subject=log.subject,
                reason="the telling lines are not in this part of the log: look further up, for the first error",
            )
        if log.listening and log.cause is not None and log.cause.kind == "port_in_use":
            yield verdict(
                "info",
                "`Application startup complete.` is no readiness: ask /health, then a known prompt",
                Excerpt(log.source, "Application startup complete."),
                subject=f"{log.subject} readiness",
            )


def _judge_end(snapshot: Snapshot, log: EngineLog) -> Verdict:
    cause = log.cause
    assert cause is not None
    what, why, todo, steps = _ENDED.get(cause.kind, _ENDED["other"])
    detail = _detail(snapshot, log)
    return verdict(
        "fail",
        f"The engine {what}{detail}",
        Excerpt(log.source, cause.line),
        subject=log.subject,
        why=why,
        fix=Fix(todo, steps),
    )


def _detail(snapshot: Snapshot, log: EngineLog) -> str:
    kind = log.cause.kind if log.cause else ""
    if kind == "arguments" and log.unknown_arguments:
        # Alone and with a blank: an option and its value were given as one word.
        glued = len(log.unknown_arguments) == 1 and " " in log.unknown_arguments[0]
        hint = " (a blank in one word: two list items belong there)" if glued else ""
        return f": {listed(log.unknown_arguments)}{hint}"
    if kind == "port_in_use" and log.port is not None:
        owner = log.port_owner.partition(" ")
        return f": {log.port}" + (f", held by process {owner[0]} ({owner[2]})" if log.port_owner else "")
    if kind == "internal_port_in_use" and log.address:
        return f": {log.address}"
    if kind == "driver_too_old":
        driver = snapshot.driver.smi.value.driver_version if snapshot.driver.smi.value else None
        has = f"; the driver {driver or ''}".rstrip() + f" supports CUDA {log.driver_cuda}" if log.driver_cuda else ""
        return has + (f" (CUDA error {log.cuda_error})" if log.cuda_error else "")
    return ""


# --- S2: several instances ------------------------------------------------------------------------------------------


@rule(
    "S2",
    "engine-instances",
    title="The engines of a host do not get in each other's way",
    severity="high",
    looks_at=("engines", "launch.script", "docker.inspect"),
    why="Each instance needs a port and GPUs of its own; two on one GPU share its memory.",
    restart="service",
    automation="never",
    risk="Restarts the service.",
    verify="ss -ltnp; nvidia-smi",
    sources=("vLLM #7196",),
    without_role=True,
)
def _instances(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    engines = snapshot.services.engines
    serving = [one for one in engines.value or () if one.command and one.name != "container"]
    if not engines.known:
        yield verdict("unknown", "Which engines this host has is not known", reason=engines.reason)
        return
    if len(serving) < 2:
        yield verdict(
            "not_applicable", "There are no two engines here", engines, reason=f"{len(serving)} engine(s) found"
        )
        return
    clashes = list(_clashes(serving))
    yield from clashes
    if not clashes:
        places = listed([f"{one.origin}: port {one.port or 'default'}, GPUs "
                         f"{one.environment.get('CUDA_VISIBLE_DEVICES', 'all')}" for one in serving], 8)  # fmt: skip
        internal = any(
            log.cause is not None and log.cause.kind == "internal_port_in_use"
            for log in snapshot.services.logs.value or ()
        )
        yield verdict(
            "info",
            f"{len(serving)} engines with ports and GPUs of their own ({places})"
            + (
                "; this release also binds a fixed internal address: it needs --disable-frontend-multiprocessing or an "
                "update"
                if internal
                else ""
            ),
            engines,
        )


def _clashes(serving: list[Engine]) -> Iterator[Verdict]:
    for at, first in enumerate(serving):
        for second in serving[at + 1 :]:
            evidence = [Excerpt(one.source, f"{one.origin}: {one.command}"[:300]) for one in (first, second)]
            if first.port is not None and first.port == second.port and first.container is None:
                yield verdict(
                    "fail",
                    f"{first.origin} and {second.origin} use one port: {first.port}",
                    *evidence,
                    subject=f"port {first.port}",
                    fix=Fix("Give each a port of its own", ("ss -ltnp", "# change --port of one of them")),
                )
            shared = _visible(first) & _visible(second)
            if shared:
                yield verdict(
                    "warn",
                    f"{first.origin} and {second.origin} share GPU {listed(sorted(shared))}",
                    *evidence,
                    subject=f"GPU {' '.join(sorted(shared))}",
                    severity="medium",
                    fix=Fix(
                        "Give each GPUs of its own",
                        ("# Environment=CUDA_VISIBLE_DEVICES=... in each", "nvidia-smi"),
                    ),
                )


def _visible(engine: Engine) -> set[str]:
    return {
        one.strip() for one in engine.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip().isdigit()
    }


# --- S3: value-checked collectives ----------------------------------------------------------------------------------


@rule(
    "S3",
    "collective-values",
    title="Collectives give the right values",
    severity="critical",
    looks_at=("nccl_tests",),
    why=(
        "A collective with one wrong value makes every answer of a model doubtful, whatever its bandwidth. The test "
        "prints an average bandwidth all the same."
    ),
    restart="service",
    automation="never",
    risk="Restarts the service.",
    verify="the same nccl-tests command several times: #wrong 0 in each row",
    sources=("nccl-tests", "NVIDIA/nccl-tests #369"),
    without_role=True,
)
def _values(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    runs = [one for ones in snapshot.measurements.values() for one in ones if one.backend == "nccl-tests"]
    if not runs:
        yield verdict(
            "unknown", "Whether collectives are right is not known", reason="no run of nccl-tests was recorded"
        )
    for one in runs:
        yield _judge_run(one)


def _judge_run(one: Measurement) -> Verdict:
    evidence, ranks = excerpt(one), one.numbers.get("ranks")
    between = f" between {listed(one.hosts)}" if len(one.hosts) > 1 else ""
    if one.status == "wrong_results":
        wrong = [row for row in one.rows if row.wrong]
        sizes = listed(
            [f"{row.size_bytes} B ({_halves(row.out_of_place)}/{_halves(row.in_place)})" for row in wrong], 4
        )
        some = len(wrong) < len(one.rows)
        return verdict(
            "fail",
            f"{one.kind} gave wrong values{between}"
            + (f" at {sizes}" if wrong else f": {one.numbers.get('out_of_bounds')} out of bounds")
            + (", at some sizes only: intermittent" if wrong and some else ""),
            evidence,
            subject=one.source,
            fix=Fix(
                "Do not serve over this path; find the layer that loses data",
                (
                    "# run it several times, then with NCCL_P2P_DISABLE=1, then with NCCL_PROTO=allreduce:simple",
                    "# between hosts: with another network plugin or library",
                ),
            ),
            explains=("S1",),
        )
    if one.status == "error":
        busy = "busy or unavailable" in one.failure
        return verdict(
            "fail",
            f"{one.kind} did not run: {one.failure}",
            evidence,
            subject=one.source,
            severity="high",
            why="Compute mode Exclusive_Process lets one process on a GPU; MPI or a plugin may open a second context."
            if busy
            else "The test ended before its first row.",
            fix=Fix(
                "See who holds the GPUs, and the compute mode" if busy else "Cure the error, then run it again",
                ("nvidia-smi -q -d COMPUTE", "nvidia-smi --query-compute-apps=pid,process_name --format=csv",
                 "nvidia-smi -c DEFAULT") if busy else ("NCCL_DEBUG=INFO all_reduce_perf -c 1 -g 2",),
            ),
        )  # fmt: skip
    if one.status == "inconclusive":
        off = " (P2P off)" if one.p2p_off else ""
        return verdict(
            "unknown",
            f"The run{off} ends before its verdict",
            evidence,
            subject=one.source,
            reason="no line `Out of bounds values`: the output was cut, or the run hung",
        )
    if ranks == 1:
        return verdict(
            "info",
            "A run with one rank: its values are right, its bandwidth says nothing",
            evidence,
            subject=one.source,
        )
    path = {True: " with P2P switched off", None: ""}.get(one.p2p_off, "")
    path = path or (
        f" over {listed(one.transports)}" if one.transports else ", over a path that its output does not name"
    )
    return verdict(
        "pass", f"{one.kind} on {ranks} ranks gave no wrong value{path}", evidence, subject=one.source,
        rung=RUNG_REDUCED if one.rung == RUNG_REDUCED else None,
    )  # fmt: skip


def _halves(half: object) -> str:
    wrong = getattr(half, "wrong", None)
    return "-" if wrong is None else str(wrong)


# --- S4: collectives that never end ---------------------------------------------------------------------------------


@rule(
    "S4",
    "collective-ends",
    title="Collectives come to an end",
    severity="critical",
    looks_at=("engine.log", "nccl.log"),
    why=(
        "A first collective that never ends, on every rank, means that the chosen path carries no data (IOMMU, ACS, a "
        "false grant), or that a rank is missing. One that fails after hours has another cause."
    ),
    restart="service",
    automation="never",
    risk="Restarts the service. GPUs that hang may need a reset (rule D18).",
    verify="all_reduce_perf with and without NCCL_P2P_DISABLE=1, each under timeout",
    sources=("vLLM #8978", "tinygrad/open-gpu-kernel-modules #45", "PyTorch ProcessGroupNCCL"),
    without_role=True,
)
def _ends(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    logs = snapshot.nccl.logs
    if not logs.value:
        yield few_gpus(snapshot) or not_told(snapshot, "Whether a collective hung is not known", logs.reason)
        return
    for log in logs.value:
        if log.hung:
            yield _judge_hang(snapshot, log)
    if not any(log.hung for log in logs.value):
        ended = any(one.backend == "nccl-tests" and one.complete for x in snapshot.measurements.values() for one in x)
        served = any(log.serving for log in snapshot.services.logs.value or ())
        if ended or served:
            yield verdict("pass", "No log tells of a collective that hung", logs)
        else:
            yield verdict(
                "unknown",
                "Whether a collective hung is not known",
                logs,
                reason="no log goes on to the end of a collective",
            )


def _judge_hang(snapshot: Snapshot, log: NcclLog) -> Verdict:
    first: HungCollective = log.hung[0]
    ranks = sorted({one.rank for one in log.hung})
    never = any(one.last_completed == -1 for one in log.hung) or first.sequence == 1
    others = f" of {log.ranks}" if log.ranks and log.ranks > len(ranks) else ""
    which = "the first collective never completed" if never else f"work {first.sequence} did not complete"
    worked = [
        one
        for ones in snapshot.measurements.values()
        for one in ones
        if one.p2p_off and one.status == "ok" and one.rows
    ]
    over_peers = log.path == "p2p"
    broken = bool(worked) and over_peers
    return verdict(
        "fail",
        f"{first.operation}: {which} within {first.timeout_ms // 1000} s on rank {listed([str(x) for x in ranks], 8)}"
        f"{others}" + (": P2P is granted, but carries no data (the same without P2P passes)" if broken else ""),
        Excerpt(log.source, first.excerpt),
        *([excerpt(worked[0])] if broken else []),
        subject=log.source,
        fix=Fix(
            "Try it without P2P; where that works, look at IOMMU and ACS (rules E1, E2, C13) and keep P2P off",
            (
                *delivery_test(log.ranks),
                "# until then, in the unit: Environment=NCCL_P2P_DISABLE=1, and --disable-custom-all-reduce",
            ),
        ),
        explains=("S1",),
    )


# --- S5: NCCL's release ---------------------------------------------------------------------------------------------


@rule(
    "S5",
    "nccl-release",
    title="NCCL's release knows these GPUs",
    severity="critical",
    looks_at=("nccl.log", "engine.log", "nvidia_smi.L"),
    why=(
        f"Releases before {version_text('nccl.sm120_minimum')} take more shared memory than compute capability 12.0 "
        f"has; before {version_text('nccl.sm120_recommended')} one reads outside of its memory on RTX PRO 6000."
    ),
    restart="service",
    automation="ask",
    risk="Changes a library of the engine's venv, or needs a newer engine.",
    verify="the line `NCCL version` of the log",
    sources=("NVIDIA/nccl #1637", "NVIDIA/nccl-tests #287", "NVIDIA/nccl #2418"),
    without_role=True,
)
def _release(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    recommended = version_text("nccl.sm120_recommended")
    fix = Fix(
        f"Use NCCL {recommended} or newer",
        ("python -m pip show nvidia-nccl-cu12 nvidia-nccl-cu13   # in the engine's venv",
         f"# a newer engine brings it; or: python -m pip install -U 'nvidia-nccl-cu12>={recommended}'"),
    )  # fmt: skip
    for log in snapshot.nccl.logs.value or ():
        if log.shared_memory:
            wanted, limit = log.shared_memory
            yield verdict(
                "fail",
                f"NCCL {(log.version or '').partition('+')[0]} is too old for this GPU: it wants {wanted} bytes of "
                f"shared memory, the GPU has {limit}",
                Excerpt(log.source, log.shared_memory_line),
                subject=log.source,
                why="This release does not know the GPU's compute capability (12.0). P2P is not the cause, and "
                "NCCL_P2P_DISABLE=1 changes nothing.",
                fix=fix,
                explains=("S1",),
            )
            return
    release = snapshot.nccl.version
    if not release.known:
        yield few_gpus(snapshot) or not_told(snapshot, "NCCL's release is not known", release.reason)
        return
    modern = _is_sm120(snapshot)
    found = version_tuple(release.value or "")
    if modern is None:
        yield verdict(
            "unknown",
            f"Whether NCCL {release.value} fits the GPUs is not known",
            release,
            reason="the models of the GPUs were not read",
        )
    elif modern and found < version("nccl.sm120_recommended"):
        old = found < version("nccl.sm120_minimum")
        yield verdict(
            "fail" if old else "warn",
            f"NCCL {release.value} {'does not know' if old else 'is known to fail on'} GPUs of compute capability "
            f"12.0: use {recommended} or newer",
            release,
            severity="critical" if old else "medium",
            fix=fix,
        )
    else:
        yield verdict("pass", f"NCCL {release.value} knows these GPUs", release)


def _is_sm120(snapshot: Snapshot) -> bool | None:
    """Whether a GPU is a Blackwell workstation or GeForce card (compute capability 12.0); None: not known."""
    models = [gpu_model(one.device) for one in snapshot.pci.gpus()]
    models += [gpu_model_by_name(gpu.name) for gpu in snapshot.gpus.value or ()]
    known = [model for model in models if model is not None]
    if any(model.architecture == "blackwell" and model.device.startswith("2") for model in known):
        return True
    return False if known and len(known) == len(models) else None


# --- S6: NCCL's interfaces ------------------------------------------------------------------------------------------


@rule(
    "S6",
    "nccl-interfaces",
    title="NCCL uses no tunnel, and no network inside of a host",
    severity="high",
    looks_at=("nccl.log", "engine.log", "nccl_tests"),
    why=(
        "NCCL takes every interface that it finds, a VPN's too. Between the GPUs of one host the network is the last "
        "resort: then neither P2P nor shared memory works."
    ),
    restart="service",
    automation="ask",
    risk="Restarts the service.",
    verify="NCCL_DEBUG=INFO: `NET/Socket : Using` and the `via` lines",
    sources=("NVIDIA/nccl #1637", "NCCL user guide, environment variables"),
    without_role=True,
)
def _interfaces(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    logs = snapshot.nccl.logs
    told = [log for log in logs.value or () if log.socket_interfaces or log.bootstrap_interface or log.transports]
    if not told:
        reason = logs.reason or "no log names an interface or a path"
        yield few_gpus(snapshot) or not_told(snapshot, "Which interfaces NCCL uses is not known", reason)
        return
    bad = False
    for log in told:
        tunnels = [one for one in log.socket_interfaces if any(part in one.lower() for part in _tunnels())]
        others = [one for one in log.socket_interfaces if one not in tunnels]
        if tunnels:
            bad = True
            keep = others[0] if others else log.bootstrap_interface or "INTERFACE"
            yield verdict(
                "warn",
                f"NCCL lists a tunnel as interface: {listed(tunnels)}",
                Excerpt(log.source, log.socket_line),
                subject=f"{log.source} tunnel",
                severity="medium",
                fix=Fix("Name the interface", (f"# in the unit: Environment=NCCL_SOCKET_IFNAME={keep}",)),
            )
        net = sum(count for path, count in log.transports.items() if path.startswith("NET"))
        if net and len(_hosts(snapshot)) < 2:
            bad = True
            yield verdict(
                "fail" if log.path == "net" else "warn",
                "NCCL goes over the network between GPUs of one host",
                Excerpt(log.source, log.transport_line),
                subject=f"{log.source} net",
                severity="high",
                fix=Fix(
                    "Let it use shared memory again",
                    ("# remove NCCL_SHM_DISABLE from units and files (rule D12)", "df -h /dev/shm   # rule G1"),
                ),
            )
    if not bad:
        first = told[0]
        network = f", network {first.network}" if first.network else ""
        # Only a log that goes on to the paths has named all interfaces.
        state = "pass" if any(log.transports for log in told) else "info"
        yield verdict(
            state,  # type: ignore[arg-type]
            f"NCCL starts over {first.bootstrap_interface or 'a local interface'}{network}",
            logs,
        )


def _tunnels() -> frozenset[str]:
    return names("nccl.tunnel_interfaces")


def _hosts(snapshot: Snapshot) -> set[str]:
    return {host for ones in snapshot.measurements.values() for one in ones for host in one.hosts}


# --- S7: the unit's own paths ---------------------------------------------------------------------------------------


@rule(
    "S7",
    "unit-tool-path",
    title="The unit of an engine finds the tools that it names",
    severity="high",
    looks_at=("systemd.unit",),
    why="An engine that compiles kernels looks for nvcc on the PATH of its unit: CUDA_HOME/bin must be on it.",
    restart="service",
    automation="ask",
    risk="Restarts the service.",
    verify="systemctl show -p Environment UNIT",
    sources=("community-scripts/ProxmoxVED #2047",),
    without_role=True,
)
def _tool_path(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    units = [one for one in snapshot.services.engines.value or () if one.origin == "unit file"]
    paths = [one for one in units if "PATH" in one.environment]
    if not paths:
        reason = (
            "no unit file with a PATH was read" if units else snapshot.services.engines.reason or "no unit was read"
        )
        yield not_told(snapshot, "The PATH of an engine's unit is not known", reason)
    for one in paths:
        folders = one.environment["PATH"].split(":")
        home = one.environment.get("CUDA_HOME", "").rstrip("/")
        evidence = Excerpt(one.source, f"PATH={one.environment['PATH']}\nCUDA_HOME={home}")
        twice = sorted({folder for folder in folders if folders.count(folder) > 1})
        if home and home in folders and f"{home}/bin" not in folders:
            yield verdict(
                "warn",
                f"PATH lists {home} itself, not its bin: nvcc is not found there"
                + (f"; {listed(twice)} is on it twice" if twice else ""),
                evidence,
                subject=one.source,
                severity="high",
                fix=Fix("Put the bin folder on PATH", (f'# Environment="PATH={home}/bin:..."',)),
                explains=("S1",),
            )
        elif home and f"{home}/bin" not in folders:
            yield verdict(
                "warn",
                f"PATH lacks {home}/bin, where CUDA_HOME has its nvcc",
                evidence,
                subject=one.source,
                severity="medium",
                fix=Fix("Put the bin folder on PATH", (f'# Environment="PATH={home}/bin:..."',)),
            )
        else:
            yield verdict("pass", "PATH and CUDA_HOME of the unit agree", evidence, subject=one.source)
