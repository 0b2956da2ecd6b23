"""The decoding loop, seen once. Every iteration is the same three lines:

    plan    which rows does each request feed, and which keys may they see?
    forward one packed pass of the target over all rows of all requests
    settle  accept, commit, roll back

Who plans is the method. `Lockstep` lets a drafter (n-gram, small model, ...) propose and verifies every request in every
iteration; without a drafter it is plain autoregressive decoding. SpecGen (specgen.py) is the other planner: its requests
sit in different phases.

Invariant between iterations, for a request that has been prefilled: all committed tokens but the last have keys and
values in the cache. The last one is the first row of the next forward, so no pass is spent on updating the cache.

Requests are independent: each has its own keys, its own random stream and its own limits, and what it gets does not
depend on its neighbours.
"""
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from minispec.core.admission import Admission
from minispec.core.attention import FullKeys, can_fuse, fused_attend, fused_inputs, keep_scores, packed_attend, tree_mask
from minispec.core.kv_cache import KVCache
from minispec.core.verify import Sampling, draw, greedy_chain, greedy_tree, point_mass_tree, rejection_chain, warp


@dataclass
class Step:
    """One round of a request: `proposed` drafts (of a tree: its depth) by `proposer` when `position` tokens had been
    generated, `accepted` of them accepted, `committed` tokens gained (accepted + 1, fewer when the answer ended inside), and
    the request's share of the seconds spent on drafting and on the target's verifying forward."""
    position: int
    proposed: int
    accepted: int
    committed: int
    proposer: str
    draft_seconds: float
    verify_seconds: float


@dataclass
class Generation:
    """What a request got. who[i] tells where token_ids[i] came from: "draft" (accepted), "correction" (the target's
    token in place of a rejected draft), "bonus" (after a fully accepted chain), "plain" (nothing was proposed)."""
    prompt_ids: list
    token_ids: list = field(default_factory=list)
    who: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    finish: str = ""                     # "stop": end of text; "length": token limit; "cancelled"


class Request:
    """A prompt being answered. `tokens` are all committed ids, the first n_cached of which are in the cache.
    final_length: prompt and answer together, where it is known beforehand (admission by "oracle")."""

    def __init__(self, prompt_ids, max_new_tokens=256, sampling=Sampling(), stop_ids=(), final_length=None):
        if not prompt_ids:
            raise ValueError("an empty prompt has no last token to continue from")
        self.tokens, self.max_new_tokens, self.sampling, self.stop_ids = list(prompt_ids), max_new_tokens, sampling, set(stop_ids)
        self.rng = torch.Generator().manual_seed(sampling.seed)
        self.generation = Generation(list(prompt_ids))
        self.longest, self.final_length = len(prompt_ids) + max_new_tokens, final_length
        self.n_cached, self.run, self.state = 0, None, None        # run: its cache slots; state: the method's own notes
        self.spent = {"draft": 0.0, "verify": 0.0, "prefill": 0.0}   # seconds of the round so far

    @property
    def remaining(self):
        return self.max_new_tokens - len(self.generation.token_ids)

    @property
    def finished(self):
        return bool(self.generation.finish)

    def cancel(self):
        """Stop here; what was generated stays."""
        self.generation.finish = self.generation.finish or "cancelled"

    def coins(self, n):
        """n uniform numbers from this request's random stream."""
        return torch.rand(n, generator=self.rng)

    def commit(self, tokens, proposed, accepted, proposer):
        """Append a round's tokens (accepted drafts, then one more), cut at the end of text and at the length limit.
        Returns the tokens that were kept."""
        kept, g = tokens[:self.remaining], self.generation
        stop = next((i for i, t in enumerate(kept) if t in self.stop_ids), None)
        if stop is not None:
            kept, g.finish = kept[:stop + 1], "stop"
        elif len(kept) == self.remaining:
            g.finish = "length"
        if len(kept) <= accepted:                        # drafts behind the end were never asked for
            proposed = accepted = len(kept)
        if proposer:
            g.steps.append(Step(len(g.token_ids), proposed, accepted, len(kept), proposer, self.spent["draft"], self.spent["verify"]))
        self.spent = dict.fromkeys(self.spent, 0.0)
        last = "plain" if proposed == 0 else "bonus" if accepted == proposed else "correction"
        g.who += ["draft"] * accepted + [last] * (len(kept) > accepted)
        g.token_ids += kept
        self.tokens += kept
        return kept


MAX_K = 32


def check_k(k, most=MAX_K):
    """ValueError unless k is a number of draft tokens that a round may have."""
    if not 1 <= k <= most:
        raise ValueError(f"k {k} is out of range; allowed is 1 to {most} draft tokens a round")


