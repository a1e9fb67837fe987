# SPDX-License-Identifier: Apache-2.0
"""What must agree, besides the tokens, before stored KV bytes may be used again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .framing import framed_digest

FINGERPRINT_BYTES = 16
FORMAT_VERSION = 1
"""Version of the stored bytes' meaning; a new one makes every older page a miss."""

_DOMAIN = "sglang-tardis/namespace/v1"

_KV_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
}


def canonical_kv_dtype(name: str) -> str:
    """Canonical name of the KV cache's element type, such as "float8_e4m3fn".

    Takes torch's names (with or without "torch.") and SGLang's (`--kv-cache-dtype`). "uint8" and "auto" are refused:
    SGLang keeps both fp8 types as uint8 in its pools, and bytes of one must never be taken for the other, so the caller
    has to resolve them (`model_runner.kv_cache_dtype`). Raises ValueError.
    """
    if not isinstance(name, str):
        name = str(name)
    canonical = _KV_DTYPES.get(name.removeprefix("torch.").lower())
    if canonical is None:
        raise ValueError(
            f"KV dtype {name!r} does not say how bytes are to be read; expected one of {', '.join(sorted(_KV_DTYPES))}"
        )
    return canonical


class NamespaceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides tokens that two pages must share to be interchangeable.

    Equal `fingerprint()` and equal `description()` go together: both are made from the same canonical fields. Fields
    are checked when an identity is made; a wrong one raises ValueError or TypeError naming the field.
    """

    model_name: Annotated[str, Meta(description="Model name as served; SGLang appends its pool's format tag, if any.")]
    model_config: Annotated[
        str, Meta(description="Digest of the effective model configuration (`weights.model_config_digest`).")
    ]
    weights: Annotated[str, Meta(description="`weights.weights_fingerprint`, or the setting `weights_revision`.")]
    kv_dtype: Annotated[str, Meta(description="Element type of the KV bytes, as `canonical_kv_dtype` spells it.")]
    layers: Annotated[int, Meta(ge=1, description="Layers stored by this rank, packed draft layers included.")]
    start_layer: Annotated[int, Meta(ge=0, description="First layer of this pipeline stage, in the whole model.")]
    end_layer: Annotated[int, Meta(ge=1, description="One past the last layer of this pipeline stage.")]
    kv_heads: Annotated[int, Meta(ge=1, description="KV heads of this rank; 1 for MLA.")]
    head_dim: Annotated[int, Meta(ge=1, description="Elements of a key head; of the latent + RoPE row for MLA.")]
    v_head_dim: Annotated[int, Meta(ge=0, description="Elements of a value head; 0 for MLA, which stores no V.")]
    page_size: Annotated[int, Meta(ge=1, description="Tokens in a page, as the radix tree counts them.")]
    layout: Annotated[str, Meta(description="Layout tag of the stored bytes (`pieces.PieceLayout.tag`).")]
    pool: Annotated[str, Meta(description="Name of the host pool; `kv` is the target model's KV.")] = "kv"
    is_mla: Annotated[
        bool, Meta(description="Multi-head latent attention: every TP rank holds equal bytes, and tp_rank is left out.")
    ] = False
    is_eagle: Annotated[
        bool,
        Meta(
            description="The tree hashes bigrams (EAGLE). Such keys never equal plain ones at one page size, so "
            "keeping them apart costs no hit, and no assumption is made that both kinds of tree hold equal KV."
        ),
    ] = False
    tp_rank: Annotated[int, Meta(ge=0, description="Rank in the attention TP group. Not part of an MLA identity.")] = 0
    tp_size: Annotated[
        int,
        Meta(ge=1, description="Attention TP size. Part of MLA identities too: sums are rounded in another order."),
    ] = 1
    pp_rank: Annotated[int, Meta(ge=0, description="Pipeline stage.")] = 0
    pp_size: Annotated[int, Meta(ge=1, description="Pipeline stages.")] = 1
    cp_rank: Annotated[int, Meta(ge=0, description="Rank in the attention context-parallel group.")] = 0
    cp_size: Annotated[int, Meta(ge=1, description="Attention context-parallel size.")] = 1
    dcp_rank: Annotated[int, Meta(ge=0, description="Rank in the decode context-parallel group.")] = 0
    dcp_size: Annotated[int, Meta(ge=1, description="Decode context-parallel size.")] = 1
    dp_rank: Annotated[
        int,
        Meta(ge=0, description="Leave 0 of 1 where replicas hold equal bytes and may share; set to keep them apart."),
    ] = 0
    dp_size: Annotated[int, Meta(ge=1, description="See dp_rank.")] = 1
    format_version: Annotated[int, Meta(ge=1, description="Version of the stored bytes' meaning.")] = FORMAT_VERSION
    extra: Annotated[
        dict[str, str],
        Meta(
            description="Further facts that change KV values: weight quantisation, KV scales from a file "
            "(`--quantization-param-path`), an engine release that changed the maths."
        ),
    ] = {}  # msgspec copies an empty mutable default for each instance

    def __post_init__(self) -> None:
        """Check types, bounds and the rules between fields."""
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type, strict=True)
            except msgspec.ValidationError as error:
                raise ValueError(f"namespace field {field.name} = {value!r}: {error}") from None
        for name in ("model_config", "weights", "layout", "pool"):
            if not getattr(self, name):
                raise ValueError(f"namespace field {name} must not be empty")
        if self.kv_dtype != canonical_kv_dtype(self.kv_dtype):
            raise ValueError(
                f"namespace field kv_dtype = {self.kv_dtype!r}: write it as {canonical_kv_dtype(self.kv_dtype)!r}"
            )
        if self.end_layer <= self.start_layer:
            raise ValueError(
                f"namespace field end_layer = {self.end_layer} must exceed start_layer = {self.start_layer}"
            )
        for group in ("tp", "pp", "cp", "dcp", "dp"):
            rank, size = getattr(self, f"{group}_rank"), getattr(self, f"{group}_size")
            if rank >= size:
                raise ValueError(f"namespace field {group}_rank = {rank} must be below {group}_size = {size}")

    def canonical(self) -> Mapping[str, Any]:
        """Fields that make up the identity, by name; a field that is no part of it is None."""
        fields = msgspec.structs.asdict(self)
        if self.is_mla:
            fields["tp_rank"] = None
        return fields

    def description(self) -> str:
        """The identity as readable, canonical JSON (ASCII, sorted keys, indented): what lies beside the data."""
        return json.dumps(self.canonical(), indent=2, sort_keys=True, ensure_ascii=True)

    def fingerprint(self) -> bytes:
        """First 128 bits (16 bytes) of SHA-256 over the framed canonical fields; equal in every process and release."""
        return framed_digest(_DOMAIN, self.canonical())[:FINGERPRINT_BYTES]
