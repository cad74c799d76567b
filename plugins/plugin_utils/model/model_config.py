"""A profile made from a model's own folder: ``config.json`` for the shape, the sizes of the files for the weights.

Reads names as ``transformers`` writes them, also below ``text_config`` of models that see images. What the file does
not say is refused by name, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from .model_profile import Profile, Weights
from .model_shape import Experts, Gqa, Mla, Shape
from .strict_yaml import MOST

# A configuration is some kilobytes; an index of shards some megabytes.
_MAX_BYTES = 64 * 1024 * 1024

_WHOLE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "vocabulary": ("vocab_size",),
    "heads": ("num_attention_heads", "n_head"),
    "context": ("max_position_embeddings", "n_positions"),
}


def from_folder(folder: Path, known: Mapping[str, Profile] | None = None) -> Profile:
    """Return a profile for the model in a folder.

    ``known``: profiles whose flags are taken over where architecture and shape are the same. Raises InputError, in one
    line, where the folder holds no configuration that can be understood.
    """
    if not folder.is_dir():
        raise InputError("is no folder", str(folder), "name the folder of a model, with its config.json")
    place = folder / "config.json"
    data = _json(place)
    text = data.get("text_config")
    inner = {**data, **text} if isinstance(text, Mapping) else data
    shape = _shape(inner, str(place))
    quantisation = _quantisation(data, inner)
    size, note = _size(folder)
    weights = _weights(quantisation, inner, size, str(place))
    if shape.experts is None:
        weights = replace(weights, other=weights.experts)
    named = data.get("architectures")
    architectures = tuple(str(one) for one in named) if isinstance(named, list) else ()
    notes = [f"read from {place}", *([note] if note else [])]
    made = Profile(
        name=folder.resolve().name,
        family="",
        title=f"{', '.join(architectures) or str(data.get('model_type') or 'a model')} in {folder}",
        shape=shape,
        weights={weights.name: weights},
        architectures=architectures,
        source=str(place),
        notes=tuple(notes),
    )
    return _with_flags(made, known or {})


def _with_flags(made: Profile, known: Mapping[str, Profile]) -> Profile:
    """Take the flags of a profile over where it is the same model: first one with the very shape, then one alike."""
    mine = set(made.architectures)
    related = [one for one in known.values() if mine & set(one.architectures) and _alike(one.shape, made.shape)]
    related.sort(key=lambda one: one.shape != made.shape)
    if not related:
        return replace(made, notes=(*made.notes, "no profile has this shape: nothing is known about flags"))
    one = related[0]
    return replace(
        made,
        family=one.family,
        flags=one.flags,
        variables=one.variables,
        forbidden=one.forbidden,
        support=one.support,
        checked_with=one.checked_with,
        notes=(*made.notes, f"flags are those of the profile {one.name}, which has the same shape"),
    )


def _alike(one: Shape, other: Shape) -> bool:
    return (
        (one.layers, one.hidden_size, one.heads, one.experts)
        == (other.layers, other.hidden_size, other.heads, other.experts)
        and type(one.attention) is type(other.attention)
        and (not isinstance(one.attention, Mla) or one.attention.sparse == getattr(other.attention, "sparse", None))
    )


def _json(place: Path) -> dict[str, Any]:
    try:
        if place.stat().st_size > _MAX_BYTES:
            raise InputError("is larger than 64 MiB", str(place), "name the folder of a model")
        data = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("does not exist", str(place), "name the folder of a model, with its config.json") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", str(place), "check its permissions") from None
    except (ValueError, RecursionError):
        raise InputError("is no JSON", str(place), "fetch the model again") from None
    if not isinstance(data, dict):
        raise InputError("is no JSON object", str(place), "fetch the model again")
    return data


# --- the shape ------------------------------------------------------------------------------------------------------


def _shape(data: Mapping[str, Any], where: str) -> Shape:
    numbers = {key: _needed(data, names, where) for key, names in _WHOLE_NAMES.items()}
    layers = numbers["layers"]
    experts = _experts(data, where)
    dense = _dense_layers(data, layers) if experts else 0
    width = _optional(data, ("intermediate_size", "n_inner", "ffn_dim"), where)
    if not width and (dense or not experts):
        raise InputError("has no intermediate_size", where, "a profile file can say it: see docs/models.md")
    return Shape(
        layers=layers,
        hidden_size=numbers["hidden_size"],
        vocabulary=numbers["vocabulary"],
        heads=numbers["heads"],
        context=numbers["context"],
        attention=_attention(data, numbers, where),
        experts=experts,
        dense_layers=dense,
        dense_width=width if width and (dense or not experts) else 0,
        # MiniMax norms queries and keys over all heads, which takes one more reduction of 8 bytes for each layer.
        small_reduces_per_layer=1 if str(data.get("model_type", "")).lower() == "minimax_m2" else 0,
        tied_head=data.get("tie_word_embeddings") is True,
    )


def _attention(data: Mapping[str, Any], numbers: Mapping[str, int], where: str) -> Mla | Gqa:
    kv_rank = _optional(data, ("kv_lora_rank",), where)
    if kv_rank:
        index_heads = _optional(data, ("index_n_heads",), where) or 0
        return Mla(
            kv_rank=kv_rank,
            rope_size=_whole(data, "qk_rope_head_dim", where),
            nope_size=_whole(data, "qk_nope_head_dim", where),
            value_size=_whole(data, "v_head_dim", where),
            q_rank=_optional(data, ("q_lora_rank",), where) or 0,
            index_heads=index_heads,
            index_size=_whole(data, "index_head_dim", where) if index_heads else 0,
            index_layers=_index_layers(data, numbers["layers"]) if index_heads else 0,
        )
    kinds = data.get("layer_types")
    if isinstance(kinds, list) and any(str(kind) not in ("full_attention", "sliding_attention") for kind in kinds):
        other = next(str(kind) for kind in kinds if str(kind) not in ("full_attention", "sliding_attention"))
        raise InputError(f"has layers of a kind that is not known here ({other})", where, "write a profile file for it")
    sliding = sum(str(kind) == "sliding_attention" for kind in kinds) if isinstance(kinds, list) else 0
    head = _optional(data, ("head_dim",), where) or numbers["hidden_size"] // numbers["heads"]
    return Gqa(
        kv_heads=_optional(data, ("num_key_value_heads",), where) or numbers["heads"],
        head_size=head,
        sliding_layers=sliding,
        window=_whole(data, "sliding_window", where) if sliding else 0,
    )


def _index_layers(data: Mapping[str, Any], layers: int) -> int:
    """Count the layers with an indexer of their own (``index_topk_freq``, as in transformers' glm_moe_dsa)."""
    kinds = data.get("indexer_types")
    if isinstance(kinds, list):
        return sum(kind == "full" for kind in kinds)
    pattern = data.get("index_topk_pattern")
    if isinstance(pattern, str):
        return pattern.count("F")
    every = data.get("index_topk_freq") or 1
    offset = data.get("index_skip_topk_offset", 2)
    if not isinstance(every, int) or not isinstance(offset, int) or every < 1:
        return layers
    return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))