def draw_drafts(requests, logits):
    """The next draft token of each request from its drafter's logits (n, V), by the request's own sampling settings.
    Returns the tokens and the distributions they were drawn from: (V,) each, None for a greedy argmax."""
    tokens, q = logits.argmax(-1).tolist(), [None] * len(requests)
    alike = {}                                           # rows with the same settings are warped and drawn together
    for i, r in enumerate(requests):
        if r.sampling.temperature > 0:
            alike.setdefault(r.sampling.settings, []).append(i)
    for rows in alike.values():
        probs = warp(logits[rows], requests[rows[0]].sampling)
        coins = torch.cat([requests[i].coins(1) for i in rows]).to(logits.device)
        for i, token, row in zip(rows, draw(probs, coins).tolist(), probs):
            tokens[i], q[i] = token, row
    return tokens, q


@dataclass
class Segment:
    """The rows one request feeds in one forward: `tokens` at positions `start`.., which may see `keys`."""
    request: Request
    tokens: list
    start: int
    keys: object
    kind: str                            # "prefill", "draft", "verify" (plain decoding verifies no drafts)
    n_logits: int                        # logits are wanted for the last n_logits rows
    drafts: list = field(default_factory=list)
    q: torch.Tensor = None               # (k, V) distributions the drafts were drawn from; None: point masses
    parents: list = None                 # of a tree: the row that each draft hangs from (see verify.py); None: a chain
    rule: object = point_mass_tree       # of a tree: who judges it where tokens are sampled
    features: torch.Tensor = None        # (n, F) what the drafter asked to see of the rows, filled in by the forward

    @property
    def positions(self):
        if self.parents is None:
            return range(self.start, self.start + len(self.tokens))
        out = [self.start]
        for parent in self.parents:
            out.append(out[parent] + 1)
        return out


