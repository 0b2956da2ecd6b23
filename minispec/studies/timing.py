"""How the studies make engines and time them: in turn, in one process, after a warm-up, so that a slow minute
of the machine slows all."""
import statistics
from dataclasses import dataclass

from tqdm import tqdm

from minispec.tools import methods
from minispec.tools.answers import summary


def engine_of(way, model, args, batch, **changes):
    """The engine of a method with the options behind its name, like "prism --tree 8". args: all other
    settings, but for `changes`."""
    method, *options = way.split()
    settings = methods.settings(*options, **{**vars(args), **changes})
    return methods.make_engine(method, model, settings, batch)


@dataclass
class Run:
    """One timed run: what is left of an engine when its cache and its graphs are gone."""
    generations: list
    phases: dict            # seconds, prompts included; capturing a GPU's graphs, once a shape, is not
    tau: float
    request_rate: float     # mean of the requests' tokens/s
    seen: object            # what the study wants to know of the engine

    @property
    def tokens(self):
        return sum(len(g.token_ids) for g in self.generations)

    @property
    def seconds(self):
        return sum(self.phases.values())

    @property
    def decoding_rate(self):
        """Tokens/s without reading the prompts, which all methods do alike."""
        return self.tokens / (self.seconds - self.phases["prefill"])


def race(cells, repeats, desc, warm_up=True, see=None):
    """Run cells {name: function that returns (engine, fresh requests)} in turn, `repeats` times after one
    warm-up. Returns {name: [Run of every repeat]}; see: what to keep of an engine."""
    runs = {name: [] for name in cells}
    for repeat in tqdm(range(-warm_up, repeats), desc=desc, leave=False):
        for name, build in cells.items():
            engine, requests = build()
            generations, rate = answer(engine, requests)
            if repeat >= 0:
                tau = summary(generations, engine)["tau"]
                runs[name].append(Run(generations, phases(engine), tau, rate, see and see(engine)))
    return runs


def answer(engine, requests):
    """(generations, mean of the requests' tokens/s) by the engine's clock. A request's time is that from its
    entry into the batch, which is when another one leaves it, to its end."""
    def clock():
        return sum(engine.seconds.values())

    entered = [clock()] * engine.batch_size
    left = {}
    for request, _ in engine.stream(requests):
        left[request] = clock()
    entered += sorted(left.values())
    rates = [len(r.generation.token_ids) / (left[r] - t) for r, t in zip(requests, entered)]
    return [r.generation for r in requests], statistics.mean(rates)


def phases(engine):
    """Seconds by phase of everything that an engine, or a diffusion model's decoder, has answered."""
    seconds = dict(engine.seconds)
    sample = sum(i["seconds"]["sample"] for i in getattr(engine, "iterations", ()))
    return {"sample": sample, "overhead": seconds.pop("other") - sample, **seconds}


def ratio(runs, plain):
    """Median and range of the ratios of decoding rates, repeat by repeat."""
    rates = [run.decoding_rate for run in runs]
    ratios = [rate / other.decoding_rate for rate, other in zip(rates, plain)]
    return {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
    }


def identical(a, b):
    """How many answers of two runs have the same tokens."""
    return sum(x.token_ids == y.token_ids for x, y in zip(a.generations, b.generations))
