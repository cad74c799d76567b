"""Tell from what was seen of a starting service how far it is, how long it still takes, and whether it stands still.

Time left is measured where it can be: the weights by their shards, or by the bytes that came where the log is silent.
What comes behind the weights (compilation, graphs, warm-up) is taken from the service's last start where the log of
this boot holds one, else from ``BEHIND_WEIGHTS_S``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..parse.load_log import STAGES, LoadLog, Stage
from .progress import duration_text, size_text

# Seconds that a large model spends in each stage behind its weights, with a cold compile cache. From public reports of
# starts on 8 GPUs: vLLM's `init engine` took 33 to 327 s (median near 130), of that `torch.compile` 10 to 51 s and
# graphs 6 to 60 s; SGLang's graphs 7 to 55 s; vLLM before V1 only captured, in 14 to 35 s.
BEHIND_WEIGHTS_S: Mapping[str, Mapping[Stage, float]] = {
    "vllm": {"loaded": 8, "compiling": 40, "cache": 5, "capturing": 40, "warming_up": 10, "tokenizer": 2},
    "vllm_v0": {"loaded": 10, "cache": 2, "capturing": 25, "warming_up": 5},
    "sglang": {"loaded": 3, "cache": 4, "capturing": 40, "warming_up": 20},
    "llama_cpp": {"loaded": 3},
}
# Below this size the stages behind the weights take less; a tenth is the least.
LARGE_BYTES = 20e9

# Less than this share of one core is what an idle server spends on its timers.
IDLE_CORE = 0.02
# Bytes between two looks that are no sign of a load: a pipe that is polled.
IDLE_BYTES = 1_000_000
# vLLM complains once in this time of a worker that gives no answer.
HUNG_STEP_S = 60.0

STAGE_TEXT: Mapping[Stage, str] = {
    "starting": "the engine starts",
    "weights": "loading the weights",
    "loaded": "weights loaded",
    "compiling": "compiling",
    "cache": "cache allocated",
    "capturing": "capturing graphs",
    "warming_up": "warming up",
    "tokenizer": "tokenizer and chat template",
    "ready": "listening",
}


@dataclass(frozen=True)
class Sample:
    """One look at the processes of a service; ``at_s`` is the host's clock.

    ``cpu_s``: CPU seconds of each process. ``states``: its letter from ``/proc/PID/stat``. ``read_bytes``: what all of
    them got from storage. ``mapped_bytes`` and ``char_bytes``: the most that one of them has mapped of files, and read
    by calls.
    """

    at_s: float
    cpu_s: Mapping[int, float] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    read_bytes: int = 0
    mapped_bytes: int = 0
    char_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Return how much of the weights can be in memory at most, by what was read."""
        return max(self.read_bytes, self.mapped_bytes, self.char_bytes)


@dataclass(frozen=True)
class Estimate:
    """How far a start is. ``fraction`` (0 to 1, of the time) and ``left_s`` are None where nothing tells."""

    stage: Stage | None
    fraction: float | None
    left_s: float | None
    text: str


def sample(raw: Mapping[str, Any]) -> Sample:
    """Return what the module read of the processes as a sample."""
    rows = [row for row in raw.get("processes") or [] if isinstance(row, Mapping)]
    return Sample(
        at_s=float(raw.get("at") or 0),
        cpu_s={int(row["pid"]): float(row["cpu_s"]) for row in rows},
        states={int(row["pid"]): str(row["state"]) for row in rows},
        names={int(row["pid"]): str(row["name"]) for row in rows},
        read_bytes=sum(int(row.get("read_bytes") or 0) for row in rows),
        mapped_bytes=max((int(row.get("mapped_bytes") or 0) for row in rows), default=0),
        char_bytes=max((int(row.get("char_bytes") or 0) for row in rows), default=0),
    )


# --- time left ------------------------------------------------------------------------------------------------------


def weights_left_s(
    points: Sequence[tuple[float, float]], total: float, begin_s: float, now_s: float, step: float
) -> float | None:
    """Return the seconds until ``total`` is reached, None where the rate is not known yet.

    ``points``: (when, how much), rising. The rate is the mean of that of the whole load and that of its last half:
    the one is steady, the other follows a page cache that ends or a disk that warms up. ``step`` is the distance of
    two points (1 for shards, 0 for bytes): within it the load goes on unseen.
    """
    if not points or not total:
        return None
    last_s, done = points[-1]
    if done <= 0 or last_s <= begin_s:
        return None
    whole = done / (last_s - begin_s)
    cut = last_s - (last_s - begin_s) / 2
    from_s, from_done = next(((at, count) for at, count in reversed(points) if at <= cut), (begin_s, 0.0))
    recent = (done - from_done) / (last_s - from_s) if last_s > from_s else whole
    rate = (whole + recent) / 2
    silent_s = max(now_s - last_s, 0.0)
    if rate * silent_s > 2 * max(step, done / 20):
        rate = min(rate, (done + step) / (now_s - begin_s))
    if rate <= 0:
        return None
    return max(total - done - min(rate * silent_s, 0.9 * step), 0.0) / rate


