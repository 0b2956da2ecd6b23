"""The decoding loop. Every iteration is the same three steps:

    schedule  which rows does each request feed, and which keys may they see?      -> [Segment]
    forward   one packed pass of the target over all rows of all requests          -> logits
    commit    verify the drafts, append tokens                                     -> [(request, tokens)]

To follow a request, read `Engine.stream`, then in this order:

    1. `Admission.admit` lets it enter: it gets blocks of the cache.
    2. `_prefill` feeds its prompt in chunks. The last chunk yields the first token.
    3. `scheduler.schedule` makes its next Segment: the last committed token and the drafts that follow it.
    4. `forward` packs the rows of all segments; each keys object stores and reads the cache (attention.py).
    5. `commit` asks verify.py which drafts are accepted, and `Request.commit` appends them and one more
       token.
    6. `retire` frees its blocks when it is finished.

The engine does steps 1, 2, 4, 5 and 6. Methods differ in step 3, see scheduler.py.

Invariant between iterations, for a request whose prompt has been read: all committed tokens but the last have
keys and values in the cache. The last one is the first row of the next forward, so no pass is spent on
updating the cache.

With delayed verification (`scheduler.delayed`) the host verifies the drafts of an iteration while the next
forward runs. Requests that wait for their verdict sit that forward out.

The output of a request does not depend on its neighbours in the batch, greedy or sampled: the seed and the
text before a position determine the target's token there. (Up to rounding: a forward with more rows may round
differently. Under the rule `rejection` this holds for the distribution of the output, not for its tokens, if
the requests have different seeds: those of one seed toss the same coins.)
"""
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from minispec.core.admission import Admission
from minispec.core.attention import FullKeys
from minispec.core.kv_cache import beside, whole_blocks
from minispec.core.prefix_cache import PrefixCache
from minispec.core.requests import Segment, check_requests, pack
from minispec.core.verify import check_numbers, verify

PROMPT_ROWS = 2048  # prompt tokens of a target's forward, all requests together: it bounds its memory


