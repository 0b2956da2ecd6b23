"""Figures as SVG files. A figure is a function of (axes, result of a study). matplotlib is optional: without
it nothing is drawn and nothing is lost, because every figure has its numbers in a file."""
from collections import defaultdict
from importlib.util import find_spec

from minispec.tools.files import replaced

STYLE = {
    "svg.hashsalt": "minispec",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw(figures, found, prefix):
    """Draw the figures {file: {name: function}} of {file: what it holds}, as SVG files whose names begin with
    `prefix`; without matplotlib, a line says so."""
    if not find_spec("matplotlib"):
        print("no matplotlib, so no figures (pip install matplotlib)")
        return
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot
    for file, result in found.items():
        for name, figure in figures[file].items():
            canvas, axes = pyplot.subplots(figsize=(7, 3))
            figure(axes, result)
            if axes.has_data():                          # measured for this model
                axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
                with replaced(f"{prefix}{name}.svg") as path:
                    canvas.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
            pyplot.close(canvas)


def lines(axes, rows, x, y, style=".-"):
    """Rows (name of a line, x, y), a line for each name. x, y: the labels of the axes."""
    points = defaultdict(list)
    for name, *point in rows:
        points[name].append(point)
    for name, some in points.items():
        axes.plot(*zip(*some), style, label=name)
    axes.set(xlabel=x, ylabel=y)
