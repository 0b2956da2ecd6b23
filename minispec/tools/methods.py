"""The methods by name: how `decode.py` and `bench.py` turn `--method NAME` and its settings into an engine.

A method is a planner for the engine; `METHODS` says in a line what each one does and who proposes. Errors are
ValueError with one line that names what is wrong and what is allowed. Diffusion models answer with a loop of their own
(cdlm.py) and their output is not the target's, so they stand in a table of their own.
"""
import argparse
import os

from minispec import cdlm, prism, specdiff, specgen
from minispec.core import drafters, gpt
from minispec.tools import checkpoints
from minispec.core.adaptive import Adaptive
from minispec.core.admission import POLICIES
from minispec.core.engine import Engine, Lockstep
from minispec.data.traces import CostTable

METHODS = {
    "ar": "plain autoregressive decoding, the baseline",
    "ngram": "prompt lookup: drafts copied from earlier text",
    "draft": "a small model drafts, rejection sampling",
    "prism": "modules trained on the model's hidden states draft, one for each draft step",
    "eagle": "the same with a single module (EAGLE-2 trees)",
    "specdiff": "a diffusion model drafts a window in one forward; several chains of drafts",
    "specgen": "the model drafts for itself with sparse attention (PillarAttn)",
    "adaptive": "whoever promises most tokens a second drafts, chosen every round",
}
TRAINED = ("prism", "eagle", "specdiff")         # those that need a drafter from a folder
DIFFUSION = {
    "cdlm": "a block-causal diffusion model, many tokens a step",
    "dlm": "its bidirectional teacher, without a cache",
}


def add_arguments(parser):
    """The settings of all methods, for argparse."""
    parser.add_argument("--method", default="ar", metavar="NAME", help="; ".join(f"{k}: {v}" for k, v in {**METHODS, **DIFFUSION}.items()))
    parser.add_argument("--model", default="checkpoints/target", metavar="DIR", help="target model, a Hugging Face folder (default %(default)s)")
    parser.add_argument("--draft-model", default="checkpoints/draft", metavar="DIR", help="draft: the small model (default %(default)s)")
    parser.add_argument("--drafter", default=None, metavar="DIR", help=f"{', '.join(TRAINED)}: the trained drafter (default checkpoints/NAME)")
    parser.add_argument("--depth", type=int, default=8, help="prism, eagle: draft steps a round (default 8)")
    parser.add_argument("--tree", type=int, default=0, metavar="N", help="prism, eagle: the N most probable drafts of a tree go to the target (default 0: a chain)")
    parser.add_argument("--width", type=int, default=4, help="prism, eagle: of a tree, nodes opened a step and children of each (default 4)")
    parser.add_argument("--gamma", type=int, default=None, help="specdiff: drafts of a chain (default: as the drafter was trained)")
    parser.add_argument("--k-drafts", type=int, default=1, metavar="K", help="specdiff: chains a round (default 1)")
    parser.add_argument("--rule", default="rejection", help=f"specdiff: who judges sampled chains: {', '.join(specdiff.RULES)} (default %(default)s)")
    parser.add_argument("--draft-temperature", type=float, default=None, metavar="T", help="specdiff: of the drafts (default: the target's; of several chains 1)")
    parser.add_argument("--draft-steps", type=int, default=1, metavar="N", help="specdiff: fill a window in N forwards, surest slots first (default 1)")
    parser.add_argument("--diffusion-model", metavar="DIR", help=f"cdlm, dlm: the model (default {', '.join(d for _, d in cdlm.METHODS.values())})")
    parser.add_argument("--order", default=cdlm.ORDER, choices=cdlm.ORDERS, help="cdlm, dlm: what to reveal where nothing is sure enough: the first masked slot or the surest, as in the papers (default %(default)s)")
    parser.add_argument("--threshold", type=float, help=f"cdlm, dlm: reveal what is surer than this (default: cdlm {cdlm.THRESHOLD}, dlm one token a step)")
    parser.add_argument("--block-size", type=int, default=cdlm.BLOCK_SIZE, help="cdlm, dlm: slots that are filled in together (default %(default)s)")
    parser.add_argument("--k", type=int, default=None, help="draft tokens a round (default: specgen 8, ngram 8, draft 4; adaptive at most 16)")
    parser.add_argument("--cost", default="results/costs.json", metavar="FILE", help="adaptive: what a round costs, as bench.py profile measures it (default %(default)s)")
    parser.add_argument("--sparsity", type=float, default=0.05, help="specgen: part of the context that a draft step reads (default 0.05)")
    parser.add_argument("--min-budget", type=int, default=64, help="specgen: but at least so many positions (default 64)")
    parser.add_argument("--recent-share", type=float, default=0.0, help="specgen: at least this part of them are the newest (default 0)")
    parser.add_argument("--select", default="ahead", help=f"specgen: who chooses the rest: {', '.join(specgen.SELECTIONS)} (default %(default)s; pillar is the paper's)")
    parser.add_argument("--schedule", default="unified", help=f"specgen: which phase requests start in: {', '.join(specgen.SCHEDULES)}")
    parser.add_argument("--delayed", action="store_true", help="specgen: judge a verification beside the next forward")
    parser.add_argument("--admission", default="reserve", help=f"who enters the cache, and who leaves it when it is full: {', '.join(POLICIES)}")
    parser.add_argument("--cache-tokens", type=int, default=None, help="slots of the cache (default: --batch of the longest request)")
    parser.add_argument("--host-tokens", type=int, default=None, help="admission offload: slots in host memory (default: as many as the cache has)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16"), help="default: float32 on the CPU, bfloat16 on a GPU")


