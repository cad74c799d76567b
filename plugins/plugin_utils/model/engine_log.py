"""Read an engine's log: how far the start is, and why it ended.

The useful cause is seldom the last line: launchers end with a general complaint, worker trees with ``see root cause
above``. So the patterns are ranked, the most telling first, and the first line that a pattern finds is taken.
Patterns of llama_cpp were seen with xllamacpp 2026.10.11549; those of vLLM and SGLang come from their released sources
(0.32.0 and 0.5.23).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# (pattern, what to do about it), most telling first.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"is not within the file bounds, model is corrupted or incomplete",
        "the weight file is truncated: bring it again",
    ),
    (r"incomplete metadata, file not fully covered", "a weight file is truncated: bring it again"),
    (r"failed to open GGUF file|peerlane: error: model .* does not exist", "check the path of the model"),
    (r"invalid magic|not a (?:valid )?GGUF|bad GGUF magic", "this file is no model: check its source"),
    (r"peerlane: error: .* holds \d+ models", "name the file instead of the folder"),
    (
        r"unknown model architecture|Model architectures? .* (?:is|are) not supported",
        "this engine does not know the model",
    ),
    (r"couldn't bind HTTP server socket|Address already in use", "the port is taken: choose another one"),
    (r"unrecognized arguments:|invalid choice:|expected one argument|the following arguments are required", ""),
    (r"torch\.OutOfMemoryError|CUDA out of memory|cudaMalloc failed: out of memory", "less context or more GPUs"),
    (
        r"failed to allocate|unable to allocate|Cannot allocate memory|std::bad_alloc",
        "not enough memory for model and cache",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache",
        "less context or more memory share",
    ),
    (r"Free memory on device .* is less than", "another process holds GPU memory"),
    (r"CUDA error: .*|CUDA driver version is insufficient", "see the kernel log for Xid messages at the same time"),
    (r"NCCL error|ncclInternalError|ncclUnhandledCudaError|ncclSystemError", "audit the links between the GPUs"),
    (r"Failed to infer device type", "no GPU is visible to the engine"),
    (r"cannot find tokenizer merges|failed to load (?:vocab|tokenizer)", "the model's tokenizer is damaged"),
    (r"ImportError: .*|ModuleNotFoundError: .*", "the engine's venv is incomplete"),
    (r"Permission denied.*", "the service user can't read or write this"),
    (r"KeyError: 'invalid tool call parser: .*|ValidationError.*|User-specified max_model_len .*", ""),
    (r"error loading model: .*", ""),
    (r"Worker proc \S+ died unexpectedly \(exit code: -?\d+\)", ""),
    (r"Scheduler hit an exception|WorkerProc hit an exception|EngineCore encountered a fatal error", ""),
    (r"(?:[A-Za-z_.]+(?:Error|Exception)): .+", ""),
    (r"peerlane: error: .+", ""),
    (r" E [a-z]+ .+", ""),
)

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

# llama.cpp starts each line with its run time and a level: 0.00.004.877 E ...
_STAMP = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ")
_PREFIX = re.compile(r"^\((?:APIServer|EngineCore|Worker\w*) pid=\d+\)\s*")

_STAGES: tuple[tuple[str, str], ...] = (
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


@dataclass(frozen=True)
class Cause:
    """Why an engine ended: the telling line (or a statement from its exit), and advice where there is some."""

    line: str
    advice: str = ""

    def text(self) -> str:
        """Return both in one line."""
        return f"{self.line}; {self.advice}" if self.advice else self.line


def clean(line: str) -> str:
    """Return the last state of a progress line, without time stamps and process prefixes."""
    last = [part for part in line.split("\r") if part.strip()][-1:] or [""]
    return _STAMP.sub("", _PREFIX.sub("", last[0])).strip()


def cause(lines: Sequence[str]) -> Cause | None:
    """Return the cause that this log tells, or None where it tells none."""
    cleaned = [clean(line) for line in lines]
    for pattern, advice in _CAUSES:
        wanted = re.compile(pattern)
        for line in cleaned:
            found = wanted.search(" " + line)
            if found:
                return Cause(_short(line), advice)
    return None


def death(runs: Sequence[Sequence[str]], code: str, status: int) -> Cause:
    """Return why a service ended.

    ``runs`` holds the log lines of its last starts, oldest first; ``code`` and ``status`` are systemd's
    ``ExecMainCode`` (``exited``, ``killed``, ``dumped`` or the numbers 1, 2, 3) and ``ExecMainStatus``.
    """
    for run in reversed(runs):
        found = cause(run)
        if found:
            return found
    if code in ("killed", "dumped", "2", "3"):
        return Cause(_SIGNALS.get(status, f"ended by signal {status}"))
    if status in _EXIT_CODES:
        return Cause(_EXIT_CODES[status])
    last = [clean(line) for run in runs for line in run if clean(line)][-1:]
    ending = f"ended with status {status}"
    return Cause(f"{ending}, last line: {_short(last[0])}" if last else f"{ending} and said nothing")


def stage(lines: Sequence[str]) -> str:
    """Say how far a start is, from the newest line that tells, or "" where none does."""
    for line in reversed([clean(line) for line in lines]):
        for pattern, text in _STAGES:
            found = re.search(pattern, line)
            if found:
                return text.format(*[group for group in found.groups() if group])
    return ""


def _short(line: str, most: int = 240) -> str:
    line = re.sub(r"^[EWI] ", "", line)
    return line if len(line) <= most else line[: most - 3] + "..."
