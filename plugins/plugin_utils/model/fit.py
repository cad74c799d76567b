"""Does a model fit? Memory of each GPU for weights, KV cache and what the engine needs beside, over layouts.

What an engine takes beside weights and cache is not known to the megabyte, so there is a low and a high figure
(``fit.yml``, with origins). A layout ``fits`` when even the high one leaves room for the wanted context and streams, it
``does not fit`` when not even the low one does, and is ``tight`` between. What is not known makes it ``unknown``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from .model_profile import Profile, Weights
from .model_shape import BF16_BYTES, PARAMETER_BYTES, Mla, Shape

_FILE = Path(__file__).resolve().parent / "fit.yml"

GIB = 1024**3

State = Literal["fits", "tight", "does not fit", "not possible", "unknown"]

# The engines whose memory is computed; the others run on the CPU, in the host's memory.
ENGINES = ("vllm", "sglang")

# How many GPUs are tried when it is asked how many are needed.
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_GPUS_PER_HOST = 8

_EXPERT_WIDTH = "an expert's width"


@dataclass(frozen=True)
class Layout:
    """How a model is laid over GPUs. ``experts``: expert parallelism over all tensor and data parallel ranks."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False

    @property
    def gpus(self) -> int:
        """Return how many GPUs it takes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        parts = [
            f"{name}{size}"
            for name, size in (("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data))
            if size > 1
        ]
        return " x ".join(parts or ["TP1"]) + (" + EP" if self.experts else "")


@dataclass(frozen=True)
class Request:
    """What is to be served on what. ``gpu_memory_gib`` and ``sm`` None: not known."""

    engine: str = "vllm"
    gpu_memory_gib: float | None = None
    sm: int | None = None
    context: int = 32768
    streams: int = 1
    kv_dtype: str = "bf16"


@dataclass(frozen=True)
class Fit:
    """The verdict on one layout with one checkpoint. Sizes are GiB for each GPU; None where not known.

    ``kv_tokens``: how many tokens of context fit in all, at the high reserve for ``fits``, else at the low one.
    """

    layout: Layout
    weights: str
    state: State
    text: str
    weights_gib: float | None = None
    kv_gib: float | None = None
    reserve_low_gib: float | None = None
    reserve_high_gib: float | None = None
    left_gib: float | None = None
    kv_tokens: int | None = None
    notes: tuple[str, ...] = ()


@functools.cache
def _data() -> Mapping[str, Any]:
    return dict(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def weight_bytes(shape: Shape, weights: Weights) -> float:
    """Return the bytes of a checkpoint: as told, else computed from the shape (without draft layers)."""
    if weights.bytes is not None:
        return weights.bytes
    return _computed(shape, weights)


def _computed(shape: Shape, weights: Weights) -> float:
    count = shape.parameters()
    other = PARAMETER_BYTES[weights.other]
    embedding = max(float(BF16_BYTES), other)
    return (
        count.experts * PARAMETER_BYTES[weights.experts]
        + count.other * other
        + ((count.embedding + count.head) * embedding)
    )


def active_bytes(shape: Shape, weights: Weights) -> float:
    """Return the bytes of weights that one token reads, over all GPUs."""
    count = shape.active()
    other = PARAMETER_BYTES[weights.other]
    embedding = max(float(BF16_BYTES), other)
    return count.experts * PARAMETER_BYTES[weights.experts] + count.other * other + count.head * embedding


def weights_per_gpu(shape: Shape, weights: Weights, layout: Layout) -> float:
    """Return the bytes of weights on the fullest GPU.

    What tensor parallelism does not split (MLA's down projections, indexers, routers) lies on every rank. Under data
    parallelism all but the routed experts does. Pipeline stages get whole layers.
    """
    total = weight_bytes(shape, weights)
    scale = total / _computed(shape, weights)
    count = shape.parameters()
    other = PARAMETER_BYTES[weights.other]
    embedding = max(float(BF16_BYTES), other)
    experts = count.experts * PARAMETER_BYTES[weights.experts] * scale
    fixed = count.replicated * max(other, 1.0) * scale
    rest = total - experts - fixed
    ends = (count.embedding + count.head) * embedding * scale
    share = 1 / layout.tensor
    if layout.experts and shape.experts:
        share = math.ceil(shape.experts.routed / (layout.tensor * layout.data)) / shape.experts.routed
    stage = math.ceil(shape.layers / layout.pipeline) / shape.layers
    end = ends / layout.tensor / min(layout.pipeline, 2)
    layers = experts * share + (rest - ends) / layout.tensor + fixed
    return (layers * stage + end) * weights.loaded_factor


def reserve_gib(request: Request, shape: Shape, layout: Layout) -> tuple[float, float]:
    """Return what the engine takes beside weights and KV cache, in GiB: low and high."""
    memory = request.gpu_memory_gib or 0.0
    row = _data()["engines"][request.engine]
    large = memory >= _data()["large_from_gib"]["value"]
    if request.engine == "sglang":
        low, high = _sglang_reserve_gib(row, memory, isinstance(shape.attention, Mla), layout)
    else:
        bounds = row["reserve_gib"]["large" if large else "small"]
        low, high = bounds["low"], bounds["high"]
    if layout.data > 1 and layout.experts:
        extra = _data()["exchange_gib"]["value"]
        low, high = low + extra, high + extra
    return low, high


def _sglang_reserve_gib(row: Mapping[str, Any], memory: float, mla: bool, layout: Layout) -> tuple[float, float]:
    """Return SGLang's own estimate of activations and CUDA graphs for its defaults, and for its smallest settings."""
    slack = row["constant_mib"] + row["per_rank_mib"] * layout.tensor * layout.pipeline
    slack += row["mla_graphs_mib"] if mla else 0

    def settings(size: Mapping[str, int]) -> float:
        return float(row["per_token_mib"] * size["chunk"] + row["per_graph_batch_mib"] * size["batch"] + slack)

    high = settings(next(one for one in row["defaults"] if memory < one["below_gib"]))
    if memory > row["floor_from_gib"]:
        high = max(high, float(row["floor_mib"]))
    low = settings(row["smallest"]) if mla else float(row["after_graphs_mib"] + slack)
    return min(low, high) / 1024, high / 1024


def kv_bytes(shape: Shape, request: Request, layout: Layout) -> tuple[float, float]:
    """Return the bytes of KV cache on each GPU: for one token of context, and for one stream whatever its length."""
    layers = math.ceil(shape.layers / layout.pipeline)
    # On SM 10x both engines read sparse MLA from a plain fp8 cache, elsewhere from packed rows.
    packed = request.sm is None or not 100 <= request.sm <= 109
    token = shape.kv_bytes_per_token(
        request.kv_dtype, layout.tensor, layers, packed, every_layer_indexed=request.engine == "sglang"
    )
    return token, shape.kv_bytes_per_stream(request.kv_dtype, layout.tensor, layers)


def impossible(shape: Shape, weights: Weights, layout: Layout) -> str:
    """Return in one line why a layout cannot work whatever the memory, or "" (hard rules of the engines)."""
    if shape.heads % layout.tensor:
        even = _among([one for one in range(1, shape.heads + 1) if shape.heads % one == 0])
        return f"{shape.heads} attention heads cannot be split over {layout.tensor} GPUs: use tensor parallel {even}"
    if layout.pipeline > shape.layers:
        return f"{shape.layers} layers cannot make {layout.pipeline} pipeline stages"
    if layout.experts and not shape.experts:
        return "expert parallelism needs a model with experts"
    if weights.block:
        for name, width, split in _widths(shape, layout):
            if width % split or (width // split) % weights.block:
                share = f"{width // split}" if width % split == 0 else f"{width}/{split}"
                good = [
                    one
                    for one in range(1, 65)
                    if width % one == 0 and (width // one) % weights.block == 0 and shape.heads % one == 0
                ]
                ways = [f"tensor parallel {_among(good)}"] if good else []
                ways += ["expert parallel"] if name == _EXPERT_WIDTH else []
                todo = f": use {', or '.join(ways)}" if ways else ""
                return f"{name} of {share} for each GPU is no multiple of the FP8 block of {weights.block}{todo}"
    return ""


def _widths(shape: Shape, layout: Layout) -> Iterable[tuple[str, int, int]]:
    if shape.experts and not layout.experts:
        yield _EXPERT_WIDTH, shape.experts.width, layout.tensor
    if shape.dense_width and (shape.dense_layers or not shape.experts):
        yield "a dense layer's width", shape.dense_width, layout.tensor


def _among(numbers: list[int]) -> str:
    words = [str(one) for one in numbers if one <= _GPUS_PER_HOST] or [str(min(numbers))]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def format_problem(weights: Weights, engine: str, sm: int | None) -> tuple[str, str]:
    """Return why a checkpoint's number format does not run on an architecture, and what to know where it does.

    One of both is "", or both are. Nothing is said where the architecture is not known.
    """
    if sm is None:
        return "", ""
    for name in dict.fromkeys((weights.experts, weights.other)):
        row = _data()["formats"][name]
        oldest = row.get("fallback", {}).get(engine, row["native"])
        if sm < oldest:
            return f"{name.upper()} weights need SM {oldest} or later in {engine}, and this is SM {sm}", ""
        if sm < row["native"]:
            return "", f"SM {sm} has no {name.upper()} arithmetic: weights are unpacked first, which is slower"
    return "", ""


def judge(shape: Shape, weights: Weights, layout: Layout, request: Request) -> Fit:
    """Judge one checkpoint on one layout."""
    reason = impossible(shape, weights, layout)
    if reason:
        return Fit(layout, weights.name, "not possible", reason)
    reason, note = format_problem(weights, request.engine, request.sm)
    if reason:
        return Fit(layout, weights.name, "not possible", reason)
    notes = tuple(one for one in (note, *_size_notes(weights)) if one)
    here = weights_per_gpu(shape, weights, layout) / GIB
    token, stream = kv_bytes(shape, request, layout)
    # Data parallel ranks share the streams.
    streams = math.ceil(request.streams / layout.data)
    wanted = (token * request.context + stream) * streams / GIB
    if request.engine not in ENGINES:
        text = f"how much memory {request.engine} takes is not computed: it runs in the host's memory"
        return Fit(layout, weights.name, "unknown", text, here, wanted, notes=notes)
    if request.gpu_memory_gib is None:
        text = f"the GPUs' memory is not known: weights take {here:.1f} GiB of each, this KV cache {wanted:.1f} GiB"
        return Fit(layout, weights.name, "unknown", text, here, wanted, notes=notes)
    low, high = reserve_gib(request, shape, layout)
    budget = request.gpu_memory_gib * _data()["engines"][request.engine]["share"]["value"] - here
    state: State = "fits" if wanted <= budget - high else "tight" if wanted <= budget - low else "does not fit"
    left = budget - (high if state == "fits" else low)
    tokens = max(0, int((left * GIB - stream * streams) / token)) * layout.data if token else None
    text = _text(state, left, tokens, wanted, here, (low, high))
    return Fit(layout, weights.name, state, text, here, wanted, low, high, left, tokens, notes)


def _size_notes(weights: Weights) -> Iterable[str]:
    if weights.bytes is None:
        yield "the checkpoint's size is computed from the shape, not measured"


def _text(
    state: State, left: float, tokens: int | None, wanted: float, weights: float, reserve: tuple[float, float]
) -> str:
    if state == "fits":
        return f"fits: {left:.1f} GiB left for KV = {tokens or 0:,} tokens"
    if state == "tight":
        return (
            f"tight: at best {left:.1f} GiB left for KV = {tokens or 0:,} tokens; the engine itself takes "
            f"{reserve[0]:.1f} to {reserve[1]:.1f} GiB"
        )
    if left <= 0:
        return (
            f"does not fit: weights of {weights:.1f} GiB and the engine's own {reserve[0]:.1f} GiB leave nothing for KV"
        )
    return f"does not fit: {left:.1f} GiB left for KV at best, and {wanted:.1f} GiB are wanted"


def layouts(gpus: int, shape: Shape) -> tuple[Layout, ...]:
    """Return the layouts of so many GPUs that are worth a look: tensor, tensor x pipeline, and with experts spread.

    A tensor parallel group has at most eight GPUs: more are on another host, or behind another hop.
    """
    found = []
    for tensor in range(min(gpus, _GPUS_PER_HOST), 0, -1):
        if gpus % tensor == 0:
            found.append(Layout(tensor, gpus // tensor))
            if shape.experts and tensor > 1:
                found.append(Layout(tensor, gpus // tensor, experts=True))
    if shape.experts and gpus > 1:
        found.append(Layout(1, 1, gpus, experts=True))
    return tuple(found)


def table(profile: Profile, gpus: int, request: Request, kv_dtypes: Mapping[str, str] | None = None) -> tuple[Fit, ...]:
    """Return the verdicts for all checkpoints and layouts on so many GPUs.

    ``kv_dtypes``: type of the KV cache for a checkpoint, where it is another than the request's.
    """
    found = []
    for weights in profile.weights.values():
        asked = _with_kv(request, (kv_dtypes or {}).get(weights.name))
        for layout in layouts(gpus, profile.shape):
            twin = Layout(layout.tensor, layout.pipeline)
            # Experts spread over the same GPUs take the same memory: of use where the plain layout is refused.
            if layout.experts and layout.data == 1 and not impossible(profile.shape, weights, twin):
                continue
            found.append(judge(profile.shape, weights, layout, asked))
    return tuple(found)


def _with_kv(request: Request, kv_dtype: str | None) -> Request:
    if kv_dtype is None or kv_dtype == request.kv_dtype:
        return request
    return Request(request.engine, request.gpu_memory_gib, request.sm, request.context, request.streams, kv_dtype)


def way_out(profile: Profile, gpus: int, request: Request, kv_dtypes: Mapping[str, str] | None = None) -> str:
    """Return in one line what would fit where nothing does: so many GPUs, this quantisation; else ""."""
    verdicts = table(profile, gpus, request, kv_dtypes)
    if request.gpu_memory_gib is None or not verdicts or any(one.state in ("fits", "tight") for one in verdicts):
        return ""
    offers = []
    for weights in profile.weights.values():
        asked = _with_kv(request, (kv_dtypes or {}).get(weights.name))
        for count in _COUNTS:
            fits = [one for one in layouts(count, profile.shape) if _fits(profile.shape, weights, one, asked)]
            if fits:
                offers.append((count, f"{weights.name} needs {count} of these GPUs ({fits[0]})"))
                break
    if offers:
        return "; ".join(text for _, text in sorted(offers))
    return f"no checkpoint of this profile fits on up to {_COUNTS[-1]} of these GPUs"


def _fits(shape: Shape, weights: Weights, layout: Layout, request: Request) -> bool:
    return judge(shape, weights, layout, request).state == "fits"
