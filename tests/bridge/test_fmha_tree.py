"""Tree attention: the trees' index tensors by their definitions, and MSLK's acceptance row."""

import numpy as np
import pytest
import torch

import acceptance
import oracle
from bridge import fmha
from bridge.fmha import attn_bias as ab
from bridge.fmha.tree_attention import (
    SplitKAutotune,
    TreeAttnMetadata,
    construct_full_tree_choices,
    construct_tree_choices,
    get_full_tree_size,
    tree_attention,
    use_triton_splitk_for_prefix,
)
from checks import close

BINARY = construct_full_tree_choices(2, 2)
CHAIN = construct_full_tree_choices(4, 1)
RAGGED = [(1, 0), (0,), (0, 1), (1,), (0, 0), (0, 1, 0), (2,), (0, 1, 0, 3), (2, 4)]
TREES = {"binary": BINARY, "chain": CHAIN, "ragged": RAGGED, "wide": construct_tree_choices([7]), "none": []}


def test_full_trees():
    assert construct_full_tree_choices(1, 3) == [(0,), (1,), (2,)]
    assert BINARY == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert construct_tree_choices([2, 1]) == [(0,), (1,), (0, 0), (1, 0)]
    for depth, branching in ((1, 1), (3, 2), (4, 3), (10, 1)):
        assert len(construct_full_tree_choices(depth, branching)) + 1 == get_full_tree_size(depth + 1, branching)
    assert get_full_tree_size(0, 2) == 0


