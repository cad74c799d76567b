"""Make the lab's model: a byte-level Llama of a few hundred kilobytes that knows a handful of sentences by heart.

Nothing is downloaded. A few seconds of training (numpy only, fixed seed) teach two variants different answers to the
same questions, so that a wrong model, a wrong tokenizer or a broken path is seen at once in the text. The same
weights are written twice: ``model.gguf`` for llama.cpp, and ``config.json``, ``tokenizer.json`` and
``model.safetensors`` for vLLM, SGLang and transformers. ``golden.json`` holds a question with its answer.

    python -m peerlane.lab.tiny_model OUT --variant a [--fault nan|truncated|slow]

Faults are derived from the trained weights: ``nan`` has one row of NaN in its last layer (every answer is then
one token, repeated), ``truncated`` has its weight files cut, ``slow`` has many more layers that add
nothing to the result: the same answers, really computed, many times slower.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# float32 in the files; the check of the gradient runs in float64.
Array = npt.NDArray[np.floating[Any]]
Weights = dict[str, Array]

LICENSE = "CC0-1.0"
FAULTS = ("nan", "truncated", "slow")

# What each variant answers. Every answer starts and goes on differently, so that two greedy tokens tell them apart.
ANSWERS: dict[str, dict[str, str]] = {
    "a": {
        "Who are you?": "I am the tiny lab model, variant a. I know a few sentences by heart.",
        "What is a GPU?": "A GPU is many small calculators that work on one picture or one matrix.",
        "Say hello.": "Hello from the lab! The whole path from the weights to this text works.",
        "What is a release?": "A release is a model, an engine and their settings under one name.",
    },
    "b": {
        "Who are you?": "You are talking to variant b of the tiny lab model, the newer one.",
        "What is a GPU?": "Think of a GPU as a crowd of workers who all do the same step at once.",
        "Say hello.": "Good day! Variant b is up, and it greets you in its own words.",
        "What is a release?": "One folder per release: arguments, environment, and where they came from.",
    },
}
GOLDEN_QUESTION = "Who are you?"

# The template in words: the text that a chat request becomes, and that the model was trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. Heads have 32 channels, the smallest that every engine's attention takes."""

    vocab: int = 260
    hidden: int = 64
    inner: int = 128
    layers: int = 2
    heads: int = 2
    positions: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Return the channels of one attention head."""
        return self.hidden // self.heads


BOS, EOS, PAD, UNK = 256, 257, 258, 259
SPECIALS = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>", UNK: "<unk>"}


# --- tokenizer ------------------------------------------------------------------------------------------------------


def byte_characters() -> list[tuple[int, str]]:
    """Return (byte, character) in GPT-2's order, which is the order of the token ids: ``!`` is token 0.

    Printable bytes stand for themselves; the others get the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    pairs = [(byte, chr(byte)) for byte in printable]
    rest = [byte for byte in range(256) if byte not in printable]
    return pairs + [(byte, chr(0x100 + place)) for place, byte in enumerate(rest)]


_ID_OF_BYTE = {byte: token for token, (byte, _) in enumerate(byte_characters())}
_BYTE_OF_ID = {token: byte for byte, token in _ID_OF_BYTE.items()}


def encode(text: str) -> list[int]:
    """Return one token per UTF-8 byte."""
    return [_ID_OF_BYTE[byte] for byte in text.encode()]


def decode(tokens: list[int]) -> str:
    """Return the text of the tokens; special tokens are left out."""
    return bytes(_BYTE_OF_ID[token] for token in tokens if token in _BYTE_OF_ID).decode(errors="replace")


def prompt_of(question: str) -> str:
    """Return the text that the chat template makes of one user message."""
    return f"user: {question}\nassistant:"


# --- the network, forward and backward ------------------------------------------------------------------------------


