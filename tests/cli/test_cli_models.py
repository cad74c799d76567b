"""``peerlane models``: the list, one model with flags and fit, own files and folders, bad input in one line."""

from __future__ import annotations

import json

import pytest

OWN = """family: glm-5
engines:
  sglang:
    recommended:
      quiet: {flag: --log-level, value: warning, versions: ">=0.5", why: a test, source: a test}
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 260,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


def test_the_list_names_each_family(peerlane):
    done = peerlane("models")

    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    for name in (
        "kimi-k2.5",
        "glm-5",
        "minimax-m2.5",
        "deepseek-v3.2",
        "qwen3-coder-480b",
        "llama-3.3-70b",
        "lab-tiny",
    ):
        assert name in names
    assert {one["name"] for one in json.loads(peerlane("models", "--format", "json").stdout)["models"]} == set(names)


def test_one_model_shows_shape_flags_and_reasons(peerlane):
    done = peerlane("models", "GLM-5", "--engine", "sglang", "--sm", "12.0")

    assert done.returncode == 0
    assert "157 per token of 12,288 bytes" in done.stdout
    assert "sglang 0.5.23 on SM 120" in done.stdout
    assert "give         --kv-cache-dtype fp8_e4m3" in done.stdout
    assert "never give   --nsa-decode-backend" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_an_older_release_gets_the_older_name(peerlane):
    done = peerlane("models", "glm-5", "--engine", "sglang", "--engine-version", "0.5.9", "--sm", "120")

    assert "--nsa-decode-backend trtllm" in done.stdout
    assert "never give   --dsa-decode-backend" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("kimi-k2.5", "--gpu-memory-gib", "95.6", "--sm", "120", "--engine", "vllm"),
            "fits: 7.9 GiB left for KV = 24",
        ),
        (("deepseek-v3", "--gpu-memory-gib", "79.6", "--sm", "90"), "instead: fp8 needs 16 of these GPUs (TP8 x PP2)"),
        (("minimax-m2", "--gpu-memory-gib", "79.6", "--sm", "90"), "no multiple of the FP8 block of 128"),
        (("glm-5", "--sm", "120"), "the GPUs' memory is not known"),
    ],
)
def test_the_fit_of_eight_gpus(peerlane, words, said):
    done = peerlane("models", *words, "--gpus", 8)

    assert done.returncode == 0
    assert said in " ".join(done.stdout.split())


def test_json_holds_what_the_text_says(peerlane):
    words = ("glm-5", "--gpus", 8, "--gpu-memory-gib", 95.6, "--sm", 120, "--engine", "sglang", "--format", "json")
    shape = json.loads(peerlane("models", *words).stdout)

    assert shape["schema"] == "peerlane.models/1"
    assert shape["shape"]["all_reduces_per_token"] == 157
    (engine,) = shape["engines"]
    row = next(one for one in engine["fit"]["rows"] if (one["weights"], one["layout"]) == ("nvfp4", "TP8"))
    assert (row["state"], row["kv_dtype"]) == ("fits", "fp8")
    assert row["kv_tokens"] > 300_000
    assert all(one["source"] and one["why"] for one in engine["recommended"] + engine["forbidden"])


def test_a_file_and_a_folder_of_one_s_own(peerlane, tmp_path):
    (tmp_path / "own.yml").write_text(OWN)
    assert "--log-level warning" in peerlane("models", "glm-5", "--profile", tmp_path / "own.yml").stdout

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"x" * 460_800)
    done = peerlane("models", "--from-config", folder, "--gpus", 1, "--gpu-memory-gib", 24, "--engine", "vllm")
    assert done.returncode == 0
    assert "0.46 MB" in done.stdout
    assert "fits:" in done.stdout
    assert "nothing is known about flags" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("glm5",), "there is no profile glm5; did you mean glm-5"),
        (("--gpus", "8"), "--gpus: needs a model; give a NAME"),
        (("glm-5", "--gpus", "0"), "'0' is no number of at least 1"),
        (("glm-5", "--gpus", "many"), "'many' is no number"),
        (("glm-5", "--gpu-memory-gib", "97887"), "no GPU has 97887 GiB; nvidia-smi prints MiB: divide by 1024"),
        (("glm-5", "--gpu-memory-gib", "nan"), "'nan' is no number of GiB"),
        (("glm-5", "--sm", "blackwell"), "--sm: 'blackwell' is no GPU architecture; give the compute capability"),
        (("glm-5", "--context", "1000000"), "--context: 1000000 is more than the model's context; glm-5 has 202752"),
        (("glm-5", "--engine", "tgi"), "--engine: 'tgi' is no engine; use vllm, sglang"),
        (("glm-5", "--engine-version", "0.5.9"), "--engine-version: needs --engine"),
        (("glm-5", "--engine", "sglang", "--engine-version", "0.9.9"), "newer than any that this Peerlane knows"),
        (("glm-5", "--engine", "sglang", "--engine-version", "latest"), "--engine-version: 'latest' is no version"),
        (("--from-config", "/no/such/folder"), "/no/such/folder: is no folder"),
        (("glm-5", "--from-config", "/tmp"), "give a NAME or --from-config, not both"),
        (("--profile", "/no/such/file.yml"), "/no/such/file.yml: cannot be read"),
        (("glm-5", "--format", "yaml"), "invalid choice: 'yaml'"),
    ],
)
def test_bad_input_is_one_line(peerlane, words, said):
    done = peerlane("models", *words)

    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_misspelt_key_is_named_with_its_line(peerlane, tmp_path):
    place = tmp_path / "mine.yml"
    place.write_text(OWN.replace("versions", "version"))
    done = peerlane("models", "glm-5", "--profile", place)

    assert done.returncode == 2
    assert "mine.yml:5: engines.sglang.recommended.quiet.version: there is no key 'version'; did you" in done.stderr
    assert len(done.stderr.splitlines()) == 1
