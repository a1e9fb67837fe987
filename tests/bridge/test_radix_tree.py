# SPDX-License-Identifier: Apache-2.0
"""Page keys of SGLang's real radix tree, through inserts, splits, evictions and re-inserts.

Whatever the tree's shape, the block hash of a page must be a function of what precedes it and of nothing else:
namespace (LoRA key, salt), bigrams or not, and the tokens up to its end. The reference below computes it from the
tokens alone.
"""

import hashlib
import random
import struct
from array import array
from importlib import metadata
from itertools import pairwise

import pytest
from sglang_tardis.bridge.keys import block_hash, block_hashes


def installed(*packages: str) -> bool:
    """Asked of the metadata: an import would find the folder tests/sglang where the real package is absent."""
    try:
        return all(metadata.version(package) for package in packages)
    except metadata.PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not installed("sglang", "torch"), reason="SGLang and torch are not installed")

PAGE = 4
Namespace = tuple[str | None, str | None]


def namespaces() -> list[Namespace]:
    from sglang.srt.mem_cache import utils

    if not hasattr(
        utils, "storage_namespace_seed"
    ):  # 0.5.16: its page keys cover tokens only; tests/sglang sees to that
        return [(None, None)]
    return [(None, None), ("lora-a", None), ("lora-b", None), (None, "salt"), ("lora-a", "salt"), ("lora-as", "alt")]


def reference_chain(tokens: list[int], namespace: Namespace, bigram: bool) -> list[bytes]:
    """Hashes of all whole pages of a sequence, from SGLang's documented chain, in plain Python."""
    prior = b""
    if namespace != (None, None):
        seed = hashlib.sha256(b"sglang-cache-namespace-v1")
        for part in namespace:
            raw = b"" if part is None else part.encode()
            seed.update(b"\0" if part is None else b"\1" + struct.pack("<Q", len(raw)) + raw)
        prior = seed.digest()
    units = list(pairwise(tokens)) if bigram else [(token,) for token in tokens]
    chain = []
    for start in range(0, len(units) - PAGE + 1, PAGE):
        words = [word for unit in units[start : start + PAGE] for word in unit]
        prior = hashlib.sha256(prior + struct.pack(f"<{len(words)}I", *words)).digest()
        chain.append(prior)
    return chain


class Tree:
    """SGLang's RadixCache with the storage hashes of its nodes filled in as HiCache does: top down, once."""

    def __init__(self, bigram: bool) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        class Allocator:
            device = "cpu"

            def __getattr__(self, name: str):  # free, free_segment, ... : nothing to give back
                return lambda *args, **kwargs: None

        self.bigram = bigram
        self.cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=Allocator(),
                page_size=PAGE,
                is_eagle=bigram,
            )
        )

    def insert(self, tokens: list[int], namespace: Namespace) -> None:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        names = {} if namespace == (None, None) else {"extra_key": namespace[0], "cache_salt": namespace[1]}
        key = RadixKey(array("q", tokens), **names)
        self.cache.insert(InsertParams(key=key, value=torch.arange(len(tokens))))

    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))

    def paths(self, hashed: bool):
        """For each node: its tokens from the root, its namespace, and the page keys from the root."""
        from sglang.srt.mem_cache.utils import compute_node_hash_values

        todo = [(child, [], []) for child in self.cache.root_node.children.values()]
        while todo:
            node, tokens, keys = todo.pop()
            if node.hash_value is None:
                if not hashed:
                    continue  # its descendants have none either
                node.hash_value = compute_node_hash_values(node, PAGE)
            raw = list(node.key.raw_token_ids())
            tokens = tokens[: len(tokens) - 1 if self.bigram and tokens else None] + raw
            keys = [*keys, *node.hash_value]
            yield tokens, (node.key.extra_key, getattr(node.key, "cache_salt", None)), keys
            todo += [(child, tokens, keys) for child in node.children.values()]


def check(tree: Tree, seen: dict[bytes, tuple], hashed: bool) -> int:
    count = 0
    for tokens, namespace, keys in tree.paths(hashed):
        count += 1
        hashes = [row.tobytes() for row in block_hashes(keys)]
        assert hashes == reference_chain(tokens, namespace, tree.bigram)
        assert [block_hash(key) for key in keys] == hashes
        for page, one in enumerate(hashes):
            end = (page + 1) * PAGE + (1 if tree.bigram else 0)
            identity = (tree.bigram, namespace, tuple(tokens[:end]))
            assert seen.setdefault(one, identity) == identity, "two prefixes share a block hash"
    return count


@pytest.mark.parametrize("seed", range(6))
def test_hashes_follow_the_prefix_whatever_happens_to_the_tree(seed: int):
    rng = random.Random(seed)
    trees = [Tree(bigram=False), Tree(bigram=True)]
    seen: dict[bytes, tuple] = {}
    sequences: list[tuple[list[int], Namespace]] = []
    nodes = 0
    for _ in range(60):
        tree = rng.choice(trees)
        action = rng.random()
        if action < 0.55 or not sequences:
            base = rng.choice(sequences)[0] if sequences and rng.random() < 0.7 else []
            base = base[: rng.randrange(len(base) + 1)]  # share a prefix, so that nodes split
            # The second alphabet has tokens beyond 16 bits; both are small, so that prefixes meet.
            alphabet = rng.choice([range(3), [7, 70_000, 2**31]])
            tokens = base + [rng.choice(alphabet) for _ in range(rng.randrange(1, 5 * PAGE))]
            sequences.append((tokens, rng.choice(namespaces())))
            tree.insert(*sequences[-1])
        elif action < 0.75:
            tree.insert(*rng.choice(sequences))  # again, perhaps after it was evicted
        else:
            tree.evict(rng.randrange(1, 8 * PAGE))
        # Sometimes nodes stay without hashes until later: they are split, or extended, before they are hashed.
        nodes += check(tree, seen, hashed=rng.random() < 0.6)
    nodes += sum(check(tree, seen, hashed=True) for tree in trees)
    assert nodes > 50 and len({identity[:2] for identity in seen.values()}) > len(namespaces())


def test_one_prompt_has_disjoint_hashes_in_every_namespace_and_kind_of_tree():
    tokens = list(range(5 * PAGE + 1))
    per_kind = {}
    for bigram in (False, True):
        for namespace in namespaces():
            tree = Tree(bigram)
            tree.insert(tokens, namespace)
            [(_, _, keys)] = tree.paths(hashed=True)
            per_kind[bigram, namespace] = {row.tobytes() for row in block_hashes(keys)}
    assert all(len(hashes) == 5 for hashes in per_kind.values())
    assert len(set().union(*per_kind.values())) == 5 * len(per_kind)
