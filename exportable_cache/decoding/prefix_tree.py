"""A tree of prefixes: cache contents of earlier sequences, which share the slots of tokens that they begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..session.persistence import RowCopy, layer_of, slots_dim

if TYPE_CHECKING:
    from ..cache.layers import CacheLayer

Tensors = Mapping[str, torch.Tensor]


@dataclass(eq=False)
class _Node:
    """Tokens after those of the parent, and what the layers hold for them.

    Attributes:
        parent: The node before; None for the root.
        tokens: Tokens from `start` on.
        start: Number of tokens before.
        slots: Slots of these tokens, by the name of the state tensor.
        whole: Tensors whose slots are not positions, after the last token; None if they were not kept there.
        ever: The most tokens that the row of `whole` held, see `RowCopy`.
        children: Nodes that follow, by their first token.
        used: Time of the last use.
    """

    parent: _Node | None
    tokens: list[int]
    start: int
    slots: Tensors
    whole: Tensors | None = None
    ever: int = 0
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in (*self.slots.values(), *(self.whole or {}).values()))


class PrefixTree:
    """Keeps the rows of sequences that have ended, up to a number of bytes; the least recently used go first.

    Slots of full-attention layers are positions, so any first part of a sequence can be used again. A ring or a state
    belongs to its whole sequence: a model with such layers can continue a sequence only where it ended.

    Reading copies, so a later eviction does not change a row.

    Args:
        layers: Layers of the cache.
        most_bytes: Limit of the bytes of all tensors.

    Attributes:
        nbytes: Bytes of all tensors.

    Raises:
        InputError: If `most_bytes` is negative.
    """

    def __init__(self, layers: Sequence[CacheLayer], most_bytes: int) -> None:
        if most_bytes < 0:
            raise InputError(f"most_bytes must be at least 0, got {most_bytes}; 0 keeps nothing")
        self.most_bytes, self.nbytes = most_bytes, 0
        self._layers = tuple(layers)
        self._root = _Node(None, [], 0, {})
        self._now = 0
        # True without rings and states: then any part of a sequence can be used.
        self._are_positions = True

    def common(self, ids: Sequence[int]) -> int:
        """Return the number of a prompt's first tokens that `read` gives."""
        return self._found(list(ids))[0]

    def read(self, ids: Sequence[int]) -> RowCopy | None:
        """Return the contents of a row that holds the first tokens of a prompt, as many as are kept; None for none."""
        length, node = self._found(list(ids))
        if length == 0:
            return None
        self._now += 1
        path: list[_Node] = []
        at: _Node | None = node
        while at is not None:
            at.used = self._now
            path.insert(0, at)
            at = at.parent
        tensors = dict(node.whole or {})
        for name in node.slots:
            dim = self._dim(name)
            assert dim is not None
            tensors[name] = torch.cat([one.slots[name] for one in path[1:]], dim).narrow(dim, 0, length)
        return RowCopy(tensors, length, max(length, node.ever))

    def add(self, ids: Sequence[int], row: RowCopy) -> None:
        """Keep the contents of a row, if they fit.

        Args:
            ids: The tokens that it holds.
            row: Its contents, of which parts are copied.
        """
        ids = list(ids[: row.length])
        if not ids or sum(tensor.nbytes for tensor in row.tensors.values()) > self.most_bytes:
            return
        self._now += 1
        self._are_positions = all(self._dim(name) is not None for name in row.tensors)
        node, at = self._root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            shared = common_length(child.tokens, ids[at:])
            node, at = child if shared == len(child.tokens) else self._split(child, shared), at + shared
            node.used = self._now
        if at < len(ids):
            slots = self._parts(row.tensors, at, len(ids) - at)
            node.children[ids[at]] = node = _Node(node, ids[at:], at, slots, used=self._now)
            self.nbytes += node.nbytes
        if node.whole is None:
            before = node.nbytes
            node.whole = {name: one.clone() for name, one in row.tensors.items() if self._dim(name) is None}
            node.ever = row.ever
            self.nbytes += node.nbytes - before
        while self.nbytes > self.most_bytes:
            self._drop(min((one for one in self._nodes() if not one.children), key=lambda one: one.used))

    def _dim(self, name: str) -> int | None:
        """Return the dimension of a row's tensor that counts positions; None if its slots are not positions."""
        layer = layer_of(self._layers, name)
        dim = slots_dim(layer, name)
        return None if dim is None or layer.max_length is None else dim - 1

    def _parts(self, tensors: Tensors, start: int, length: int) -> dict[str, torch.Tensor]:
        """Return copies of a range of slots of the tensors whose slots are positions."""
        dims = {name: self._dim(name) for name in tensors}
        return {name: tensors[name].narrow(dim, start, length).clone() for name, dim in dims.items() if dim is not None}

    def _found(self, ids: list[int]) -> tuple[int, _Node]:
        """Return the number of tokens that can be used again, and the node of the last one."""
        node, at, found = self._root, 0, (0, self._root)
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            shared = common_length(child.tokens, ids[at:])
            ends = shared == len(child.tokens)
            if self._are_positions or (ends and child.whole is not None):
                found = at + shared, child
            if not ends:
                break
            node, at = child, at + shared
        return found

    def _split(self, node: _Node, tokens: int) -> _Node:
        """Split a node, and return its first part, of `tokens` tokens. Both have copies, so that each can be freed."""
        assert node.parent is not None
        head = _Node(node.parent, node.tokens[:tokens], node.start, self._parts(node.slots, 0, tokens))
        node.parent.children[head.tokens[0]] = node.parent = head
        node.slots = self._parts(node.slots, tokens, len(node.tokens) - tokens)
        node.tokens, node.start = node.tokens[tokens:], node.start + tokens
        head.children[node.tokens[0]] = node
        return head

    def _drop(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.tokens[0]]
        self.nbytes -= leaf.nbytes

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of first tokens that two lists share."""
    least, most = 0, min(len(first), len(second))
    # By halves, because comparing slices is much faster than comparing tokens in Python.
    while least < most:
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
