"""The cause of an engine's end is the telling line, not the last one."""

from __future__ import annotations

import time

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


# --- one whole log --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("ERROR 01-02 10:00:00 [core.py:1] RuntimeError: CUDA error: no kernel image is available for execution",
         "no_kernel_image"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", "driver_too_old"),
        ("RuntimeError: ... Error 804: forward compatibility was attempted on non supported HW", "driver_too_old"),
        ("x | ValueError: No available memory for the cache blocks. Try increasing", "cache_memory"),
        ("ValueError: Free memory on device (3.1/23.6 GiB) on startup is less than desired", "gpu_memory_taken"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "gpu_memory"),
        ("vllm: error: unrecognized arguments: --old-flag", "arguments"),
        ("ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8080): address already in use",
         "port_in_use"),
        ('  File "/v/zmq/sugar/socket.py", line 311, in bind', "internal_port_in_use"),
        ("Failed: Cuda error /w/custom_all_reduce.cuh:307 'peer access is not supported between these two devices'",
         "custom_all_reduce"),
        ('  File "/v/triton/runtime/build.py", line 93, in compile_module_from_src', "build_tools"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", "build_tools"),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(", "collective_timeout"),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "gpu_busy"),
        ("RuntimeError: NCCL error: unhandled system error", "nccl"),
    ],
)  # fmt: skip
def test_each_cause_has_its_class(line, kind):
    found = engine_log.cause(
        ["INFO starting", line, "RuntimeError: Engine core initialization failed. See root cause above"]
    )
    assert found is not None
    assert found.kind == kind


def test_a_refused_peer_access_of_nccl_is_no_fault_of_the_engines_kernel():
    line = "n:1:2 [0] transport/shm.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported'"
    assert engine_log.read(line, "engine.log").custom_all_reduce == ""


def test_the_general_complaint_is_never_the_cause():
    assert engine_log.read("RuntimeError: Engine core initialization failed. See root cause above.", "x").cause is None


def test_a_port_and_its_owner_come_out_behind_the_prefix_of_a_ci_system():
    made = engine_log.read(
        "  | [2024-09-05T00:38:34Z] INFO:     Application startup complete.\n"
        "  | [2024-09-05T00:38:34Z] ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 4431): "
        "[errno 98] address already in use\n"
        "  | [2024-09-05T00:38:34Z] DEBUG 09-04 17:38:34 launcher.py:64] port 4431 is used by process "
        "psutil.Process(pid=66, name='pt_main_thread', status='sleeping') launched with command:\n",
        "engine.log",
    )
    assert (made.port, made.port_owner, made.listening) == (4431, "66 pt_main_thread", True)
    assert made.cause.kind == "port_in_use"
    assert made.cause.line.startswith("ERROR:")
    assert made.prefix == "| [2024-09-05T00:38:34Z] "


def test_behind_a_serving_line_a_complaint_about_a_request_ends_nothing():
    served = "INFO:     Application startup complete.\n"
    assert engine_log.read(served + "ValueError: prompt too long\n", "x").cause is None
    assert engine_log.read("RuntimeError: first try\n" + served, "x").cause is None
    assert not engine_log.read(served, "x").serving
    assert engine_log.read(served + "INFO:     Uvicorn running on http://0.0.0.0:8000 (Press", "x").serving
    assert engine_log.read(served + "torch.OutOfMemoryError: CUDA out of memory.\n", "x").cause.kind == "gpu_memory"


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ("Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.", "no_p2p"),
        ("Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.", "many_pcie"),
        ("Custom allreduce is disabled because of missing custom allreduce library", ""),
    ],
)
def test_why_the_engines_own_all_reduce_is_off(row, state):
    made = engine_log.read(f"WARNING 05-13 08:48:35 custom_all_reduce.py:166] {row}\n", "x")
    assert made.custom_all_reduce == state


def test_smaller_facts():
    made = engine_log.read(
        "Aug 19 18:34:30 host1 vllm[87]: (APIServer pid=87) x\n[19:01:01 TP0] Init nccl begin.\n[19:01:01 TP1] x\n"
        "INFO utils.py:132] reading GPU P2P access cache from /c/gpu_p2p_access_cache_for_0,1.json\n"
        "error: unrecognized arguments: --a --b value -c\nRuntimeError: too old (found version 11040). Error 804: x\n",
        "x",
    )
    assert (made.component, made.pid, made.tensor_parallel_ranks) == ("APIServer", 87, (0, 1))
    assert made.p2p_cache == "/c/gpu_p2p_access_cache_for_0,1.json"
    assert made.unknown_arguments == ("--a", "--b value", "-c")
    assert (made.driver_cuda, made.cuda_error) == ("11.4", 804)


def test_a_log_of_days_is_read_quickly():
    rows = "INFO 01-01 10:00:00 [loggers.py:1] Avg prompt throughput: 12.0 tokens/s, Running: 1 reqs\n" * 30_000
    noise = "ERROR 01-01 10:00:00 [x.py:1] a client went away, failed\n" * 5_000
    started = time.perf_counter()
    made = engine_log.read(rows + noise + "torch.OutOfMemoryError: CUDA out of memory.\n" + "y" * 1_000_000, "x")
    assert time.perf_counter() - started < 20
    assert made.cause.kind == "gpu_memory"


def test_the_collectors_log_is_one_log_for_each_unit(built):
    made = built(
        {
            "engine.log": "# ==> unit a.service <==\ntorch.OutOfMemoryError: CUDA out of memory.\n"
            "# ==> unit b.service <==\nINFO:     Application startup complete.\nINFO:     Uvicorn running on http://x\n"
        }
    )
    first, second = made.services.logs.value
    assert (first.subject, first.cause.kind) == ("unit a.service", "gpu_memory")
    assert (second.subject, second.cause, second.serving) == ("unit b.service", None, True)
