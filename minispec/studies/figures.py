"""The lessons' figures, drawn from results/*.json. matplotlib is optional: without it nothing is drawn, and nothing is lost,
for every figure has its numbers in results/."""
import os

import numpy as np

from minispec.tools.files import blame, read_json
from minispec.data.traces import read_traces


def draw(results, folder):
    """Draw every figure whose measurements are in the folder `results`, as SVG files into `folder`."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib, so no figures (pip install matplotlib)")
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "minispec", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot
    os.makedirs(folder, exist_ok=True)
    for study, figures in FIGURES.items():
        file = os.path.join(results, source(study))
        if os.path.exists(file):
            result = load(file)
            for name, figure in figures.items():
                canvas, axes = pyplot.subplots(figsize=(7, 3))
                with blame(file):
                    figure(axes, result)
                if axes.get_legend_handles_labels()[0]:
                    axes.legend(frameon=False)
                canvas.savefig(os.path.join(folder, name + ".svg"), bbox_inches="tight", metadata={"Date": None})
                pyplot.close(canvas)


def source(study):
    """The file in results/ that the figures of a study are drawn from."""
    return "traces.jsonl" if study == "traces" else study + ".json"


def load(file):
    if file.endswith(".jsonl"):
        return read_traces(file)
    with blame(file):
        return read_json(file)["result"]


def schedule(axes, r):
    """Rows of each forward under the lock-step and the unified schedule."""
    for name, style in (("lockstep", "-"), ("unified", "-")):
        axes.plot(r["evenness"][name]["rows"][:60], style, label=name, linewidth=1.2)
    axes.set(xlabel="iteration", ylabel="rows in the forward", ylim=(0, None))


def captured(axes, r):
    """Attention mass on cached positions that the round's selection had caught, along a chain of thought."""
    for name in r["captured"]:
        axes.plot(*zip(*((context, share) for context, share, _ in r["captured"][name])), ".-", label=name, markersize=3, linewidth=0.8)
    axes.set(xlabel="tokens of context", ylabel="attention mass caught by 5 %", ylim=(0, 1.02))


# -- performance or illusion (numbers of the plots as in the notes: P1 to P8) ------------------------------------------------

def _mixed(cells):
    """The cells of the mixed workload if it was run, else of the first one; copies left out where there are other batches."""
    which = "mixed" if any(c["workload"] == "mixed" for c in cells) else cells[0]["workload"]
    some = [c for c in cells if c["workload"] == which]
    return which, [c for c in some if c["kind"] == "different"] or some


def speedup_by_batch(axes, r):
    """P1: observed, best fixed k, greedy and the two optima against the batch size."""
    which, cells = _mixed(r["cells"])
    batch, top = [c["batch"] for c in cells], lambda some: max(some.values(), default=np.nan)
    for label, style, value in (("L6 all drafters", "k-", lambda c: c["L6"]), ("L5 best single", "b-", lambda c: top(c["L5"])), ("L4 greedy, best single", "b:", lambda c: top({m: s for m, s in c["L4"].items() if m != "all"})),
                                ("L2 best fixed k", "g--", lambda c: top({m: x["speedup"] for m, x in c["L2"].items()})),
                                ("observed, best single", "go", lambda c: top({m: s for m, s in c.get("L0", {}).items() if m in c["L5"]})),
                                ("observed, adaptive", "r*", lambda c: c.get("L0", {}).get("adaptive", np.nan))):
        axes.plot(batch, [value(c) for c in cells], style, label=label, linewidth=1.2)
    axes.set(xlabel=f"batch ({which})", ylabel="speed-up", xscale="log", xticks=batch, xticklabels=batch)


