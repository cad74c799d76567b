"""How far a load is and how long it still takes, against replayed logs and byte counts; and when it stands still."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from replayed_loads import LOADS

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import loading
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.loading import Sample
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import load_log

GB = 10**9
# The promise, as a share of the whole time of the load.
WITHIN = 0.15


def looks(total_s: float, count: int = 80) -> list[float]:
    """Times from a third of the load on, evenly up to its end."""
    return [total_s / 3 + total_s * 2 / 3 * place / count for place in range(count)]


def errors(rows, samples, total_s, **more) -> list[tuple[float, float, float]]:
    """(time, error of the fraction, error of the time left as a share of the whole) at each look."""
    found = []
    for now in looks(total_s):
        log = load_log.read([row for row in rows if row[0] <= now])
        said = loading.estimate(log, [one for one in samples if one.at_s <= now], now, **more)
        assert said.fraction is not None, (now, log)
        assert said.left_s is not None
        found.append((now, abs(said.fraction - now / total_s), abs(said.left_s - (total_s - now)) / total_s))
    return found


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_progress_and_time_left_are_right_from_a_third_on(load):
    rows = load.rows
    total_s = rows[-1][0]
    assert load_log.read(rows).stage == "ready"
    found = errors(rows, [], total_s)
    assert len(found) > 50
    worst_fraction, worst_left = max(one[1] for one in found), max(one[2] for one in found)
    assert worst_fraction <= WITHIN, (worst_fraction, load)
    assert worst_left <= WITHIN, (worst_left, load)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_the_last_start_of_the_service_makes_the_time_left_of_the_next_exact(load):
    before = load_log.read(load.rows)
    again = replace(load, seed=load.seed + 100, drift=1.0, jitter=0.1)
    rows = again.rows
    found = errors(rows, [], rows[-1][0], before=before)
    assert max(one[2] for one in found) <= 0.06


def silent(total_bytes: int, rate: float, seed: int, kind: str) -> tuple[list, list[Sample], float]:
    """A load whose log tells nothing between its begin and its end, and the byte counts of its process."""
    rng, rows, samples = random.Random(seed), [(0.0, "peerlane: release 0a1b2c3d4e5f")], []
    rows.append((1.0, "0.00.004.542 I srv    load_model: loading model '/m/model.gguf'"))
    programs, done, at = 300_000_000, 0.0, 0.5
    while done < total_bytes:
        if at > 1.0:
            done += rate * 4 * rng.uniform(0.5, 1.5)
        samples.append(Sample(at, {9: at}, {9: "R"}, {9: "python3"}, **{kind: programs + int(min(done, total_bytes))}))
        at += 4
    rows.append((at, "peerlane: serving /m/model.gguf on http://127.0.0.1:8000"))
    return rows, samples, at


@pytest.mark.parametrize("kind", ["read_bytes", "mapped_bytes", "char_bytes"])
@pytest.mark.parametrize(("size", "rate"), [(40 * GB, 0.2 * GB), (550 * GB, 1.1 * GB), (140 * GB, 0.9 * GB)])
def test_where_the_log_is_silent_bytes_and_rate_tell(kind, size, rate):
    rows, samples, total_s = silent(size, rate, 3, kind)
    found = errors(rows, samples, total_s, model_bytes=size)
    assert max(one[1] for one in found) <= WITHIN
    assert max(one[2] for one in found) <= WITHIN


def test_without_bytes_and_shards_nothing_is_invented():
    rows, _, _ = silent(40 * GB, GB, 3, "read_bytes")
    said = loading.estimate(load_log.read(rows[:2]), [], 60.0)
    assert (said.stage, said.fraction, said.left_s, said.text) == ("weights", None, None, "loading the weights")
    assert loading.estimate(load_log.read([]), [], 60.0).text == ""


@pytest.mark.parametrize(
    ("shape", "stages"),
    [
        ("vllm_new", "starting weights loaded compiling cache capturing warming_up tokenizer ready"),
        ("vllm_old", "starting weights loaded cache capturing warming_up ready"),
        ("sglang_new", "starting weights loaded cache capturing warming_up ready"),
        ("sglang_old", "starting weights loaded cache capturing warming_up ready"),
    ],
)
def test_each_engine_passes_its_stages(shape, stages):
    load = next(one for one in LOADS if one.shape == shape)
    log = load_log.read(load.rows)
    assert [stage for stage, _at in log.reached] == stages.split()
    assert log.engine == shape.replace("_old", "_v0" if "vllm" in shape else "").replace("_new", "")
    assert (log.shards[-1][1], log.shards_total) == (load.shards, load.shards)
    if shape != "vllm_old":
        assert log.graphs == log.graphs_total


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["Starting to load model /m...", "Loading pt checkpoint shards:  50% Completed | 4/8 [00"], "weights 4 of 8"),
        (["Starting to load model /m...", "\rMulti-thread loading shards:   0% Completed | 0/8\rMulti-thread loading "
          "shards:  25% Completed | 2/8"], "weights 2 of 8"),
        (["Loading safetensors using InstantTensor loader:  65% Completed | 44841/69187 [00:14<00:07, 3277.90it/s]"],
         "weights 44841 of 69187"),
        (["Load weight end. elapsed=2.1 s, type=X", "Capturing CUDA graphs (decode, FULL):  40%|####  | 14/35 [00:01<"],
         "capturing graphs 14 of 35"),
        (["Load weight end. elapsed=2.1 s, type=X", "Capturing CUDA graph shapes:  20%|##        | 7/35 [00:04<00:15"],
         "capturing graphs 7 of 35"),
        (["Load weight end. type=X", "[x TP0] Capture cuda graph begin.", " 17%|█▋  | 4/23 [00:03<00:13]"],
         "capturing graphs 4 of 23"),
        (["Loading weights took 3.4 seconds", "Dynamo bytecode transform time: 3.54 s"], "compiling"),
        (["Load weight end. type=X", "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<"],
         "weights loaded (with a draft model)"),
    ],
)  # fmt: skip
def test_the_stage_in_words(rows, text):
    log = load_log.read([(float(at), row) for at, row in enumerate(rows)])
    assert loading.estimate(log, [], float(len(rows))).text.startswith(text)


def test_the_front_end_of_sglang_that_listens_is_not_ready():
    rows = [
        (0.0, "server_args=ServerArgs(x)"),
        (1.0, "Load weight end. type=X"),
        (2.0, "INFO: Application startup complete."),
    ]
    assert load_log.read(rows).stage == "warming_up"
    assert load_log.read([*rows, (9.0, "The server is fired up and ready to roll!")]).stage == "ready"


def test_a_bar_without_sense_is_left_out():
    rows = [(0.0, "Loading safetensors checkpoint shards: 900% Completed | 9/0"), (1.0, "shards: 1% Completed | x/y")]
    assert load_log.read(rows).shards == ()


def test_a_long_log_is_read_quickly():
    rows = [
        (float(at), "INFO 01-01 10:00:00 [loggers.py:1] Avg prompt throughput: 12.0 tokens/s") for at in range(20_000)
    ]
    rows.append((20_001.0, "Loading safetensors checkpoint shards: " + "9" * 1_000_000))
    started = time.perf_counter()
    load_log.read(rows)
    assert time.perf_counter() - started < 5


# --- standing still -------------------------------------------------------------------------------------------------

LOADING = load_log.read([(0.0, "Load weight begin. avail mem=93 GB")])


def still(state="S", cpu=lambda at: 5.0, upto=120, **more):
    return [
        Sample(float(at), {7: cpu(at)}, {7: state}, {7: "VLLM::Worker_TP0"}, **{k: v(at) for k, v in more.items()})
        for at in range(0, upto + 1, 4)
    ]


@pytest.mark.parametrize(
    ("samples", "bound", "says"),
    [
        (still("T"), 60, "process 7 (VLLM::Worker_TP0) is stopped (by SIGSTOP"),
        (still("D"), 60, "waits in the kernel"),
        (still("S"), 60, "no CPU time, no bytes and no log line for 2 min 00 s"),
        (still("S"), 121, ""),
        (still("S"), 0, ""),
        (still("R", lambda at: at * 0.5), 60, ""),
        # A server that polls spends a little: that is no sign of a load.
        (still("S", lambda at: at * 0.01), 60, "no CPU time"),
        (still("S", read_bytes=lambda at: at * 10_000_000), 60, ""),
        (still("D", mapped_bytes=lambda at: at * 10_000_000), 60, ""),
        (still("S", char_bytes=lambda at: at * 100), 60, "no CPU time"),
        # One process is stopped while another one goes on.
        ([Sample(one.at_s, {7: 1.0, 8: one.at_s}, {7: "T", 8: "R"}, {7: "a", 8: "b"}) for one in still()], 60, "(a)"),
        ([], 60, ""),
    ],
)
def test_a_service_stands_still_where_nothing_moves_for_the_bound(samples, bound, says):
    found = loading.stall(LOADING, samples, 120.0, bound)
    assert (says in found) if says else found == ""


def test_a_log_line_is_a_sign_of_life_but_a_question_to_the_server_is_none():
    rows = [(0.0, "Load weight begin. avail mem=93 GB")]
    spoke = load_log.read([*rows, (100.0, "Using model weights format ['*.safetensors']")])
    asked = load_log.read([*rows, (100.0, 'INFO:     10.0.0.9:4 - "GET /health HTTP/1.1" 503 Service Unavailable')])
    assert loading.stall(spoke, still(), 120.0, 60) == ""
    assert loading.stall(asked, still(), 120.0, 60) != ""


def test_a_worker_that_gives_no_answer_for_the_bound_is_a_stall_and_progress_ends_it():
    silent_worker = (60.0, "(EngineCore pid=2) INFO No available shared memory broadcast block found in 60 seconds.")
    rows = [(0.0, "Starting to load model /m..."), silent_worker, silent_worker]
    assert "a collective may hang" in loading.stall(load_log.read(rows), still(cpu=lambda at: at), 120.0, 120)
    assert loading.stall(load_log.read(rows), still(cpu=lambda at: at), 120.0, 180) == ""
    rows.append((121.0, "Loading weights took 3.4 seconds"))
    assert load_log.read(rows).hung == 0


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ([{1: "python3", 2: "VLLM::Worker_TP0"}, {1: "python3"}], "VLLM::Worker_TP0 (process 2)"),
        (
            [{1: "python3", 2: "sglang::scheduler_TP1"}, {1: "python3", 3: "cc1plus"}],
            "sglang::scheduler_TP1 (process 2)",
        ),
        # Compilers come and go, and a start anew is another matter.
        ([{1: "python3", 2: "cc1plus"}, {1: "python3"}], ""),
        ([{1: "python3", 2: "VLLM::Worker_TP0"}, {9: "python3"}], ""),
        ([{1: "python3", 2: "VLLM::Worker_TP0"}] * 2, ""),
        ([], ""),
    ],
)
def test_a_worker_that_is_gone_while_its_parent_lives(names, lost):
    samples = [Sample(float(at), dict.fromkeys(row, 1.0), {}, row) for at, row in enumerate(names)]
    assert loading.lost_worker(samples, 1) == lost
