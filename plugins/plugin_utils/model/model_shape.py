"""The shape of a language model, and what follows from it: parameters, bytes per token, KV cache, all-reduces.

Counts are of text layers; a vision encoder and draft (MTP) layers are not in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# Bytes of one indexer key of DeepSeek sparse attention: ``index_size`` fp8 values and one fp32 scale (vLLM and SGLang:
# [blocks, 64, 132] for a size of 128).
_INDEX_SCALE_BYTES = 4

# Bytes of one row of the packed fp8 layout of sparse MLA beside the fp8 latent: four fp32 scales; the rotary part stays
# bf16 (512 + 16 + 128 = 656 for a rank of 512 and a rotary part of 64).
_PACKED_SCALE_BYTES = 16

BF16_BYTES = 2


@dataclass(frozen=True)
class Mla:
    """Latent attention. ``index_*`` are of DeepSeek sparse attention: 0 heads means that there is none.

    ``index_layers``: layers with an indexer of their own; the others share the one before.
    """

    kv_rank: int
    rope_size: int
    nope_size: int
    value_size: int
    q_rank: int = 0
    index_heads: int = 0
    index_size: int = 0
    index_layers: int = 0

    @property
    def sparse(self) -> bool:
        """Whether it is DeepSeek sparse attention."""
        return self.index_heads > 0


@dataclass(frozen=True)
class Gqa:
    """Attention with grouped keys. ``sliding_layers`` see ``window`` tokens only."""

    kv_heads: int
    head_size: int
    sliding_layers: int = 0
    window: int = 0


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of one layer. ``width``: intermediate size of one expert."""

    routed: int
    active: int
    width: int
    shared: int = 0


@dataclass(frozen=True)
class Parameters:
    """Parameters by what becomes of them: ``experts`` are the routed ones, ``replicated`` is a part of ``other``.

    ``replicated`` lies on every tensor parallel rank in full: MLA's down projections, the indexers, the routers.
    """

    experts: int
    other: int
    embedding: int
    head: int
    replicated: int

    @property
    def total(self) -> int:
        """Return all of them."""
        return self.experts + self.other + self.embedding + self.head


@dataclass(frozen=True)
class AllReduces:
    """All-reduces of one forward pass under tensor parallelism: ``count`` of ``bytes_per_token`` each.

    ``small_count`` more carry 8 bytes per token (the variances of a norm over all heads).
    """

    count: int
    bytes_per_token: int
    small_count: int = 0