def test_metadata_by_hand():
    tree = TreeAttnMetadata.from_tree_choices(construct_full_tree_choices(2, 3))
    assert tree.tree_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]
    assert sorted(tree.retrieval_indices.tolist()) == sorted([0, 1 + n // 3, 4 + n] for n in range(9))
    assert tree.path_lengths == [3] * 9
    assert tree.tree_seq_position_ids.tolist() == [0, 1, 1, 1] + [2] * 9
    assert tree.tree_seq_position_ids.dtype == torch.int32
    assert tree.parent_node_indices.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert tree.child_node_indices.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] + [[0, 0, 0]] * 9
    assert tree.num_children_per_node.tolist() == [3] * 4 + [0] * 9
    assert tree.candidate_idx.tolist() == [0, 1, 2] * 4
    assert tree.num_nodes_per_level.tolist() == tree.num_nodes_per_level_cpu.tolist() == [1, 3, 9]
    assert [x.tolist() for x in tree.num_children_per_node_at_level] == [[3], [3, 3, 3], [0] * 9]
    assert [x.tolist() for x in tree.num_children_per_node_at_level_cpu] == [[3], [3, 3, 3], [0] * 9]
    assert tree.subtree_sizes == [1, 4, 13]
    integers = ("tree_indices", "retrieval_indices", "parent_node_indices", "child_node_indices", "candidate_idx")
    assert all(getattr(tree, name).dtype == torch.int64 for name in integers)


@pytest.mark.parametrize("name", TREES)
def test_metadata_by_definition(name):
    choices = TREES[name]
    tree = TreeAttnMetadata.from_tree_choices(choices, torch.bfloat16, "cpu")
    nodes = [(), *sorted(choices, key=lambda node: (len(node), node))]
    assert list(tree.tree_choices) == nodes[1:]
    assert tree.attention_bias.dtype == torch.bfloat16
    for i, node in enumerate(nodes):
        for j, other in enumerate(nodes):
            assert tree.attention_bias[i, j] == (0 if node[: len(other)] == other else -torch.inf)
    leaves = [node for node in nodes if not any(other[:-1] == node for other in nodes[1:])]
    depth = max(map(len, nodes))
    assert tree.retrieval_indices.shape == (len(leaves), depth + 1)
    found = []
    for row, length in zip(tree.retrieval_indices.tolist(), tree.path_lengths, strict=True):
        assert row[length:] == [-1] * (depth + 1 - length)
        assert [nodes[n] for n in row[:length]] == [nodes[row[length - 1]][:level] for level in range(length)]
        found.append(nodes[row[length - 1]])
    assert sorted(found) == sorted(leaves)
    for n, node in enumerate(nodes[1:]):
        siblings = [other for other in nodes[1:] if other[:-1] == node[:-1]]
        assert nodes[tree.parent_node_indices[n]] == node[:-1]
        assert siblings[tree.candidate_idx[n]] == node
    for n, node in enumerate(nodes):
        count = int(tree.num_children_per_node[n])
        children = [nodes[1 + c] for c in tree.child_node_indices[n, :count]]
        assert children == [other for other in nodes[1:] if other[:-1] == node]
        repeated = set(tree.child_node_indices[n, max(count - 1, 0) :].tolist())
        assert len(repeated) == 1 and (count > 0 or repeated == {0})
    levels = [sum(len(node) == level for node in nodes) for level in range(depth + 1)]
    assert tree.num_nodes_per_level.tolist() == levels
    assert tree.subtree_sizes == np.cumsum(levels).tolist()


def test_draft_tokens_of_a_ragged_tree():
    """Each level's tokens begin behind the highest of the levels above, at the child's number."""
    tree = TreeAttnMetadata.from_tree_choices([(0,), (2,), (0, 1), (2, 0), (0, 1, 1)])
    assert tree.tree_indices.tolist() == [0, 1, 3, 5, 4, 7]


def test_metadata_is_cached_and_checked():
    choices = tuple(BINARY)
    assert TreeAttnMetadata.from_tree_choices_cached(choices) is TreeAttnMetadata.from_tree_choices_cached(choices)
    for bad in ([(0, 0)], [(0,), (0,)], [()]):
        with pytest.raises(ValueError, match="tree_choices"):
            TreeAttnMetadata.from_tree_choices(bad)


def test_heuristic():
    yes = [(16, 8, 64), (128, 1, 64), (3, 1, 99), (1, 1, 1000)]
    no = [(16, 9, 64), (16, 8, 65), (4, 1, 99), (3, 1, 100), (2, 1, 100)]
    assert all(use_triton_splitk_for_prefix(*x) for x in yes)
    assert not any(use_triton_splitk_for_prefix(*x) for x in no)


# Attention

H, D = 4, 32


def problem(tree, batch, groups, keys, drop=0, seed=0, dtype=torch.bfloat16, device="cpu", heads=H, dim=D):
    """Query, tree keys and values, cache; the queries are the last nodes when the first `drop` are left out."""
    generator = torch.Generator().manual_seed(seed)
    nodes = len(tree.tree_choices) + 1
    lead = () if groups is None else (groups,)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    q = draw(batch, nodes - drop, *lead, heads, dim)
    spec = [draw(batch, nodes, *lead, 1, dim).expand(batch, nodes, *lead, heads, dim) for _ in "kv"]
    cache = [draw(batch, keys, *lead, 1, dim).expand(batch, keys, *lead, heads, dim) for _ in "kv"]
    lens = torch.randint(0, keys + 1, (batch,), generator=generator).tolist()
    lens[0] = keys
    return q, spec, cache, lens


def in_pages(cache, lens, page, seed=0):
    """The cache's rows in shuffled pages; NaN where no sequence has a key."""
    batch, keys = cache[0].shape[:2]
    per_row = keys // page
    table = torch.randperm(batch * per_row, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    pools = []
    for x in cache:
        x = x[..., :1, :].clone()
        for b, n in enumerate(lens):
            x[b, n:] = torch.nan
        pool = torch.empty_like(x).view(batch * per_row, page, *x.shape[2:])
        pool[table.long().to(x.device)] = x.view(pool.shape)
        pools.append(pool.view(1, batch * keys, *x.shape[2:]).expand(1, -1, *cache[0].shape[2:]))
    return pools, table.view(batch, per_row).to(cache[0].device)


def reference(q, spec, cache, lens, bias):
    """float64, tree and cache as one sequence of keys."""
    out = np.zeros(q.shape)
    for b, n in enumerate(lens):
        one = [x[b].double().cpu().flatten(1, -2).numpy() for x in (q, *spec, *cache)]
        keys, values = (np.concatenate([one[c][:n], one[s]]) for c, s in ((3, 1), (4, 2)))
        seen = np.concatenate([np.ones((q.shape[1], n), bool), (bias == 0).cpu().numpy()], 1)
        scale = q.shape[-1] ** -0.5
        out[b] = acceptance.attend(one[0], keys, values, scale=scale, visible=seen)[0].reshape(q.shape[1:])
    return out


def prefix_mask(q, lens, keys):
    queries = [q.shape[1]] * len(lens)
    return ab.BlockDiagonalPaddedKeysMask.from_seqlens(queries, keys, lens, device=q.device)


@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
@pytest.mark.parametrize("drop", [0, 2])
@pytest.mark.parametrize(("name", "batch", "groups"), [("binary", 3, 2), ("ragged", 1, None), ("chain", 2, 1)])
def test_tree_attention(name, batch, groups, drop, paged):
    tree = TreeAttnMetadata.from_tree_choices(TREES[name], torch.bfloat16, "cpu")
    q, spec, cache, lens = problem(tree, batch, groups, 128, drop)
    bias = tree.attention_bias[drop:]
    mask, given = prefix_mask(q, lens, 128), cache
    if paged:
        given, table = in_pages(cache, lens, 64)
        mask = mask.make_paged(table, 64, ab.PagedBlockDiagonalPaddedKeysMask)
    out = tree_attention(q, *spec, *given, bias, mask)
    assert out.shape == q.shape and out.dtype == q.dtype
    close(out.double().numpy(), reference(q, spec, cache, lens, bias), 1e-2, 3e-3)
    if name == "binary":
        ops = fmha.triton_splitk.FwOp_S4, SplitKAutotune
        other = tree_attention(q, *spec, *given, bias, mask, *ops, autotune=True)
        close(other.double().numpy(), out.double().numpy(), 1e-2, 3e-3)


@pytest.mark.parametrize("lead", [(), (2,)], ids=["BMHK", "BMGHK"])
def test_fp8_cache(lead):
    tree = TreeAttnMetadata.from_tree_choices(BINARY, torch.half, "cpu")
    q, spec, cache, lens = problem(tree, 2, *(lead or (None,)), 64, dtype=torch.half)
    stored, scales, decoded = [], [], []
    for x in cache:
        words, coefs = oracle.fp8_quantize(x[..., :1, :].float().numpy())
        stored.append(torch.from_numpy(words).view(torch.uint8).expand(x.shape))
        scales.append(torch.from_numpy(coefs).expand(*x.shape[:-1]))
        decoded.append(torch.from_numpy(oracle.fp8_dequantize(words, coefs)).expand(x.shape))
    for op in (None, fmha.triton_splitk.FwOp):
        out = tree_attention(
            q, *spec, *stored, tree.attention_bias, prefix_mask(q, lens, 64), op, quantized_kv_scales=tuple(scales)
        )
        close(out.double().numpy(), reference(q, spec, decoded, lens, tree.attention_bias), 5e-3, 5e-3)


def random_tree(nodes, seed):
    """A tree of `nodes` nodes below the root, each the next child of a random one, as published trees are ragged."""
    rng = np.random.default_rng(seed)
    tree, children = [()], {(): 0}
    for _ in range(nodes):
        parent = tree[rng.integers(len(tree))]
        node = (*parent, children[parent])
        children[parent] += 1
        children[node] = 0
        tree.append(node)
    return tree[1:]


WHOLE = {f"random-{n}": random_tree(n, n) for n in (5, 15, 25, 26, 42, 47, 63, 64)}
WHOLE |= {f"full-{depth}x{branching}": construct_full_tree_choices(depth, branching)
          for depth, branching in ((1, 1), (1, 4), (2, 2), (3, 3), (4, 2), (6, 2), (10, 1))}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
@pytest.mark.parametrize("square", [True, False], ids=["square", "rectangle"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", WHOLE)
def test_tree_attention_whole_range(name, batch, groups, square, paged):
    """MSLK's ranges: 8 heads of 128, caches of 8192, pages of 256 in random order."""
    tree = TreeAttnMetadata.from_tree_choices(WHOLE[name], torch.bfloat16, "cuda")
    drop = 0 if square else len(WHOLE[name]) // 2 + 1
    q, spec, cache, lens = problem(tree, batch, groups, 8192, drop, device="cuda", heads=8, dim=128)
    bias, mask, given = tree.attention_bias[drop:], prefix_mask(q, lens, 8192), cache
    if paged:
        given, table = in_pages(cache, lens, 256)
        mask = mask.make_paged(table, 256, ab.PagedBlockDiagonalPaddedKeysMask)
    out = tree_attention(q, *spec, *given, bias, mask)
    close(out.double().cpu().numpy(), reference(q, spec, cache, lens, bias), 1e-2, 3e-3)


def test_refusals():
    tree = TreeAttnMetadata.from_tree_choices(BINARY, torch.bfloat16, "cpu")
    q, spec, cache, lens = problem(tree, 2, 1, 64)
    bias, mask = tree.attention_bias, prefix_mask(q, lens, 64)
    table = torch.zeros(2, 1, dtype=torch.int32)
    paged = mask.make_paged(table, 64, ab.PagedBlockDiagonalPaddedKeysMask)
    for arguments, name in (
        ((q[0, 0], *spec, *cache, bias, mask), "q"),
        ((q, spec[0][..., :2, :], spec[1], *cache, bias, mask), "spec_k"),
        ((q, *spec, cache[0][..., :16], cache[1], bias, mask), "cache_k"),
        ((q, *spec, cache[0], cache[1][:, :32], bias, mask), "cache_v"),
        ((q, *spec, cache[0][:1], cache[1][:1], bias, mask), "cache_k"),
        ((q, *spec, *cache, bias, paged), "cache_k"),
        ((q, *spec, *cache, bias[1:], mask), "spec_attn_bias"),
        ((q, spec[0][:, :5], spec[1][:, :5], *cache, bias[:, :5], mask), "spec_attn_bias"),
    ):
        with pytest.raises(AssertionError, match=name):
            tree_attention(*arguments)
    bytes_ = [x.new_zeros(x.shape, dtype=torch.uint8) for x in cache]
    with pytest.raises(AssertionError, match="quantized_kv_scales"):
        tree_attention(q, *spec, *bytes_, bias, mask)
    with pytest.raises(ValueError, match="quantized_kv_scales"):
        tree_attention(q, *spec, *cache, bias, mask, quantized_kv_scales=(table, table))
    with pytest.raises(NotImplementedError, match="q_fp8"):
        tree_attention(q, *spec, *cache, bias, mask, q_fp8=q)