class Engine:
    """Serves requests with continuous batching. planner(engine) makes the planner; see Lockstep.

    batch_size: requests decoded together. cache_tokens: slots of the pool (default: batch_size of the longest request
    seen at `stream`). prefill_chunk: prompt tokens a request feeds in one iteration. admission: see admission.py;
    host_tokens: size of the host pool for "offload" (default: as many as the pool has).
    """

    def __init__(self, model, planner, batch_size=8, cache_tokens=None, prefill_chunk=512, admission="reserve", host_tokens=None):
        self.model, self.batch_size, self.prefill_chunk = model, batch_size, prefill_chunk
        self.cache_tokens, self.host_tokens = cache_tokens, host_tokens
        self.planner, self.admission = planner(self), Admission(self, admission)
        self.cache = self.graphs = None                  # graphs: of forwards on the kernels, see kernels/graphs.py
        self.active, self.waiting = [], []
        self.seconds = {"draft": 0.0, "verify": 0.0, "prefill": 0.0, "other": 0.0}
        self.iterations = []                             # of each one: rows by kind, the state of the pool, seconds by phase
        self.judging = 0.0                               # seconds of this iteration spent on acceptance, a part of "other"
        self.group = model.config.n_head // model.config.n_kv_head
        self.fused = model.device.type == "cuda" and self.planner.fusable and can_fuse(model.embed.weight)
        self.thread = ThreadPoolExecutor(1) if self.planner.delayed else None

    # -- the loop ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def stream(self, requests):
        """Answer the requests; yields (request, newly committed tokens) as they are committed."""
        self._prepare(requests)
        while True:
            started, counted, self.judging = time.perf_counter(), dict(self.seconds), 0.0
            self._retire()                               # finished, or cancelled while the caller had the tokens
            if not (self.waiting or self.active or self.admission.paused):
                break
            committed = self.admission.step()
            plan = self.planner.plan(self.active)
            self._note(plan)
            if self.planner.delayed:                     # what the last iteration verified is judged beside this forward
                running = self.thread.submit(self.forward, plan)
                committed += self.planner.late()
                logits = running.result()
            else:
                logits = self.forward(plan)
            committed += self.planner.settle(plan, logits)
            # Whatever the phases did not count is "other"; what the caller does with the tokens is nobody's.
            self.seconds["other"] += time.perf_counter() - started - (sum(self.seconds.values()) - sum(counted.values()))
            spent = {phase: self.seconds[phase] - counted[phase] for phase in counted}
            sample = min(self.judging, other := spent.pop("other"))      # delayed: the rest was hidden beside the forward
            self.iterations[-1]["seconds"] = {**spent, "sample": sample, "overhead": other - sample}
            yield from committed

    def generate(self, requests):
        """Answer the requests and return their generations, in order."""
        for _ in self.stream(requests):
            pass
        return [r.generation for r in requests]

    @torch.inference_mode()
    def forward(self, plan):
        """One packed pass of the target. Returns the logits (n, V) of all rows that want them, in plan order."""
        if not plan:
            return None
        started, device = time.perf_counter(), self.model.device
        tokens, positions, segments, wanted, n = [], [], [], [], 0
        for s in plan:
            rows = len(s.tokens)
            tokens += s.tokens
            positions += s.positions
            segments.append((n, n + rows, s.keys))
            n += rows
            wanted += range(n - s.n_logits, n)
        inputs = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        if self.fused:
            (hidden, *features), scores, capturing = self.graphs(fused_inputs(self.cache, plan, *inputs, self.group))
            keep_scores(plan, scores)
            self.seconds["capture"] = self.seconds.get("capture", 0.0) + capturing
            started += capturing
        else:
            hidden, *features = self._pass(*inputs, packed_attend(segments))
        for s, (a, b, _) in zip(plan, segments):
            s.features = features[0][a:b] if features else None
        logits = self.model.logits(hidden if len(wanted) == n else hidden[wanted])
        if logits.is_cuda:
            torch.cuda.synchronize()
        spent = time.perf_counter() - started
        for s in plan:                                   # a mixed forward is charged by rows
            self.charge(s.request, s.kind, spent * len(s.tokens) / n)
        return logits

    def _pass(self, tokens, positions, attend):
        """The final hidden states (n, C), and, if the planner asks, the features (n, F)."""
        if self.planner.taps is None:
            return [self.model(tokens, positions, attend)]
        return list(self.model.features(tokens, positions, attend, self.planner.taps))

    def charge(self, request, phase, seconds):
        """Book time of a phase, on the engine and on the request's round."""
        self.seconds[phase] += seconds
        request.spent[phase] += seconds

    # -- what planners share -------------------------------------------------------------------------------------------

    def prefill(self, request, record=0):
        """The next chunk of a request whose prompt is not cached yet; the chunk that ends it yields the first token.
        record: make the last chunk one of so many rows at most, and record its attention scores."""
        start, end = request.n_cached, len(request.tokens)
        recorded = start >= end - record
        chunk = request.tokens[start:min(start + self.prefill_chunk, end if recorded else end - record)]
        keys = FullKeys(self.cache, request.run.first, start, len(chunk), record=recorded)
        return Segment(request, chunk, start, keys, "prefill", int(start + len(chunk) == end))

    def judge(self, segments, logits):
        """Apply the acceptance rule to segments whose drafts and last token fed len(drafts) + 1 rows each.
        Returns [(accepted, next token)]; logits (n, V) are theirs, in order. accepted: how many drafts of a chain, or
        which rows of a tree."""
        started, results, row, sampled = time.perf_counter(), [None] * len(segments), 0, {}
        best = logits.argmax(-1).tolist() if any(s.request.sampling.temperature == 0 for s in segments) else None
        for i, s in enumerate(segments):
            n = len(s.drafts) + 1
            if s.request.sampling.temperature == 0:
                rows = best[row:row + n]
                results[i] = greedy_chain(s.drafts, rows) if s.parents is None else greedy_tree(s.drafts, s.parents, rows)
            elif s.parents is not None:
                p = warp(logits[row:row + n], s.request.sampling)
                results[i] = s.rule(s.drafts, s.parents, p, s.request.coins(n))
            else:                                        # equal chains are judged together
                sampled.setdefault((n, s.q is None, s.request.sampling.settings), []).append((i, s, row))
            row += n
        for (n, point_mass, _), group in sampled.items():
            rows = torch.tensor([[row + j for j in range(n)] for _, _, row in group], device=logits.device)
            p = warp(logits[rows], group[0][1].request.sampling)                         # (B, n, V)
            draft = torch.tensor([s.drafts for _, s, _ in group], dtype=torch.long, device=logits.device).view(len(group), n - 1)
            q = None if point_mass else torch.stack([s.q for _, s, _ in group])
            coins = torch.stack([s.request.coins(n) for _, s, _ in group]).to(logits.device)
            accepted, token = rejection_chain(draft, q, p, coins)
            for (i, _, _), a, t in zip(group, accepted.tolist(), token.tolist()):
                results[i] = (a, t)
        self.judging += time.perf_counter() - started
        return results

    # -- admission -----------------------------------------------------------------------------------------------------

    def _prepare(self, requests):
        block = self.model.config.block_size
        for r in requests:
            if not 0 <= min(r.tokens) <= max(r.tokens) < self.model.config.vocab_size:
                raise ValueError(f"a prompt has token ids from {min(r.tokens)} to {max(r.tokens)}; the vocabulary of this model is 0 to {self.model.config.vocab_size - 1}")
            if r.longest > block:
                raise ValueError(f"prompt of {len(r.tokens)} tokens and {r.max_new_tokens} new ones exceed the context of {block}")
        sizes = [r.longest + self.planner.extra_slots(r) for r in requests]
        largest = max(sizes, default=0)
        slots = self.cache_tokens or largest * min(self.batch_size, len(requests))
        if largest > slots:
            raise ValueError(f"a cache of {slots} tokens cannot hold a request of {largest}")
        if self.cache is None or self.cache.n_slots < slots:
            host = slots if self.host_tokens is None else self.host_tokens
            self.cache, self.graphs = KVCache(self.model.config, slots, self.model.dtype, self.model.device, host, int(self.fused)), None
        longest = max([r.longest for r in requests], default=0)
        if self.fused and (self.graphs is None or self.graphs.longest < longest):
            from kernels.graphs import Graphs
            self.graphs = Graphs(lambda x: self._pass(x.tokens, x.positions, fused_attend(self.cache, x)), self.cache, self.batch_size,
                                 longest, self.planner.widest(longest), self.group)
        self.waiting += requests

    def _note(self, plan):
        rows = {"prefill": 0, "draft": 0, "verify": 0}
        for s in plan:
            rows[s.kind] += len(s.tokens)
        self.iterations.append({**rows, "active": len(self.active), "stalled": len(self.active) - len(plan), "paused": len(self.admission.paused),
                                "used": self.cache.used + self.cache.charged})

    def _retire(self):
        for request in [r for r in self.active + self.admission.paused if r.finished]:
            self.admission.leave(request)
            if request in self.active:
                self.active.remove(request)
        self.waiting = [r for r in self.waiting if not r.finished]


