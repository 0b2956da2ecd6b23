"""The tables of docs/specgen.md and of its appendix."""
import statistics
from itertools import product

import numpy as np

from minispec.studies.markdown import percent, row, same, span, table, times, two


# -- accepted drafts -------------------------------------------------------------------------------

def _mean(groups, draws=2000):
    """"mean (low-high)" of groups of texts, with a 95 % bootstrap over the texts, if there are several."""
    values = np.ravel(groups)
    if len(values) == 1:
        return two(values[0])
    some = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    return f"{values.mean():.2f} ({span(np.percentile(values[some].mean(1), (2.5, 97.5)))})"


def _accepted(kinds, context, setting, rule=3):
    """By kind, by text, what was accepted with a setting [select, k, sparsity]; rule: 3 rejection, 4
    greedy."""
    return [[next(x[rule] for x in text[context]["rows"] if x[:3] == setting) for text in some]
            for some in kinds.values()]


def _first(r):
    """{context: what was measured} of one text."""
    return next(iter(r["kinds"].values()))[0]


def acceptance(r):
    """Selections and settings by context, means of the kinds of text."""
    first = _first(r)
    settings = max(([x[:3] for x in at["rows"]] for at in first.values()), key=len)
    rows = []
    for setting in settings:
        select, k, sparsity = setting
        cells = [_mean(_accepted(r["kinds"], context, setting))
                 if setting in [x[:3] for x in at["rows"]] else "" for context, at in first.items()]
        rows.append(f"{select}, {k}, {100 * sparsity:g} % | {row(cells)}")
    return table(f"selection, k, budget s | {row(f'{context} tokens' for context in first)}", rows)


def kinds(r):
    """What the kinds of text differ in, at the usual setting."""
    rows = []
    for context, (kind, some) in product(_first(r), r["kinds"].items()):
        shown = (("pillar", 3), ("pillar", 4), ("ahead", 3), ("window", 3), ("oracle", 3))
        cells = [_mean(_accepted({kind: some}, context, [select, r["k"], r["sparsity"]], rule))
                 for select, rule in shown]
        repeated = statistics.mean(text[context]["repeated"] for text in some)
        rows.append(f"{kind}, {context} tokens | {percent(repeated)} | {row(cells)}")
    return table("text | repeated 8-grams | pillar | pillar, greedy | ahead | window | oracle", rows)


def mass(r):
    """Attention mass in each head's own top 5 % of keys, by layers."""
    rows = []
    for context, (kind, some) in product(_first(r), r["kinds"].items()):
        layers = np.mean([text[context]["mass"] for text in some], axis=0)
        thirds = [part.mean() for part in np.array_split(layers[1:], 3)]
        cells = row(two(x) for x in (layers[0], *thirds, layers.mean()))
        rows.append(f"{kind}, {context} tokens | {cells}")
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
    rows = [f"{name} | {e['mean']:.1f} | {e['deviation'] / e['mean']:.2f} | {e['most'] / e['least']:.1f}"
            for name, e in r["evenness"].items()]
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
