"""The tables of docs/specgen.md and of its appendix."""
from itertools import product

import numpy as np

from minispec.studies.markdown import percent, row, same, span, table, times, two


# -- accepted drafts -------------------------------------------------------------------------------

def _mean(values, draws=2000):
    """"mean (low-high)" of texts, with a 95 % bootstrap over the texts, if there are several."""
    if len(values) == 1:
        return two(values[0])
    values = np.array(values)
    some = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    return f"{values.mean():.2f} ({span(np.percentile(values[some].mean(1), (2.5, 97.5)))})"


def _accepted(at, *setting, rule=3):
    """What was accepted at a context of a text with a setting; rule: 3 rejection, 4 greedy. None where the
    setting was not tried."""
    return next((x[rule] for x in at["rows"] if x[:3] == list(setting)), None)


def _by_context(r):
    """[(name, what was measured there)] of every context and kind of text."""
    contexts = next(iter(r["kinds"].values()))
    return [(f"{kind}, {context} tokens", text[context])
            for context, (kind, text) in product(contexts, r["kinds"].items())]


def acceptance(r):
    """Selections and settings by context, means of the kinds of text."""
    first, *_ = kinds = list(r["kinds"].values())
    settings = max(([x[:3] for x in at["rows"]] for at in first.values()), key=len)
    rows = []
    for select, k, sparsity in settings:
        cells = []
        for context in first:
            found = [_accepted(text[context], select, k, sparsity) for text in kinds]
            cells.append("" if None in found else _mean(found))
        rows.append(f"{select}, {k}, {100 * sparsity:g} % | {row(cells)}")
    return table(f"selection, k, budget s | {row(f'{context} tokens' for context in first)}", rows)


def kinds(r):
    """What the kinds of text differ in, at the usual setting."""
    shown = (("pillar", 3), ("pillar", 4), ("ahead", 3), ("window", 3), ("oracle", 3))
    rows = []
    for name, at in _by_context(r):
        cells = row(two(_accepted(at, select, r["k"], r["sparsity"], rule=rule)) for select, rule in shown)
        rows.append(f"{name} | {percent(at['repeated'])} | {cells}")
    return table("text | repeated 8-grams | pillar | pillar, greedy | ahead | window | oracle", rows)


def mass(r):
    """Attention mass in each head's own top 5 % of keys, by layers."""
    rows = []
    for name, at in _by_context(r):
        layers = np.array(at["mass"])
        thirds = [part.mean() for part in np.array_split(layers[1:], 3)]
        rows.append(f"{name} | {row(two(x) for x in (layers[0], *thirds, layers.mean()))}")
    return table("mass in the top 5 % of keys | first layer | first third of the others | second third | "
                 "last third | mean of all", rows)


# -- throughput ------------------------------------------------------------------------------------

def serving(r):
    rows = []
    for x in r["rows"]:
        specgen = " |  |  |  | "
        if x["method"] == "specgen":
            specgen = (f"{x['accepted']:.2f} | {percent(x.get('attention_share'))} | "
                       f"{x['own_speedup']:.2f} | {two(x.get('predicted'))} | {same(x, x['requests'])}")
        where = f"{x['requests']} x {x['context']}, {x['temperature']:g}"
        rows.append(f"{where} | {x['method']} | {x['dtype']} | {x['tokens_per_second']:.1f} | {times(x)} | "
                    f"{percent(x.get('repeated'))} | {specgen}")
    return table("requests x context, temperature | method | dtype | tokens/s | "
                 "speed-up over the best ar (range) | repeated 8-grams | accepted of 8 | attention share | "
                 "speed-up in its dtype | predicted | identical to ar in its dtype", rows)


def stages(r):
    rows = [f"{x['stage']} | {x['tokens_per_second']:.0f} | {times(x)} | {x['active_mean']:.1f} | "
            f"{x['iterations']} | {x['rows_mean']:.0f} | {percent(x.get('host'), 1)} | "
            f"{x['offloaded']} | {x['recomputed']} | {same(x, r['requests'])}" for x in r["rows"]]
    return table("stage | tokens/s | speed-up (range) | requests at once | forwards | rows of one | "
                 "host's share of the time | tokens offloaded | recomputed | identical to ar", rows)


def scheduler(r):
    if "evenness" not in r:
        return stages(r)
    rows = [f"{name} | {np.mean(some):.1f} | {np.std(some) / np.mean(some):.2f} | {max(some) / min(some):.1f}"
            for name, some in r["evenness"].items()]
    even = table("schedule, 40 requests | rows a forward | standard deviation / mean | most / least", rows)
    return stages(r) + "\n\n" + even


SPECGEN = {
    "acceptance": acceptance,
    "acceptance_kinds": kinds,
    "attention": mass,
    "serving": serving,
    "scheduler": scheduler,
}
FROM = {"acceptance_kinds": "acceptance", "attention": "acceptance"}
