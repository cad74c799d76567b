"""Arguments of a service against a profile: one profile serves releases before and after a flag was renamed."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import model_profile, served_args

PROFILES = model_profile.profiles()


def checked(name, engine, version, sm, args, weights="", **more):
    return served_args.checked_args(PROFILES[name], engine, version, sm, args, weights, **more)


GLM = ("glm-5", "sglang")


@pytest.mark.parametrize(
    ("name", "engine", "version", "sm", "weights", "args", "said"),
    [
        # the rename, and what must not be chosen under either name
        (
            *GLM,
            "0.5.23",
            120,
            "nvfp4",
            ["--nsa-decode-backend", "trtllm"],
            "--nsa-decode-backend trtllm: renamed in 0.5.13",
        ),
        (*GLM, "0.5.20", 90, "fp8", ["--nsa-prefill-backend=fa3"], "use --dsa-prefill-backend"),
        (*GLM, "0.5.9", 120, "nvfp4", ["--dsa-decode-backend", "trtllm"], "the name is known since 0.5.13"),
        (
            *GLM,
            "0.5.9",
            120,
            "nvfp4",
            {"nsa_decode_backend": "flashmla_kv"},
            "--nsa-decode-backend flashmla_kv: FlashMLA",
        ),
        (*GLM, "0.5.12.post1", 120, "nvfp4", {"nsa-decode-backend": "flashmla_sparse"}, "assert"),
        (
            *GLM,
            "0.5.23",
            120,
            "nvfp4",
            ["--dsa-decode-backend", "flashmla_kv"],
            "use none, with --kv-cache-dtype fp8_e4m3",
        ),
        (*GLM, "0.5.23", 120, "nvfp4", ["--dsa-decode-backend", "trtllm"], "Unsupported architecture"),
        (*GLM, "0.5.23", 120, "nvfp4", ["--kv-cache-dtype", "bfloat16"], "picks trtllm"),
        (
            "glm-5",
            "vllm",
            "0.33.0",
            120,
            "nvfp4",
            ["--attention-backend", "FLASHMLA_SPARSE"],
            "--attention-backend FLASHMLA",
        ),
        (
            "glm-5",
            "vllm",
            "0.33.0",
            120,
            "nvfp4",
            ["--attention-backend", "flashmla_sparse"],
            "--attention-backend flashmla",
        ),
        ("glm-5", "vllm", "0.19.1", 120, "nvfp4", [], "glm-5 does not run in vllm 0.19.1 on SM 120"),
        ("glm-5", "vllm", "0.33.0", 86, "fp8", [], "no valid attention backend below SM 90"),
        ("glm-5", "vllm", "0.22.1", 90, "fp8", ["--kv-cache-dtype", "bfloat16"], "answers are nonsense"),
        ("kimi-k2.5", "vllm", "0.33.0", 120, "int4", ["--attention-backend=FLASHINFER_MLA"], "only TRITON_MLA accepts"),
        ("kimi-k2.5", "vllm", "0.15.1", 120, "int4", {"kv_cache_dtype": "fp8"}, "NotImplementedError"),
        ("kimi-k2.5", "sglang", "0.5.9", 121, "int4", [], "degenerate repetition"),
        ("minimax-m2.5", "vllm", "0.16.0", 120, "nvfp4", ["--enable-expert-parallel"], "illegal memory access"),
        ("minimax-m2.5", "sglang", "0.5.9", 90, "fp8", ["--kv-cache-dtype", "fp8_e4m3"], "gibberish"),
        ("gpt-oss-120b", "vllm", "0.33.0", 120, "mxfp4", {"attention_backend": "FLASHINFER"}, "no attention sinks"),
        # hard rules
        ("minimax-m2.5", "vllm", "0.33.0", 90, "fp8", {"tensor_parallel_size": 8}, "no multiple of the FP8 block"),
        ("minimax-m2.5", "sglang", "0.5.23", 90, "fp8", ["--tp", "8"], "no multiple of the FP8 block"),
        ("glm-5", "vllm", "0.33.0", 90, "", ["-tp", "6"], "64 attention heads cannot be split over 6 GPUs"),
        ("glm-5", "vllm", "0.33.0", 90, "fp8", ["--tensor-parallel-size", "eight"], "that is no number of GPUs"),
        ("gpt-oss-120b", "vllm", "0.33.0", 75, "mxfp4", [], "MXFP4 weights need SM 80 or later"),
    ],
)
def test_obstacles(name, engine, version, sm, weights, args, said):
    found = checked(name, engine, version, sm, args, weights)

    assert [one for one in found.obstacles if said in one], found.obstacles
    assert not [one for one in found.obstacles if "\n" in one]


@pytest.mark.parametrize(
    ("name", "engine", "version", "sm", "weights", "args"),
    [
        (*GLM, "0.5.9", 120, "nvfp4", ["--nsa-decode-backend", "trtllm"]),
        # a deprecated alias in between, still taken
        (*GLM, "0.5.19", 90, "fp8", ["--nsa-decode-backend", "fa3"]),
        (*GLM, "0.5.23", 120, "nvfp4", ["--kv-cache-dtype", "fp8_e4m3"]),
        (*GLM, "0.5.23", 90, "fp8", ["--dsa-decode-backend", "flashmla_kv"]),
        ("glm-5", "vllm", "0.33.0", 120, "nvfp4", ["--kv-cache-dtype", "fp8"]),
        ("minimax-m2.5", "vllm", "0.33.0", 90, "fp8", ["--tensor-parallel-size", "4"]),
        ("minimax-m2.5", "vllm", "0.33.0", 90, "fp8", ["-tp", "8", "--enable-expert-parallel"]),
        ("minimax-m2.5", "sglang", "0.5.23", 90, "fp8", ["--tp-size", "8", "--ep-size", "8"]),
        ("minimax-m2.5", "sglang", "0.5.23", 90, "fp8", ["--kv-cache-dtype", "fp8_e4m3"]),
        ("kimi-k2.5", "vllm", "0.33.0", 120, "int4", {"tensor_parallel_size": 8, "kv_cache_dtype": "fp8"}),
        ("kimi-k2.5", "vllm", "0.33.0", 100, "int4", ["--attention-backend", "FLASHINFER_MLA"]),
        ("gpt-oss-120b", "vllm", "0.33.0", 90, "mxfp4", {"attention_backend": "FLASHINFER"}),
    ],
)
def test_no_obstacles(name, engine, version, sm, weights, args):
    assert checked(name, engine, version, sm, args, weights).obstacles == ()


def words(found):
    return [one.words for one in found.additions]


def test_what_is_recommended_and_not_given_is_advice_for_that_release():
    old = words(checked("glm-5", "sglang", "0.5.9", 120, [], "nvfp4"))
    new = words(checked("glm-5", "sglang", "0.5.23", 120, [], "nvfp4"))

    assert "--nsa-decode-backend trtllm" in old
    assert not any("--nsa" in one or "--dsa" in one for one in new)
    assert "--kv-cache-dtype fp8_e4m3" in new
    assert "--kv-cache-dtype fp8_e4m3" not in old
    assert {"--tool-call-parser glm47", "--reasoning-parser glm45"} <= set(old) & set(new)


def test_what_is_given_is_not_advised_and_another_value_is_a_note():
    found = checked(
        "glm-5", "sglang", "0.5.23", 120, {"tool_call_parser": "glm45", "reasoning-parser": "glm45"}, "nvfp4"
    )

    assert not any("parser" in one for one in words(found))
    assert len([one for one in found.notes if "--tool-call-parser glm45 is given; recommended is glm47" in one]) == 1


def test_a_bare_flag_and_a_choice():
    given = words(checked("kimi-k2.5", "vllm", "0.33.0", 90, ["--trust-remote-code"], "int4"))

    assert "--trust-remote-code" not in given
    assert "--enable-auto-tool-choice" in given
    assert "--language-model-only" not in given


def test_environment_is_advised_until_it_is_set():
    args = ("minimax-m2.5", "vllm", "0.33.0", 120, [], "fp8")

    assert "VLLM_USE_DEEP_GEMM=0" in words(checked(*args))
    assert "VLLM_USE_DEEP_GEMM=0" not in words(checked(*args, environment={"VLLM_USE_DEEP_GEMM": "0"}))


def test_an_unknown_gpu_makes_no_obstacle_and_no_pass_but_a_note():
    found = checked("glm-5", "sglang", "0.5.23", None, ["--dsa-decode-backend", "trtllm"], "nvfp4")

    assert found.obstacles == ()
    assert any(one.startswith("on SM 120-129, --dsa-decode-backend trtllm") for one in found.notes)


def test_an_unknown_checkpoint_makes_rows_for_one_a_note():
    found = checked("minimax-m2.5", "vllm", "0.16.0", 120, ["--enable-expert-parallel"])

    assert found.obstacles == ()
    assert any("with nvfp4 weights, --enable-expert-parallel" in one for one in found.notes)


def test_a_release_newer_than_the_profile_is_a_note():
    notes = checked("glm-5", "sglang", "0.6.0", 120, [], "nvfp4").notes

    assert any("was checked with sglang 0.5.23, which is older than 0.6.0" in one for one in notes)


def test_an_engine_that_the_profile_does_not_know_is_a_note():
    found = checked("glm-5", "llama_cpp", "2026.10.11549", None, [])

    assert found.notes == ("the profile glm-5 says nothing about llama_cpp",)
    assert found.additions == ()


@pytest.mark.parametrize(
    ("args", "weights", "version", "said"),
    [
        (
            "--tp 8 --kv-cache-dtype 'fp8'",
            "",
            "0.33.0",
            "model_service_args: is one string; write a dictionary, or a list",
        ),
        ([], "fp4", "0.33.0", "glm-5 has no checkpoint fp4; did you mean nvfp4?"),
        ([], "", "latest", "'latest' is no version"),
    ],
)
def test_bad_input_is_one_line(args, weights, version, said):
    with pytest.raises(InputError) as caught:
        checked("glm-5", "vllm", version, 120, args, weights)

    assert said in caught.value.line()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--a", "1", "--b"], {"--a": ("1",), "--b": ()}),
        (["--a=1", "--a_b", "x", "y"], {"--a": ("1",), "--a-b": ("x", "y")}),
        (["-tp", "2"], {"--tensor-parallel-size": ("2",)}),
        (["--tp=2"], {"--tensor-parallel-size": ("2",)}),
        (["--x", "-1", "--y", "-0.5"], {"--x": ("-1",), "--y": ("-0.5",)}),
        (["model", "--x"], {"--x": ()}),
        ({"a": 1, "b": True, "c": False, "d": {"k_v": 2}}, {"--a": ("1",), "--b": (), "--d": ('{"k_v": 2}',)}),
        (["--kernel_config.enable_x=False"], {"--kernel-config.enable_x": ("False",)}),
        ([], {}),
    ],
)
def test_options_are_read_as_the_engines_read_them(args, expected):
    assert served_args.options(args) == expected


@pytest.mark.parametrize(
    ("name", "engine", "version", "sm", "weights", "given", "expected"),
    [
        ("glm-5", "sglang", "0.5.23", 120, "nvfp4", {}, "fp8"),
        ("glm-5", "sglang", "0.5.23", 90, "fp8", {}, "bf16"),
        ("glm-5", "sglang", "0.5.23", 90, "fp8", {"--kv-cache-dtype": ("fp8_e4m3",)}, "fp8"),
        ("glm-5", "sglang", "0.5.23", 120, "nvfp4", {"--kv-cache-dtype": ("bfloat16",)}, "bf16"),
        ("kimi-k2.5", "vllm", "0.33.0", None, "int4", {}, "bf16"),
    ],
)
def test_the_cache_has_the_type_that_is_given_or_recommended(name, engine, version, sm, weights, given, expected):
    assert served_args.kv_dtype(PROFILES[name], engine, version, sm, weights, given) == expected
