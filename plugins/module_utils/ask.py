# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask an OpenAI-compatible server one prompt as a stream, with a time for each piece of the answer."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.parse
from typing import Any, Callable

CONNECT_S = 5
POLL_S = 1.0


def health(url: str) -> str:
    """Return ``ok`` where ``/health`` answers 200, or in words what it answers."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read(65536)
        return "ok" if answer.status == 200 else "HTTP {0} from /health".format(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return "no answer yet ({0})".format(getattr(error, "strerror", None) or type(error).__name__)
    finally:
        connection.close()


def metrics(url: str, api_key: str = "") -> str:
    """Return the text of ``/metrics``, "" where the server has none."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_S)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": "Bearer " + api_key} if api_key else {})
        answer = connection.getresponse()
        text = answer.read(4 * 1024 * 1024).decode("utf-8", "replace")
        return text if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def ask(
    url: str, body: dict[str, Any], timeout_s: float, give_up: Callable[[], bool], api_key: str = ""
) -> dict[str, Any]:
    """Send a streamed completion request and return what came.

    Returns ``text, tokens, completion_tokens, null_logprobs, first_token_ms, tokens_per_s, error``.
    While nothing comes, ``give_up`` is asked about once a second; True ends the waiting.
    """
    lines: queue.Queue[tuple[str, str]] = queue.Queue()
    started = time.monotonic()
    reader = threading.Thread(target=_read, args=(url, body, timeout_s, api_key, lines), daemon=True)
    reader.start()
    collected: list[tuple[float, dict[str, Any]]] = []
    error = ""
    while True:
        left = timeout_s - (time.monotonic() - started)
        if left <= 0:
            got = sum(1 for _at, piece in collected if piece.get("choices"))
            error = "no complete answer within {0:g} s ({1} pieces came): it may hang".format(timeout_s, got)
            break
        try:
            kind, text = lines.get(timeout=min(POLL_S, left))
        except queue.Empty:
            if give_up():
                error = "the service ended while it answered"
                break
            continue
        if kind == "end":
            error = text
            break
        piece, error = parse_event(text)
        if error:
            break
        if piece:
            collected.append((time.monotonic() - started, piece))
    result = join_pieces(collected)
    result["error"] = error
    return result


def _read(url: str, body: dict[str, Any], timeout_s: float, api_key: str, lines: Any) -> None:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = "Bearer " + api_key
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            lines.put(("end", "HTTP {0}: {1}".format(answer.status, http_message(answer.read(65536)))))
            return
        for raw in answer:
            lines.put(("line", raw.decode("utf-8", "replace")))
        lines.put(("end", ""))
    except (OSError, http.client.HTTPException) as error:
        lines.put(("end", "the answer broke off: {0}".format(getattr(error, "strerror", None) or type(error).__name__)))
    finally:
        connection.close()


def http_message(body: bytes) -> str:
    """Return the message of an error answer."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
        inner = value.get("error", value)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        return " ".join(text.split())[:200]


def parse_event(line: str) -> tuple[dict[str, Any], str]:
    """Return the JSON of one line of the stream ({} where it holds none), and an error that the server sent in it."""
    if not line.startswith("data:"):
        return {}, ""
    data = line[len("data:") :].strip()
    if data in ("", "[DONE]"):
        return {}, ""
    try:
        piece = json.loads(data)
    except ValueError:
        return {}, "the stream holds a line that is no JSON: {0}".format(data[:80])
    if not isinstance(piece, dict):
        return {}, ""
    if piece.get("error"):
        return {}, http_message(json.dumps(piece).encode("utf-8"))
    return piece, ""


def join_pieces(collected: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Join the pieces of a stream, each with its time in seconds since the request."""
    text, null_logprobs = "", False
    times: list[float] = []
    tokens: list[str] = []
    usage: dict[str, Any] = {}
    for at, piece in collected:
        usage = piece.get("usage") or usage
        for choice in piece.get("choices") or []:
            if choice.get("text"):
                text += str(choice["text"])
                times.append(at)
            seen, null = _tokens(choice.get("logprobs"))
            tokens += seen
            null_logprobs = null_logprobs or null
    count = int(usage.get("completion_tokens") or 0)
    return {
        "text": text,
        "tokens": tokens,
        "completion_tokens": count,
        "null_logprobs": null_logprobs,
        "first_token_ms": round(times[0] * 1000, 1) if times else None,
        # Over the whole request, prompt included: what came in one piece must not look fast.
        "tokens_per_s": round(count / times[-1], 1) if times and times[-1] > 0 and count > 1 else None,
    }


def _tokens(logprobs: Any) -> tuple[list[str], bool]:
    """Return the tokens of a piece and whether one of them has no probability.

    llama.cpp sends ``content: [{token, logprob}]``; vLLM and SGLang send ``tokens`` and ``token_logprobs``.
    """
    if not isinstance(logprobs, dict):
        return [], False
    rows = logprobs.get("content") or []
    if rows:
        return [str(row.get("token")) for row in rows], any(row.get("logprob") is None for row in rows)
    values = logprobs.get("token_logprobs") or []
    return [str(one) for one in logprobs.get("tokens") or []], any(value is None for value in values)
