"""Long loads to replay: (seconds, line) as vLLM and SGLang, old and new, write them. Composed here, with a fixed seed.

The shapes are those of the released sources and of logs in public reports; the times are made up, each load with its
own rate, drift, jitter and stages behind the weights. A load does not follow the usual times that the estimate knows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Rows = list[tuple[float, str]]


@dataclass(frozen=True)
class Load:
    """One load. ``drift``: how much slower (above 1) the last shard is than the first. The rest is in seconds."""

    name: str
    shape: str
    shards: int
    shard_s: float
    seed: int
    start_s: float = 25
    drift: float = 1.0
    jitter: float = 0.3
    compile_s: float = 45
    cache_s: float = 5
    graphs_s: float = 35
    graphs: int = 51
    warm_s: float = 12

    @property
    def rows(self) -> Rows:
        """Return the lines with their times."""
        return SHAPES[self.shape](self)

    def shard_times(self) -> list[float]:
        """Return when each shard is there, from the begin of the weights on."""
        rng, at, times = random.Random(self.seed), 0.0, []
        for place in range(self.shards):
            grown = 1 + (self.drift - 1) * place / max(self.shards - 1, 1)
            at += self.shard_s * grown * rng.uniform(1 - self.jitter, 1 + self.jitter)
            times.append(at)
        return times


def clock(at: float) -> str:
    whole = int(at) + 36_000
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def bar(label: str, done: int, total: int) -> str:
    return f"{label}:  {100 * done // total}% Completed | {done}/{total} [01:02<03:04,  2.50s/it]"


def graph_bar(label: str, done: int, total: int) -> str:
    return f"{label}: {100 * done // total:3d}%|####      | {done}/{total} [00:10<00:12,  1.80it/s]"


def vllm_new(load: Load) -> Rows:
    rows: Rows = []

    def say(at: float, who: str, where: str, text: str) -> None:
        rows.append((at, f"({who} pid=211) INFO 12-01 {clock(at)} [{where}] {text}"))

    say(0, "APIServer", "utils.py:233", "non-default args: {'model': '/m', 'tensor_parallel_size': 8}")
    say(8, "APIServer", "model.py:514", "Resolved architecture: DeepseekV3ForCausalLM")
    say(12, "EngineCore", "core.py:101", "Initializing a V1 LLM engine (v0.32.0) with config: model='/m'")
    at = load.start_s
    for rank in range(8):
        say(at + rank / 10, f"Worker_TP{rank}", "gpu_model_runner.py:4001", "Starting to load model /m...")
    begin = at + 1
    label = "Multi-thread loading shards"
    rows.append((begin, "\r" + bar(label, 0, load.shards)))
    for count, after in enumerate(load.shard_times(), 1):
        rows.append((begin + after, "\r" + bar(label, count, load.shards)))
    at = begin + load.shard_times()[-1] + 1
    for rank in range(8):
        say(at, f"Worker_TP{rank}", "default_loader.py:384", "Loading weights took 812.17 seconds")
    say(at + 3, "Worker_TP0", "gpu_model_runner.py:4879", "Model loading took 79.01 GiB memory and 833.65 seconds")
    at += 8
    say(at, "Worker_TP0", "backends.py:1069", "Using cache directory: /c/rank_0_0/backbone for vLLM's torch.compile")
    say(at + 6, "Worker_TP0", "backends.py:1128", "Dynamo bytecode transform time: 5.90 s")
    at += load.compile_s
    say(at, "Worker_TP0", "monitor.py:34", f"torch.compile takes {load.compile_s:.2f} s in total")
    say(at + 1, "Worker_TP0", "gpu_worker.py:356", "Available KV cache memory: 8.60 GiB")
    say(at + 2, "EngineCore", "kv_cache_utils.py:1307", "GPU KV cache size: 263,680 tokens")
    say(at + 2, "EngineCore", "kv_cache_utils.py:1312", "Maximum concurrency for 131,072 tokens per request: 2.01x")
    at += load.cache_s
    for label in ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)", "Capturing CUDA graphs (decode, FULL)"):
        # A journal gets the whole bar at its end.
        steps = [graph_bar(label, done, load.graphs) for done in range(load.graphs + 1)]
        at += load.graphs_s / 2
        rows.append((at, "\r".join(steps)))
    say(at + 1, "Worker_TP0", "gpu_model_runner.py:6053", "Graph capturing finished in 35 secs, took 1.02 GiB")
    say(at + 2, "EngineCore", "core.py:283", "init engine (profile, create kv cache, warmup model) took 98.20 s")
    at += load.warm_s
    say(at - 2, "APIServer", "base.py:180", "Warming up chat template processing...")
    say(at - 1, "APIServer", "api_server.py:500", "Starting vLLM server on http://127.0.0.1:8000")
    rows.append((at, "(APIServer pid=211) INFO:     Application startup complete."))
    return rows


def vllm_old(load: Load) -> Rows:
    rows: Rows = []

    def say(at: float, where: str, text: str) -> None:
        rows.append((at, f"INFO 09-05 {clock(at)} {where}] {text}"))

    say(0, "api_server.py:459", "vLLM API server version 0.6.3")
    say(6, "llm_engine.py:237", "Initializing an LLM engine (v0.6.3) with config: model='/m', tensor_parallel_size=8")
    at = load.start_s
    say(at, "model_runner.py:1056", "Starting to load model /m...")
    rows.append((at + 1, bar("Loading safetensors checkpoint shards", 0, load.shards)))
    for count, after in enumerate(load.shard_times(), 1):
        rows.append((at + 1 + after, bar("Loading safetensors checkpoint shards", count, load.shards)))
    at += load.shard_times()[-1] + 3
    say(at, "model_runner.py:1067", "Loading model weights took 75.5010 GB")
    at += load.cache_s + 8
    say(at, "distributed_gpu_executor.py:57", "# GPU blocks: 21042, # CPU blocks: 2048")
    say(at + 2, "model_runner.py:1395", "Capturing the model for CUDA graphs. This may lead to unexpected consequences")
    at += 2 + load.graphs_s
    say(at, "model_runner.py:1523", f"Graph capturing finished in {load.graphs_s:.0f} secs.")
    rows.append((at + 3, "INFO:     Started server process [77]"))
    rows.append((at + 3, "INFO:     Waiting for application startup."))
    rows.append((at + 3.5, "INFO:     Application startup complete."))
    return rows


def sglang_new(load: Load) -> Rows:
    return _sglang(load, new=True)


def sglang_old(load: Load) -> Rows:
    return _sglang(load, new=False)


def _sglang(load: Load, new: bool) -> Rows:
    rows: Rows = []

    def say(at: float, text: str, rank: int | None = 0) -> None:
        who = "" if rank is None else f" TP{rank}"
        rows.append((at, f"[2026-09-01 {clock(at)}{who}] {text}"))

    say(0, "server_args=ServerArgs(model_path='/m', tp_size=8)", None)
    say(14, "Using default HuggingFace chat template with detected content format: string", None)
    say(15, "Init torch distributed begin.")
    at = load.start_s
    for rank in range(8):
        say(at + rank / 8, "Load weight begin. avail mem=93.21 GB", rank)
    rows.append((at + 1, bar("Loading safetensors checkpoint shards", 0, load.shards)))
    for count, after in enumerate(load.shard_times(), 1):
        rows.append((at + 1 + after, bar("Loading safetensors checkpoint shards", count, load.shards)))
    at += load.shard_times()[-1] + 2
    for rank in range(8):
        ended = "elapsed=912.51 s, " if new else ""
        say(at + rank / 3, f"Load weight end. {ended}type=DeepseekV3ForCausalLM, avail mem=13.20 GB.", rank)
    at += 4
    say(at, "KV Cache is allocated. #tokens: 161488, KV size: 10.57 GB")
    say(at, "Memory pool end. avail mem=9.23 GB")
    at += load.cache_s
    kind = "target decode CUDA" if new else "cuda"
    say(at, f"Capture {kind} graph begin. This can take up to several minutes. avail mem=9.20 GB")
    label = "Capturing batches (bs=1 avail_mem=8.10 GB)"
    steps = [graph_bar(label, done, 23) if new else graph_bar(label, done, 23).partition(": ")[2] for done in range(24)]
    at += load.graphs_s
    rows.append((at, "\r".join(steps)))
    took = f"elapsed={load.graphs_s:.2f} s" if new else f"Time elapsed: {load.graphs_s:.2f} s"
    say(at, f"Capture {kind} graph end. {took}. avail mem=8.16 GB.")
    say(at + 1, "max_total_num_tokens=161488, chunked_prefill_size=8192, max_running_requests=2048, context_len=163840")
    rows.append((at + 2, "INFO:     Application startup complete."))
    rows.append((at + 2, "INFO:     Uvicorn running on http://127.0.0.1:8000 (Press CTRL+C to quit)"))
    say(at + 4, 'INFO:     127.0.0.1:50232 - "GET /model_info HTTP/1.1" 200 OK', None)
    at += load.warm_s + 6
    say(at, "The server is fired up and ready to roll!", None)
    return rows


SHAPES = {"vllm_new": vllm_new, "vllm_old": vllm_old, "sglang_new": sglang_new, "sglang_old": sglang_old}

LOADS = (
    Load("vllm, 550 GB at 0.7 GB/s", "vllm_new", 64, 12.5, 1),
    Load("vllm, many shards, cold compile", "vllm_new", 163, 4.4, 2, compile_s=88, graphs_s=62, warm_s=20),
    Load("vllm, warm compile cache", "vllm_new", 163, 3.6, 3, compile_s=9, graphs_s=20, warm_s=6),
    Load("vllm, slower towards the end", "vllm_new", 96, 5.2, 4, drift=1.35),
    Load("vllm, faster towards the end", "vllm_new", 96, 9.0, 5, drift=0.75),
    Load("vllm, rough shards", "vllm_new", 46, 18.0, 6, jitter=0.8),
    Load("vllm 0.6, 55 shards", "vllm_old", 55, 9.0, 7, graphs_s=22),
    Load("vllm 0.6, network disk", "vllm_old", 163, 24.0, 8, jitter=0.7, drift=1.2, graphs_s=34),
    Load("sglang, 163 shards", "sglang_new", 163, 5.0, 9, graphs_s=55),
    Load("sglang, kernels compiled in the warm-up", "sglang_new", 163, 5.5, 10, graphs_s=84, warm_s=70),
    Load("sglang, slower towards the end", "sglang_new", 64, 11.0, 11, drift=1.4, jitter=0.6),
    Load("sglang 0.4, 163 shards", "sglang_old", 163, 3.1, 12, graphs_s=25),
    Load("sglang 0.4, an hour", "sglang_old", 163, 25.0, 13, jitter=0.9, graphs_s=55),
)