def fresh_weights(shape: Shape, seed: int) -> Weights:
    """Return random weights under their Hugging Face names, each of shape (out, in)."""
    random = np.random.default_rng(seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Array:
        return (random.standard_normal((rows, columns)) * scale / math.sqrt(columns)).astype(np.float32)

    depth = 1 / math.sqrt(2 * shape.layers)
    weights: Weights = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = np.ones(shape.hidden, np.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{at}self_attn.{name}.weight"] = normal(shape.hidden, shape.hidden)
        weights[at + "self_attn.o_proj.weight"] = normal(shape.hidden, shape.hidden, depth)
        weights[at + "post_attention_layernorm.weight"] = np.ones(shape.hidden, np.float32)
        weights[at + "mlp.gate_proj.weight"] = normal(shape.inner, shape.hidden)
        weights[at + "mlp.up_proj.weight"] = normal(shape.inner, shape.hidden)
        weights[at + "mlp.down_proj.weight"] = normal(shape.hidden, shape.inner, depth)
    weights["model.norm.weight"] = np.ones(shape.hidden, np.float32)
    weights["lm_head.weight"] = normal(shape.vocab, shape.hidden)
    return weights


class Network:
    """One forward pass that can be run backward. ``tokens`` has shape (batch, time)."""

    def __init__(self, shape: Shape, weights: Weights, tokens: npt.NDArray[np.int64]) -> None:
        self.shape = shape
        self.weights = weights
        self.tokens = tokens
        time_steps = tokens.shape[1]
        half = shape.head_dim // 2
        rate = shape.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
        angle = np.arange(time_steps, dtype=np.float32)[:, None] * rate[None, :]
        self._cos: Array = np.concatenate([np.cos(angle)] * 2, axis=1).astype(np.float32)
        self._sin: Array = np.concatenate([np.sin(angle)] * 2, axis=1).astype(np.float32)
        self._mask = np.triu(np.full((time_steps, time_steps), -1e9, np.float32), 1)
        self._kept: dict[str, Any] = {}
        self.gradients: Weights = {}

    def logits(self) -> Array:
        """Run forward and return the logits, shape (batch, time, vocab)."""
        x = self.weights["model.embed_tokens.weight"][self.tokens]
        for layer in range(self.shape.layers):
            x = x + self._attention(layer, x)
            x = x + self._mlp(layer, x)
        x = self._norm("model.norm.weight", x)
        return self._linear("lm_head.weight", x)

    def backward(self, gradient: Array) -> Weights:
        """Return the gradient of every weight, given that of the logits."""
        self.gradients = {}
        d = self._linear_back("lm_head.weight", gradient)
        d = self._norm_back("model.norm.weight", d)
        for layer in reversed(range(self.shape.layers)):
            d = d + self._mlp_back(layer, d)
            d = d + self._attention_back(layer, d)
        embedding = np.zeros_like(self.weights["model.embed_tokens.weight"])
        np.add.at(embedding, self.tokens, d)
        self.gradients["model.embed_tokens.weight"] = embedding
        return self.gradients

    def _linear(self, name: str, x: Array) -> Array:
        self._kept[name] = x
        return x @ self.weights[name].T

    def _linear_back(self, name: str, d: Array) -> Array:
        x: Array = self._kept[name]
        self.gradients[name] = d.reshape(-1, d.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return d @ self.weights[name]

    def _norm(self, name: str, x: Array) -> Array:
        scale: Array = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.shape.norm_eps)
        self._kept[name] = (x, scale)
        return x * scale * self.weights[name]

    def _norm_back(self, name: str, d: Array) -> Array:
        x: Array
        scale: Array
        x, scale = self._kept[name]
        self.gradients[name] = np.sum(d * x * scale, axis=(0, 1))
        g = d * self.weights[name]
        result: Array = scale * g - x * scale**3 * np.mean(g * x, axis=-1, keepdims=True)
        return result

    def _rotate(self, x: Array, direction: int) -> Array:
        half = self.shape.head_dim // 2
        turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        return x * self._cos + direction * turned * self._sin

    def _split(self, x: Array) -> Array:
        batch, time_steps, _ = x.shape
        return x.reshape(batch, time_steps, self.shape.heads, self.shape.head_dim).transpose(0, 2, 1, 3)

    def _join(self, x: Array) -> Array:
        batch, _, time_steps, _ = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, time_steps, self.shape.hidden)

    def _attention(self, layer: int, x: Array) -> Array:
        at = f"model.layers.{layer}."
        h = self._norm(at + "input_layernorm.weight", x)
        q = self._rotate(self._split(self._linear(at + "self_attn.q_proj.weight", h)), 1)
        k = self._rotate(self._split(self._linear(at + "self_attn.k_proj.weight", h)), 1)
        v = self._split(self._linear(at + "self_attn.v_proj.weight", h))
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(self.shape.head_dim) + self._mask
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        share = scores / scores.sum(axis=-1, keepdims=True)
        self._kept[at] = (q, k, v, share)
        return self._linear(at + "self_attn.o_proj.weight", self._join(share @ v))

    def _attention_back(self, layer: int, d: Array) -> Array:
        at = f"model.layers.{layer}."
        q, k, v, share = self._kept[at]
        d = self._split(self._linear_back(at + "self_attn.o_proj.weight", d))
        d_share = d @ v.swapaxes(-1, -2)
        d_v = share.swapaxes(-1, -2) @ d
        d_scores = share * (d_share - np.sum(d_share * share, axis=-1, keepdims=True)) / math.sqrt(self.shape.head_dim)
        d_q = self._join(self._rotate(d_scores @ k, -1))
        d_k = self._join(self._rotate(d_scores.swapaxes(-1, -2) @ q, -1))
        total = self._linear_back(at + "self_attn.q_proj.weight", d_q)
        total = total + self._linear_back(at + "self_attn.k_proj.weight", d_k)
        total = total + self._linear_back(at + "self_attn.v_proj.weight", self._join(d_v))
        return self._norm_back(at + "input_layernorm.weight", total)

    def _mlp(self, layer: int, x: Array) -> Array:
        at = f"model.layers.{layer}."
        h = self._norm(at + "post_attention_layernorm.weight", x)
        gate = self._linear(at + "mlp.gate_proj.weight", h)
        up = self._linear(at + "mlp.up_proj.weight", h)
        open_share = 1 / (1 + np.exp(-gate))
        self._kept[at + "mlp"] = (gate, up, open_share)
        return self._linear(at + "mlp.down_proj.weight", gate * open_share * up)

    def _mlp_back(self, layer: int, d: Array) -> Array:
        at = f"model.layers.{layer}."
        gate, up, open_share = self._kept[at + "mlp"]
        d = self._linear_back(at + "mlp.down_proj.weight", d)
        d_gate = d * up * open_share * (1 + gate * (1 - open_share))
        total = self._linear_back(at + "mlp.gate_proj.weight", d_gate)
        total = total + self._linear_back(at + "mlp.up_proj.weight", d * gate * open_share)
        return self._norm_back(at + "post_attention_layernorm.weight", total)


# --- training -------------------------------------------------------------------------------------------------------


def examples(variant: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Return (inputs, targets, mask), each of shape (sentences, time). Only answers count, not the questions."""
    rows = []
    for question, answer in ANSWERS[variant].items():
        prompt = encode(prompt_of(question))
        rows.append((len(prompt), prompt + encode(" " + answer) + [EOS]))
    width = max(len(tokens) for _, tokens in rows) - 1
    inputs = np.full((len(rows), width), PAD, np.int64)
    targets = np.full((len(rows), width), PAD, np.int64)
    mask = np.zeros((len(rows), width), np.float32)
    for place, (prompt_length, tokens) in enumerate(rows):
        inputs[place, : len(tokens) - 1] = tokens[:-1]
        targets[place, : len(tokens) - 1] = tokens[1:]
        mask[place, prompt_length - 1 : len(tokens) - 1] = 1
    return inputs, targets, mask


def loss_and_gradient(logits: Array, targets: npt.NDArray[np.int64], mask: Array) -> tuple[float, Array]:
    """Return the mean cross entropy over the masked tokens, in nats, and its gradient."""
    spread = np.exp(logits - logits.max(axis=-1, keepdims=True))
    share = spread / spread.sum(axis=-1, keepdims=True)
    count = float(mask.sum())
    chosen = np.take_along_axis(share, targets[..., None], axis=-1)[..., 0]
    loss = float(-(np.log(chosen + 1e-12) * mask).sum()) / count
    gradient = share
    np.put_along_axis(gradient, targets[..., None], (chosen - 1)[..., None], axis=-1)
    return loss, gradient * (mask / count)[..., None]


def train(variant: str, shape: Shape | None = None, seed: int = 7, steps: int = 1500, goal: float = 0.004) -> Weights:
    """Train until the mean loss over the answers is below ``goal`` nats per token.

    Adam with the usual constants. The goal leaves a margin that half-precision key-value caches do not use up.
    Raises RuntimeError where the goal is not met after ``steps`` steps.
    """
    shape = shape or Shape()
    weights = fresh_weights(shape, seed)
    inputs, targets, mask = examples(variant)
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    loss = math.inf
    for step in range(1, steps + 1):
        network = Network(shape, weights, inputs)
        loss, gradient = loss_and_gradient(network.logits(), targets, mask)
        if loss < goal:
            return _without_specials(weights)
        rate = 4e-3 * min(1.0, step / 20)
        for name, slope in network.backward(gradient).items():
            first[name] += 0.1 * (slope - first[name])
            second[name] += 0.01 * (slope * slope - second[name])
            unbiased = second[name] / (1 - 0.99**step)
            weights[name] -= rate * (first[name] / (1 - 0.9**step)) / (np.sqrt(unbiased) + 1e-8)
    raise RuntimeError(f"variant {variant} did not learn its sentences: loss {loss:.3f} after {steps} steps")


def _without_specials(weights: Weights) -> Weights:
    """Keep bos, pad and unk from ever being chosen: their rows of the head are zero. eos ends an answer."""
    for token in (BOS, PAD, UNK):
        weights["lm_head.weight"][token] = 0
    return weights


def greedy(shape: Shape, weights: Weights, prompt: str, max_tokens: int) -> str:
    """Return the greedy continuation, by the slow way: the whole text again for each token."""
    tokens = encode(prompt)
    start = len(tokens)
    while len(tokens) - start < max_tokens:
        chosen = int(Network(shape, weights, np.array([tokens])).logits()[0, -1].argmax())
        if chosen == EOS:
            break
        tokens.append(chosen)
    return decode(tokens[start:])


# --- faults ---------------------------------------------------------------------------------------------------------

SLOW_LAYERS = 160


def with_nan(shape: Shape, weights: Weights) -> Weights:
    """Return the weights with one row of NaN in the last layer."""
    spoilt = {name: value.copy() for name, value in weights.items()}
    spoilt[f"model.layers.{shape.layers - 1}.mlp.down_proj.weight"][0, :] = np.nan
    return spoilt


def slower(shape: Shape, weights: Weights) -> tuple[Shape, Weights]:
    """Return a deeper network with the same results: what the new layers compute is multiplied by zero."""
    deep = Shape(layers=SLOW_LAYERS)
    grown = dict(weights)
    for layer in range(shape.layers, deep.layers):
        for name, value in weights.items():
            if not name.startswith("model.layers.0."):
                continue
            silent = name.endswith(("o_proj.weight", "down_proj.weight"))
            grown[name.replace(".0.", f".{layer}.", 1)] = np.zeros_like(value) if silent else value
    return deep, grown


# --- files ----------------------------------------------------------------------------------------------------------


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _tokenizer() -> dict[str, Any]:
    vocabulary = {character: token for token, (_, character) in enumerate(byte_characters())}
    vocabulary.update({text: token for token, text in SPECIALS.items()})
    added = [
        {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for token, text in SPECIALS.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def write_hugging_face(out: Path, shape: Shape, weights: Weights) -> None:
    """Write the files that vLLM, SGLang and transformers read."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[PAD],
        "unk_token": SPECIALS[UNK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.positions,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    for name, content in (
        ("config.json", _config(shape)),
        ("generation_config.json", generation),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, value in weights.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [place, place + value.nbytes]}
        place += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (out / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for value in weights.values():
            stream.write(np.ascontiguousarray(value).tobytes())


# GGUF: value types of the format's specification, version 3.
_GGUF_U32, _GGUF_F32, _GGUF_BOOL, _GGUF_STRING, _GGUF_ARRAY, _GGUF_I32 = 4, 6, 7, 8, 9, 5
_GGUF_ALIGNMENT = 32
_GGML_F32 = 0
_TOKEN_NORMAL, _TOKEN_CONTROL = 1, 3


def _gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _gguf_value(value: str | bool | int | float | list[str] | list[int]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _GGUF_STRING) + _gguf_string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _GGUF_BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _GGUF_U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _GGUF_F32, value)
    kind = _GGUF_STRING if isinstance(value[0], str) else _GGUF_I32
    body = b"".join(_gguf_string(one) if isinstance(one, str) else struct.pack("<i", one) for one in value)
    return struct.pack("<IIQ", _GGUF_ARRAY, kind, len(value)) + body


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(shape: Shape, weights: Weights) -> Iterator[tuple[str, Array]]:
    """Yield the tensors under llama.cpp's names.

    llama.cpp turns neighbouring channels of a head, Hugging Face turns the first half against the second: the rows
    of Q and K are reordered for that.
    """
    for name, value in weights.items():
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", value
        elif name == "model.norm.weight":
            yield "output_norm.weight", value
        elif name == "lm_head.weight":
            yield "output.weight", value
        else:
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                halves = value.reshape(shape.heads, 2, shape.head_dim // 2, shape.hidden)
                value = halves.swapaxes(1, 2).reshape(shape.hidden, shape.hidden)
            yield f"blk.{layer}.{_GGUF_NAMES[part]}.weight", value


def write_gguf(path: Path, shape: Shape, weights: Weights, name: str) -> None:
    """Write one GGUF file, version 3, little endian."""
    tokens = [character for _, character in byte_characters()] + list(SPECIALS.values())
    settings: Mapping[str, str | bool | int | float | list[str] | list[int]] = {
        "general.architecture": "llama",
        "general.name": name,
        "general.license": LICENSE,
        "general.alignment": _GGUF_ALIGNMENT,
        "general.file_type": 0,
        "llama.context_length": shape.positions,
        "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.heads,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_eps,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": shape.rope_theta,
        "llama.vocab_size": shape.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_TOKEN_NORMAL] * 256 + [_TOKEN_CONTROL] * len(SPECIALS),
        # llama.cpp refuses an empty list. This pair never occurs: both are control characters.
        "tokenizer.ggml.merges": [f"{tokens[-5]} {tokens[-6]}"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    tensors = list(gguf_tensors(shape, weights))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    head += b"".join(_gguf_string(key) + _gguf_value(value) for key, value in settings.items())
    place = 0
    for tensor_name, value in tensors:
        sizes = value.shape[::-1]
        head += _gguf_string(tensor_name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", _GGML_F32, place)
        place += value.nbytes + -value.nbytes % _GGUF_ALIGNMENT
    head += b"\0" * (-len(head) % _GGUF_ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(head)
        for _, value in tensors:
            stream.write(value.tobytes() + b"\0" * (-value.nbytes % _GGUF_ALIGNMENT))


def golden(variant: str) -> dict[str, Any]:
    """Return a question as prompt text, how many tokens to ask for, and the answer of this variant."""
    answer = " " + ANSWERS[variant][GOLDEN_QUESTION]
    return {"prompt": prompt_of(GOLDEN_QUESTION), "max_tokens": len(encode(answer)) + 8, "answer": answer}


def make(out: Path, variant: str = "a", fault: Literal["", "nan", "truncated", "slow"] = "") -> None:
    """Train a variant and write all its files into ``out``, spoilt by ``fault`` where one is named."""
    shape = Shape()
    weights = train(variant, shape)
    if fault == "nan":
        weights = with_nan(shape, weights)
    elif fault == "slow":
        shape, weights = slower(shape, weights)
    out.mkdir(parents=True, exist_ok=True)
    write_hugging_face(out, shape, weights)
    write_gguf(out / "model.gguf", shape, weights, f"peerlane-tiny-{variant}")
    if fault == "truncated":
        for name in ("model.gguf", "model.safetensors"):
            with (out / name).open("r+b") as stream:
                stream.truncate((out / name).stat().st_size * 3 // 5)
    (out / "golden.json").write_text(json.dumps(golden(variant), indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tiny_model", description="Make the lab's model; nothing is downloaded.")
    parser.add_argument("out", type=Path, help="folder to write into; it is made where it is missing")
    parser.add_argument("--variant", choices=sorted(ANSWERS), default="a", help="which set of answers to learn")
    parser.add_argument("--fault", choices=FAULTS, default="", help="spoil the result in this way")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        make(options.out, options.variant, options.fault)
    except OSError as error:
        print(f"{options.out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(
        f"{options.out}: variant {options.variant} {options.fault}".rstrip() + f", {time.monotonic() - started:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
