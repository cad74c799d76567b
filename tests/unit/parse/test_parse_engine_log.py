"""The cause of an engine's end is the telling line, not the last one."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import engine_log

# Recorded from xllamacpp 2026.10.11549 under the launcher; paths shortened.
TRUNCATED = """\
peerlane: release 0a1b2c3d4e5f
0.00.000.331 I srv          init: initializing ...
0.00.003.118 W srv          init: security: no API key is set and CORS allows all origins
0.00.004.542 I srv    load_model: loading model '/m/model.gguf'
0.00.004.877 E llama_model_load: error loading model: \
tensor 'blk.1.attn_v.weight' data is not within the file bounds, model is corrupted or incomplete
0.00.004.880 E llama_model_load_from_file_impl: failed to load model
0.00.005.043 E srv    load_model: failed to load model, '/m/model.gguf'
0.00.005.389 E srv          init: exiting due to model loading error
peerlane: error: Failed to init server, please check the input params.
""".splitlines()

PORT = """\
0.00.006.849 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8125
0.00.006.851 I srv    operator(): operator(): cleaning up before exit...
0.00.007.065 E srv          init: exiting due to HTTP server error
peerlane: error: Failed to init server, please check the input params.
""".splitlines()

# Composed in the shape of vLLM's log (0.32.0): a worker tells, the parent complains.
WORKER_TREE = """\
(EngineCore pid=211) INFO 12-01 10:00:00 [core.py:90] Initializing a V1 LLM engine
(Worker_TP1 pid=214) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.
(EngineCore pid=211) ERROR EngineCore failed to start.
(APIServer pid=200) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


@pytest.mark.parametrize(
    ("log", "line", "advice"),
    [
        (TRUNCATED, "tensor 'blk.1.attn_v.weight' data is not within the file bounds", "truncated"),
        (PORT, "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8125", "the port is taken"),
        (WORKER_TREE, "CUDA out of memory. Tried to allocate 1.50 GiB", "more GPUs"),
        (["x", "peerlane: error: model /m does not exist"], "model /m does not exist", "path"),
        (["serve: error: unrecognized arguments: --ctx 5"], "unrecognized arguments: --ctx 5", ""),
        (["a", "OSError: [Errno 98] Address already in use"], "Address already in use", "port"),
        (["SafetensorError: incomplete metadata, file not fully covered"], "not fully covered", "bring it again"),
        (["ValueError: something rare"], "ValueError: something rare", ""),
    ],
)
def test_the_telling_line_is_the_cause(log, line, advice):
    found = engine_log.cause(log)

    assert found is not None
    assert line in found.line
    assert advice in found.advice
    assert "\n" not in found.text()


def test_a_healthy_log_has_no_cause():
    log = ["0.00.38 I srv init: model loaded", "peerlane: serving /m on http://127.0.0.1:8000", "peerlane: drained"]
    assert engine_log.cause(log) is None


def test_the_newest_start_that_tells_something_is_believed():
    restarted = ["peerlane: release 0a1b2c3d4e5f"]
    assert "file bounds" in engine_log.death([PORT, TRUNCATED, restarted], "1", 1).line


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("2", 4, "illegal instruction"),
        ("killed", 9, "SIGKILL"),
        ("3", 11, "segmentation fault"),
        ("2", 35, "signal 35"),
        ("1", 203, "can't be executed"),
        ("1", 217, "user does not exist"),
        ("1", 226, "sandbox"),
        ("1", 7, "status 7 and said nothing"),
    ],
)
def test_a_silent_death_is_told_by_its_exit(code, status, says):
    assert says in engine_log.death([], code, status).text()


def test_an_unknown_death_shows_its_last_line():
    assert engine_log.death([["one", "two"]], "1", 3).line == "ended with status 3, last line: two"


@pytest.mark.parametrize(
    ("lines", "stage"),
    [
        (
            [
                "Loading safetensors checkpoint shards:  50% Completed | 4/8 [00:10]\r"
                "Loading safetensors checkpoint shards:  62% Completed | 5/8"
            ],
            "weights 5 of 8",
        ),
        (["(Worker_TP0 pid=9) Capturing CUDA graphs (decode, FULL):  40%|####"], "capturing graphs 40 %"),
        (["0.00.004.542 I srv    load_model: loading model '/m/model.gguf'"], "loading the model"),
        (["Load weight end. elapsed=12.5 s"], "weights loaded in 12.5 s"),
        (
            ["No available shared memory broadcast block found in 60 seconds."],
            "no answer from a worker: a collective may hang",
        ),
        (["peerlane: release 12ab"], "starting release 12ab"),
        (["nothing known"], ""),
        ([], ""),
    ],
)
def test_the_newest_stage_is_said(lines, stage):
    assert engine_log.stage(lines) == stage


def test_a_very_long_line_is_cut():
    found = engine_log.cause(["ValueError: " + "x" * 5000])
    assert found is not None
    assert len(found.line) <= 240
