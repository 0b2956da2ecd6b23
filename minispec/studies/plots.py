"""The plots of the lessons on PRISM, SpecDiff-2 and CDLM: functions of (axes, result of a study)."""


def by_step(axes, r):
    """How often a draft is accepted, by its place in the chain, where all before it were; short trainings."""
    for name in ("eagle2", "ttt1", "prism2", "stack2"):
        shares = r["arms"][f"{name}, 1000 prompts"]["at_0"]["by_depth"]
        axes.plot(range(1, len(shares) + 1), shares, ".-", label=name, linewidth=1.2)
    axes.set(xlabel="draft step", ylabel="accepted if all before were", ylim=(0, 1.02))


def by_depth(axes, r):
    """Speed-up of chains and of trees against the depth."""
    for method, color in (("eagle", "tab:blue"), ("prism", "tab:green")):
        for width, style in ((1, "o-"), (2, "s--")):
            some = [x for x in r["rows"] if x["method"] == method and x["width"] == width]
            best = {x["depth"]: x["speedup"] for x in sorted(some, key=lambda x: x["speedup"])}
            label = f"{method}, chains" if width == 1 else f"{method}, trees of width {width}"
            axes.plot(sorted(best), [best[d] for d in sorted(best)], style, label=label, color=color)
    axes.set(xlabel="depth", ylabel="speed-up", ylim=(1, None))


def by_slot(axes, r):
    """How often a draft of a window is accepted, by its slot, where all before it were."""
    for name in ("start", "mdlm", "streak", "ships"):
        shares = r["arms"][name]["at_0"]["by_depth"]
        axes.plot(range(1, len(shares) + 1), shares, ".-", label=name, linewidth=1.2)
    axes.set(xlabel="slot of the window", ylabel="accepted if all before were", ylim=(0, 1.02))


def by_chains(axes, r):
    """tau and speed-up of K chains, judged by the walk."""
    for temperature in (0.0, 1.0):
        some = [x for x in r["rows"] if x["temperature"] == temperature
                and (x["chains"] == 1 and x["rule"] == "rejection"
                     or x["rule"] == "walk" and x["draft_temperature"] == 1)]
        chains = [x["chains"] for x in some]
        axes.plot(chains, [x["tau"] for x in some], "o-", label=f"tau, temperature {temperature:g}")
        axes.plot(chains, [x["speedup"] for x in some], "s--", label=f"speed-up, temperature {temperature:g}")
    axes.set(xlabel="chains K", xticks=chains, ylim=(0, None))


def by_steps(axes, r):
    """What is solved against the steps of an answer."""
    for decoder in ("teacher", "dual", "student"):
        some = [x for x in r["rows"] if x["decoder"] == decoder and x["threshold"] and x["order"] != "surest"]
        axes.plot([x["steps"] for x in some], [100 * x["solved"] for x in some], ".-", label=decoder)
    cut = [x for x in r["rows"] if x["steps_a_block"]]
    axes.plot([x["steps"] for x in cut], [100 * x["solved"] for x in cut], "k.:", label="teacher, cut")
    axes.set(xlabel="steps an answer", ylabel="solved, %", xscale="log", ylim=(0, 100))


def by_batch(axes, r):
    """tokens/s against the batch: where the plain loop wins back."""
    for decoder in ("ar", "teacher", "student", "student, threshold 0.999"):
        some = [x for x in r["rows"] if x["decoder"] == decoder]
        batch = [x["batch"] for x in some]
        axes.plot(batch, [x["tokens_per_second"] for x in some], "o-", label=decoder)
    axes.set(xlabel="batch", ylabel="tokens/s", xscale="log", yscale="log", xticks=batch, xticklabels=batch)


PLOTS = {
    "prism_arms": {"prism_steps": by_step},
    "prism_trees": {"prism_depth": by_depth},
    "specdiff_objectives": {"specdiff_slots": by_slot},
    "specdiff_chains": {"specdiff_chains": by_chains},
    "cdlm_curves": {"cdlm_steps": by_steps},
    "cdlm_speed": {"cdlm_batch": by_batch},
}
