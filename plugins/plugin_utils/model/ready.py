"""Judge what a model service answered to a known prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..parse import engine_log

Verdict = Literal["ready", "waiting", "dead", "wrong"]

# A text of this many equal tokens is no answer of a healthy model to a question.
REPEATED_TOKENS = 8


@dataclass(frozen=True)
class Judgement:
    """What to do next, and one line for a person."""

    verdict: Verdict
    text: str


def judge(step: Mapping[str, Any], unit: str, expected: str | None) -> Judgement:
    """Judge one step of the module ``model_ready``.

    ``expected`` is the answer that a known prompt must give; None where any healthy text will do.
    """
    runs = step.get("log_runs") or []
    if step.get("dead"):
        service = step.get("service") or {}
        cause = engine_log.death(runs, str(service.get("ExecMainCode", "")), _number(service.get("ExecMainStatus")))
        return Judgement("dead", f"{unit} ended before it was ready: {cause.text()}")
    answer = step.get("answer")
    if not answer:
        stage = engine_log.stage(runs[-1]) if runs else ""
        return Judgement("waiting", stage or str(step.get("http") or "starting"))
    if answer.get("error"):
        return Judgement("wrong", f"{unit} answers, but not the prompt: {answer['error']}")
    return _judge_answer(answer, unit, expected)


def _judge_answer(answer: Mapping[str, Any], unit: str, expected: str | None) -> Judgement:
    tokens: Sequence[str] = answer.get("tokens") or ()
    if answer.get("null_logprobs"):
        return Judgement(
            "wrong",
            f"{unit} computes NaN: the probabilities of its answer are null; the weights, a kernel or the quantization "
            "is wrong for this GPU, or the file is damaged",
        )
    if len(tokens) >= REPEATED_TOKENS and len(set(tokens)) == 1:
        return Judgement(
            "wrong", f"{unit} repeats one token ({tokens[0]!r}, {len(tokens)} times): its results are not numbers"
        )
    if not answer.get("completion_tokens"):
        return Judgement("wrong", f"{unit} gave an empty answer to the known prompt")
    text = str(answer.get("text") or "")
    if expected is not None and text.strip() != expected.strip():
        return Judgement(
            "wrong", f"{unit} gave a wrong answer to the known prompt: {_short(text)!r}, expected {_short(expected)!r}"
        )
    return Judgement("ready", f"{unit} answered {answer['completion_tokens']} tokens")


def _short(text: str, most: int = 100) -> str:
    text = text.strip()
    return text if len(text) <= most else text[: most - 3] + "..."


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