def durations_s(log: LoadLog) -> dict[Stage, float]:
    """Return how long each stage of a start took; {} where it did not become ready."""
    if log.stage != "ready":
        return {}
    return {stage: after[1] - at for (stage, at), after in pairwise(log.reached)}


def estimate(
    log: LoadLog,
    samples: Sequence[Sample],
    now_s: float,
    model_bytes: int | None = None,
    before: LoadLog | None = None,
    started_s: float | None = None,
) -> Estimate:
    """Estimate a start at ``now_s``. ``before`` is an earlier start of the same service that became ready."""
    started = started_s if started_s is not None else log.started_at if log.started_at is not None else now_s
    past = durations_s(before) if before is not None and _comparable(log, before) else {}
    stage = log.stage
    left = None if stage == "ready" else _left_s(log, samples, now_s, model_bytes, past)
    elapsed = max(now_s - started, 0.0)
    fraction = None
    if left is not None:
        fraction = elapsed / (elapsed + left) if elapsed + left > 0 else 0.0
    return Estimate(stage, fraction, left, _text(log, samples, model_bytes, fraction, left))


def _comparable(log: LoadLog, before: LoadLog) -> bool:
    return before.engine == log.engine and (log.shards_total is None or log.shards_total == before.shards_total)


def _left_s(
    log: LoadLog, samples: Sequence[Sample], now_s: float, model_bytes: int | None, past: Mapping[Stage, float]
) -> float | None:
    usual = past or _usual(log, model_bytes)
    stage = log.stage
    if stage is None or stage == "starting":
        if not past:
            return None
        spent = now_s - (log.at("starting") or now_s)
        return max(past.get("starting", 0.0) - spent, 0.0) + sum(past.get(name, 0.0) for name in STAGES[1:])
    begin = log.at("weights")
    if stage == "weights" and begin is not None:
        left = _weights_left(log, samples, begin, now_s, model_bytes)
        if left is None and past:
            left = max(past.get("weights", 0.0) - (now_s - begin), 0.0)
        return None if left is None else left + sum(usual.get(name, 0.0) for name in STAGES[2:])
    spent = now_s - log.reached[-1][1]
    later = sum(usual.get(name, 0.0) for name in STAGES[STAGES.index(stage) + 1 :])
    if stage == "capturing" and log.graphs_percent and log.graphs_percent < 100:
        return spent * (100 - log.graphs_percent) / log.graphs_percent + later
    # A stage that is overdue takes longer the longer it has taken.
    return max(usual.get(stage, 0.0) - spent, spent / 5 if usual.get(stage) else 0.0) + later


def _weights_left(
    log: LoadLog, samples: Sequence[Sample], begin: float, now_s: float, model_bytes: int | None
) -> float | None:
    if log.shards_total and log.shards:
        # The first line of a bar says 0: what came before it was no reading.
        first = log.shards[0][0] if log.shards[0][1] == 0 else begin
        points = [(at, float(count)) for at, count in log.shards]
        if (left := weights_left_s(points, log.shards_total, first, now_s, 1)) is not None:
            return left
    if not model_bytes:
        return None
    points = loaded_points(samples, begin, model_bytes)
    return weights_left_s(points, model_bytes, begin, now_s, 0)


def loaded_points(samples: Sequence[Sample], begin_s: float, model_bytes: int) -> list[tuple[float, float]]:
    """Return (when, bytes of the weights that are there) of the looks since the weights began.

    Counters fall when a process ends, so the most that was seen counts. What was read before the weights began
    (programs and libraries) is no weight.
    """
    base = max((one.loaded_bytes for one in samples if one.at_s < begin_s), default=0)
    most, points = 0, []
    for one in samples:
        if one.at_s >= begin_s:
            most = max(most, one.loaded_bytes - base)
            points.append((one.at_s, float(min(most, model_bytes))))
    return points


def _usual(log: LoadLog, model_bytes: int | None) -> dict[Stage, float]:
    scale = 1.0 if model_bytes is None else min(max(model_bytes / LARGE_BYTES, 0.1), 1.0)
    return {stage: seconds * scale for stage, seconds in BEHIND_WEIGHTS_S.get(log.engine, {}).items()}


