"""Read an engine's log: how far the start is, why it ended, and what it says of its paths between GPUs.

The useful cause is seldom the last line: launchers end with a general complaint, worker trees with ``see root cause
above``. So the patterns are ranked, the most telling first, and the first line that a pattern finds is taken.
Patterns of llama_cpp were seen with xllamacpp 2026.10.11549; those of vLLM and SGLang come from their released sources
(0.32.0 and 0.5.23), from PyTorch's words and from public reports.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from ..core.runtime import Cause, EngineLog
from .text import lines as clean_lines

# (class, pattern, what to do about it), most telling first.
_CAUSES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (kind, re.compile(pattern), advice)
    for kind, pattern, advice in (
        (
            "weights",
            r"is not within the file bounds, model is corrupted or incomplete",
            "the weight file is truncated: bring it again",
        ),
        ("weights", r"incomplete metadata, file not fully covered", "a weight file is truncated: bring it again"),
        (
            "disk_full",
            r"No space left on device|\[Errno 28\]|[Dd]isk quota exceeded",
            "the file system is full: make room, see df -h and df -i",
        ),
        (
            "weights",
            r"failed to open GGUF file|peerlane: error: model .* does not exist",
            "check the path of the model",
        ),
        ("weights", r"invalid magic|not a (?:valid )?GGUF|bad GGUF magic", "this file is no model: check its source"),
        ("weights", r"peerlane: error: .* holds \d+ models", "name the file instead of the folder"),
        ("weights", r"SafetensorError: .*", "a weight file is damaged: bring it again"),
        (
            "model_unknown",
            r"unknown model architecture|Model architectures? .* (?:is|are) not supported",
            "this engine does not know the model",
        ),
        (
            "port_in_use",
            r"couldn't bind HTTP server socket|[Aa]ddress already in use",
            "the port is taken: choose another one",
        ),
        (
            "internal_port_in_use",
            r'zmq/sugar/socket\.py", line \d+, in bind',
            "an address between the engine's own processes is taken",
        ),
        (
            "arguments",
            r"unrecognized arguments:|invalid choice:|expected one argument|the following arguments are required",
            "",
        ),
        (
            "no_kernel_image",
            r"no kernel image is available for execution|with CUDA capability sm_\d+ is not compatible",
            "the engine has no code for this GPU: install a build for its architecture",
        ),
        (
            "driver_too_old",
            r"driver on your system is too old|Error 804: forward compatibility|CUDA driver version is insufficient",
            "update the driver of the host, or take an engine built for an older CUDA",
        ),
        (
            "custom_all_reduce",
            r"custom_all_reduce\.cuh:\d+ 'peer access is not supported|CUDART error: peer access is not supported",
            "start with --disable-custom-all-reduce",
        ),
        (
            "gpu_busy",
            r"CUDA-capable device\(s\) is/are busy or unavailable",
            "compute mode Exclusive_Process, or another process holds the GPU",
        ),
        (
            "gpu_memory",
            r"torch\.OutOfMemoryError|CUDA out of memory|cudaMalloc failed: out of memory",
            "less context or more GPUs",
        ),
        (
            "host_memory",
            r"failed to allocate|unable to allocate|Cannot allocate memory|std::bad_alloc",
            "not enough memory for model and cache",
        ),
        (
            "cache_memory",
            r"No available memory for the cache blocks|larger than the available KV cache|"
            r"larger than the maximum number of tokens that can be stored in KV cache",
            "less context or more memory share",
        ),
        ("gpu_memory_taken", r"Free memory on device .* is less than", "another process holds GPU memory"),
        (
            "build_tools",
            r"Failed to find C compiler|Could not find nvcc|nvcc(?: was)? not found|ninja(?:'|: not found| is required)"
            r"|CUDA_HOME environment variable is not set|InvalidCxxCompiler",
            "nvcc, a C compiler and ninja must be on the PATH of the unit",
        ),
        (
            "gpu_error",
            r"CUDA error: .*",
            "see the kernel log for Xid messages at the same time",
        ),
        (
            "collective_timeout",
            r"Watchdog caught collective operation timeout",
            "a collective did not end: audit the links between the GPUs",
        ),
        (
            "nccl",
            r"NCCL error|ncclInternalError|ncclUnhandledCudaError|ncclSystemError",
            "audit the links between the GPUs",
        ),
        ("no_gpu", r"Failed to infer device type|No CUDA GPUs are available", "no GPU is visible to the engine"),
        (
            "weights",
            r"cannot find tokenizer merges|failed to load (?:vocab|tokenizer)",
            "the model's tokenizer is damaged",
        ),
        ("venv", r"ImportError: .*|ModuleNotFoundError: .*", "the engine's venv is incomplete"),
        ("permission", r"Permission denied.*", "the service user can't read or write this"),
        (
            "arguments",
            r"KeyError: 'invalid tool call parser: .*|ValidationError.*|User-specified max_model_len .*",
            "",
        ),
        ("weights", r"error loading model: .*", ""),
        # Triton compiles its launcher there: the traceback of a missing compiler, where the complaint itself was cut.
        ("build_tools", r"triton/runtime/build\.py", "a C compiler must be on the PATH of the unit"),
        ("other", r"Worker proc \S+ died unexpectedly \(exit code: -?\d+\)", ""),
        ("other", r"Scheduler hit an exception|WorkerProc hit an exception|EngineCore encountered a fatal error", ""),
        ("other", r"(?:[A-Za-z_.]{1,80}(?:Error|Exception)): .+", ""),
        ("other", r"peerlane: error: .+", ""),
        ("other", r" E [a-z]+ .+", ""),
    )
)
# The complaint of the process above; the cause stands further up.
_NO_CAUSE = re.compile(r"See root cause above|NCCL WARN")
# Words that every cause has one of. They are looked for first, since a long log has few such lines.
_TELLING = re.compile(
    r"rror|xcept|ailed|Address already|address already|in bind|argument|choice|kernel image|"
    r"not compatible|too old|insufficient|emory|KV cache|nvcc|ninja|build\.py|nccl|NCCL|atchdog|denied|"
    r"max_model_len|died|file bounds|fully covered|magic|holds|not supported|unknown model|allocat|CUDA|"
    r" E |find tokenizer|Xid|No space|quota"
)
# A log that complains for days: its first and its last complaints count.
_MOST_COMPLAINTS = 4000
_LONGEST = 2000

# What a killed process tells by its signal (man 7 signal), where the log tells nothing.
_SIGNALS: Mapping[int, str] = {
    4: "illegal instruction: the engine was built for a CPU with more features (AVX2?)",
    6: "aborted itself",
    7: "bus error: /dev/shm or a memory-mapped file is too small",
    9: "killed (SIGKILL): by the kernel for lack of memory, or by hand",
    11: "crashed (segmentation fault)",
    31: "used a system call that its sandbox forbids",
}

# systemd.exec(5), "Process Exit Codes": what failed before the engine ran.
_EXIT_CODES: Mapping[int, str] = {
    126: "its program can't be executed by the service user",
    200: "its working directory is missing (status 200/CHDIR)",
    203: "its program is missing or can't be executed (status 203/EXEC)",
    208: "its resource limits can't be set (status 208/LIMITS)",
    217: "its user does not exist (status 217/USER)",
    226: "its sandbox can't be set up (status 226/NAMESPACE)",
    238: "its state directory can't be made (status 238/STATE_DIRECTORY)",
    239: "its cache directory can't be made (status 239/CACHE_DIRECTORY)",
}

# What an engine says when it can't serve any more, though its first process may live on (vLLM 0.32, SGLang 0.5.23).
FATAL = (
    r"EngineCore failed to start|EngineCore encountered a fatal error|Engine core initialization failed|"
    r"Worker proc \S+ died unexpectedly|WorkerProc failed to start|WorkerProc hit an exception|EngineDeadError|"
    r"RPC call to \w+ timed out|(?:Scheduler|DetokenizerManager|TokenizerManager) hit an exception|"
    r"SIGQUIT received\. |Capture cuda graph failed:|Watchdog caught collective operation timeout"
)
_FATAL = re.compile(FATAL)
# What systemd says of a service that ended, and the kernel of a process that it ended (mm/oom_kill.c).
_EXITED = re.compile(r"Main process exited, code=(\w+), status=(\d+)")
_RESULT = re.compile(r"Failed with result '([\w-]+)'")
_OOM = re.compile(r"(?:Out of memory|[Mm]emory cgroup out of memory): Kill(?:ed)? process (\d+) \(([^)]*)\)")
_XID = re.compile(r"NVRM: Xid .*")

# llama.cpp starts each line with its run time and a level: 0.00.004.877 E ...
_STAMP = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ")
# What journald, docker compose, a CI system and vLLM put in front of a line.
_PREFIX = re.compile(
    r"^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [\w.@-]+\[\d+\]: )?"
    r"(?:[\w.-]{0,60} *\| +)?(?:\[\d{4}-\d\d-\d\dT[\d:.]+Z?\] )?"
    r"(?:\((?:APIServer|EngineCore|Worker)\w* pid=\d+\)\s*)?"
)
_VLLM_HEAD = re.compile(r"^(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w.]+:\d+\] ")

_STAGES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"Loading safetensors checkpoint shards:\s+\d+% Completed \| (\d+)/(\d+)", "weights {0} of {1}"),
        (r"Multi-thread loading shards:\s+\d+% Completed \| (\d+)/(\d+)", "weights {0} of {1}"),
        (r"Capturing CUDA graphs \([^)]*\):\s+(\d+)%", "capturing graphs {0} %"),
        (r"Capturing batches \(bs=(\d+)", "capturing graphs, batch {0}"),
        (r"(?:load_model|srv\s+load_model): loading model '", "loading the model"),
        (r"Starting to load model |Load weight begin", "loading the model"),
        (r"Loading weights took ([\d.]+) seconds|Load weight end. elapsed=([\d.]+) s", "weights loaded in {0} s"),
        (r"KV cache size: ([\d,]+) tokens", "cache of {0} tokens"),
        (r"init engine \(profile", "engine warmed up"),
        (
            r"No available shared memory broadcast block found in 60 seconds",
            "no answer from a worker: a collective may hang",
        ),
        (r"listening on http|Application startup complete|fired up and ready to roll", "listening"),
        (r"peerlane: release (\S+)", "starting release {0}"),
    )
)
_STAGE_WORDS = re.compile(r"Load|load|aptur|cache|init engine|broadcast|listening|startup|fired|release")


def clean(line: str) -> str:
    """Return the last state of a progress line, without time stamps and process prefixes."""
    last = [part for part in line.split("\r") if part.strip()][-1:] or [""]
    return _VLLM_HEAD.sub("", _PREFIX.sub("", _STAMP.sub("", last[0].strip()))).strip()


def cause(lines: Sequence[str]) -> Cause | None:
    """Return the cause that this log tells, or None where it tells none."""
    head: list[str] = []
    tail: deque[str] = deque(maxlen=_MOST_COMPLAINTS)
    for line in lines:
        if _TELLING.search(line):
            (head if len(head) < _MOST_COMPLAINTS else tail).append(line)
    cleaned = [clean(line[:_LONGEST]) for line in (*head, *tail)]
    cleaned = [line for line in cleaned if not _NO_CAUSE.search(line)] or cleaned
    for kind, pattern, advice in _CAUSES:
        for line in cleaned:
            if pattern.search(" " + line):
                return Cause(_short(line), advice, kind)
    return None


def fatal(lines: Sequence[str]) -> str:
    """Return the first line that says that the engine can't serve any more, or ""."""
    return next((clean(line[:_LONGEST]) for line in lines if _FATAL.search(line[:_LONGEST])), "")


