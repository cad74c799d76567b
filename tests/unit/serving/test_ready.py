"""What counts as a healthy answer to a known prompt."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import ask
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import ready

UNIT = "peerlane-model@chat.service"


def answered(**changes):
    answer = {"text": " four.", "tokens": list(" four."), "completion_tokens": 6, "null_logprobs": False, "error": ""}
    return {"dead": False, "answer": answer | changes}


def logged(*lines, invocation="i1", at=100.0, manager=False):
    return [[at + place, invocation, line, manager] for place, line in enumerate(lines)]


def starting(*lines, **more):
    return {"answer": None, "service": {"InvocationID": "i1"}, "entries": logged(*lines), "now": 110.0, **more}


@pytest.mark.parametrize(
    ("step", "expected", "verdict", "state", "says"),
    [
        (answered(), "four.", "ready", "ready", "6 tokens"),
        (answered(), None, "ready", "ready", "6 tokens"),
        (answered(text="five."), "four.", "wrong", "degraded", "'five.', expected 'four.'"),
        (answered(null_logprobs=True), None, "wrong", "degraded", "computes NaN"),
        # The right words with null probabilities are luck.
        (answered(null_logprobs=True), "four.", "wrong", "degraded", "computes NaN"),
        (answered(text="G" * 8, tokens=["G"] * 8, completion_tokens=8), None, "wrong", "degraded", "('G', 8 times)"),
        # Engines that send no tokens: the text tells.
        (answered(text="!" * 16, tokens=[], completion_tokens=16), None, "wrong", "degraded", "('!', 16 times)"),
        # It became NaN in the middle of the answer.
        (answered(text="ab!!", tokens=["a", "b", *"!!!!!!!!!"]), None, "wrong", "degraded", "'!', 9"),
        (answered(text="", tokens=[], completion_tokens=0), None, "wrong", "degraded", "empty answer"),
        (answered(text="", tokens=[], completion_tokens=0), "", "wrong", "degraded", "empty answer"),
        (answered(error="HTTP 404: no such model"), None, "wrong", "degraded", "HTTP 404: no such model"),
        (answered(error="HTTP 400: Out of range float values are not JSON compliant"), None, "wrong", "degraded",
         "NaN"),
        (answered(error="no complete answer within 600 s (0 pieces came): it may hang"), None, "wrong", "stalled",
         "gives no answer"),
        ({"answer": None, "http": "no answer yet (Connection refused)"}, None, "waiting", "loading", "refused"),
        # Health alone makes nothing ready.
        ({"answer": None, "http": "ok"}, None, "waiting", "loading", "ok"),
        (starting("peerlane: release 1f", "srv load_model: loading model '/m'"), None, "waiting", "loading",
         "loading the weights"),
        ({"dead": True, "service": {"ExecMainCode": "2", "ExecMainStatus": "4"}}, None, "dead", "dead",
         "ended before it was ready: illegal instruction"),
        ({"dead": True, "service": {}}, None, "dead", "dead", "said nothing"),
    ],
)  # fmt: skip
def test_judgement(step, expected, verdict, state, says):
    found = ready.judge(step, UNIT, expected)
    assert (found.verdict, found.state, says in found.text) == (verdict, state, True), found
    assert "\n" not in found.text


def test_seven_equal_tokens_may_be_an_answer():
    assert ready.judge(answered(tokens=["."] * 7, completion_tokens=7), UNIT, None).verdict == "ready"


def test_a_known_answer_may_repeat_itself():
    step = answered(text=" " + "-" * 20, tokens=["-"] * 20, completion_tokens=20)
    assert ready.judge(step, UNIT, "-" * 20).verdict == "ready"
    assert ready.judge(step, UNIT, None).verdict == "wrong"


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        (["vllm:num_requests_running{engine=\"0\"} 3.0"], [], "serving"),
        (["llamacpp:requests_processing 0", "llamacpp:tokens_predicted_total 10"],
         ["llamacpp:requests_processing 0", "llamacpp:tokens_predicted_total 16"], "ready"),
        (["vllm:generation_tokens_total{a=\"1\"} 10", "vllm:generation_tokens_total{a=\"2\"} 5"],
         ["vllm:generation_tokens_total{a=\"1\"} 90", "vllm:generation_tokens_total{a=\"2\"} 7"], "serving"),
        (["sglang:num_running_reqs 0.0"], ["sglang:num_running_reqs NaNs"], "ready"),
        ([], [], "ready"),
    ],
)  # fmt: skip
def test_a_service_that_works_on_other_requests_is_serving(before, after, state):
    found = ready.judge({**answered(), "metrics": [before, after]}, UNIT, None)
    assert (found.verdict, found.state) == ("ready", state)


# --- deaths ---------------------------------------------------------------------------------------------------------

SAFETENSORS = "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered"


@pytest.mark.parametrize(
    ("lines", "kind", "says"),
    [
        (["(Worker_TP1 pid=9) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.",
          "(EngineCore pid=8) ERROR EngineCore failed to start."], "gpu_memory", "CUDA out of memory"),
        (["(Worker_TP1 pid=9) RuntimeError: NCCL error: unhandled system error",
          "(EngineCore pid=8) ERROR 12-01 10:00:00 [multiproc_executor.py:1] Worker proc VllmWorker-1 died "
          "unexpectedly (exit code: 1), shutting down executor."], "nccl", "NCCL error"),
        (["[2026-09-01 10:00:00 TP3] Scheduler hit an exception: Traceback (most recent call last):",
          "RuntimeError: CUDA error: no kernel image is available for execution on the device"],
         "no_kernel_image", "no kernel image"),
        (["RuntimeError: The NVIDIA driver on your system is too old (found version 12040).",
          "SIGQUIT received. signum=None, frame=None. It usually means one child failed."],
         "driver_too_old", "too old"),
        ([SAFETENSORS, "RuntimeError: Engine core initialization failed. See root cause above."], "weights",
         "truncated"),
        (["Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."], "other",
         "died unexpectedly"),
    ],
)  # fmt: skip
def test_a_fatal_line_is_a_death_though_the_parent_lives(lines, kind, says):
    step = starting("Starting to load model /m...", *lines, now=103.0)
    found = ready.judge(step, UNIT, None)
    assert (found.verdict, found.state, found.stage) == ("dead", "dead", "weights"), found
    assert found.cause.kind == kind
    assert says in found.text
    assert found.noticed_s <= 2.0


def test_a_fatal_line_of_an_earlier_start_is_history():
    step = starting("Starting to load model /m...")
    step["entries"] = logged("EngineCore failed to start.", invocation="i0", at=50) + step["entries"]
    assert ready.judge(step, UNIT, None).state == "loading"
    assert (
        ready.judge({**step, "entries": logged("EngineCore failed to start.")}, UNIT, None, after="i1").state
        == "loading"
    )


def test_a_worker_that_is_gone_without_a_word_is_a_death():
    def look(at, *names):
        return {"at": at, "processes": [{"pid": pid, "name": name, "state": "S", "cpu_s": 1.0} for pid, name in names]}

    step = starting("Load weight begin. avail mem=93 GB", service={"InvocationID": "i1", "MainPID": "1"})
    step["samples"] = [look(104.0, (1, "python3"), (2, "sglang::scheduler_TP1")), look(108.0, (1, "python3"))]
    found = ready.judge(step, UNIT, None)
    assert found.state == "dead"
    assert "sglang::scheduler_TP1 (process 2) is gone" in found.text


def test_the_kernel_tells_who_was_out_of_memory():
    row = {"pid": 77, "name": "python3", "state": "R", "cpu_s": 1.0}
    step = {
        "dead": True,
        "service": {"InvocationID": "i1", "ExecMainCode": "2", "ExecMainStatus": "9"},
        "samples": [{"at": 101.0, "processes": [row]}],
        "entries": logged("peerlane: release 1f"),
        "kernel": ["Memory cgroup out of memory: Killed process 77 (python3) total-vm:900kB, anon-rss:1kB"],
        "now": 104.0,
    }
    found = ready.judge(step, UNIT, None)
    assert (found.cause.kind, "the kernel killed python3 (process 77) for lack of memory" in found.text) == (
        "host_memory",
        True,
    )
    other = {**step, "kernel": ["Out of memory: Killed process 5 (other) total-vm:1kB"]}
    assert "killed (SIGKILL)" in ready.judge(other, UNIT, None).text
    told = {**step, "kernel": [], "service": {**step["service"], "Result": "oom-kill"}}
    assert "for lack of memory" in ready.judge(told, UNIT, None).text


def test_a_death_that_systemd_has_hidden_by_a_new_start_is_told_by_its_own_words():
    step = {
        "dead": True,
        "service": {"InvocationID": "i2", "ExecMainCode": "0", "ExecMainStatus": "0"},
        "entries": [
            *logged("peerlane: release 1f", invocation="i1"),
            *logged("x.service: Main process exited, code=killed, status=11/SEGV", at=103.0, manager=True),
            *logged("peerlane: release 1f", invocation="i2", at=113.0),
        ],
        "now": 114.0,
    }
    watch = ready.observe(ready.Watch(first_invocation="i1"), step)
    found = ready.judge(step, UNIT, None, watch)
    assert "segmentation fault" in found.text
    assert found.noticed_s == 11.0


def test_a_watch_grows_step_by_step_and_stalls_at_the_bound():
    watch = ready.Watch()
    for at in range(100, 141, 4):
        row = {"pid": 1, "name": "python3", "state": "T", "cpu_s": 2.0}
        step = {
            "answer": None,
            "service": {"InvocationID": "i1"},
            "now": float(at),
            "http": "no answer yet (timed out)",
        }
        step["samples"] = [{"at": float(at), "processes": [row]}]
        step["entries"] = logged("Load weight begin. avail mem=93 GB") if at == 100 else []
        watch = ready.observe(watch, step)
        found = ready.judge(step, UNIT, None, watch, stall_after_s=30)
        assert found.state == ("stalled" if at >= 130 else "loading"), at
    assert "SIGSTOP" in found.text
    assert found.verdict == "wrong"


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
