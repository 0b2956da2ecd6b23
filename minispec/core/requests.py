"""A request, the record of its rounds, and the rows that it feeds in one forward."""
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch

from minispec.core.attention import FullKeys, packed_attend
from minispec.core.verify import Sampling


@dataclass
class Round:
    """One round of a request.

    position: number of tokens generated before. proposed: number of drafts; in a tree, those of the longest
    chain that begins with the accepted drafts, prompt-lookup tokens included. accepted: how many of these
    were accepted. proposer: the drafter.
    committed: tokens gained (accepted + 1, or fewer when the answer ended). draft_seconds, verify_seconds:
    the request's share of drafting and of the target's forward. drafted: all verified drafts of the proposer;
    lookup: verified prompt-lookup tokens beside them."""
    position: int
    proposed: int
    accepted: int
    committed: int
    proposer: str
    draft_seconds: float
    verify_seconds: float
    drafted: int = 0
    lookup: int = 0


@dataclass
class Generation:
    """The answer to a request. who[i] is the origin of token_ids[i]: "draft" (accepted), "correction" (the
    target's token in place of a rejected draft), "bonus" (after the last draft was accepted), "plain" (no
    draft was proposed)."""
    prompt_ids: list
    token_ids: list = field(default_factory=list)
    who: list = field(default_factory=list)
    rounds: list = field(default_factory=list)
    finish: str = ""  # "stop": end of text; "length": token limit; "cancelled"; "": not finished