def exit_of(lines: Sequence[str]) -> tuple[str, int, str] | None:
    """Return (code, status, result) of the last end that systemd's own messages tell, None where they tell none."""
    ended = [found for line in lines if (found := _EXITED.search(line))]
    if not ended:
        return None
    result = [found[1] for line in lines if (found := _RESULT.search(line))]
    return ended[-1][1], int(ended[-1][2]), result[-1] if result else ""


def kernel_cause(lines: Sequence[str], processes: Collection[int]) -> Cause | None:
    """Return what the kernel's messages tell of the end of one of these processes, None where they tell nothing."""
    for line in reversed(lines):
        found = _OOM.search(line)
        if found and int(found[1]) in processes:
            return _out_of_memory(f"{found[2]} (process {found[1]})")
    for line in lines:
        if found := _XID.search(line):
            return Cause(_short(found[0]), "the GPU reported a fault at that time: see the audit", "gpu_error")
    return None


def _out_of_memory(what: str) -> Cause:
    return Cause(
        f"the kernel killed {what} for lack of memory",
        "more memory for the host or the unit (MemoryMax), or less context",
        "host_memory",
    )


def death(
    runs: Sequence[Sequence[str]], code: str, status: int, result: str = "", kernel: Cause | None = None
) -> Cause:
    """Return why a service ended.

    ``runs`` holds the log lines of its last starts, oldest first; ``code`` and ``status`` are systemd's
    ``ExecMainCode`` (``exited``, ``killed``, ``dumped`` or the numbers 1, 2, 3) and ``ExecMainStatus``; ``result`` is
    its ``Result``; ``kernel`` is what ``kernel_cause`` found.
    """
    killed = code in ("killed", "dumped", "2", "3")
    if result == "oom-kill":
        return kernel if kernel and kernel.kind == "host_memory" else _out_of_memory("it")
    if killed and status == 9 and kernel and kernel.kind == "host_memory":
        return kernel
    for run in reversed(runs):
        found = cause(run)
        if found:
            return found
    if kernel:
        return kernel
    if killed:
        return Cause(_SIGNALS.get(status, f"ended by signal {status}"), kind="killed")
    if status in _EXIT_CODES:
        return Cause(_EXIT_CODES[status])
    last = [clean(line) for run in runs for line in run if clean(line)][-1:]
    ending = f"ended with status {status}"
    return Cause(f"{ending}, last line: {_short(last[0])}" if last else f"{ending} and said nothing")


