"""The rows that a request feeds next: the interface between the engine and a method, and the scheduler of
most methods.

`SyncScheduler` lets a drafter (prompt lookup, a small model, ...) propose, and verifies every request in
every iteration; without a drafter it is plain autoregressive decoding. SpecGen (specgen.py) is the other
scheduler: its drafts are rows of the target, so some requests draft in an iteration while others verify.
"""
from minispec.core.attention import FullKeys, tree_mask
from minispec.core.drafters import Drafter, NGram, with_lookup
from minispec.core.requests import Segment, check_k

MAX_LOOKUP = 512            # prompt-lookup tokens of a forward; see `verify.coins`


class Scheduler:
    """The interface between the engine and a scheduler, with the usual answers."""
    delayed = False                      # True: the engine verifies beside the next forward
    record = None                        # of verifications, see FullKeys
    record_prompt = 0                    # number of last rows of a prompt that are recorded as well
    drafter = Drafter()
    rows = 1                             # the most rows of a verification
    shares = True                        # whether requests may share the blocks of a common beginning

    def schedule(self, ready):
        """Segments for the requests that may decode: their prompts are read, and no verdict is due."""

    def extra_slots(self, request):
        """Buffers that this request needs besides its blocks, in slots of the cache."""
        return 0

    def budget(self, length):
        """The number of selected positions that a draft row reads of `length` cached ones."""
        return 0

    def take_drafts(self, segments, logits):
        """The logits (n, V) of n segments of the kind "draft", a row each."""

    def verified(self, segment, accepted):
        """The verdict on a segment: the number of its accepted drafts."""

    def release(self, request):
        """Forget this request: it is finished, or will start again."""


class SyncScheduler(Scheduler):
    """The scheduler with which every request verifies in every iteration.

    drafter None: autoregressive decoding. k: the most drafts a round, of a chain or of a tree. lookup:
    prompt-lookup tokens per forward, shared by the batch, that are verified beside the drafts.
    """

    def __init__(self, engine, drafter=None, k=0, lookup=0):
        if drafter:
            check_k(k, drafter.width)
        if not 0 <= lookup <= MAX_LOOKUP:
            raise ValueError(f"prompt-lookup tokens must be 0 to {MAX_LOOKUP}, got {lookup}")
        self.engine = engine
        self.drafter = drafter or Drafter()
        self.k = k
        self.lookup = lookup
        self.ngram = NGram()
        self.rows = k + lookup + 1
        self.shares = not self.drafter.uses_hidden_states  # the states of shared tokens are gone

    def schedule(self, ready):
        # 1. Drafts. A round commits one token besides them, so the last token needs none.
        proposals = [([], None)] * len(ready)
        if self.k and ready:
            started = self.engine.clock()
            proposals = self.drafter.propose(ready, [min(self.k, r.remaining - 1) for r in ready])
            if spare := self.lookup // len(ready):
                proposals = [with_lookup(own, self.ngram.lookup(r, min(spare, r.remaining - 1 - len(own[0]))))
                             for r, own in zip(ready, proposals)]
            spent = self.engine.clock() - started
            for r in ready:
                self.engine.charge(r, "draft", spent / len(ready))
        # 2. The rows of the verifications: the last committed token, then the drafts.
        segments = []
        for r, (drafts, q, *tree) in zip(ready, proposals):
            rows = [r.tokens[-1], *drafts]
            tail = tree_mask(tree[0]) if tree else None
            keys = FullKeys(self.engine.cache, r.blocks, r.n_cached, len(rows), tail=tail)
            segments.append(Segment(r, rows, r.n_cached, keys, "verify", len(rows), drafts, q, *tree,
                                    select=self.drafter.select, proposer=self.drafter.name))
        return segments

    def release(self, request):
        self.drafter.release(request)
        self.ngram.release(request)
