"""The methods by name: how `decode.py` and `bench.py` turn `--method NAME` and its settings into an engine.

A method is a planner for the engine. `METHODS` maps its name to the function that builds it:
build(model, settings) returns planner(engine), and its docstring is what --help says. Diffusion models answer
with a loop of their own (cdlm.py), and their output is not the target's, so they have a table of their own.
Errors are ValueError with one line that names what is wrong and what is allowed.
"""
import argparse
import os
import sys
from functools import partial

from minispec import cdlm, prism, specdiff, specgen
from minispec.core import drafters
from minispec.core.adaptive import Adaptive
from minispec.core.admission import POLICIES
from minispec.core.engine import Engine, Lockstep
from minispec.bounds import CostTable
from minispec.data.tokenizer import Tokenizer
from minispec.data.traces import read_costs
from minispec.tools import checkpoints

SHIPPED = "checkpoints/target"
FREE = ("ar", "ngram", "specgen")                # methods that need nothing but the target
TRAINED = ("prism", "eagle", "specdiff")         # methods whose drafter is trained and lies in a folder
DIFFUSION = {
    "cdlm": "a block-causal diffusion model, many tokens a step",
    "dlm": "its bidirectional teacher, without a cache",
}


# -- one function per method ----------------------------------------

def ar(model, settings):
    """plain autoregressive decoding, the baseline"""
    return Lockstep


def ngram(model, settings):
    """prompt lookup: drafts copied from earlier text"""
    return partial(Lockstep, drafter=drafters.NGram(), k=_k(settings, 8))


def draft(model, settings):
    """a small model drafts, rejection sampling"""
    small = checkpoints.load(settings.draft_model, model.device, model.dtype)
    return partial(Lockstep, drafter=drafters.SmallLM(small, model), k=_k(settings, 4))


def prism_chain_or_tree(model, settings, name="prism"):
    """modules trained on the model's hidden states draft, one for each draft step"""
    folder = _trained(name, settings)
    trained = prism.load(folder, model.device, model.dtype)
    trained.check(model)
    checkpoints.check_target(trained.config, model, folder)

    depth = trained.config.depth if settings.depth is None else settings.depth
    tree, width = settings.tree, settings.width
    n_modules = trained.config.n_modules
    if name == "eagle" and n_modules > 1:
        raise ValueError(f"the drafter in {folder} has {n_modules} modules; --method prism takes it, "
                         "eagle means one module")
    if not 0 <= tree <= prism.MAX_NODES:
        raise ValueError(f"tree {tree} is out of range; allowed is 0 (a chain) to {prism.MAX_NODES} drafts")
    if tree and width < 2:
        raise ValueError(f"width {width} is out of range; a tree needs 2 or more (--tree 0 is a chain)")
    if not tree:
        width = 1
    drafter = prism.PrismDrafter(trained, model, depth, width, name)
    return partial(Lockstep, drafter=drafter, k=tree or depth)


def eagle(model, settings):
    """the same with a single module (EAGLE-2 trees)"""
    return prism_chain_or_tree(model, settings, "eagle")


def specdiff_windows(model, settings):
    """a diffusion model drafts a window in one forward; several chains of drafts"""
    folder = _trained("specdiff", settings)
    trained = specdiff.load(folder, model)
    checkpoints.check_target(trained.config, model, folder)
    drafter = specdiff.SpecDiffDrafter(trained, model, settings.gamma, settings.k_drafts, settings.rule,
                                       settings.draft_temperature)
    return partial(Lockstep, drafter=drafter, k=drafter.gamma * drafter.width)


def self_speculation(model, settings):
    """the model drafts for itself with sparse attention (PillarAttn)"""
    return partial(specgen.SpecGen, k=_k(settings, 8), sparsity=settings.sparsity,
                   min_budget=settings.min_budget, select=settings.select, schedule=settings.schedule,
                   delayed=settings.delayed)