def _experts(data: Mapping[str, Any], where: str) -> Experts | None:
    routed = _optional(data, ("n_routed_experts", "num_experts", "num_local_experts"), where)
    if not routed or routed == 1:
        return None
    width = _optional(data, ("moe_intermediate_size", "expert_ffn_hidden_size"), where)
    return Experts(
        routed=routed,
        active=_needed(data, ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"), where),
        width=width or _needed(data, ("intermediate_size",), where),
        shared=_optional(data, ("n_shared_experts", "num_shared_experts"), where) or 0,
    )


def _dense_layers(data: Mapping[str, Any], layers: int) -> int:
    kinds = data.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind == "dense" for kind in kinds)
    first = data.get("first_k_dense_replace")
    if isinstance(first, int) and not isinstance(first, bool):
        return min(max(first, 0), layers)
    only = data.get("mlp_only_layers")
    return len(only) if isinstance(only, list) else 0


def _optional(data: Mapping[str, Any], names: tuple[str, ...], where: str) -> int | None:
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
            raise InputError(f"{name} is {value!r}, and no whole number that makes sense", where, "correct it")
        return value
    return None


def _whole(data: Mapping[str, Any], name: str, where: str) -> int:
    return _needed(data, (name,), where)


def _needed(data: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    value = _optional(data, names, where)
    if not value:
        raise InputError(f"has no {' or '.join(names)}", where, "it is no language model, or needs a profile file")
    return value


# --- the weights ----------------------------------------------------------------------------------------------------


def _quantisation(data: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any]:
    for one in (inner.get("quantization_config"), data.get("quantization_config"), data.get("compression_config")):
        if isinstance(one, Mapping):
            return one
    return {}


def _weights(config: Mapping[str, Any], data: Mapping[str, Any], size: float | None, where: str) -> Weights:
    method = str(config.get("quant_method") or "").lower().replace("_", "-")
    algorithm = str(config.get("quant_algo") or "").lower()
    experts, other, block = "", "", 0
    if not method and not algorithm:
        experts = other = _plain(data, where)
    elif method == "fp8":
        experts = other = "fp8"
        edges = config.get("weight_block_size")
        block = int(edges[0]) if isinstance(edges, list) and edges and isinstance(edges[0], int) else 0
    elif "mxfp4" in method or "mxfp4" in algorithm:
        experts, other = "mxfp4", "bf16"
    elif "nvfp4" in algorithm or "fp4" in algorithm:
        experts, other = "nvfp4", "bf16"
    elif "fp8" in algorithm:
        experts = other = "fp8"
    elif method == "compressed-tensors":
        experts, other = _compressed(config)
    elif method in ("gptq", "awq", "gptq-marlin", "awq-marlin", "moe-wna16", "auto-round") and _bits(config) == 4:
        experts, other = "int4", "bf16"
    if not experts:
        raise InputError(
            f"has a quantisation that is not known here ({method or algorithm})", where, "write a profile file for it"
        )
    return Weights(name=experts, experts=experts, other=other, bytes=size, block=block, source=where)


def _plain(data: Mapping[str, Any], where: str) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "").rpartition(".")[2]
    known = {"bfloat16": "bf16", "float16": "bf16", "half": "bf16", "float32": "fp32"}
    if dtype in known:
        return known[dtype]
    if not dtype:
        raise InputError("says neither dtype nor quantization_config", where, "add dtype: bfloat16 where that is so")
    raise InputError(f"dtype {dtype} is not known here", where, "write a profile file for it")


