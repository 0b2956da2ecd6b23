"""How the studies time engines: in turn, in one process, after a warm-up, so that a slow minute of the
machine slows all."""
import statistics

from tqdm import tqdm


def busy(engine):
    """Seconds of decoding: everything but reading the prompts, which all methods do alike."""
    return engine.seconds["draft"] + engine.seconds["verify"] + engine.seconds["other"]


def phases(engine):
    """Seconds by phase of everything that an engine, or a diffusion model's decoder, has answered."""
    if hasattr(engine, "iterations"):
        names = engine.iterations[0]["seconds"]
        return {name: sum(i["seconds"][name] for i in engine.iterations) for name in names}
    seconds = {name: s for name, s in engine.seconds.items() if name != "other"}
    return {"sample": 0.0, "overhead": engine.seconds["other"], **seconds}


def iteration_seconds(engine):
    """Medians over the iterations without prompts: seconds of one, and what of it is neither drafting nor
    verifying."""
    spent = [i["seconds"] for i in engine.iterations if not i["prefill"]]
    whole = statistics.median(sum(s.values()) for s in spent)
    host = statistics.median(s["sample"] + s["overhead"] for s in spent)
    return whole, host


def race(cells, repeats, desc, warm_up=True):
    """Run cells {name: function that returns (engine, fresh requests)} in turn, `repeats` times after one
    warm-up. Returns {name: ([decoded tokens/s of every repeat], last engine, last generations)}."""
    rates, last = {name: [] for name in cells}, {}
    for repeat in tqdm(range(repeats + warm_up), desc=desc):
        for name, build in cells.items():
            engine, requests = build()
            generations = engine.generate(requests)
            if repeat >= warm_up:
                tokens = sum(len(g.token_ids) for g in generations)
                rates[name].append(tokens / busy(engine))
            last[name] = engine, generations
    return {name: (rates[name], *last[name]) for name in cells}


def ratio(rates, *baselines):
    """Median and range of the ratios, repeat by repeat, to the fastest of the baselines."""
    ratios = [rate / max(plain) for rate, plain in zip(rates, zip(*baselines))]
    return {
        "tokens_per_second": statistics.median(rates),
        "speedup": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
    }


def identical(a, b):
    """How many of two lists of generations have the same tokens."""
    return sum(x.token_ids == y.token_ids for x, y in zip(a, b))