def stage(lines: Sequence[str]) -> str:
    """Say how far a start is, from the newest line that tells, or "" where none does."""
    for line in reversed(lines):
        if not _STAGE_WORDS.search(line):
            continue
        line = clean(line[-_LONGEST:])
        for pattern, text in _STAGES:
            found = pattern.search(line)
            if found:
                return text.format(*[group for group in found.groups() if group])
    return ""


def _short(line: str, most: int = 240) -> str:
    line = re.sub(r"^[EWI] ", "", line)
    return line if len(line) <= most else line[: most - 3] + "..."


# --- one whole log --------------------------------------------------------------------------------------------------

# What a request can make an engine say that goes on serving.
_OF_REQUESTS = ("other", "arguments", "permission", "host_memory")
_LISTENING = re.compile(r"listening on http|Application startup complete|fired up and ready to roll")
# What an engine says only when it has its address, or has answered.
_SERVING = re.compile(
    r"listening on http|fired up and ready to roll|Uvicorn running on|HTTP/1\.1\" 200|Avg generation throughput"
)
_COMPONENT = re.compile(r"\b(EngineCore|APIServer|Worker|Scheduler)(?:_\w+)?(?: pid=(\d+)|\b)")
_JOURNAL = re.compile(r"(?:vllm|sglang|python\d?)\[(\d+)\]: ")
_UNKNOWN_ARGUMENTS = re.compile(r"unrecognized arguments: (.+)")
_BIND = re.compile(r"bind on address \('[^']*', (\d+)\)|socket, hostname: \S+, port: (\d+)")
_ZMQ_ADDRESS = re.compile(r"addr='?((?:tcp|ipc)://[^')\s]+)")
_OWNER = re.compile(r"port (\d+) is used by process psutil\.Process\(pid=(\d+), name='([^']*)'")
_NO_CUSTOM = re.compile(r"Custom allreduce is disabled because (.*)")
_CACHE = re.compile(r"(?:reading|generating) GPU P2P access cache (?:from|in) (\S+)")
_CUDA_NUMBER = re.compile(r"\bError (\d{3}): ")
_DRIVER_CUDA = re.compile(r"too old \(found version (\d+)\)")
_RANK = re.compile(r"\bTP(\d+)\b")
_FACT_WORDS = re.compile(
    r"EngineCore|APIServer|Worker|Scheduler|\]: |unrecognized|bind|addr=|is used by|llreduce|"
    r"P2P access cache|Error |too old|TP"
)


