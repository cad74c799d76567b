"""Fit: hard rules, bytes of KV cache and weights against published readings, and every published deployment."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import fit, model_profile
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.fit import GIB, Layout, Request
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.model_profile import Weights
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.model_shape import Experts, Gqa, Shape

PROFILES = model_profile.profiles()

# What nvidia-smi tells of a GPU, in GiB: 97887, 81559, 143771, 183359 and 275040 MiB.
RTX_PRO_6000, H100, H200, B200, B300 = 95.6, 79.6, 140.4, 179.1, 268.6


def judge(name, weights, layout, memory, sm, engine="vllm", context=32768, streams=1, kv="bf16"):
    one = PROFILES[name]
    request = Request(engine, memory, sm, context, streams, kv)
    return fit.judge(one.shape, one.weights[weights], layout, request)


# Deployments that somebody published as serving (or as not fitting), with where. ``fits`` also means: not only just.
DEPLOYMENTS = [
    # field report and vllm 40608
    ("kimi-k2.5", "int4", Layout(8), RTX_PRO_6000, 120, "vllm", "fp8", {"fits"}),
    ("kimi-k2.6", "int4", Layout(8), RTX_PRO_6000, 120, "vllm", "fp8", {"fits"}),
    # sglang PR 20479
    ("kimi-k2.5", "int4", Layout(8), RTX_PRO_6000, 120, "sglang", "fp8", {"fits"}),
    # recipes: verified on H200; NVFP4 on four B300 (K2.6)
    ("kimi-k2.5", "int4", Layout(8), H200, 90, "vllm", "bf16", {"fits"}),
    ("kimi-k2.6", "nvfp4", Layout(4), B300, 103, "vllm", "fp8", {"fits"}),
    # field report; InferenceX PR 2335
    ("glm-5", "nvfp4", Layout(8), RTX_PRO_6000, 120, "sglang", "fp8", {"fits"}),
    ("glm-5.2", "nvfp4", Layout(8), RTX_PRO_6000, 120, "sglang", "fp8", {"fits"}),
    # the same pull request: "TP4 cannot hold the weights", attention DP would not fit
    ("glm-5.2", "nvfp4", Layout(4), RTX_PRO_6000, 120, "sglang", "fp8", {"does not fit"}),
    # recipes: FP8 on eight H200, bf16 needs several hosts
    ("glm-5", "fp8", Layout(8), H200, 90, "vllm", "fp8", {"fits"}),
    ("glm-5.2", "fp8", Layout(8), H200, 90, "vllm", "fp8", {"fits"}),
    ("glm-5", "bf16", Layout(8), H200, 90, "vllm", "bf16", {"does not fit"}),
    # recipes: FP8 on four H100 at TP4; pure TP8 is refused, TP8 + EP is not
    ("minimax-m2.5", "fp8", Layout(4), H100, 90, "vllm", "fp8", {"fits"}),
    ("minimax-m2.5", "fp8", Layout(8), H100, 90, "vllm", "fp8", {"not possible"}),
    ("minimax-m2.5", "fp8", Layout(8, experts=True), H100, 90, "vllm", "fp8", {"fits"}),
    ("minimax-m2.7", "fp8", Layout(1, 1, 8, True), H100, 90, "vllm", "fp8", {"fits"}),
    # recipes: rtx_pro_6000_2x verified
    ("minimax-m2.7", "nvfp4", Layout(2), RTX_PRO_6000, 120, "vllm", "fp8", {"fits"}),
    # recipes: eight H200; lmdeploy 2960: out of memory on eight H800 with 80 GB
    ("deepseek-v3.1", "fp8", Layout(8), H200, 90, "vllm", "bf16", {"fits"}),
    ("deepseek-v3.2", "fp8", Layout(8), H200, 90, "vllm", "fp8", {"fits"}),
    ("deepseek-v3", "fp8", Layout(8), H100, 90, "vllm", "bf16", {"does not fit"}),
    ("deepseek-v3", "fp8", Layout(8), H100, 90, "sglang", "fp8", {"does not fit"}),
    ("deepseek-v3", "fp8", Layout(8, 2), H100, 90, "vllm", "bf16", {"fits"}),
    # recipes: four H200 for bf16; vllm 21348: FP8 on four H100
    ("qwen3-235b", "bf16", Layout(4), H200, 90, "vllm", "bf16", {"fits"}),
    ("qwen3-235b", "fp8", Layout(4), H100, 90, "vllm", "bf16", {"fits"}),
    ("qwen3-235b", "fp8", Layout(8), H100, 90, "vllm", "bf16", {"not possible"}),
    # recipes: DP8 + EP on eight H200 (and H20) for FP8, TP8 + EP for bf16
    ("qwen3-coder-480b", "fp8", Layout(1, 1, 8, True), H200, 90, "vllm", "bf16", {"fits"}),
    ("qwen3-coder-480b", "fp8", Layout(8), H200, 90, "vllm", "bf16", {"not possible"}),
    # recipes: one H100 for FP8 (which leaves little), one B200 for NVFP4
    ("llama-3.3-70b", "fp8", Layout(1), H100, 90, "vllm", "fp8", {"tight"}),
    ("llama-3.3-70b", "nvfp4", Layout(1), B200, 100, "vllm", "fp8", {"fits"}),
    # recipes: one A100 or H100 with 80 GB; vllm 27508, 33155: out of memory there in the defaults, works with less
    ("gpt-oss-120b", "mxfp4", Layout(1), H100, 90, "vllm", "bf16", {"tight"}),
    ("gpt-oss-120b", "mxfp4", Layout(1), RTX_PRO_6000, 120, "vllm", "bf16", {"fits"}),
    ("gpt-oss-120b", "mxfp4", Layout(4), H100, 80, "vllm", "bf16", {"fits"}),
]


@pytest.mark.parametrize(
    ("name", "weights", "layout", "memory", "sm", "engine", "kv", "expected"),
    DEPLOYMENTS,
    ids=str,
)
def test_published_deployments(name, weights, layout, memory, sm, engine, kv, expected):
    verdict = judge(name, weights, layout, memory, sm, engine, context=8192, kv=kv)

    assert {verdict.state} == expected, verdict.text


@pytest.mark.parametrize(
    ("name", "layout", "kv", "sm", "engine", "tokens", "gib", "tolerance", "source"),
    [
        ("qwen3-235b", Layout(4), "bf16", 90, "vllm", 178_880, 8.11, 0.015, "vllm 21348"),
        ("qwen3-coder-480b", Layout(1, 1, 8, True), "bf16", 90, "vllm", 262_144, 62.00, 0.0005, "recipes PR 12"),
        ("minimax-m2.7", Layout(2), "bf16", 121, "vllm", 196_608, 23.25, 0.0005, "spark-vllm-docker 396"),
        ("minimax-m2.7", Layout(2), "bf16", 121, "vllm", 240_816, 28.74, 0.015, "spark-vllm-docker 396"),
        # 59,763,793,920 bytes on eight ranks
        ("glm-5.2", Layout(8), "fp8", 90, "vllm", 138_615, 59_763_793_920 / 8 / GIB, 0.002, "recipes PR 893"),
        ("glm-5.2", Layout(8), "fp8", 90, "vllm", 44_498, 19_111_157_760 / 8 / GIB, 0.005, "recipes PR 893"),
        # two streams of 131072, K and V in 16 bit: 9216 MiB of full and 90 MiB of sliding cells (1280, a batch more)
        ("gpt-oss-120b", Layout(1), "bf16", 90, "vllm", 262_144, 9.0, 0.0005, "ollama 16480"),
    ],
)
def test_kv_bytes_against_what_engines_printed(name, layout, kv, sm, engine, tokens, gib, tolerance, source):
    token, _ = fit.kv_bytes(PROFILES[name].shape, Request(engine, 100.0, sm, kv_dtype=kv), layout)

    assert token * tokens / GIB == pytest.approx(gib, rel=tolerance), source


def test_kv_bytes_of_sglang_without_sparse_attention():
    """InferenceX PR 2335: 464,768 tokens in 23.91 GiB, dense Triton MLA with an fp8 cache and indexer keys."""
    token = PROFILES["glm-5.2"].shape.kv_bytes_per_token("fp8", packed=False, every_layer_indexed=True)

    assert token * 464_768 / GIB == pytest.approx(23.91, rel=0.001)


@pytest.mark.parametrize(
    ("name", "weights", "layout", "gib", "tolerance", "source"),
    [
        ("glm-5.2", "nvfp4", Layout(8), 56, 0.02, "InferenceX PR 2335"),
        ("gpt-oss-120b", "mxfp4", Layout(1), 64.38, 0.01, "vllm 33155"),
        ("kimi-k2.5", "int4", Layout(8), 595e9 / 8 / GIB, 0.03, "engines.md: 74 GB a GPU"),
    ],
)
def test_weights_on_a_gpu_against_what_engines_printed(name, weights, layout, gib, tolerance, source):
    one = PROFILES[name]

    assert fit.weights_per_gpu(one.shape, one.weights[weights], layout) / GIB == pytest.approx(gib, rel=tolerance), (
        source
    )


def test_what_sglang_left_for_the_cache():
    """InferenceX PR 2335: 23.91 GiB for the pool on eight RTX PRO 6000."""
    verdict = judge("glm-5.2", "nvfp4", Layout(8), RTX_PRO_6000, 120, "sglang", kv="fp8")

    assert verdict.left_gib == pytest.approx(23.91, rel=0.06)


@pytest.mark.parametrize(
    ("name", "weights", "layout", "memory", "left", "source"),
    [
        ("qwen3-235b", "fp8", Layout(4), H100, 8.11, "vllm 21348, share 0.9 then"),
        ("qwen3-coder-480b", "fp8", Layout(1, 1, 8, True), H200, 48.66, "recipes PR 12, H20, share 0.9 then"),
    ],
)
def test_what_vllm_left_for_the_cache_lies_between_both_reserves(name, weights, layout, memory, left, source):
    one = PROFILES[name]
    low, high = fit.reserve_gib(Request("vllm", memory, 90), one.shape, layout)
    here = memory * 0.9 - fit.weights_per_gpu(one.shape, one.weights[weights], layout) / GIB

    assert here - high <= left <= here - low, source


# --- hard rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "layout", "said"),
    [
        (
            "minimax-m2",
            "fp8",
            Layout(8),
            "an expert's width of 192 for each GPU is no multiple of the FP8 block of 128: use tensor parallel 1, 2, "
            "3, 4 or 6, or expert parallel",
        ),
        ("qwen3-235b", "fp8", Layout(8), "use tensor parallel 1, 2 or 4, or expert parallel"),
        ("qwen3-coder-480b", "fp8", Layout(8), "an expert's width of 320"),
        (
            "glm-5",
            "nvfp4",
            Layout(6),
            "64 attention heads cannot be split over 6 GPUs: use tensor parallel 1, 2, 4 or 8",
        ),
        ("llama-3.3-70b", "bf16", Layout(3), "64 attention heads cannot be split over 3 GPUs"),
        ("llama-3.3-70b", "bf16", Layout(2, experts=True), "expert parallelism needs a model with experts"),
        ("lab-tiny", "fp32", Layout(1, 4), "2 layers cannot make 4 pipeline stages"),
        ("minimax-m2", "fp8", Layout(4), ""),
        ("minimax-m2", "fp8", Layout(8, experts=True), ""),
        ("deepseek-v3", "fp8", Layout(8), ""),
        ("deepseek-v3", "fp8", Layout(16), ""),
        ("qwen3-235b", "bf16", Layout(8), ""),
    ],
)
def test_hard_rules(name, weights, layout, said):
    reason = fit.impossible(PROFILES[name].shape, PROFILES[name].weights[weights], layout)

    assert (said in reason) if said else reason == "", reason


@pytest.mark.parametrize(
    ("experts", "other", "engine", "sm", "problem", "note"),
    [
        ("fp8", "fp8", "vllm", 90, "", ""),
        ("fp8", "fp8", "vllm", 80, "", "SM 80 has no FP8 arithmetic"),
        ("fp8", "fp8", "sglang", 75, "FP8 weights need SM 80 or later in sglang", ""),
        ("fp8", "fp8", "vllm", 70, "FP8 weights need SM 75 or later in vllm", ""),
        ("nvfp4", "bf16", "vllm", 120, "", ""),
        ("nvfp4", "bf16", "vllm", 90, "", "SM 90 has no NVFP4 arithmetic"),
        ("mxfp4", "bf16", "vllm", 75, "MXFP4 weights need SM 80 or later in vllm", ""),
        ("int4", "bf16", "sglang", 75, "INT4 weights need SM 80 or later in sglang", ""),
        ("bf16", "bf16", "vllm", 75, "BF16 weights need SM 80 or later in vllm", ""),
        ("nvfp4", "bf16", "vllm", None, "", ""),
    ],
)
def test_number_formats_by_architecture(experts, other, engine, sm, problem, note):
    found = fit.format_problem(Weights("w", experts, other), engine, sm)

    assert found[0].startswith(problem) if problem else found[0] == ""
    assert found[1].startswith(note) if note else found[1] == ""


# --- what is not known ----------------------------------------------------------------------------------------------


def test_unknown_memory_gives_no_verdict_but_the_need():
    verdict = judge("glm-5", "nvfp4", Layout(8), None, 120, "sglang", kv="fp8")

    assert verdict.state == "unknown"
    assert "the GPUs' memory is not known: weights take 57.7 GiB of each" in verdict.text
    assert verdict.kv_tokens is None


def test_an_engine_whose_memory_is_not_computed_is_unknown():
    assert judge("lab-tiny", "fp32", Layout(1), 80.0, None, "llama_cpp").state == "unknown"


def test_a_size_that_is_computed_says_so():
    assert "computed from the shape" in " ".join(judge("kimi-k2.5", "nvfp4", Layout(8), B200, 100).notes)
    assert judge("kimi-k2.5", "int4", Layout(8), B200, 100).notes == ()


# --- answers --------------------------------------------------------------------------------------------------------


def test_answers_say_tokens_or_what_is_needed():
    good = judge("kimi-k2.5", "int4", Layout(8), RTX_PRO_6000, 120, kv="fp8")
    assert good.text.startswith("fits: 7.9 GiB left for KV = 24")
    assert good.kv_tokens == int(good.left_gib * GIB / (61 * 576))

    bad = judge("deepseek-v3", "fp8", Layout(8), H100, 90)
    assert bad.text.startswith("does not fit: weights of 81.")


def test_more_context_and_streams_make_a_fit_tight_and_then_none():
    states = [
        judge("kimi-k2.5", "int4", Layout(8), RTX_PRO_6000, 120, context=131072, streams=n, kv="fp8").state
        for n in (1, 2, 3, 4)
    ]

    assert states == ["fits", "tight", "tight", "does not fit"]


def test_a_way_out_names_gpus_and_quantisation():
    request = Request("vllm", H100, 90)
    assert fit.way_out(PROFILES["deepseek-v3"], 8, request) == "fp8 needs 16 of these GPUs (TP8 x PP2)"
    text = fit.way_out(PROFILES["glm-5"], 4, Request("vllm", RTX_PRO_6000, 120), {"nvfp4": "fp8"})
    assert text.startswith("nvfp4 needs 8 of these GPUs (TP8)")
    assert fit.way_out(PROFILES["glm-5"], 8, Request("vllm", RTX_PRO_6000, 120), {"nvfp4": "fp8"}) == ""
    assert fit.way_out(PROFILES["glm-5"], 8, Request("vllm", None, 120)) == ""
    assert "fits on up to 64" in fit.way_out(PROFILES["kimi-k2.5"], 1, Request("vllm", 4.0, 120))


def test_layouts_of_eight_gpus_show_experts_only_where_they_help():
    rows = fit.table(PROFILES["minimax-m2.5"], 8, Request("vllm", H100, 90))
    shown = {str(row.layout) for row in rows if row.weights == "fp8"}

    assert shown == {"TP8", "TP8 + EP", "TP4 x PP2", "TP2 x PP4", "PP8", "DP8 + EP"}


@pytest.mark.parametrize("gpus", [1, 2, 3, 6, 7, 8, 12, 16])
def test_each_layout_takes_just_these_gpus(gpus):
    for one in PROFILES.values():
        for layout in fit.layouts(gpus, one.shape):
            assert layout.gpus == gpus
            assert layout.tensor <= 8


def test_splitting_never_makes_a_gpu_fuller():
    for one in PROFILES.values():
        for weights in one.weights.values():
            sizes = [fit.weights_per_gpu(one.shape, weights, Layout(n)) for n in (1, 2, 4, 8)]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] == pytest.approx(fit.weight_bytes(one.shape, weights) * weights.loaded_factor)
            assert sizes[3] >= sizes[0] / 8


def test_kv_heads_are_replicated_where_there_are_too_few():
    shape = Shape(2, 64, 100, 8, 100, Gqa(2, 16), dense_width=128)

    assert shape.kv_bytes_per_token("bf16", 1) == 2 * 2 * 2 * 16 * 2
    assert shape.kv_bytes_per_token("bf16", 2) == shape.kv_bytes_per_token("bf16", 8)
    assert shape.kv_bytes_per_token("fp8", 1) * 2 == shape.kv_bytes_per_token("bf16", 1)


def test_sliding_layers_take_no_more_than_their_window():
    shape = PROFILES["gpt-oss-120b"].shape
    full = dataclasses.replace(shape, attention=Gqa(8, 64))

    assert shape.kv_bytes_per_token("bf16") * 2 == full.kv_bytes_per_token("bf16")
    assert shape.kv_bytes_per_stream("bf16") == 18 * 128 * 2 * 8 * 64 * 2
    assert full.kv_bytes_per_stream("bf16") == 0


def test_experts_that_do_not_divide_evenly_fill_one_gpu_more():
    shape = Shape(2, 64, 100, 8, 100, Gqa(8, 8), Experts(10, 2, 32))
    even = fit.weights_per_gpu(shape, Weights("w", "bf16", "bf16"), Layout(4))
    spread = fit.weights_per_gpu(shape, Weights("w", "bf16", "bf16"), Layout(4, experts=True))

    assert spread - even == pytest.approx(2 * 3 * 64 * 32 * 10 * 2 * (3 / 10 - 1 / 4))