class Lockstep:
    """The plan in which every request verifies in every iteration. drafter None: autoregressive decoding. k: the most
    drafts a round, of a chain or of a tree."""
    delayed = False                                      # True: the engine calls `late` while the next forward runs

    def __init__(self, engine, drafter=None, k=0):
        if drafter:
            check_k(k, getattr(drafter, "max_k", MAX_K))
        self.engine, self.drafter, self.k = engine, drafter, k
        self.rows = k + 1                                # the most rows that a verification writes
        self.fusable = getattr(drafter, "width", 1) == 1  # the kernels serve chains, not trees
        self.taps = getattr(drafter, "taps", None)       # what the drafter asks to see of the target; None: nothing
        self.chosen = getattr(drafter, "chosen", {})     # who proposed, where the drafter asks others

    def extra_slots(self, request):
        """Cache slots' worth of buffers that this request needs beside its run."""
        return 0

    def widest(self, length):
        """How many selected positions a row reads at most, of `length`."""
        return 0

    def plan(self, active):
        ready = [r for r in active if r.n_cached == len(r.tokens) - 1]
        drafts = self._propose(ready) if self.drafter and ready else {}
        return [self._verify(r, *drafts.get(r, ([], None))) if r.n_cached == len(r.tokens) - 1 else self.engine.prefill(r)
                for r in active]

    def _propose(self, ready):
        started = time.perf_counter()
        # A round commits at least one token beside its drafts, so the last one needs no draft.
        drafts = self.drafter.propose(ready, [min(self.k, r.remaining - 1) for r in ready])
        spent = time.perf_counter() - started
        for r in ready:
            self.engine.charge(r, "draft", spent / len(ready))
        return dict(zip(ready, drafts))

    def _verify(self, request, drafts, q, parents=None, rule=point_mass_tree):
        rows = [request.tokens[-1], *drafts]
        tail = None if parents is None else tree_mask(parents)
        keys = FullKeys(self.engine.cache, request.run.first, request.n_cached, len(rows), tail=tail)
        return Segment(request, rows, request.n_cached, keys, "verify", len(rows), drafts, q, parents, rule)

    def settle(self, plan, logits):
        judged = [s for s in plan if s.n_logits]
        for s in plan:
            if s.kind == "prefill":
                s.request.n_cached += len(s.tokens)
                if self.taps is not None:
                    self.drafter.observe(s.request, s.features)
        for s, (accepted, token) in zip(judged, self.engine.judge(judged, logits)):
            r, path = s.request, range(1, accepted + 1) if s.parents is None else accepted      # the rows of accepted drafts
            if s.kind == "verify":
                if s.parents is not None:
                    self.engine.cache.keep(r.run.first + r.n_cached, [0, *path])
                r.n_cached += 1 + len(path)              # rejected rows are simply overwritten by the next ones
                if self.taps is not None:
                    self.drafter.observe(r, s.features[[0, *path]])
            proposer = self.chosen.get(r, self.drafter.name if self.drafter else "target") if s.kind == "verify" else ""
            depth = max(s.positions) - s.start if s.kind == "verify" else 0                     # of a chain: its length
            yield r, r.commit([s.drafts[i - 1] for i in path] + [token], depth, len(path), proposer)

    def release(self, request):
        if self.drafter:
            self.drafter.release(request)