def _text(
    log: LoadLog, samples: Sequence[Sample], model_bytes: int | None, fraction: float | None, left: float | None
) -> str:
    stage = log.stage
    if stage is None:
        return ""
    text = STAGE_TEXT[stage]
    if stage == "weights":
        begin = log.at("weights") or 0.0
        if log.shards_total and log.shards:
            text = f"weights {log.shards[-1][1]} of {log.shards_total}"
        elif model_bytes and (points := loaded_points(samples, begin, model_bytes)):
            text = f"weights {size_text(points[-1][1])} of {size_text(model_bytes)}"
    elif stage == "capturing" and log.graphs_total:
        text = f"capturing graphs {log.graphs} of {log.graphs_total}"
    elif stage == "capturing" and log.graphs_percent is not None:
        text = f"capturing graphs {log.graphs_percent} %"
    if log.second_weights and stage not in ("weights", "ready"):
        text += " (with a draft model)"
    if fraction is not None and left is not None:
        text += f", {100 * fraction:.0f} %, about {duration_text(left)} left"
    return text


# --- standing still -------------------------------------------------------------------------------------------------


def quiet_s(log: LoadLog, samples: Sequence[Sample], now_s: float) -> float:
    """Return for how many seconds nothing moved: no CPU time, no bytes, no line in the log."""
    if not samples:
        return 0.0
    moved = samples[0].at_s
    for earlier, later in pairwise(samples):
        if _moved(earlier, later):
            moved = later.at_s
    return max(now_s - max(moved, log.newest_at or moved), 0.0)


def _moved(earlier: Sample, later: Sample) -> bool:
    if set(earlier.cpu_s) != set(later.cpu_s):
        return True
    spent = sum(later.cpu_s.values()) - sum(earlier.cpu_s.values())
    if spent > IDLE_CORE * max(later.at_s - earlier.at_s, 0.5):
        return True
    return (
        later.read_bytes - earlier.read_bytes > IDLE_BYTES
        or later.char_bytes - earlier.char_bytes > IDLE_BYTES
        or later.mapped_bytes - earlier.mapped_bytes > IDLE_BYTES
    )


def stopped_s(samples: Sequence[Sample], now_s: float) -> float:
    """Return for how many seconds a process of the service has been stopped by a signal or a debugger."""
    since = now_s
    wanted = _in_state(samples[-1], "Tt") if samples else set()
    for one in reversed(samples):
        wanted &= _in_state(one, "Tt")
        if not wanted:
            break
        since = one.at_s
    return now_s - since


def stall(log: LoadLog, samples: Sequence[Sample], now_s: float, bound_s: float) -> str:
    """Return in words why a service counts as stalled, "" where it does not. ``bound_s`` 0: it never does."""
    if bound_s <= 0:
        return ""
    quiet = quiet_s(log, samples, now_s)
    stopped = stopped_s(samples, now_s)
    if quiet >= bound_s:
        return f"no CPU time, no bytes and no log line for {duration_text(quiet)}{_why(samples)}"
    if stopped >= bound_s:
        return f"stands still for {duration_text(stopped)}{_why(samples)}"
    if log.hung * HUNG_STEP_S >= bound_s:
        return (
            f"a worker gives no answer for {duration_text(log.hung * HUNG_STEP_S)}: a collective may hang; audit the "
            "links between the GPUs"
        )
    return ""


def _why(samples: Sequence[Sample]) -> str:
    last = samples[-1] if samples else Sample(0.0)
    for letters, text in (
        ("Tt", "is stopped (by SIGSTOP or a debugger): SIGCONT lets it go on"),
        ("D", "waits in the kernel (disk, network file system or GPU driver)"),
    ):
        found = sorted(_in_state(last, letters))
        if found:
            return f": process {found[0]} ({last.names.get(found[0], '?')}) {text}"
    return ""


def _in_state(one: Sample, letters: str) -> set[int]:
    return {pid for pid, state in one.states.items() if state in tuple(letters)}


def lost_worker(samples: Sequence[Sample], main_pid: int) -> str:
    """Return the name of an engine's process that is gone while its main process goes on, or "".

    vLLM and SGLang give their processes titles of their own (``VLLM::Worker_TP0``, ``sglang::scheduler_TP0``).
    """
    if not samples or main_pid not in samples[-1].names:
        return ""
    seen: dict[int, str] = {}
    for one in samples:
        if main_pid in one.names:
            seen.update({pid: name for pid, name in one.names.items() if "::" in name})
    gone = sorted(pid for pid in seen if pid not in samples[-1].names)
    return f"{seen[gone[0]]} (process {gone[0]})" if gone else ""
