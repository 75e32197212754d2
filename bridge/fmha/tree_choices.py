"""Trees of speculative tokens: how they are described, and the index tensors that decoding with them needs.

A tree is a list of choices, one tuple a node: (1, 0, 3) is child 3 of child 0 of child 1 of the root. The root is no
tuple; among the nodes it has index 0, and choice n of the sorted list has index n + 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from pallas_kernels.errors import ArgumentError

Choice = tuple[int, ...]
Device = torch.device | str


def construct_tree_choices(branching: Sequence[int]) -> list[Choice]:
    """The tree in which every node of level n has branching[n] children; the root is level 0."""
    levels = range(1, len(branching) + 1)
    return [node for depth in levels for node in itertools.product(*map(range, branching[:depth]))]


@functools.cache
def construct_full_tree_choices(tree_depth: int, branching: int) -> list[Choice]:
    """The tree of `tree_depth` levels below the root in which every node but the leaves has `branching` children."""
    return construct_tree_choices([branching] * tree_depth)


def get_full_tree_size(tree_depth: int, branching: int) -> int:
    """Nodes of a full tree of `tree_depth` levels, the root's among them."""
    return sum(branching**level for level in range(tree_depth))


@dataclass
class TreeAttnMetadata:
    """A tree of T nodes (the root included) as tensors, int64 unless said otherwise.

    tree_choices: the T - 1 choices, sorted by depth, then by value.
    attention_bias: [T, T] of the given dtype; 0 where a node may see another (the root, its ancestors, itself), else
        -inf. The `spec_attn_bias` of `tree_attention`.
    tree_indices: [T], the draft token of each node: one for each child number of each level, the root's being 0.
    retrieval_indices: [leaves, depth + 1], the nodes of each path from the root to a leaf, -1 behind its end.
    path_lengths: the length of each of these paths.
    tree_seq_position_ids: int32 [T], the level of each node.
    parent_node_indices: [T - 1], the parent's index of each choice.
    child_node_indices: [T, most children], the choices that are each node's children; the last one repeated, 0 for
        leaves.
    num_children_per_node: [T].
    candidate_idx: [T - 1], the rank of each choice among its siblings.
    num_nodes_per_level: [depth + 1], the root's level first; num_nodes_per_level_cpu: the same on the CPU.
    num_children_per_node_at_level: `num_children_per_node` cut into levels; ..._cpu: the same on the CPU.
    subtree_sizes: nodes of each level and those above it.
    """

    tree_choices: Sequence[Choice]
    attention_bias: torch.Tensor
    tree_indices: torch.Tensor
    retrieval_indices: torch.Tensor
    path_lengths: list[int]
    tree_seq_position_ids: torch.Tensor
    parent_node_indices: torch.Tensor
    child_node_indices: torch.Tensor
    num_children_per_node: torch.Tensor
    candidate_idx: torch.Tensor
    num_nodes_per_level: torch.Tensor
    num_nodes_per_level_cpu: torch.Tensor
    num_children_per_node_at_level: list[torch.Tensor]
    num_children_per_node_at_level_cpu: list[torch.Tensor]
    subtree_sizes: list[int]

    @classmethod
    @functools.cache
    def from_tree_choices_cached(
        cls, tree_choices: tuple[Choice, ...], dtype: torch.dtype | None = None, device: Device | None = None
    ) -> Self:
        """`from_tree_choices`, once for equal arguments; tree_choices: a tuple."""
        return cls.from_tree_choices(tree_choices, dtype, device)

    @classmethod
    def from_tree_choices(
        cls, tree_choices: Sequence[Choice], dtype: torch.dtype | None = None, device: Device | None = None
    ) -> Self:
        """tree_choices: in any order; dtype: of the bias, default torch's; device: of all tensors but the `_cpu` ones.

        Raises ArgumentError (a ValueError) for a node without its parent, or one given twice.
        """
        choices = sorted(map(tuple, tree_choices), key=lambda node: (len(node), node))
        nodes = [(), *choices]
        index = {node: n for n, node in enumerate(nodes)}
        if len(index) != len(nodes):
            raise ArgumentError("tree_choices: every node once, and not the root, which has no tuple")
        for node in choices:
            if node[:-1] not in index:
                raise ArgumentError(f"tree_choices: node {node} is there, but not its parent {node[:-1]}")

        children: list[list[int]] = [[] for _ in nodes]
        for n, node in enumerate(choices):
            children[index[node[:-1]]].append(n)
        most = max(1, *map(len, children))
        padded = [(found or [0]) + (found or [0])[-1:] * (most - max(1, len(found))) for found in children]
        counts = [len(found) for found in children]
        depth = len(nodes[-1])
        levels = [0] * (depth + 1)
        for node in nodes:
            levels[len(node)] += 1
        sizes = list(itertools.accumulate(levels))
        leaves = [node for node, count in zip(nodes, counts) if count == 0]
        paths = [[index[leaf[:level]] for level in range(len(leaf) + 1)] for leaf in leaves]

        bias = torch.full((len(nodes), len(nodes)), -torch.inf, dtype=dtype)
        for n, node in enumerate(nodes):
            bias[n, [index[node[:level]] for level in range(len(node) + 1)]] = 0

        def integers(values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        at_level = [integers(counts[end - size : end]) for size, end in zip(levels, sizes)]
        per_level = integers(levels)
        return cls(
            tree_choices=choices,
            attention_bias=bias.to(device) if device is not None else bias,
            tree_indices=integers(_draft_tokens(nodes)),
            retrieval_indices=integers([path + [-1] * (depth + 1 - len(path)) for path in paths]),
            path_lengths=[len(path) for path in paths],
            tree_seq_position_ids=integers([len(node) for node in nodes], torch.int32),
            parent_node_indices=integers([index[node[:-1]] for node in choices]),
            child_node_indices=integers(padded),
            num_children_per_node=integers(counts),
            candidate_idx=integers([children[index[node[:-1]]].index(n) for n, node in enumerate(choices)]),
            num_nodes_per_level=per_level,
            num_nodes_per_level_cpu=per_level.cpu(),
            num_children_per_node_at_level=at_level,
            num_children_per_node_at_level_cpu=[x.cpu() for x in at_level],
            subtree_sizes=sizes,
        )


def _draft_tokens(nodes: Sequence[Choice]) -> list[int]:
    """Level by level, child number c is token c + 1 + the highest token of the levels above."""
    tokens, above, highest, level = [0], 0, 0, 1
    for node in nodes[1:]:
        if len(node) != level:
            above, level = highest, len(node)
        tokens.append(above + node[-1] + 1)
        highest = max(highest, tokens[-1])
    return tokens
