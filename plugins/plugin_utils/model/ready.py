"""Judge what a model service does: how it starts, what it answers to a known prompt, why it ended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..core.runtime import Cause
from ..parse import engine_log, load_log
from . import loading

Verdict = Literal["ready", "waiting", "dead", "wrong"]
State = Literal["loading", "ready", "serving", "stalled", "dead", "degraded"]

# A text of this many equal tokens is no answer of a healthy model to a question.
REPEATED_TOKENS = 8
# What a watch keeps: a day of a chatty service must not fill the controller's memory.
MOST_ENTRIES = 20_000
MOST_SAMPLES = 20_000

# vLLM's answer to a request for probabilities that are NaN (0.32).
_NOT_NUMBERS = re.compile(r"Out of range float values are not JSON compliant")
_HANGS = re.compile(r"no complete answer within|the service ended while it answered")
_NAN_TEXT = "the weights, a kernel or the quantization is wrong for this GPU, or the file is damaged"


@dataclass(frozen=True)
class Judgement:
    """What to do next, and one line for a person.

    ``verdict``: ``waiting`` goes on, ``ready`` is the good end, ``dead`` and ``wrong`` are bad ones. ``cause`` and
    ``noticed_s`` (seconds since the fatal line or the end of the process) are those of a death.
    """

    verdict: Verdict
    text: str
    state: State
    stage: str = ""
    cause: Cause | None = None
    noticed_s: float | None = None


@dataclass(frozen=True)
class Watch:
    """What the steps of the module ``model_ready`` brought so far.

    ``entries``: (when, invocation, line, whether systemd said it); ``first_invocation``: the start that is watched.
    """

    entries: tuple[tuple[float, str, str, bool], ...] = ()
    samples: tuple[loading.Sample, ...] = ()
    first_invocation: str = ""
    weight_bytes: Mapping[str, int] | None = None

    def runs(self, after: str = "") -> list[list[load_log.Row]]:
        """Return the rows of the starts that are watched, oldest first.

        ``after`` is the invocation id of a start that, with all before it, is of no interest.
        """
        order = list(dict.fromkeys(one[1] for one in self.entries if one[1]))
        first = 0
        if after in order:
            first = order.index(after) + 1
        elif self.first_invocation in order:
            first = order.index(self.first_invocation)
        elif self.first_invocation:
            first = len(order)
        return [self._rows(invocation) for invocation in order[first:]]

    def earlier(self, after: str = "") -> list[list[load_log.Row]]:
        """Return the rows of the starts before those that are watched, oldest first."""
        order = list(dict.fromkeys(one[1] for one in self.entries if one[1]))
        return [self._rows(invocation) for invocation in order[: len(order) - len(self.runs(after))]]

    def manager_lines(self, invocations: Sequence[str]) -> list[tuple[float, str]]:
        """Return what systemd said of these starts."""
        return [(at, line) for at, invocation, line, manager in self.entries if manager and invocation in invocations]

    def watched(self, after: str = "") -> list[str]:
        """Return the invocation ids of the starts that are watched."""
        order = list(dict.fromkeys(one[1] for one in self.entries if one[1]))
        return order[len(order) - len(self.runs(after)) :]

    def _rows(self, invocation: str) -> list[load_log.Row]:
        return [(at, line) for at, one, line, manager in self.entries if one == invocation and not manager]


def observe(watch: Watch, step: Mapping[str, Any]) -> Watch:
    """Return the watch with what one step brought."""
    entries = tuple((float(at), str(run), str(line), bool(own)) for at, run, line, own in step.get("entries") or ())
    samples = tuple(loading.sample(raw) for raw in step.get("samples") or ())
    service = step.get("service") or {}
    return replace(
        watch,
        entries=(*watch.entries, *entries)[-MOST_ENTRIES:],
        samples=(*watch.samples, *samples)[-MOST_SAMPLES:],
        first_invocation=watch.first_invocation or str(service.get("InvocationID") or ""),
        weight_bytes=watch.weight_bytes if step.get("weight_bytes") is None else dict(step["weight_bytes"]),
    )


def judge(
    step: Mapping[str, Any],
    unit: str,
    expected: str | None,
    watch: Watch | None = None,
    after: str = "",
    stall_after_s: float = 0,
) -> Judgement:
    """Judge the newest step of the module ``model_ready``; ``watch`` has seen it and those before it.

    ``expected`` is the answer that a known prompt must give; None where any healthy text will do. ``after`` is the
    invocation id of the last start that does not count.
    """
    watch = observe(Watch(), step) if watch is None else watch
    runs = watch.runs(after)
    log = load_log.read(runs[-1] if runs else [])
    stage = log.stage or ""
    if step.get("dead"):
        return replace(_dead(step, unit, watch, after), stage=stage)
    now = float(step.get("now") or (watch.samples[-1].at_s if watch.samples else 0))
    answer = step.get("answer")
    if answer and not answer.get("error"):
        return replace(_judge_answer(answer, step, unit, expected), stage=stage)
    if lost := _lost(step, unit, runs, watch, now):
        return replace(lost, stage=stage)
    if answer:
        return replace(_judge_error(str(answer["error"]), unit, log, watch, now), stage=stage)
    if why := loading.stall(log, watch.samples, now, stall_after_s):
        return Judgement("wrong", f"{unit} is stalled: {why}", "stalled", stage)
    estimate = _estimate(step, log, watch, after, now)
    return Judgement("waiting", estimate.text or str(step.get("http") or "starting"), "loading", stage)


def _estimate(step: Mapping[str, Any], log: load_log.LoadLog, watch: Watch, after: str, now: float) -> loading.Estimate:
    sizes = watch.weight_bytes or {}
    kinds = (".gguf",) if log.engine == "llama_cpp" else (".safetensors", ".bin", ".pt")
    size = next((sizes[kind] for kind in kinds if sizes.get(kind)), None)
    past = [one for one in map(load_log.read, watch.earlier(after)) if one.stage == "ready"]
    age = step.get("age_s")
    started = None if age is None else now - float(age)
    return loading.estimate(log, watch.samples, now, size, past[-1] if past else None, started)


# --- death ----------------------------------------------------------------------------------------------------------


def _dead(step: Mapping[str, Any], unit: str, watch: Watch, after: str) -> Judgement:
    service = step.get("service") or {}
    runs = watch.runs(after)
    managed = watch.manager_lines(watch.watched(after))
    ended = engine_log.exit_of([line for _at, line in managed])
    code, status, result = ended or (
        str(service.get("ExecMainCode", "")),
        _number(service.get("ExecMainStatus")),
        "",
    )
    result = result or str(service.get("Result") or "")
    kernel = engine_log.kernel_cause([str(line) for line in step.get("kernel") or ()], _processes(service, watch))
    cause = engine_log.death([[line for _at, line in run] for run in runs], code, status, result, kernel)
    times = [at for at, line in managed if "exited" in line][:1] or _times_of(cause, runs)
    return Judgement(
        "dead",
        f"{unit} ended before it was ready: {cause.text()}",
        "dead",
        cause=cause,
        noticed_s=_since(step, times),
    )


def _lost(
    step: Mapping[str, Any], unit: str, runs: Sequence[Sequence[load_log.Row]], watch: Watch, now: float
) -> Judgement | None:
    """Judge a service whose first process lives on after what does the work has died."""
    rows = runs[-1] if runs else []
    service = step.get("service") or {}
    line = engine_log.fatal([text for _at, text in rows])
    worker = loading.lost_worker(watch.samples, _number(service.get("MainPID")))
    if not line and not worker:
        return None
    said = f"{worker} is gone" if worker and not line else line
    kernel = engine_log.kernel_cause([str(one) for one in step.get("kernel") or ()], _processes(service, watch))
    found = engine_log.cause([text for _at, text in rows])
    cause = found or kernel or Cause(said)
    if kernel and kernel.kind == "host_memory":
        cause = kernel
    times = _times_of(Cause(line), runs) if line else [now]
    return Judgement(
        "dead",
        f"{unit} can't serve any more, though its first process still runs: {cause.text()}",
        "dead",
        cause=cause,
        noticed_s=_since(step, times),
    )


def _processes(service: Mapping[str, Any], watch: Watch) -> set[int]:
    return {pid for one in watch.samples for pid in one.names} | {_number(service.get("MainPID"))}


def _times_of(cause: Cause, runs: Sequence[Sequence[load_log.Row]]) -> list[float]:
    wanted = cause.line.removesuffix("...")
    return [at for run in runs for at, line in run if wanted and wanted in engine_log.clean(line)][:1]


def _since(step: Mapping[str, Any], times: Sequence[float]) -> float | None:
    now = step.get("now")
    return None if now is None or not times else round(max(float(now) - times[0], 0.0), 1)


# --- answers --------------------------------------------------------------------------------------------------------


def _judge_error(error: str, unit: str, log: load_log.LoadLog, watch: Watch, now: float) -> Judgement:
    if _NOT_NUMBERS.search(error):
        return Judgement("wrong", f"{unit} computes NaN ({error}): {_NAN_TEXT}", "degraded")
    if _HANGS.search(error):
        why = loading.stall(log, watch.samples, now, 1)
        return Judgement(
            "wrong", f"{unit} listens, but gives no answer: {error}" + (f"; {why}" if why else ""), "stalled"
        )
    return Judgement("wrong", f"{unit} answers, but not the prompt: {error}", "degraded")


def _judge_answer(answer: Mapping[str, Any], step: Mapping[str, Any], unit: str, expected: str | None) -> Judgement:
    tokens: Sequence[str] = answer.get("tokens") or ()
    text = str(answer.get("text") or "")
    if answer.get("null_logprobs"):
        return Judgement(
            "wrong", f"{unit} computes NaN: the probabilities of its answer are null; {_NAN_TEXT}", "degraded"
        )
    if expected is not None and text.strip() == expected.strip() and text.strip():
        return _answered(answer, step, unit)
    if repeated := _repeated(tokens, text):
        one, times = repeated
        return Judgement(
            "wrong", f"{unit} repeats one token ({one!r}, {times} times): its results are not numbers", "degraded"
        )
    if not answer.get("completion_tokens"):
        return Judgement("wrong", f"{unit} gave an empty answer to the known prompt", "degraded")
    if expected is not None and text.strip() != expected.strip():
        return Judgement(
            "wrong",
            f"{unit} gave a wrong answer to the known prompt: {_short(text)!r}, expected {_short(expected)!r}",
            "degraded",
        )
    return _answered(answer, step, unit)


def _answered(answer: Mapping[str, Any], step: Mapping[str, Any], unit: str) -> Judgement:
    tokens = _number(answer.get("completion_tokens"))
    if busy := _busy(step.get("metrics") or (), tokens):
        return Judgement("ready", f"{unit} answered {tokens} tokens, and {busy}", "serving")
    return Judgement("ready", f"{unit} answered {tokens} tokens", "ready")


def _repeated(tokens: Sequence[str], text: str) -> tuple[str, int] | None:
    """Return (token, times) of an answer that ends in one token again and again, for half of it at least.

    Where no tokens came, the characters of the text stand for them: token 0 of many vocabularies is ``!``.
    """
    pieces = list(tokens) or list(text)
    if not pieces:
        return None
    run = next((place for place, one in enumerate(reversed(pieces)) if one != pieces[-1]), len(pieces))
    return (pieces[-1], run) if run >= REPEATED_TOKENS and 2 * run >= len(pieces) else None


def _busy(metrics: Sequence[Sequence[str]], own_tokens: int) -> str:
    """Say what a service does besides answering the known prompt, from its metrics before and after; "" for nothing."""
    if len(metrics) != 2:
        return ""
    before, after = _totals(metrics[0]), _totals(metrics[1])
    running = sum(value for name, value in before.items() if "total" not in name)
    if running >= 1:
        return f"works on {running:.0f} other requests"
    more = sum(value - before.get(name, 0.0) for name, value in after.items() if "total" in name)
    # Two tokens of play: engines differ in whether the last one is counted.
    return f"computed {more - own_tokens:.0f} tokens of others" if more - own_tokens > 2 else ""


def _totals(lines: Sequence[str]) -> dict[str, float]:
    """Return the sum of each metric over its labels."""
    found: dict[str, float] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        try:
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
        except ValueError:
            continue
    return found


def _short(text: str, most: int = 100) -> str:
    text = text.strip()
    return text if len(text) <= most else text[: most - 3] + "..."


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