def settings(**changes):
    """The settings above with their defaults, as a namespace, except for `changes`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changes})


def ready(settings):
    """The methods but `ar` for which everything is there: those whose trained drafter or cost table is not are left out."""
    needed = {name: settings.drafter or f"checkpoints/{name}" for name in TRAINED}
    needed |= {"draft": settings.draft_model, "adaptive": settings.cost}
    return [name for name in METHODS if name != "ar" and os.path.exists(needed.get(name, "."))]


def diffusion_ready(settings):
    """The diffusion models that are there."""
    return [name for name in DIFFUSION if os.path.exists(settings.diffusion_model or cdlm.METHODS[name][1])]


def chain_drafters(model, settings, k):
    """{name: drafter} of all methods that are ready and in which a drafter proposes chains, for up to k drafts a round."""
    changed = argparse.Namespace(**{**vars(settings), "k": k, "depth": k, "tree": 0, "k_drafts": 1})
    planners = {name: make_engine(name, model, changed, 1).planner for name in ready(settings)
                if name != "adaptive" and not (name in TRAINED[1:] and settings.drafter)}       # --drafter names one of them
    return {name: planner.drafter for name, planner in planners.items() if isinstance(planner, Lockstep)}


def make_engine(name, model, settings, batch_size):
    """Engine of method `name` for a loaded target. settings: a namespace with the arguments above."""
    if name in DIFFUSION:
        return cdlm.load_decoder(name, settings, batch_size, model)
    if name not in METHODS:
        raise ValueError(f"unknown method '{name}'; choose from {', '.join([*METHODS, *DIFFUSION])}")
    k = settings.k if settings.k is not None else 4 if name == "draft" else 8
    if name == "ar":
        planner = Lockstep
    elif name == "ngram":
        planner = lambda engine: Lockstep(engine, drafters.NGram(), k)
    elif name == "draft":
        small = checkpoints.load(settings.draft_model, model.device, model.dtype)
        drafter = drafters.SmallLM(small, model)
        planner = lambda engine: Lockstep(engine, drafter, k)
    elif name in TRAINED:
        drafter, n = make_drafter(name, model, settings)
        planner = lambda engine: Lockstep(engine, drafter, n)
    elif name == "adaptive":
        drafter = make_adaptive(model, settings, 16 if settings.k is None else settings.k)
        planner = lambda engine: Lockstep(engine, drafter, drafter.k)
    else:
        planner = lambda engine: specgen.SpecGen(engine, k, settings.sparsity, settings.min_budget, settings.recent_share,
                                                 settings.select, settings.schedule, settings.delayed)
    return Engine(model, planner, batch_size, settings.cache_tokens, admission=settings.admission, host_tokens=settings.host_tokens)


def make_adaptive(model, settings, k):
    """The drafter of the method `adaptive`: all that are ready and have a price, and read the same states of the target."""
    if not os.path.exists(settings.cost):
        raise ValueError(f"no cost table {settings.cost}; `python bench.py profile` measures one")
    cost = CostTable.load(settings.cost)
    ready = chain_drafters(model, settings, k)
    some = [d for name, d in ready.items() if name in cost.drafters]
    taps = next((d.taps for d in some if getattr(d, "taps", None) is not None), None)
    return Adaptive([d for d in some if getattr(d, "taps", None) in (None, taps)], cost, k)


def make_drafter(name, model, settings):
    """(drafter, drafts a round) of the methods whose drafter is trained."""
    folder = settings.drafter or f"checkpoints/{name}"
    if name == "specdiff":
        trained = specdiff.load(folder, model)
        checkpoints.check_target(trained.config, model, folder)
        drafter = specdiff.SpecDiffDrafter(trained, model, settings.gamma, settings.k_drafts, settings.rule, settings.draft_temperature, settings.draft_steps)
        return drafter, drafter.gamma * drafter.width
    trained = prism.load(folder, model.device, model.dtype)
    trained.check(model)
    checkpoints.check_target(trained.config, model, folder)
    if name == "eagle" and trained.config.n_modules > 1:
        raise ValueError(f"the drafter in {folder} has {trained.config.n_modules} modules; --method prism takes it, eagle means one module")
    if not 0 <= settings.tree <= prism.MAX_NODES:
        raise ValueError(f"tree {settings.tree} is out of range; allowed is 0 (a chain) to {prism.MAX_NODES} drafts")
    if settings.tree and settings.width < 2:
        raise ValueError(f"width {settings.width} is out of range; a tree needs 2 or more (--tree 0 is a chain)")
    return prism.PrismDrafter(trained, model, settings.depth, settings.width if settings.tree else 1, name), settings.tree or settings.depth
