"""The lessons' figures, drawn from results/*.json. matplotlib is optional: without it nothing is drawn, and nothing is lost,
for every figure has its numbers in results/."""
import json
import os


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
        file = os.path.join(results, study + ".json")
        if os.path.exists(file):
            with open(file, encoding="utf-8") as f:
                result = json.load(f)["result"]
            for name, figure in figures.items():
                canvas, axes = pyplot.subplots(figsize=(7, 3))
                figure(axes, result)
                axes.legend(frameon=False)
                canvas.savefig(os.path.join(folder, name + ".svg"), bbox_inches="tight", metadata={"Date": None})
                pyplot.close(canvas)


def schedule(axes, r):
    """Rows of each forward under the lock-step and the unified schedule."""
    for name, style in (("lockstep", "-"), ("unified", "-")):
        axes.plot(r["evenness"][name]["rows"][:60], style, label=name, linewidth=1.2)
    axes.set(xlabel="iteration", ylabel="rows in the forward", ylim=(0, None))


def captured(axes, r):
    """Attention mass on cached positions that the round's selection had caught, along a chain of thought."""
    for name in r["captured"]:
        axes.plot(*zip(*sorted(r["captured"][name])), ".", label=name, markersize=2)
    axes.set(xlabel="tokens of context", ylabel="attention mass caught by 5 %", ylim=(0, 1.02))


FIGURES = {"scheduler": {"specgen_schedule": schedule}, "attention": {"specgen_captured": captured}}