class Request:
    """A prompt being answered. `tokens` are all committed ids, the first n_cached of which are in the
    cache."""

    def __init__(self, prompt_ids, max_new_tokens=256, sampling=Sampling(), stop_ids=()):
        if not prompt_ids:
            raise ValueError("an empty prompt has no last token to continue from")
        if max_new_tokens < 1:
            raise ValueError(f"max-new-tokens {max_new_tokens} is out of range; allowed is 1 or more")
        self.tokens = list(prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.stop_ids = set(stop_ids)
        self.longest = len(prompt_ids) + max_new_tokens
        self.generation = Generation(list(prompt_ids))
        self.n_cached = 0
        self.engine = None               # whose open stream it is in
        self.blocks = None               # its Allocation in the cache
        self.state = None                # the scheduler's notes on it
        self.spent = {"draft": 0.0, "verify": 0.0, "prefill": 0.0}       # seconds of the round so far

    @property
    def remaining(self):
        return self.max_new_tokens - len(self.generation.token_ids)

    @property
    def finished(self):
        return bool(self.generation.finish)

    @property
    def is_prefilled(self):
        """Whether all tokens but the last are in the cache."""
        return self.n_cached >= len(self.tokens) - 1

    def cancel(self):
        """Stop here; the generated tokens stay."""
        self.generation.finish = self.generation.finish or "cancelled"

    def commit(self, segment, path, token):
        """Append a round's tokens: the accepted drafts, which are the rows `path` of a verified segment, then
        `token`; cut at the end of text and at the length limit. Returns the appended tokens. The first token
        after a prompt is no round."""
        g = self.generation
        tokens = [segment.drafts[row - 1] for row in path] + [token]
        accepted = len(path)
        proposed = segment.longest(path)
        # 1. Cut at the end of the answer.
        kept = tokens[:self.remaining]
        stops = [i for i, token in enumerate(kept) if token in self.stop_ids]
        if stops:
            kept = kept[:stops[0] + 1]
            g.finish = "stop"
        elif len(kept) == self.remaining:
            g.finish = "length"
        # 2. The record. Drafts after the end do not count.
        if len(kept) <= accepted:
            proposed = accepted = len(kept)
        if segment.kind == "verify":
            drafted = len(segment.drafts) - segment.lookup
            g.rounds.append(Round(len(g.token_ids), proposed, accepted, len(kept), segment.proposer,
                                self.spent["draft"], self.spent["verify"], drafted, segment.lookup))
        self.spent = dict.fromkeys(self.spent, 0.0)
        # 3. Accepted drafts come first; one token of the target follows them.
        g.who += ["draft"] * accepted
        if len(kept) > accepted:
            g.who.append("plain" if proposed == 0 else "bonus" if accepted == proposed else "correction")
        g.token_ids += kept
        self.tokens += kept
        return kept


MAX_K = 32                  # drafts of a chain
MAX_NODES = 256             # drafts of a tree, or of all chains of a round


def check_k(k, width=1):
    """ValueError unless a round may have k draft tokens. width: the drafter's."""
    most, what = (MAX_K, "drafts in a row") if width == 1 else (MAX_NODES, "draft tokens a round")
    if not 1 <= k <= most:
        raise ValueError(f"k {k} is out of range; allowed is 1 to {most} {what}")


def check_requests(requests, config):
    """ValueError for a request that a model of this config can never answer, or that is in an open stream."""
    if len(set(requests)) < len(requests) or any(r.engine for r in requests if not r.finished):
        raise ValueError("a request can be in one open stream only, and there once")
    for r in requests:
        low, high = min(r.tokens), max(r.tokens)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(f"a prompt has token ids from {low} to {high}; "
                             f"the vocabulary of this model is 0 to {config.vocab_size - 1}")
        if r.longest > config.block_size:
            raise ValueError(f"prompt of {len(r.tokens)} tokens and {r.max_new_tokens} new ones "
                             f"exceed the context of {config.block_size}")


@dataclass
class Segment:
    """The rows that one request feeds in one forward of the target or of a drafter: `tokens` at positions
    `start`.., which read `keys`."""
    request: Request
    tokens: list
    start: int
    keys: object
    kind: str = "draft"                  # "prefill", "draft", "verify" (plain decoding verifies no drafts)
    n_logits: int = 0                    # the number of last rows whose logits are wanted
    drafts: list = field(default_factory=list)
    q: object = None                     # () -> (n, V), the distributions of the first drafts, if known
    parents: list = None                 # the parent row of each draft of a tree (verify.py); None: a chain
    chains: list = None                  # of a tree, for rejection: pairs (rows, q), see verify.rejection
    lookup: int = 0                      # of a tree, how many of its last drafts are prompt-lookup tokens
    select: object = None                # of a tree under the rule `selection`: see specdiff.best_path
    proposer: str = ""                   # the name shown beside its drafts
    features: torch.Tensor = None        # (n, (F + 1) * C) the target's states of the rows, for drafters

    @property
    def positions(self):
        if self.parents is None:
            return range(self.start, self.start + len(self.tokens))
        # In a tree, one more than the parent's: siblings share a position.
        out = [self.start]
        for parent in self.parents:
            out.append(out[parent] + 1)
        return out

    @property
    def drawn(self):
        """The chains, if rejection is to verify them."""
        if not self.request.sampling.rejects:
            return None
        if self.q and self.parents is None:
            return [(list(range(1, len(self.drafts) + 1)), self.q)]
        return self.chains

    @property
    def above(self):
        """The parent row of each draft."""
        return self.parents or range(len(self.drafts))

    def longest(self, path):
        """Drafts of the longest chain that begins with the rows `path`."""
        depth = {[0, *path][-1]: len(path)}
        for row, parent in enumerate(self.above, 1):
            if parent in depth:
                depth[row] = depth[parent] + 1
        return max(depth.values())


def pack(segments, device, per_request=None, options=()):
    """The rows of a list of Segments, in order, as a Batch."""
    tokens = torch.tensor([token for s in segments for token in s.tokens], device=device)
    positions = torch.tensor([position for s in segments for position in s.positions], device=device)
    # The first and last row of each request.
    ends = list(accumulate(len(s.tokens) for s in segments))
    spans = list(zip([0, *ends], ends, [s.keys for s in segments]))
    per_request = {name: torch.tensor(x, device=device) for name, x in (per_request or {}).items()}
    features = None
    if segments[0].features is not None:
        features = torch.cat([s.features for s in segments])
    return Batch(tokens, positions, spans, features, per_request, options)


@dataclass
class Batch:
    """Rows of several requests, packed for torch's operators (kernels.graphs.Inputs for the kernels): tokens
    (N,), positions (N,), and spans: (first row, last row + 1, keys) of each Segment. Drafters also read
    features (N, (F + 1) * C); per_request, {name: tensor with an entry for each request}; and options, which
    are no tensors (see ChainDrafter.propose for both). ends_early: whether a round may stop before its last
    step."""
    tokens: torch.Tensor
    positions: torch.Tensor
    spans: list
    features: torch.Tensor
    per_request: dict
    options: tuple
    ends_early = True

    @cached_property
    def attend(self):
        """Every row sees the keys of its own request."""
        return packed_attend(self.spans, self.tokens.device)

    def next_rows(self, number, tokens, sees=None):
        """The rows of draft step `number` = 2, 3, ..: tokens (n, w) are the newest ones of n requests, one
        position further. sees (n, w, m): of a tree, which of the last m rows each row sees."""
        w = tokens.shape[1]
        positions = (self.per_request["ends"] + number - 2).repeat_interleave(w)
        masks = [None] * len(tokens) if sees is None else sees
        spans = []
        for i, (mask, (_, _, before)) in enumerate(zip(masks, self.spans)):
            keys = FullKeys(before.cache, before.blocks, before.start + before.n, w, tail=mask)
            spans.append((i * w, (i + 1) * w, keys))
        return Batch(tokens.flatten(), positions, spans, None, self.per_request, self.options)
