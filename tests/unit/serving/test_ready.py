"""What counts as a healthy answer to a known prompt."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import ask
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import ready

UNIT = "peerlane-model@chat.service"


def answered(**changes):
    answer = {"text": " four.", "tokens": list(" four."), "completion_tokens": 6, "null_logprobs": False, "error": ""}
    return {"dead": False, "answer": answer | changes, "log_runs": []}


@pytest.mark.parametrize(
    ("step", "expected", "verdict", "says"),
    [
        (answered(), "four.", "ready", "6 tokens"),
        (answered(), None, "ready", "6 tokens"),
        (answered(text="five."), "four.", "wrong", "'five.', expected 'four.'"),
        (answered(null_logprobs=True), None, "wrong", "computes NaN"),
        (
            answered(text="G" * 8, tokens=["G"] * 8, completion_tokens=8),
            None,
            "wrong",
            "repeats one token ('G', 8 times)",
        ),
        (answered(text="", tokens=[], completion_tokens=0), None, "wrong", "empty answer"),
        (answered(error="HTTP 404: no such model"), None, "wrong", "HTTP 404: no such model"),
        ({"answer": None, "http": "no answer yet (Connection refused)", "log_runs": []}, None, "waiting", "refused"),
        (
            {"answer": None, "log_runs": [["loading model '/m'"], ["peerlane: release 1f"]]},
            None,
            "waiting",
            "release 1f",
        ),
        (
            {"dead": True, "service": {"ExecMainCode": "2", "ExecMainStatus": "4"}, "log_runs": []},
            None,
            "dead",
            "ended before it was ready: illegal instruction",
        ),
        ({"dead": True, "service": {}, "log_runs": []}, None, "dead", "said nothing"),
    ],
)
def test_judgement(step, expected, verdict, says):
    found = ready.judge(step, UNIT, expected)
    assert (found.verdict, says in found.text) == (verdict, True), found
    assert "\n" not in found.text


def test_seven_equal_tokens_may_be_an_answer():
    assert ready.judge(answered(tokens=["."] * 7, completion_tokens=7), UNIT, None).verdict == "ready"


# --- the stream -----------------------------------------------------------------------------------------------------


def piece(text, logprobs=None, **more):
    return {"choices": [{"text": text, "logprobs": logprobs}], **more}


def test_a_stream_is_joined_with_its_times():
    joined = ask.join_pieces(
        [
            (0.1, piece("ab", {"content": [{"token": "ab", "logprob": -0.1}]})),
            (0.3, piece("c", {"content": [{"token": "c", "logprob": -0.2}]})),
            (0.4, piece("", usage={"completion_tokens": 3})),
        ]
    )
    assert joined["text"] == "abc"
    assert joined["tokens"] == ["ab", "c"]
    assert joined["completion_tokens"] == 3
    assert joined["first_token_ms"] == 100.0
    assert joined["tokens_per_s"] == 10.0
    assert joined["null_logprobs"] is False


def test_null_probabilities_are_seen_in_both_shapes():
    ours = [(0.1, piece("G", {"content": [{"token": "G", "logprob": None}]}))]
    theirs = [(0.1, piece("!", {"tokens": ["!"], "token_logprobs": [None]}))]
    assert ask.join_pieces(ours)["null_logprobs"]
    assert ask.join_pieces(theirs)["null_logprobs"]


def test_one_piece_gives_no_speed():
    assert ask.join_pieces([(0.1, piece("a", usage={"completion_tokens": 1}))])["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("data: [DONE]", ""),
        (": ping", ""),
        ("", ""),
        ('data: {"error": {"message": "EngineCore encountered an issue"}}', "EngineCore encountered an issue"),
        ("data: {broken", "no JSON"),
    ],
)
def test_lines_of_a_stream(line, error):
    found, said = ask.parse_event(line)
    assert found == {}
    assert error in said
    assert bool(error) == bool(said)
