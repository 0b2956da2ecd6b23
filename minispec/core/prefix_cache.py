"""Texts that begin alike share the blocks of their common beginning (prefix caching, as in vLLM).

A full block is found by its tokens and the block before it, and counts its users. A block without users keeps
its content until the room is needed; the block that lost its last user first is reused first, but a text
that is alone takes blocks that are neighbours. Shared blocks are never written. The block in which two texts
part, or one ends, is copied.
"""
import itertools
import os
from collections import Counter, OrderedDict

from minispec.core.kv_cache import KVCache


class PrefixCache(KVCache):
    """A KVCache that remembers the tokens of its blocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.users = Counter()                           # how many requests have each block
        self.names = {}                                  # (name of the block before, tokens) -> (name, block)
        self.named = {}                                  # block -> its key in `names`
        self.begun = {}                                  # block that was not full -> the same
        self.idle = OrderedDict()                        # named blocks without users, the oldest first
        self.new_name = itertools.count(1)

    @property
    def used(self):
        return super().used - len(self.idle) * self.block

    def _take(self, n, blocks):
        """Neighbours; or first free blocks, then those that were left without users first."""
        taken = self._neighbours(n, blocks) or sorted([*sorted(self.free_blocks), *self.idle][:n])
        for block in taken:
            if block in self.idle:
                del self.idle[block], self.names[self.named.pop(block)]
            else:
                self.free_blocks.remove(block)
            self.users[block] = 1
            self.begun.pop(block, None)
        return taken

    def _neighbours(self, n, blocks):
        """n blocks for a text that is alone, because attention reads neighbours as one matrix: those behind its
        last block, or the first of a run that has room for all of it. Nothing if there are none, if others
        have blocks, or if texts that have left would lose some although free ones are enough."""
        if len(self.free_blocks) + len(self.idle) + len(blocks.table) < self.n_blocks:
            return []
        age = dict.fromkeys(self.free_blocks, 0)
        age |= {block: i for i, block in enumerate(self.idle, 1)}              # the oldest first
        most = max(n, blocks.most)
        if blocks.table:
            end = blocks.table[-1] + 1
            runs = [range(end, end + n)]
        else:
            runs = [range(start, start + most) for start in sorted(age)]
        # The run whose newest block has been left for longest.
        newest = {run: max(map(age.get, run)) for run in runs if age.keys() >= set(run)}
        run = min(newest, key=newest.get, default=())
        if run and newest[run] and most <= len(self.free_blocks):
            return []
        return [*run[:n]]

    def _give_back(self, block):
        self.users[block] -= 1
        if not self.users[block]:
            if block in self.named:
                self.idle[block] = None
            else:
                super()._give_back(block)

    def _parts(self, tokens):
        """The tokens of each block; the last one may be short."""
        return [tuple(tokens[i:i + self.block]) for i in range(0, len(tokens), self.block)]

    def share(self, blocks, tokens):
        """Give a new Allocation the blocks that hold the beginning of `tokens`, and an unshared block
        with a copy of the tokens that follow. Returns the number of tokens in them."""
        name = 0
        for part in self._parts(tokens):
            if (name, part) not in self.names:
                break
            name, block = self.names[name, part]
            self.users[block] += 1
            self.idle.pop(block, None)
            blocks.table.append(block)
        # Of the blocks that follow, the one that begins with most of the other tokens.
        size = self.size(blocks)
        rest = tuple(tokens[size:])
        known, source = max(((len(os.path.commonprefix([part, rest])), block)
                             for block, (before, part) in (self.begun | self.named).items()
                             if before == name), default=(0, None))
        if known:
            blocks.table += self._take(1, blocks)        # it may be the source
            new, old = (block * self.block for block in (blocks.table[-1], source))
            self.kv[:, :, :, new:new + known] = self.kv[:, :, :, old:old + known]
        return size + known

    def remember(self, blocks, tokens):
        """These blocks hold `tokens`, which are not written any more: let other requests share them."""
        name = 0
        for block, part in zip(blocks.table, self._parts(tokens)):
            key = name, part
            if len(part) < self.block:
                self.begun[block] = key
                break
            if key not in self.names:
                if block in self.named:                  # under a beginning that has left the pool since
                    break
                self.names[key] = next(self.new_name), block
                self.named[block] = key
            name, _ = self.names[key]