@dataclass(frozen=True)
class Shape:
    """A decoder. ``dense_layers`` come first and have no experts; ``dense_width`` is their intermediate size."""

    layers: int
    hidden_size: int
    vocabulary: int
    heads: int
    context: int
    attention: Mla | Gqa
    experts: Experts | None = None
    dense_layers: int = 0
    dense_width: int = 0
    small_reduces_per_layer: int = 0
    tied_head: bool = False

    @property
    def expert_layers(self) -> int:
        """Return how many layers have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def parameters(self) -> Parameters:
        """Return the parameters, without norms and biases."""
        attention, replicated = self._attention()
        other = attention
        dense = self.dense_layers if self.experts else self.layers
        other += dense * 3 * self.hidden_size * self.dense_width
        experts = 0
        if self.experts:
            one = 3 * self.hidden_size * self.experts.width
            experts = self.expert_layers * self.experts.routed * one
            router = self.expert_layers * self.hidden_size * self.experts.routed
            other += self.expert_layers * self.experts.shared * one + router
            replicated += router
        embedding = self.vocabulary * self.hidden_size
        return Parameters(experts, other, embedding, 0 if self.tied_head else embedding, replicated)

    def active(self) -> Parameters:
        """Return the parameters that one token reads (the embedding is a look-up, and counts as none)."""
        all_of_it = self.parameters()
        share = self.experts.active / self.experts.routed if self.experts else 0
        return Parameters(
            experts=round(all_of_it.experts * share),
            other=all_of_it.other,
            embedding=0,
            head=all_of_it.head or all_of_it.embedding,
            replicated=all_of_it.replicated,
        )

    def _attention(self) -> tuple[int, int]:
        """Return the parameters of all layers' attention, and how many of them every rank holds in full."""
        hidden, kind = self.hidden_size, self.attention
        if isinstance(kind, Gqa):
            return self.layers * 2 * hidden * kind.head_size * (self.heads + kind.kv_heads), 0
        head = kind.nope_size + kind.rope_size
        down = hidden * (kind.q_rank + kind.kv_rank + kind.rope_size)
        up = (kind.q_rank or hidden) * self.heads * head + kind.kv_rank * self.heads * (
            kind.nope_size + kind.value_size
        )
        out = self.heads * kind.value_size * hidden
        index = kind.index_layers * (
            (kind.q_rank or hidden) * kind.index_heads * kind.index_size + hidden * (kind.index_size + kind.index_heads)
        )
        return self.layers * (down + up + out) + index, self.layers * down + index

    def all_reduces(self) -> AllReduces:
        """Return the all-reduces of one pass: two a layer (attention, MLP or experts), one for the embedding.

        Source: layer code of vLLM; experts and shared experts are summed before one reduction.
        """
        return AllReduces(
            2 * self.layers + 1, self.hidden_size * BF16_BYTES, self.small_reduces_per_layer * self.layers
        )

    def kv_bytes_per_token(
        self,
        kv_dtype: str,
        tensor_parallel: int = 1,
        layers: int | None = None,
        packed: bool = True,
        every_layer_indexed: bool = False,
    ) -> float:
        """Return the bytes of KV cache that one more token of context takes on each GPU.

        ``kv_dtype``: bf16 or fp8. ``layers``: of this pipeline stage, all for None. ``packed``: sparse attention in fp8
        keeps scales and a bf16 rotary part in each row. ``every_layer_indexed``: the engine keeps indexer keys for all
        layers, also those that share one. MLA is not split by tensor parallelism, and neither is a single KV head.
        Layers with a sliding window take nothing more once the window is full: see ``kv_bytes_per_stream``.
        """
        size = 1 if kv_dtype == "fp8" else BF16_BYTES
        stage = (layers or self.layers) / self.layers
        kind = self.attention
        if isinstance(kind, Gqa):
            heads = max(1, math.ceil(kind.kv_heads / tensor_parallel))
            return stage * (self.layers - kind.sliding_layers) * 2 * heads * kind.head_size * size
        row: float = (kind.kv_rank + kind.rope_size) * size
        if kind.sparse and size == 1 and packed:
            row = kind.kv_rank + _PACKED_SCALE_BYTES + kind.rope_size * BF16_BYTES
        index_layers = self.layers if kind.sparse and every_layer_indexed else kind.index_layers
        index = index_layers * (kind.index_size + _INDEX_SCALE_BYTES) if kind.sparse else 0
        return stage * (self.layers * row + index)

    def kv_bytes_per_stream(self, kv_dtype: str, tensor_parallel: int = 1, layers: int | None = None) -> float:
        """Return the bytes that the sliding layers of one stream take on each GPU, whatever its length."""
        kind = self.attention
        if not isinstance(kind, Gqa) or not kind.sliding_layers:
            return 0.0
        size = 1 if kv_dtype == "fp8" else BF16_BYTES
        heads = max(1, math.ceil(kind.kv_heads / tensor_parallel))
        stage = (layers or self.layers) / self.layers
        return stage * kind.sliding_layers * kind.window * 2 * heads * kind.head_size * size


Precision = Literal["bf16", "fp8", "int4", "nvfp4", "mxfp4", "fp32"]

# Bytes of one parameter in each format, scales included: NVFP4 has an fp8 scale for 16 values, MXFP4 an 8-bit one for
# 32, INT4 here a bf16 one for 32 (Kimi); the fp32 scales of FP8 blocks of 128 x 128 don't count.
PARAMETER_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int4": 0.5625,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
