# SPDX-License-Identifier: Apache-2.0
"""Namespace identities: every field counts, and the fingerprint is the same everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import sglang_tardis
from sglang_tardis.bridge.namespace import NamespaceIdentity, canonical_kv_dtype

BASE = {
    "model_name": "llama",
    "model_config": "c" * 64,
    "weights": "weights-v1:" + "0" * 64,
    "kv_dtype": "bfloat16",
    "layers": 32,
    "start_layer": 0,
    "end_layer": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "v_head_dim": 128,
    "page_size": 64,
    "layout": "layer-major",
    "tp_rank": 1,
    "tp_size": 4,
    "pp_size": 2,
    "cp_size": 2,
    "dcp_size": 2,
    "dp_size": 2,
}
CHANGES = {
    "model_name": "llama2",
    "model_config": "d" * 64,
    "weights": "weights-v1:" + "1" * 64,
    "kv_dtype": "float16",
    "layers": 31,
    "start_layer": 1,
    "end_layer": 33,
    "kv_heads": 4,
    "head_dim": 64,
    "v_head_dim": 64,
    "page_size": 32,
    "layout": "page_first",
    "pool": "draft",
    "is_mla": True,
    "is_eagle": True,
    "tp_rank": 2,
    "tp_size": 8,
    "pp_rank": 1,
    "pp_size": 3,
    "cp_rank": 1,
    "cp_size": 3,
    "dcp_rank": 1,
    "dcp_size": 3,
    "dp_rank": 1,
    "dp_size": 3,
    "format_version": 2,
    "extra": {"quantization": "fp8"},
}
GOLDEN = "4faa173a5ebb510d1047ca4a79819e03"
GOLDEN_MLA = "fd681811ea790aba15d71c3b27002d57"


def identity(**changes) -> NamespaceIdentity:
    return NamespaceIdentity(**{**BASE, **changes})


def test_the_table_above_has_every_field():
    assert set(CHANGES) == {field.name for field in msgspec.structs.fields(NamespaceIdentity)}


def test_every_field_changes_fingerprint_and_description():
    seen = {"": identity(), **{name: identity(**{name: value}) for name, value in CHANGES.items()}}
    assert len({one.fingerprint() for one in seen.values()}) == len(seen)
    assert len({one.description() for one in seen.values()}) == len(seen)
    assert all(len(one.fingerprint()) == 16 for one in seen.values())


def test_kv_dtypes_that_share_an_element_size_are_apart():
    names = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fnuz"]
    assert len({identity(kv_dtype=canonical_kv_dtype(name)).fingerprint() for name in names}) == len(names)
    assert canonical_kv_dtype("torch.float8_e5m2") == canonical_kv_dtype("fp8_e5m2") == "float8_e5m2"
    assert canonical_kv_dtype("torch.bfloat16") == "bfloat16"
    for name in ("uint8", "torch.uint8", "auto", "", "int8", "bogus"):
        with pytest.raises(ValueError, match="KV dtype"):
            canonical_kv_dtype(name)
    for name in ("uint8", "bf16", "auto"):
        with pytest.raises(ValueError, match="dtype"):
            identity(kv_dtype=name)


def test_mla_ranks_share_and_mha_ranks_do_not():
    mla = [identity(is_mla=True, tp_rank=rank) for rank in range(4)]
    assert len({one.fingerprint() for one in mla}) == 1
    assert len({one.description() for one in mla}) == 1, "the store refuses one fingerprint with two descriptions"
    assert json.loads(mla[2].description())["tp_rank"] is None
    assert len({identity(tp_rank=rank).fingerprint() for rank in range(4)}) == 4
    assert identity(is_mla=True, tp_size=8).fingerprint() != mla[0].fingerprint()
    # Not only the rank: other groups split MLA bytes as well.
    assert identity(is_mla=True, cp_rank=1).fingerprint() != mla[0].fingerprint()


def test_extra_fields_are_framed():
    extras = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {}, {"": "abc"}, {"c": "", "a": "b"}]
    assert len({identity(extra=extra).fingerprint() for extra in extras}) == len(extras) - 1
    one, same = identity(extra=extras[2]), identity(extra=extras[5])
    assert one.fingerprint() == same.fingerprint() and one.description() == same.description()


def test_description_is_readable_canonical_ascii_json():
    one = identity(model_name='näm"e\n\0\ud800', extra={"ключ": "значение"})
    text = one.description()
    assert text.isascii() and text.isprintable() is False and "\0" not in text
    fields = json.loads(text)
    assert fields["model_name"] == one.model_name and fields["extra"] == one.extra
    assert list(fields) == sorted(fields)
    assert len(one.fingerprint()) == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", True),
        ("layers", "32"),
        ("layers", 1.0),
        ("kv_heads", -1),
        ("page_size", None),
        ("model_name", b"llama"),
        ("weights", ""),
        ("layout", ""),
        ("pool", ""),
        ("is_mla", 1),
        ("tp_rank", 4),
        ("tp_rank", -1),
        ("cp_rank", 2),
        ("end_layer", 0),
        ("extra", {"a": 1}),
        ("extra", [("a", "b")]),
    ],
)
def test_wrong_fields_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        identity(**{field: value})


def test_golden_fingerprints_in_other_processes():
    """The fingerprint is on disk: neither the process nor hash randomisation nor a later release may change it."""
    assert identity().fingerprint().hex() == GOLDEN
    program = (
        "import json, sys; from sglang_tardis.bridge.namespace import NamespaceIdentity as N;"
        "a = json.loads(sys.argv[1]);"
        "print(N(**a).fingerprint().hex(), N(**dict(reversed(a.items())), is_mla=True).fingerprint().hex())"
    )
    source = str(Path(sglang_tardis.__file__).parents[1])
    for seed in ("0", "1", "4242", "random"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source}
        result = subprocess.run(
            [sys.executable, "-c", program, json.dumps(BASE)], env=environ, capture_output=True, text=True, check=True
        )
        assert result.stdout.split() == [GOLDEN, GOLDEN_MLA]