def adaptive(model, settings):
    """the drafter that promises most tokens/s, chosen every round"""
    if not os.path.exists(settings.cost):
        raise ValueError(f"no cost table {settings.cost}; `python bench.py profile` measures one")
    cost = CostTable(read_costs(settings.cost))
    k = _k(settings, 16)
    candidates, taps = [], None
    for name, drafter in chain_drafters(model, settings, k).items():
        if name not in cost.drafters:
            print(f"adaptive: {settings.cost} has no price of '{name}', which is left out", file=sys.stderr)
            continue
        # One forward of the target reports one set of hidden states: all drafters must read the same.
        if taps is None:
            taps = drafter.taps
        if drafter.taps in (None, taps):
            candidates.append(drafter)
    chooser = Adaptive(candidates, cost, k)
    return partial(Lockstep, drafter=chooser, k=chooser.k)


METHODS = {
    "ar": ar,
    "ngram": ngram,
    "draft": draft,
    "prism": prism_chain_or_tree,
    "eagle": eagle,
    "specdiff": specdiff_windows,
    "specgen": self_speculation,
    "adaptive": adaptive,
}


def make_engine(name, model, settings, batch_size):
    """Engine of method `name` for a loaded target. settings: a namespace with the arguments below."""
    if name in DIFFUSION:
        return _diffusion(name, model, settings, batch_size)
    if name not in METHODS:
        raise ValueError(f"unknown method '{name}'; choose from {', '.join([*METHODS, *DIFFUSION])}")
    planner = METHODS[name](model, settings)
    return Engine(model, planner, batch_size, settings.cache_tokens, admission=settings.admission,
                  host_tokens=settings.host_tokens)


def _diffusion(name, model, settings, batch_size):
    """The decoder of a diffusion model with the vocabulary of the target."""
    kind, folder = cdlm.METHODS[name]
    folder = settings.diffusion_model or folder
    trained = checkpoints.load(folder, model.device, model.dtype)
    ours, theirs = trained.config.vocab_size, model.config.vocab_size
    if ours != theirs:
        raise ValueError(f"the diffusion model has {ours} tokens in its vocabulary, the target {theirs}")
    threshold = settings.threshold
    if threshold is None and name == "cdlm":
        threshold = cdlm.THRESHOLD
    mask_id = cdlm.mask_id_of(Tokenizer.load(folder), folder)
    return cdlm.Decoder(trained, mask_id, kind, settings.block_size, threshold, None, settings.order,
                        batch_size)


def _k(settings, default):
    return default if settings.k is None else settings.k


def _folder(name, settings):
    """Where the trained drafter of a method is: --drafter, else the folder that is kept for this model."""
    kept = "checkpoints"
    if os.path.realpath(settings.model) != os.path.realpath(SHIPPED):
        kept = os.path.join(kept, os.path.basename(os.path.normpath(settings.model)))
    return settings.drafter or os.path.join(kept, name)


def _trained(name, settings):
    """That folder. ValueError, where none was named and none is kept, says how to train one."""
    folder = _folder(name, settings)
    if settings.drafter or os.path.exists(folder):
        return folder
    script = "train_specdiff.py" if name == "specdiff" else "train_prism.py"
    arm = " --arm ttt1" if name == "eagle" else ""
    raise ValueError(f"there is no drafter for {settings.model} in {folder}; this trains one: python "
                     f"{script}{arm} --target {settings.model} --out {folder} --minutes 60")


# -- which of them can run here ----------------------------------------

def ready(settings):
    """The methods but `ar` for which everything is there: the others lack a drafter or a cost table."""
    needed = {name: _folder(name, settings) for name in TRAINED}
    needed |= {"draft": settings.draft_model, "adaptive": settings.cost}
    return [name for name in METHODS if name != "ar" and os.path.exists(needed.get(name, "."))]


def diffusion_ready(settings):
    """The diffusion models that are there."""
    return [name for name in DIFFUSION if os.path.exists(settings.diffusion_model or cdlm.METHODS[name][1])]


def chain_drafters(model, settings, k):
    """{name: drafter} of all methods that are ready and whose drafter proposes chains, of up to k drafts."""
    chains = argparse.Namespace(**{**vars(settings), "k": k, "depth": k, "tree": 0, "k_drafts": 1})
    found = {}
    for name in ready(settings):
        # adaptive asks this function; a folder given with --drafter belongs to the first trained method.
        if name == "adaptive" or settings.drafter and name in TRAINED[1:]:
            continue
        try:
            planner = make_engine(name, model, chains, 1).planner
        except ValueError:
            if settings.drafter:
                raise
            continue                                     # trained for another target
        if isinstance(planner, Lockstep):
            found[name] = planner.drafter
    return found


