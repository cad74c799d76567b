"""A profile from a model's own folder: shapes by the names of transformers, sizes from the files."""

from __future__ import annotations

import copy
import json
import random

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import fit, model_config, model_profile

PROFILES = model_profile.profiles()

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "vocab_size": 128256,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "vocab_size": 154880,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 202752,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 262144,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        },
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "vocab_size": 200064,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "vocab_size": 201088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}


def folder(tmp_path, config, name="model"):
    place = tmp_path / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return place


@pytest.mark.parametrize(
    ("config", "name", "weights"),
    [
        (DENSE, "llama-3.3-70b", "bf16"),
        (GLM, "glm-5", "nvfp4"),
        (KIMI, "kimi-k2.5", "int4"),
        (MINIMAX, "minimax-m2.5", "fp8"),
        (GPT_OSS, "gpt-oss-120b", "mxfp4"),
    ],
)
def test_a_known_model_gets_its_shape_and_its_flags(tmp_path, config, name, weights):
    one = model_config.from_folder(folder(tmp_path, config), PROFILES)

    assert one.shape == PROFILES[name].shape
    assert list(one.weights) == [weights]
    assert one.weights[weights].block == PROFILES[name].weights[weights].block
    assert one.family == PROFILES[name].family
    assert one.flags == next(p for p in PROFILES.values() if p.family == one.family and p.shape == one.shape).flags
    assert one.weights[weights].bytes is None
    assert "no *.safetensors here" in " ".join(one.notes)


def test_an_indexer_for_four_layers():
    every_fourth = {**GLM, "index_topk_freq": 4}

    assert model_config._shape(every_fourth, "").attention.index_layers == 21
    assert model_config._shape({**GLM, "index_topk_pattern": "FSSF"}, "").attention.index_layers == 2
    assert model_config._shape({**GLM, "indexer_types": ["full", "shared"]}, "").attention.index_layers == 1


def test_an_unknown_model_gets_a_shape_and_no_flags(tmp_path):
    one = model_config.from_folder(folder(tmp_path, {**DENSE, "hidden_size": 4096}), PROFILES)

    assert one.flags == one.forbidden == ()
    assert one.checked_with == {}
    assert "no profile has this shape" in " ".join(one.notes)


def test_sizes_come_from_the_files_of_the_index(tmp_path):
    place = folder(tmp_path, DENSE)
    for name, size in (("model-1.safetensors", 100), ("model-2.safetensors", 50), ("consolidated.safetensors", 150)):
        (place / name).write_bytes(b"x" * size)
    index = {"metadata": {"total_size": 149}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))

    assert model_config.from_folder(place).weights["bf16"].bytes == 150

    (place / "model-2.safetensors").unlink()
    one = model_config.from_folder(place)
    assert one.weights["bf16"].bytes == 149
    assert "1 of 2 shards are missing (model-2.safetensors): the size is what the index says" in one.notes


def test_sizes_without_an_index(tmp_path):
    place = folder(tmp_path, DENSE)
    (place / "model.safetensors").write_bytes(b"x" * 70)

    assert model_config.from_folder(place).weights["bf16"].bytes == 70


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, ("nvfp4", "nvfp4")),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            ("fp8", "fp8"),
        ),
        ({"quant_method": "awq", "bits": 4}, ("int4", "int4")),
        ({"quant_method": "gptq", "bits": 4}, ("int4", "int4")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8", "fp8")),
        ({}, ("bf16", "bf16")),
    ],
)
def test_quantisations(tmp_path, quantisation, expected):
    one = model_config.from_folder(folder(tmp_path, {**DENSE, "quantization_config": quantisation}))
    weights = next(iter(one.weights.values()))

    assert (weights.experts, weights.other) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "config.json: is no JSON"),
        ("[]", "is no JSON object"),
        ("[" * 100_000, "is no JSON"),
        ("{}", "has no num_hidden_layers or n_layer; it is no language model"),
        ({**DENSE, "num_hidden_layers": "80"}, "num_hidden_layers is '80', and no whole number"),
        ({**DENSE, "num_attention_heads": -1}, "num_attention_heads is -1, and no whole number"),
        ({**DENSE, "hidden_size": True}, "hidden_size is True, and no whole number"),
        ({**DENSE, "intermediate_size": None}, "has no intermediate_size"),
        ({**DENSE, "torch_dtype": None}, "says neither dtype nor quantization_config"),
        ({**DENSE, "torch_dtype": "int8"}, "dtype int8 is not known here"),
        (
            {**DENSE, "quantization_config": {"quant_method": "gguf"}},
            "has a quantisation that is not known here (gguf)",
        ),
        ({**DENSE, "quantization_config": {"quant_method": "gptq", "bits": 3}}, "not known here (gptq)"),
        ({**GPT_OSS, "layer_types": ["linear_attention"] * 36}, "layers of a kind that is not known here (linear_att"),
        ({**GPT_OSS, "sliding_window": None}, "has no sliding_window"),
        ({**GLM, "v_head_dim": None}, "has no v_head_dim"),
        ({**GLM, "num_experts_per_tok": None}, "has no num_experts_per_tok"),
    ],
)
def test_a_bad_configuration_is_one_line(tmp_path, config, said):
    with pytest.raises(InputError) as caught:
        model_config.from_folder(folder(tmp_path, config))

    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(InputError, match="is no folder"):
        model_config.from_folder(tmp_path / "gone")
    with pytest.raises(InputError, match=r"config\.json: does not exist"):
        model_config.from_folder(tmp_path)


def broken(config, dice):
    """The same configuration with one value, at any depth, replaced by one of another kind or taken away."""
    made = copy.deepcopy(config)
    node = made
    while True:
        key = dice.choice(list(node))
        if not isinstance(node[key], dict) or not node[key] or dice.random() < 0.3:
            break
        node = node[key]
    odd = [None, True, -1, 0, 3, 10**12, 1.5, "", "x", [], [1], {}, {"a": 1}]
    if dice.random() < 0.2:
        del node[key]
    else:
        node[key] = dice.choice(odd)
    return made


def test_a_broken_configuration_is_judged_or_refused_in_one_line(tmp_path):
    dice = random.Random(7)
    judged = refused = 0
    for _ in range(400):
        config = broken(dice.choice([DENSE, GLM, KIMI, MINIMAX, GPT_OSS]), dice)
        try:
            one = model_config.from_folder(folder(tmp_path, config), PROFILES)
        except InputError as error:
            assert "\n" not in error.line()
            refused += 1
            continue
        for engine in fit.ENGINES:
            assert fit.table(one, 8, fit.Request(engine, 95.6, 120))
        judged += 1

    assert judged > 50
    assert refused > 50