def read(text: str, source: str, unit: str = "") -> EngineLog:
    """Read what one log tells. A cause counts only behind the last line that says the engine serves.

    Behind such a line a complaint without a class is one about a request, and no cause of an end.
    """
    rows = clean_lines(text)
    served = max((at for at, row in enumerate(rows) if _serves(row)), default=-1)
    found = cause(rows[served + 1 :])
    if found is not None and ((served >= 0 and found.kind in _OF_REQUESTS) or "root cause above" in found.line):
        found = None
    told: dict[str, str] = {}
    ranks: set[int] = set()
    for row in rows:
        if len(row) > _LONGEST or not _FACT_WORDS.search(row):
            continue
        _take(row, told, ranks)
    custom = told.get("custom", "")
    if found is not None and found.kind == "custom_all_reduce":
        custom = "failed"
    arguments = told.get("arguments", "").strip()
    return EngineLog(
        source=source,
        unit=unit,
        cause=found,
        stage=stage(rows),
        listening=served >= 0,
        serving=served >= 0 and any(_SERVING.search(row[:_LONGEST]) for row in rows[served:]),
        component=told.get("component", ""),
        unknown_arguments=_arguments(arguments),
        port=int(told["port"]) if "port" in told else None,
        address=told.get("address", ""),
        port_owner=told.get("owner", ""),
        custom_all_reduce=custom,
        custom_all_reduce_line=told.get("custom_line", "") or (found.line if custom == "failed" and found else ""),
        p2p_cache=told.get("cache", ""),
        p2p_cache_line=told.get("cache_line", ""),
        cuda_error=int(told["cuda_error"]) if "cuda_error" in told else None,
        driver_cuda=_cuda(told["driver_cuda"]) if "driver_cuda" in told else "",
        tensor_parallel_ranks=tuple(sorted(ranks)),
        pid=int(told["pid"]) if "pid" in told else None,
        prefix=_prefix(rows, found),
    )