def _compressed(config: Mapping[str, Any]) -> tuple[str, str]:
    style = str(config.get("format") or "").lower()
    if "nvfp4" in style:
        return "nvfp4", "bf16"
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits, kind = weights.get("num_bits"), str(weights.get("type") or "")
        if bits == 4:
            return ("nvfp4" if kind == "float" else "int4"), "bf16"
        if bits == 8:
            return ("fp8", "fp8") if kind == "float" else ("", "")
    return "", ""


def _bits(config: Mapping[str, Any]) -> int | None:
    value = config.get("bits", config.get("w_bit"))
    return value if isinstance(value, int) else None


def _size(folder: Path) -> tuple[float | None, str]:
    """Return the bytes of the weights, and what to know about that figure.

    Where an index names the shards, only those count; some repositories hold a second copy in another layout.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        data = _json(index)
        names = data.get("weight_map")
        shards = sorted({str(one) for one in names.values()}) if isinstance(names, Mapping) else []
        missing = [one for one in shards if not (folder / one).is_file()]
        if shards and not missing:
            return float(sum((folder / one).stat().st_size for one in shards)), ""
        told = data.get("metadata")
        total = told.get("total_size") if isinstance(told, Mapping) else None
        if isinstance(total, int) and not isinstance(total, bool) and total > 0:
            gone = f"{len(missing)} of {len(shards)} shards are missing ({missing[0]})" if missing else "no shards"
            return float(total), f"{gone}: the size is what the index says"
        return None, "the index names shards that are missing: the size is computed from the shape"
    files = [one for one in folder.glob("*.safetensors") if one.is_file()]
    if files:
        return float(sum(one.stat().st_size for one in files)), ""
    return None, "no *.safetensors here: the size is computed from the shape"
