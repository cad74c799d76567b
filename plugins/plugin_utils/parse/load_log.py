"""Read how far the start of an engine is from the lines of its log, each with the time at which it was written.

Line shapes: vLLM 0.6 to 0.33 and SGLang 0.3 to 0.5.23 (released sources and logs in public reports), llama.cpp under
this collection's launcher (xllamacpp 2026.10.11549). The bars of shards end with a newline in both engines, so each
step is a line; the bars of graphs do not, so a journal holds them as one line once they are complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Stage = Literal["starting", "weights", "loaded", "compiling", "cache", "capturing", "warming_up", "tokenizer", "ready"]
Engine = Literal["vllm", "vllm_v0", "sglang", "llama_cpp", ""]

# In the order in which a start passes them; an engine leaves some out.
STAGES: tuple[Stage, ...] = (
    "starting",
    "weights",
    "loaded",
    "compiling",
    "cache",
    "capturing",
    "warming_up",
    "tokenizer",
    "ready",
)
_ORDER = {stage: place for place, stage in enumerate(STAGES)}

# A row of a log: when it was written (seconds, any origin) and its text.
Row = tuple[float, str]

_BAR = r"\s*(\d{1,3})%(?:\s+Completed)?\s*\|(?:[^|\n]{0,400}\|)?\s*(\d+)/(\d+)"
_SHARDS = re.compile(
    r"(?:Loading (?:safetensors|pt|npcache|fastsafetensors|[\w.-]+) checkpoint shards|Multi-thread loading shards|"
    r"Loading safetensors using [\w ]{1,60} (?:loader|streamer))\s*:" + _BAR
)
_GRAPHS = re.compile(
    r"(?:Capturing CUDA graphs \([^)]{0,60}\)|Capturing CUDA graph shapes|Capturing batches \([^)]{0,80}\))\s*:"
    r"\s*(\d{1,3})%(?:\|[^|\n]{0,400}\|\s*(\d+)/(\d+))?"
)
_BARE_BAR = re.compile(r"^\s*(\d{1,3})%\|[^|\n]{0,400}\|\s*(\d+)/(\d+) \[")

_PATTERNS: tuple[tuple[Stage, str], ...] = (
    (
        "ready",
        r"listening on http|Application startup complete|fired up and ready to roll|peerlane: serving ",
    ),
    (
        "tokenizer",
        r"Warming up chat template|Chat template warmup|Detected the chat template content format|"
        r"Using supplied chat template|Using default HuggingFace chat template|init_tokenizer: initializing",
    ),
    (
        "warming_up",
        r"Graph capturing finished|Capture .{0,40}[Cc][Uu][Dd][Aa] graph end|init engine \(profile|"
        r"Starting vLLM (?:API )?server|Started server process|Waiting for application startup|"
        r"Uvicorn running on|max_total_num_tokens=",
    ),
    (
        "capturing",
        r"Capturing CUDA graph|Capturing batches|Capture .{0,40}[Cc][Uu][Dd][Aa] graph begin|"
        r"Capturing the model for CUDA graphs|Capturing cudagraphs for decoding",
    ),
    (
        "cache",
        r"KV cache size: |Available KV cache memory|# (?:GPU|CUDA|CPU|cuda|cpu) blocks: |Memory pool end|"
        r"KV Cache is allocated|Maximum concurrency for ",
    ),
    (
        "compiling",
        r"Dynamo bytecode transform time|Compiling a graph for|torch\.compile (?:takes|took|and initial)|"
        r"Using cache directory: \S+ for vLLM's torch\.compile|Directly load the compiled graph|"
        r"Cache the graph of|DeepGEMM (?:JIT|warmup)|JIT [Cc]ompil|Autotuning process starts",
    ),
    (
        "loaded",
        r"Loading weights took |Loading model weights took |Model loading took |Load weight end\.|: model loaded",
    ),
    ("weights", r"Starting to load model |Load weight begin|load_model: loading model '"),
    (
        "starting",
        r"Initializing a[n]? (?:V1 )?LLM engine|server_args=ServerArgs|non-default args: |peerlane: release |"
        r"Init torch distributed",
    ),
)
_MARKS = tuple((stage, re.compile(pattern)) for stage, pattern in _PATTERNS)
# Words that every mark has one of: most lines of a log have none.
_WORDS = re.compile(
    r"shards|loader|streamer|[Ll]oad|aptur|graph|%\||cache|Cache|blocks|pool|concurrency|ompil|took|takes|ynamo|"
    r"utotun|DeepGEMM|template|tokenizer|engine|erver|startup|Uvicorn|max_total|listening|fired|serving|release|"
    r"args|Init|broadcast"
)
_HUNG = re.compile(r"No available shared memory broadcast block found")
# What anybody's question to the server leaves in its log: no sign of a load that goes on.
_ACCESS = re.compile(r'"(?:GET|POST|HEAD|OPTIONS) /\S* HTTP/1|\b(?:GET|POST) /(?:health|metrics|v1)\b')
_ENGINES: tuple[tuple[Engine, re.Pattern[str]], ...] = (
    ("sglang", re.compile(r"server_args=ServerArgs|Load weight begin|Init torch distributed")),
    ("vllm", re.compile(r"V1 LLM engine|EngineCore|\(APIServer pid=|\[gpu_model_runner\.py:|\[core\.py:")),
    ("vllm_v0", re.compile(r"Initializing an LLM engine|model_runner\.py:\d+\]|llm_engine\.py:\d+\]")),
    ("llama_cpp", re.compile(r"load_model: loading model '|peerlane: release ")),
)
_LONGEST = 2000


@dataclass(frozen=True)
class LoadLog:
    """What a log tells of one start.

    ``reached``: (stage, when it was first told), in order. ``shards``: (when, how many of ``shards_total`` are there).
    ``graphs`` and ``graphs_total``: of the newest bar. ``second_weights``: whether another model (a draft) is loaded
    behind the first. ``hung``: how often the engine complained of a worker without answer, with no progress since.
    ``newest_at``: when the newest line was written that is not about a request; None where there is none.
    """

    engine: Engine = ""
    reached: tuple[tuple[Stage, float], ...] = ()
    shards: tuple[tuple[float, int], ...] = ()
    shards_total: int | None = None
    graphs: int | None = None
    graphs_total: int | None = None
    graphs_percent: int | None = None
    second_weights: bool = False
    hung: int = 0
    started_at: float | None = None
    newest_at: float | None = None

    @property
    def stage(self) -> Stage | None:
        """Return the furthest stage, None where no line told one."""
        return self.reached[-1][0] if self.reached else None

    def at(self, stage: Stage) -> float | None:
        """Return when a stage was first told."""
        return next((at for name, at in self.reached if name == stage), None)


def last_state(text: str) -> str:
    """Return the last state of a line that holds several, separated by carriage returns."""
    parts = [part for part in text.split("\r") if part.strip()]
    return parts[-1][-_LONGEST:] if parts else ""


def read(rows: Sequence[Row]) -> LoadLog:
    """Read one start, its rows oldest first. What is not understood is left out."""
    log = LoadLog(started_at=rows[0][0] if rows else None)
    for at, text in rows:
        if len(text) > _LONGEST:
            text = text[-_LONGEST * 4 :]
        if _ACCESS.search(text):
            continue
        log = replace(log, newest_at=at)
        if not _WORDS.search(text):
            continue
        log = _take(log, at, last_state(text))
    return log


def _take(log: LoadLog, at: float, text: str) -> LoadLog:
    if _HUNG.search(text):
        return replace(log, hung=log.hung + 1)
    if log.engine in ("", "vllm_v0"):
        engine = next((name for name, pattern in _ENGINES if pattern.search(text)), log.engine)
        log = replace(log, engine=engine)
    if found := _SHARDS.search(text):
        return _take_shards(log, at, int(found[2]), int(found[3]))
    found = _GRAPHS.search(text) or (_BARE_BAR.search(text) if log.stage == "capturing" else None)
    if found:
        done, total = (int(found[2]), int(found[3])) if found[3] else (None, None)
        log = replace(log, graphs=done, graphs_total=total, graphs_percent=int(found[1]))
        return _reach(log, "capturing", at)
    for stage, pattern in _MARKS:
        if pattern.search(text):
            return _take_mark(log, stage, at, text)
    return log


def _take_mark(log: LoadLog, stage: Stage, at: float, text: str) -> LoadLog:
    # SGLang says this before its own warm-up request.
    if stage == "ready" and log.engine == "sglang" and "fired up" not in text:
        stage = "warming_up"
    # Its front end reads the template while the weights load.
    if stage == "tokenizer" and _ORDER[log.stage or "starting"] < _ORDER["loaded"]:
        return log
    return _reach(log, stage, at)


def _take_shards(log: LoadLog, at: float, done: int, total: int) -> LoadLog:
    if not total or done > total:
        return log
    if _ORDER[log.stage or "starting"] >= _ORDER["loaded"]:
        return replace(log, second_weights=True, hung=0)
    # Each rank may print its own bar: the one that is furthest counts.
    known = log.shards[-1][1] if log.shards else -1
    if log.shards_total not in (None, total) or done > known:
        kept = log.shards if log.shards_total in (None, total) else ()
        log = replace(log, shards=(*kept, (at, done)), shards_total=total, hung=0)
    return _reach(log, "weights", at)


def _reach(log: LoadLog, stage: Stage, at: float) -> LoadLog:
    if log.stage is not None and _ORDER[stage] <= _ORDER[log.stage]:
        return replace(log, hung=0) if stage == log.stage else log
    return replace(log, reached=(*log.reached, (stage, at)), hung=0)