# -- settings ----------------------------------------

def add_arguments(parser):
    """The settings of all methods, for argparse: a group for each kind of method."""
    about = {name: build.__doc__ for name, build in METHODS.items()} | DIFFUSION
    add = parser.add_argument_group("method and model").add_argument
    add("--method", default="ar", metavar="NAME",
        help="; ".join(f"{name}: {text}" for name, text in about.items()))
    add("--model", default=SHIPPED, metavar="MODEL",
        help="the target: a Hugging Face folder, a GGUF file, or smollm2 (default %(default)s)")
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on the CPU, bfloat16 on a GPU")

    add = parser.add_argument_group("batch and cache").add_argument
    add("--admission", default="reserve",
        help=f"who enters the cache, and who leaves it when it is full: {', '.join(POLICIES)}")
    add("--cache-tokens", type=int, help="slots of the cache (default: --batch of the longest request)")
    add("--host-tokens", type=int,
        help="admission offload: slots in host memory (default: as many as the cache has)")

    add = parser.add_argument_group("drafting: ngram, draft, specgen, adaptive").add_argument
    add("--k", type=int,
        help="draft tokens per round (default: specgen 8, ngram 8, draft 4; adaptive at most 16)")
    add("--draft-model", default="checkpoints/draft", metavar="DIR",
        help="draft: the small model (default %(default)s)")
    add("--cost", default="results/costs.json", metavar="FILE",
        help="adaptive: what a round costs, as bench.py profile measures it (default %(default)s)")

    add = parser.add_argument_group("trained drafters: prism, eagle, specdiff").add_argument
    add("--drafter", metavar="DIR",
        help="the trained drafter (default checkpoints/NAME, for another model checkpoints/MODEL/NAME)")
    add("--depth", type=int, help="prism, eagle: draft steps per round (default: as many as paid in training)")
    add("--tree", type=int, default=0, metavar="N",
        help="prism, eagle: the N most probable drafts of a tree go to the target (default 0: a chain)")
    add("--width", type=int, default=4,
        help="prism, eagle: of a tree, nodes opened per step and children of each (default 4)")
    add("--gamma", type=int, help="specdiff: drafts of a chain (default: as the drafter was trained)")
    add("--k-drafts", type=int, default=1, metavar="K", help="specdiff: chains per round (default 1)")
    add("--rule", default="rejection",
        help=f"specdiff: who judges sampled chains: {', '.join(specdiff.RULES)} (default %(default)s)")
    add("--draft-temperature", type=float, metavar="T",
        help="specdiff: of the drafts (default: the target's; of several chains 1)")

    add = parser.add_argument_group("self-speculation: specgen").add_argument
    add("--sparsity", type=float, default=0.05,
        help="part of the context that a draft step reads (default 0.05)")
    add("--min-budget", type=int, default=64, help="but at least this many positions (default 64)")
    add("--select", default="ahead",
        help=f"who chooses the rest: {', '.join(specgen.SELECTIONS)} "
             "(default %(default)s; pillar is the paper's)")
    add("--schedule", default="unified",
        help=f"which phase requests start in: {', '.join(specgen.SCHEDULES)}")
    add("--delayed", action="store_true", help="judge a verification while the next forward runs")

    add = parser.add_argument_group("diffusion models: cdlm, dlm").add_argument
    folders = ", ".join(folder for _, folder in cdlm.METHODS.values())
    add("--diffusion-model", metavar="DIR", help=f"the model (default {folders})")
    add("--block-size", type=int, default=cdlm.BLOCK_SIZE,
        help="slots that are filled in together (default %(default)s)")
    add("--threshold", type=float, help="reveal every slot whose confidence is above this "
        f"(default: cdlm {cdlm.THRESHOLD}, dlm one token per step)")
    add("--order", default=cdlm.ORDER, choices=cdlm.ORDERS, help="what to reveal where no slot is above the "
        "threshold: the first masked slot, or the most confident, as in the papers (default %(default)s)")


def settings(**changes):
    """The settings above with their defaults, as a namespace, except for `changes`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changes})