def _prefix(rows: Sequence[str], found: Cause | None) -> str:
    """Return what stands before the line of the cause."""
    if found is None:
        return ""
    line = found.line.removesuffix("...")
    row = next((row for row in rows if line in row[:_LONGEST]), "")
    return row[: row.find(line)]


def _serves(row: str) -> bool:
    return ("listening" in row or "startup" in row or "fired up" in row) and bool(_LISTENING.search(row[:_LONGEST]))


def _take(row: str, told: dict[str, str], ranks: set[int]) -> None:
    if found := _COMPONENT.search(row):
        told.setdefault("component", found[1])
        if found[2]:
            told.setdefault("pid", found[2])
    if found := _JOURNAL.search(row):
        told.setdefault("pid", found[1])
    if found := _UNKNOWN_ARGUMENTS.search(row):
        told.setdefault("arguments", found[1])
    if found := _BIND.search(row):
        told["port"] = found[1] or found[2]
    if found := _ZMQ_ADDRESS.search(row):
        told["address"] = found[1]
    if found := _OWNER.search(row):
        told["port"], told["owner"] = found[1], f"{found[2]} {found[3]}"
    if found := _NO_CUSTOM.search(row):
        many = "more than two PCIe-only GPUs" in found[1]
        none = "lacks GPU P2P" in found[1]
        told.setdefault("custom", "many_pcie" if many else "no_p2p" if none else "")
        told.setdefault("custom_line", row.strip())
    if found := _CACHE.search(row):
        told.setdefault("cache", found[1])
        told.setdefault("cache_line", row.strip())
    if found := _CUDA_NUMBER.search(row):
        told.setdefault("cuda_error", found[1])
    if found := _DRIVER_CUDA.search(row):
        told.setdefault("driver_cuda", found[1])
    if len(ranks) < 64:
        ranks.update(int(rank) for rank in _RANK.findall(row) if len(rank) < 4)


def _arguments(text: str) -> tuple[str, ...]:
    """Split ``--a --b value`` into ``--a`` and ``--b value``: argparse prints the words without their borders."""
    return tuple(part.strip() for part in re.split(r"\s+(?=--?[a-zA-Z])", text) if part.strip())


def _cuda(number: str) -> str:
    """Return CUDA's number as a version: 11040 is 11.4."""
    value = int(number)
    return f"{value // 1000}.{value % 1000 // 10}"