def waterfall(axes, r):
    """P6: from what is observed to what is possible, at batch 1."""
    _, cells = _mixed(r["cells"])
    c = cells[0]
    steps = {"L2 fixed k": max(x["speedup"] for x in c["L2"].values()), "L3 k by request": max(c["L3"].values()),
             "L5 one drafter": max(c["L5"].values()), "L6 all drafters": c["L6"], "L7 free drafters": c["L7"]}
    if "L0" in c:
        steps = {"L0 best single": max((s for m, s in c["L0"].items() if m in c["L5"]), default=1.0), **steps}
    values = list(steps.values())
    low = [0, *np.minimum(values[:-1], values[1:])]
    axes.bar(range(len(values)), [values[0], *np.abs(np.diff(values))], bottom=low, color=["0.5"] + ["tab:green" if d > 0 else "tab:red" for d in np.diff(values)])
    axes.set(xticks=range(len(values)), ylabel="speed-up")
    axes.set_xticklabels(steps, rotation=20, ha="right")


def lengths(axes, r):
    """P7: how many drafts the optimum over all drafters takes a round, and whose, at batch 1."""
    _, cells = _mixed(r["cells"])
    some, who = cells[0]["choices"]["lengths"], cells[0]["choices"]["who"]
    axes.bar([int(k) for k in some], [n / sum(some.values()) for n in some.values()])
    axes.set(xlabel="drafts a round; who: " + ", ".join(f"{m} {100 * n / sum(who.values()):.0f} %" for m, n in who.items()), ylabel="share of rounds")


def contexts(axes, r):
    """P8: modelled speed-up with the best k against the context."""
    for rows, style in zip(r["context"], ("-", "--")):
        for i, (m, curve) in enumerate(r["context"][rows].items()):
            axes.plot(*zip(*curve), style, color=f"C{i}", label=f"{m}, batch {rows}", linewidth=1.2)
    axes.set(xlabel="tokens of context", ylabel="speed-up", xscale="log")


def _padded(traces, value):
    """(requests, positions), NaN behind the end of an output; entry 0 is not used."""
    out = np.full((len(traces), max(t.n_out for t in traces) - 1), np.nan)
    for row, t in zip(out, traces):
        row[:t.n_out - 1] = value(t)[1:]
    return out


def accept_map(axes, traces):
    """P2: accept length by request and position, of the first drafter."""
    name = next(iter(traces[0].accept))
    image = axes.imshow(_padded(traces, lambda t: t.accept[name]), aspect="auto", interpolation="nearest", cmap="viridis")
    axes.figure.colorbar(image, label=f"tokens a round of {name} gains")
    axes.set(xlabel="position in the output", ylabel="request")


def accept_difference(axes, traces):
    """P3: the first drafter's accept length minus the last one's."""
    first, *_, last = traces[0].accept if len(traces[0].accept) > 1 else 2 * list(traces[0].accept)
    image = axes.imshow(_padded(traces, lambda t: t.accept[first] - t.accept[last]), aspect="auto", interpolation="nearest", cmap="RdBu", vmin=-8, vmax=8)
    axes.figure.colorbar(image, label=f"{first} minus {last}")
    axes.set(xlabel="position in the output", ylabel="request")


def accept_by_position(axes, traces):
    """P4: mean accept length along the output, with the band of half of the requests."""
    for m in traces[0].accept:
        values = _padded(traces, lambda t: t.accept[m])
        x = np.arange(1, values.shape[1] + 1)
        axes.plot(x, np.nanmean(values, 0), label=m, linewidth=1.2)
        axes.fill_between(x, *np.nanpercentile(values, (25, 75), axis=0), alpha=0.2)
    axes.set(xlabel="position in the output", ylabel="tokens a round gains")


def accept_by_request(axes, traces):
    """P5: mean accept length of each request."""
    axes.boxplot([[t.accept[m][1:].mean() for t in traces if t.n_out > 1] for m in traces[0].accept])
    axes.set(ylabel="tokens a round gains, mean of a request")
    axes.set_xticklabels(traces[0].accept)


FIGURES = {"scheduler": {"specgen_schedule": schedule}, "attention": {"specgen_captured": captured},
           "bounds": {"bounds_batch": speedup_by_batch, "bounds_waterfall": waterfall, "bounds_lengths": lengths, "bounds_context": contexts},
           "traces": {"accept_map": accept_map, "accept_difference": accept_difference, "accept_position": accept_by_position, "accept_request": accept_by_request}}