class Engine:
    """Serves requests with continuous batching. scheduler(engine) makes the scheduler; see scheduler.py.

    batch_size: requests decoded together. cache_tokens: slots of the pool (default: the slots of the largest
    request of a `stream`, times the number of requests decoded together). prefill_chunk: most prompt tokens
    of a request in one iteration. admission: see admission.py. ValueError if one of the sizes is below 1.
    """
    verify = staticmethod(verify)                        # a study may put another rule in its place

    def __init__(self, model, scheduler, batch_size=8, cache_tokens=None, prefill_chunk=512,
                 admission="reserve"):
        sizes = {"batch_size": batch_size, "cache_tokens": cache_tokens, "prefill_chunk": prefill_chunk}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be 1 or more, got {size}")
        self.model = model
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk
        self.cache_tokens = cache_tokens
        self.cache = None                                # made by the first `stream`
        self.scheduler = scheduler(self)
        self.admission = Admission(self, admission)
        self.waiting = []
        self.active = []                                 # oldest first
        self.pending = []                                # segments that wait for their verdict,
        self.pending_logits = None                       # and their rows of logits
        self.seconds = {"draft": 0.0, "verify": 0.0, "prefill": 0.0, "other": 0.0}
        self.warm_up = 0.0                               # of compiling and capturing, in no other account
        self.iterations = []                             # of each: rows by kind, the pool, seconds by kind
        self.on_prefill = None                           # called with the number of prompt tokens just read
        # On a GPU: Triton kernels, CUDA graphs of them, and a stream to verify on.
        self.fused = False
        if model.device.type == "cuda":
            from kernels import can_run                  # a GPU alone has a use for it
            self.fused = can_run(model, self.scheduler.rows)
        self.graphs = None                               # of forwards on the kernels, see kernels/graphs.py
        self.thread = self.side = None
        if self.scheduler.delayed:
            self.thread = ThreadPoolExecutor(1)
            if model.device.type == "cuda":
                self.thread.submit(torch.cuda.set_device, model.device)        # a thread starts on device 0
                # Of high priority: no graph is captured on such a stream.
                self.side = torch.cuda.Stream(model.device, priority=-1)

    # -- the loop --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def stream(self, requests):
        """Answer the requests; yields (request, newly committed tokens) as they are committed.

        One stream at a time. Closing it (or leaving its loop) releases the requests that are not finished:
        they keep their tokens, and continue when they are streamed again. ValueError for a request that can
        never be answered.
        """
        if self.active or self.waiting or self.admission.paused:
            raise ValueError("another stream of this engine is open; finish or close it first")
        delayed, spoiled, forwarding = self.scheduler.delayed, False, False
        try:
            self._prepare(requests)
            for r in requests:
                r.engine = self
            while True:
                started = self.clock()
                self.spent = {"draft": 0.0, "verify": 0.0, "prefill": 0.0}     # seconds of this iteration,
                self.sample_seconds = 0.0                                      # and those in verify.py
                self.retire()  # finished, or cancelled while the caller had the tokens
                if not (self.waiting or self.active or self.admission.paused):
                    break

                # 1. Schedule: the scheduler's decoding rows, then chunks of prompts. A request gets its
                #    verdict before it leaves the cache, so admission may commit tokens already.
                committed = self.admission.admit()
                stalled = {s.request for s in self.pending}
                running = [r for r in self.active if r not in stalled]
                segments = self.scheduler.schedule([r for r in running if r.is_prefilled])
                segments += self._prefill([r for r in running if not r.is_prefilled])
                self._record(segments)

                # 2. Forward. Delayed: the drafts of the last iteration are verified meanwhile; on a GPU on
                #    another stream than the forward's, or verification would wait for it.
                if delayed:
                    # What the other stream reads must outlive its work.
                    held = [(s, s.request.state) for s in self.pending]
                    forwarding = True
                    with beside(self.side):
                        future = self.thread.submit(self.forward, segments)
                        committed += self.commit()
                    if self.side:
                        self.side.synchronize()
                    del held
                    logits, forwarding = future.result(), False
                else:
                    logits = self.forward(segments)
                self._prefilled([s for s in segments if s.kind == "prefill"])
                # Drafting segments come first, a row each.
                drafting = [s for s in segments if s.kind == "draft"]
                n = len(drafting)
                self.scheduler.take_drafts(drafting, logits[:n])
                self.pending = [s for s in segments if s.n_logits and s.kind != "draft"]
                self.pending_logits = logits[n:]

                # 3. Commit.
                if not delayed:
                    committed += self.commit()
                self._account(started)
                yield from committed
        except ValueError:
            spoiled = bool(self.active)                  # by keys that are no numbers: no mask hides them
            raise
        finally:
            if forwarding:
                self.thread.submit(int).result()         # wait for an interrupted forward, which uses blocks
            self.retire(everything=True)
            self.pending = []
            for r in requests:
                if r.engine is self:                     # a refused one may be another engine's
                    r.engine = None
            if spoiled:
                self.cache = self.graphs = None

    def generate(self, requests):
        """Answer the requests and return their generations, in order."""
        for _ in self.stream(requests):
            pass
        return [r.generation for r in requests]

    def _prefill(self, requests):
        """The next chunks of prompts, the oldest request first; others wait if no room is left. A last chunk
        yields the first token. The rows whose attention the scheduler records are a chunk of their own."""
        segments = []
        room = PROMPT_ROWS
        for r in requests:
            start = r.n_cached
            end = len(r.tokens)
            last_rows = end - self.scheduler.record_prompt
            recorded = start >= last_rows
            stop = min(start + self.prefill_chunk, end if recorded else last_rows)
            if stop - start > room:
                stop = start if recorded else start + room         # the recorded rows stay together
            if stop <= start:
                continue
            if stop == end - 1:
                stop = end                               # one row left would count as prefilled
            room -= stop - start
            keys = FullKeys(self.cache, r.blocks, start, stop - start,
                            record=self.scheduler.record if recorded else None)
            tokens = r.tokens[start:stop]
            segments.append(Segment(r, tokens, start, keys, "prefill", n_logits=int(stop == end)))
        return segments

    def _prefilled(self, segments):
        """Chunks of prompts are in the cache."""
        for s in segments:
            n = len(s.tokens)
            s.request.n_cached += n
            if self.scheduler.drafter.uses_hidden_states:
                self.scheduler.drafter.observe(s.request, s.features)
            self.admission.remember(s.request)
            if self.on_prefill:
                self.on_prefill(n)

    def run(self, x):
        """[the target's hidden states, and those that its drafter reads] of a packed batch."""
        return [self.model(x.tokens, x.positions, x.attend, self.scheduler.drafter.feature_layers)]

    @torch.inference_mode()
    def forward(self, segments):
        """One packed pass of the target. Returns the logits (n, V) of the segments' last n_logits rows."""
        if not segments:
            return torch.empty(0)
        started = self.clock()
        # On the kernels or on torch operators.
        features, = self.graphs(segments) if self.fused else self.run(pack(segments, self.model.device))
        # The rows of all segments lie one after the other.
        n = 0
        wanted = []
        for s, own in zip(segments, features.split([len(s.tokens) for s in segments])):
            s.features = own
            n += len(s.tokens)
            wanted += range(n - s.n_logits, n)
        hidden = features[:, -self.model.config.d_model:]
        # Of prompts few rows are wanted.
        if len(wanted) < n:
            hidden = hidden[wanted]
        logits = self.model.logits(hidden)
        check_numbers(logits)                            # this waits for a GPU
        # A mixed forward is charged by rows.
        spent = self.clock() - started
        for s in segments:
            self.charge(s.request, s.kind, spent * len(s.tokens) / n)
        return logits

    def commit(self):
        """Verify and commit. Returns [(request, newly committed tokens)]."""
        segments, self.pending = self.pending, []
        if not segments:
            return []
        started = time.perf_counter()
        verdicts = self.verify(segments, self.pending_logits)
        self.sample_seconds += time.perf_counter() - started
        # Others were cancelled meanwhile.
        live = [(s, *verdict) for s, verdict in zip(segments, verdicts) if not s.request.finished]
        # Later rows overwrite the rejected rows of a chain. The accepted path of a tree moves together.
        self.cache.keep([(s.request.blocks, s.start, [0, *path]) for s, path, _ in live if s.parents])
        committed = []
        for s, path, token in live:
            r = s.request
            if s.kind == "verify":
                r.n_cached += len(path) + 1
                if self.scheduler.drafter.uses_hidden_states:
                    # A slice for a chain: a list has to go to a GPU. A copy: a view would keep all rows.
                    chosen = [0, *path] if s.parents else slice(len(path) + 1)
                    self.scheduler.drafter.observe(r, s.features[chosen].clone())
            self.scheduler.verified(s, len(path))
            committed.append((r, r.commit(s, path, token)))
        return committed

    # -- time ------------------------------------------------------------------------------------------------

    def clock(self):
        """Seconds, without those of compiling and capturing."""
        return time.perf_counter() - self.warm_up

    def charge(self, request, kind, seconds):
        """Book the time of a kind of row ("draft", "verify", "prefill"), on the iteration and on the round of
        the request."""
        self.spent[kind] += seconds
        request.spent[kind] += seconds

    def _account(self, started):
        """Book the iteration. The time that no row is charged with is "other": verify.py, and overhead."""
        other = self.clock() - started - sum(self.spent.values())
        for kind, seconds in (self.spent | {"other": other}).items():
            self.seconds[kind] += seconds
        sample = min(self.sample_seconds, other)         # delayed: the rest was hidden behind the forward
        self.iterations[-1]["seconds"] = {**self.spent, "sample": sample, "overhead": other - sample}

    def _record(self, segments):
        """Note what this iteration feeds, and the use of the cache."""
        rows = {"prefill": 0, "draft": 0, "verify": 0}
        for s in segments:
            rows[s.kind] += len(s.tokens)
        stalled = sum(not s.request.finished for s in self.pending)
        self.iterations.append({**rows, "active": len(self.active), "stalled": stalled,
                                "used": self.cache.used + self.cache.charged})

    # -- the pool and who is in it ---------------------------------------------------------------------------

    def slots_for(self, requests):
        """Slots of a cache for these requests. ValueError where one exceeds the context or the cache."""
        check_requests(requests, self.model.config)
        largest = max([whole_blocks(r.longest) + self.scheduler.extra_slots(r) for r in requests], default=0)
        slots = whole_blocks(self.cache_tokens or largest * min(self.batch_size, len(requests)))
        if largest > slots:
            raise ValueError(f"a cache of {self.cache_tokens} tokens cannot hold a request of {largest}")
        return slots

    def _prepare(self, requests):
        """Check the requests, and make a cache that they fit into."""
        slots = self.slots_for(requests)
        longest = whole_blocks(max([r.longest for r in requests], default=0))
        # The cache is kept from stream to stream; it grows with the requests.
        if self.cache is None:
            self.cache = PrefixCache(self.model.config, slots, self.model.dtype, self.model.device,
                                     spare=int(self.fused))
        if self.cache.n_slots < slots:
            self.graphs = None                           # they hold the old addresses
            self.cache.enlarge(slots)                    # with the keys and values of earlier texts
        # A graph's tables have room for the longest request.
        if self.fused and (self.graphs is None or self.graphs.longest < longest):
            from kernels.rounds import accelerate
            accelerate(self, longest)
        self.waiting += requests

    def retire(self, everything=False):
        """Release the requests that are finished, or all of them."""
        for r in [*self.active, *self.admission.paused]:
            # After an interrupt a request may be in two lists.
            if r.blocks and (everything or r.finished):
                self.admission.leave(r)
        # An interrupt may have come while a request entered.
        if everything and self.cache:
            for r in self.waiting:
                if r.blocks:
                    self.cache.close(r.blocks)
                    r.blocks, r.n_cached = None, 0
            self.cache.charged = 0
        self.active[:] = [r for r in self.active if r.blocks]
        self.waiting = [r for r in self.waiting if not (everything or r.finished)]
