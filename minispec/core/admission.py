"""Who may be decoded now? Admission of requests to the cache, and what happens when the cache is full (SpecGen section 4.4:
"dynamic KV-cache manager").

The length of a chain of thought is not known beforehand. Policies:

    reserve    a request enters when its longest possible answer fits; nothing ever goes wrong, much of the cache stays empty
    oracle     a request enters when its true length fits (Request.final_length, known to a benchmark only; where that was
               too short, it goes on as `preempt` does)
    preempt    enter as soon as the prompt fits; when the cache is full, drop the youngest request and compute it again later
    offload    the same, but the youngest moves to host memory in chunks and comes back before anybody new is admitted

The oldest request always goes on, so every request ends. The youngest leaves first and the last one to leave comes back
first, so those that wait on the host are a stack and service is in order of age.
"""
POLICIES = ("reserve", "oracle", "preempt", "offload")
CHUNK = 1024            # tokens that move between device and host at once
GROWTH = 64             # slots that a run grows by beyond its need, while there is room: growing may mean moving


class Admission:
    """Moves requests between engine.waiting, engine.active (oldest first) and `paused` (on the host, youngest first)."""

    def __init__(self, engine, policy="reserve"):
        if policy not in POLICIES:
            raise ValueError(f"unknown admission policy '{policy}'; choose from {', '.join(POLICIES)}")
        self.engine, self.policy, self.paused = engine, policy, []
        self.recomputed = 0                                # tokens that `preempt` threw away

    def step(self):
        """Before an iteration: make room for what the active requests will write, then let others in. Returns what had to be
        judged for that, as `SpecGen.late` yields it."""
        engine, active, judged = self.engine, self.engine.active, []
        if self.policy != "reserve":
            if engine.planner.delayed and sum(max(self.reach(r) - r.run.size, 0) for r in active) > engine.cache.free:
                judged += engine.planner.late()            # somebody must leave, so nobody may wait for a judgement
            i = 0
            while i < len(active) and self._make_room(active[i]):
                i += 1
            while self.paused and len(active) < engine.batch_size and self._resume(self.paused[-1]):
                active.append(self.paused.pop())
        while engine.waiting and not self.paused and len(active) < engine.batch_size and self._enter(engine.waiting[0]):
            active.append(engine.waiting.pop(0))
        return judged

    def reach(self, r):
        """Slots that a request needs for what it has and for its next verification."""
        if self.policy == "reserve":
            return r.longest
        n = len(r.tokens) + self.engine.planner.rows
        if self.policy == "oracle":
            n = max(n, (r.final_length or r.longest) + self.engine.planner.rows)
        return min(r.longest, n)

    def _make_room(self, r):
        """Room for the next rows of an active request, at the cost of younger ones. False where it was the youngest."""
        need = self.reach(r)
        if r.run.size >= need or self.engine.cache.resize(r.run, min(r.longest, need + GROWTH)):
            return True
        while not self.engine.cache.resize(r.run, need):
            victim = self.paused[-1] if self.paused and self.paused[-1].run.size else None      # one is half out already
            if victim is None:
                victim = self.engine.active.pop()
                self._push_out(victim)
            if self.policy == "offload":
                self.engine.cache.offload(victim.run, CHUNK)
            if victim is r:
                return False
        return True

    def _push_out(self, r):
        if self.policy == "offload":
            self.engine.cache.charged -= self.engine.planner.extra_slots(r)      # its buffers count as moved with it
            self.paused.append(r)
        else:
            self.recomputed += r.n_cached
            self.leave(r)
            r.n_cached = 0
            self.engine.waiting.insert(0, r)

    def _enter(self, r):
        cache, extra = self.engine.cache, self.engine.planner.extra_slots(r)
        r.run = cache.open(self.reach(r)) if self.reach(r) + extra <= cache.free else None
        cache.charged += extra if r.run else 0
        return r.run is not None

    def _resume(self, r):
        """Bring a request back, chunk by chunk, once everybody's next rows fit beside it. True when it is whole again."""
        cache, extra = self.engine.cache, self.engine.planner.extra_slots(r)
        size = max(self.reach(r), r.run.size + r.run.on_host)
        growth = sum(max(self.reach(other) - other.run.size, 0) for other in self.engine.active)
        if cache.free < extra + growth + size - r.run.size:
            return False
        cache.charged += extra
        while r.run.host:
            cache.restore(r.run)
        return cache.resize(r.run, size)

    def leave(self, r):
        """A request that is finished, or starts again: its slots and buffers are free."""
        self.engine.cache.close(r.run)
        if r in self.paused:
            self.paused.remove(r)
        else:
            self.engine.cache.charged -= self.engine.planner.extra_slots(r)
        self.engine.planner.release(r)
        r.run = None
