"""A drafter that is trained for one target, and the parts of the target that it uses: the embedding, the head
or a few rows of it, and hidden states.

A drafter of one layer is small, the head of a real model is not: SmolLM2 has 135M weights, its head 28M, a
drafter's layer 4M. A drafter may therefore have a *draft vocabulary* (FR-Spec 2502.14856, EAGLE-3
2503.01840): the N tokens that the target writes most. It reads only their rows of the head, in training too.

Decoding stays lossless. The drafter's distribution q is 0 for all other tokens, and the rules of verify.py
only ask for the q that the drafts were really drawn from. Tokens outside the draft vocabulary come from the
target: as the correction of a rejected draft, or as the bonus.
"""
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn as nn

from minispec.core import gpt
from minispec.core.cpu import Linear
from minispec.core.noise import noise


class DraftHead:
    """The rows of a target's head that its drafter uses: `head` maps states (..., C) to logits (..., N). ids
    (N,): the draft vocabulary; None: all V tokens. An index counts along the draft vocabulary, a token along
    the whole one. ValueError where ids do not fit the target."""

    def __init__(self, target, ids=None):
        self.head = target.head
        self.ids = ids
        self.vocab_size = target.config.vocab_size
        self.size = self.vocab_size if ids is None else len(ids)
        if ids is None:
            return
        # A token named twice would have twice its probability.
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(f"a draft vocabulary names tokens from 0 to {self.vocab_size - 1}, each once")
        # Gathered once: a view of scattered rows would be gathered at every step.
        rows = target.head.weight.detach()[ids]
        self.head = Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.head.weight = nn.Parameter(rows, requires_grad=False)

    def tokens(self, indices):
        """The tokens of indices (...)."""
        return indices if self.ids is None else self.ids[indices]

    def indices(self, tokens):
        """The indices of tokens (...); -1 for those outside."""
        if self.ids is None:
            return tokens
        # A table from tokens to indices, the inverse of ids.
        index = torch.full((self.vocab_size,), -1, device=self.ids.device)
        index[self.ids] = torch.arange(len(self.ids), device=self.ids.device)
        return index[tokens]

    def noise(self, streams, positions):
        """The noise (n, N) of these tokens; see noise.py."""
        return noise(streams, positions, self.vocab_size, self.ids, self.head.weight.device)

    def whole(self, q):
        """A distribution over the whole vocabulary: (..., N) -> (..., V), 0 outside."""
        if self.ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.vocab_size).index_copy_(-1, self.ids, q)


# -- trained drafters ----------------------------------------------------------------------------------------

def fusion(config):
    """The projection of the states of several layers ((F + 1) * C) to one (C), which begins as the final one.
    The final states alone stay as they are."""
    n = len(config.feature_layers)
    if not n:
        return nn.Identity()
    fuse = Linear((n + 1) * config.d_model, config.d_model, bias=False)
    with torch.no_grad():
        fuse.weight.zero_()
        fuse.weight[:, -config.d_model:] = torch.eye(config.d_model)
    return fuse


@dataclass
class DrafterConfig(gpt.GPTConfig):
    """The shape of the target's blocks, and the settings of all trained drafters."""
    feature_layers: tuple = ()  # the target's layers whose states it reads besides the final ones
    target: str = ""        # fingerprint of the target that it was saved for
    draft_vocab: int = 0    # tokens that it may draft, the ids in its weights; 0: all

    def __post_init__(self):
        self.feature_layers = tuple(self.feature_layers)         # JSON has lists only


class TrainedDrafter(nn.Module):
    """The weights of a drafter. Embedding and head are the target's and not held here. ValueError where the
    draft vocabulary does not fit the target."""
    n_params = gpt.GPT.n_params

    def __init__(self, config, target):
        super().__init__()
        n = config.draft_vocab
        if not 0 <= n < config.vocab_size:
            raise ValueError(f"draft_vocab {n} is out of range; the target has {config.vocab_size} tokens, "
                             "0 is all")
        self.config = config
        self.__dict__["target"] = target                 # not registered, so neither trained nor saved
        self.rope = gpt.Rope(config)
        # Zeros, until `restrict` or a file gives the ids.
        self.register_buffer("vocabulary", torch.zeros(n, dtype=torch.long) if n else None)

    @cached_property
    def draft_head(self):                                # not before the ids are loaded
        return DraftHead(self.target, self.vocabulary)

    def restrict(self, ids):
        """Let a new drafter draft the tokens ids (N,) alone; None: all. Returns it."""
        self.config = replace(self.config, draft_vocab=0 if ids is None else len(ids))
        self.vocabulary = None if ids is None else ids.to(self.rope.cos.device)
        self.__dict__.pop("draft_head", None)
        return self
