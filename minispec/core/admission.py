"""Admission of requests to the cache, and the choice of requests that leave it when it is full (SpecGen
section 4.4: "dynamic KV-cache manager").

The length of a chain of thought is not known beforehand. Policies:

    reserve    a request enters when its longest possible answer fits; no request ever leaves, but much of the
               cache stays empty
    preempt    a request enters when its prompt fits; when the cache is full, the youngest request is dropped
               and computed again later
    offload    the same, but the youngest request moves to host memory in chunks, and comes back before any
               new request is admitted

The oldest request always continues, so every request ends. The youngest leaves first and the last to leave
comes back first, so the requests on the host are a stack, and service is in order of age. No request leaves
before the verdict on its last verification (delayed verification), because the verdict determines how much of
its cache is valid. The cache hands out whole blocks (kv_cache.py).
"""
from minispec.core.kv_cache import Allocation, whole_blocks

POLICIES = ("reserve", "preempt", "offload")
CHUNK = 1024            # tokens that move between device and host at once


class Admission:
    """Moves requests between engine.waiting, engine.active (oldest first) and `paused` (on the host,
    youngest first)."""

    def __init__(self, engine, policy):
        self.engine = engine
        self.policy = policy
        self.paused = []
        self.dropped = 0                                   # tokens that `preempt` threw away
        self.shared = 0                                    # tokens found in blocks when a request enters

    def admit(self):
        """Before an iteration: make room for the rows of the active requests, then admit others. Returns the
        verdicts that this needed, as [(request, newly committed tokens)]."""
        engine = self.engine
        active = engine.active
        verified = []
        if self._missing_slots() > engine.cache.free:
            # A request must leave, so no verdict may be due. Requests that it finishes make room, too.
            verified = engine.commit()
            engine.retire()
        # The oldest first; the youngest may leave meanwhile.
        i = 0
        while i < len(active) and self._make_room(active[i]):
            i += 1
        # There is room again: the last one to leave comes back first.
        while self.paused and len(active) < engine.batch_size and self._resume(self.paused[-1]):
            # A request is added to its new list before it leaves the old one: an interrupt between these
            # lines loses nothing.
            active.append(self.paused[-1])
            del self.paused[-1]
        # Waiting requests enter in order: small ones that overtake could keep a large one out for ever.
        while engine.waiting and not self.paused and len(active) < engine.batch_size:
            if not self._enter(engine.waiting[0]):
                break
            active.append(engine.waiting[0])
            del engine.waiting[0]
        return verified

    def reach(self, r):
        """Slots that a request needs for its tokens and its next verification."""
        return whole_blocks(min(r.longest, len(r.tokens) + self.engine.scheduler.rows))

    def claim(self, r):
        """Slots that no other request may get. Blocks are handed out when they are needed, so that used
        blocks lie together, but `reserve` counts the longest answer."""
        return whole_blocks(r.longest) if self.policy == "reserve" else self.reach(r)

    def _missing_slots(self):
        """Slots that the active requests claim in addition to those they have."""
        size = self.engine.cache.size
        return sum(max(self.claim(r) - size(r.blocks), 0) for r in self.engine.active)

    def _make_room(self, r):
        """Room for the next rows of an active request, at the cost of younger ones. False if it had to
        leave."""
        engine = self.engine
        cache = engine.cache
        # Requests leave, from the youngest on. If r is the youngest, it leaves itself.
        while not cache.resize(r.blocks, self.reach(r)):
            half_out = self.paused and self.paused[-1].blocks.table
            victim = self.paused[-1] if half_out else engine.active[-1]
            assert victim not in [s.request for s in engine.pending], "a request leaves before its verdict"
            if self.policy == "offload":
                if not half_out:
                    self.paused.append(victim)
                    del engine.active[-1]
                    cache.charged -= engine.scheduler.extra_slots(victim)      # its buffers count as moved
                cache.offload(victim.blocks, CHUNK)
            else:
                # Its tokens stay; its keys are shared or computed again when it enters again.
                engine.waiting.insert(0, victim)
                self.dropped += victim.n_cached
                self.leave(victim)
                del engine.active[-1]
            if victim is r:
                return False
        return True

    def _enter(self, r):
        """Give a waiting request its first blocks, unless the active requests claim them. Returns whether it
        may enter now."""
        cache = self.engine.cache
        scheduler = self.engine.scheduler
        extra = scheduler.extra_slots(r)
        if self._missing_slots() + self.claim(r) + extra > cache.free:
            return False
        # The last rows are always prefilled: they give the first token, and the recorded scores. At least
        # two, because a request with one row left counts as prefilled, and would draft at once.
        known = max(len(r.tokens) - max(scheduler.record_prompt, 2), 0)
        beginning, half = r.tokens[:known], cache.block // 2
        # It waits while another request still prefills half a block or more that both share.
        for other in self.engine.active if scheduler.shares else []:
            wanted = other.n_cached + half
            if not other.is_prefilled and len(beginning) >= wanted:
                if other.tokens[:wanted] == beginning[:wanted]:
                    return False
        r.blocks = Allocation(most=cache.blocks_for(r.longest))
        r.state = None
        if scheduler.shares and not r.n_cached:          # measurements begin with a cache that counts as read
            r.n_cached = cache.share(r.blocks, beginning)
            self.shared += r.n_cached
        cache.resize(r.blocks, self.reach(r))
        cache.charged += extra
        return True

    def _resume(self, r):
        """Bring a request back, chunk by chunk, if the next rows of all others fit beside it. Returns whether
        it is back."""
        cache = self.engine.cache
        extra = self.engine.scheduler.extra_slots(r)
        size = self.reach(r)                             # at least what it had when it left
        if cache.free < extra + self._missing_slots() + size - cache.size(r.blocks):
            return False
        cache.charged += extra
        while r.blocks.host:
            cache.restore(r.blocks)
        return cache.resize(r.blocks, size)

    def remember(self, r):
        """Let others share the blocks of this request."""
        if self.engine.scheduler.shares and not r.blocks.host:
            self.engine.cache.remember(r.blocks, r.tokens[:r.n_cached])

    def leave(self, r):
        """Free the blocks and buffers of a request that is finished or starts again."""
        self.engine.scheduler.release(r)
        self.remember(r)
        r.n_cached = 0
        self.engine.cache.close(r.blocks)
        if r in self.paused:
            self.paused.remove(r)
        else:
            self.engine.cache.charged -= self.engine.scheduler.extra_slots(r)
        r.blocks = None
