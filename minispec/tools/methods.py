"""The methods by name: `decode.py` and `bench.py` turn `--method NAME` and its settings into an engine.

A method is a scheduler for the engine. `METHODS` maps its name to the function that builds it:
build(model, settings) returns scheduler(engine); its docstring is shown by --help. Diffusion models have
their own loop (cdlm.py) and their own output, and a table of their own. Errors are a ValueError of one line.
"""
import argparse
import os
import sys
from functools import partial

from minispec import ROOT, SHIPPED, cdlm, prism, specdiff, specgen
from minispec.core import drafters
from minispec.adaptive import Adaptive
from minispec.core.admission import POLICIES
from minispec.core.engine import Engine
from minispec.core.requests import MAX_NODES, check_k
from minispec.core.scheduler import SyncScheduler
from minispec.costs import CostTable, read_costs
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, drafter_files
from minispec.tools.script import add_device, positive

TRAINED = {                                      # methods with a trained drafter: the command that trains it
    "prism": "train_prism.py",
    "eagle": "train_prism.py --arm ttt1",
    "specdiff": "train_specdiff.py",
}
DIFFUSION = {
    "cdlm": "a block-causal diffusion model, many tokens a step",
    "dlm": "its bidirectional teacher, without a cache",
}


# -- one function per method ----------------------------------------

def drafted(drafter, k, settings):
    """The scheduler of a drafter, up to k drafts a round, with the prompt-lookup tokens of the settings."""
    return partial(SyncScheduler, drafter=drafter, k=k, lookup=settings.prompt_lookup)


def ar(model, settings):
    """plain autoregressive decoding, the baseline"""
    return SyncScheduler


def ngram(model, settings):
    """prompt lookup: drafts copied from earlier text"""
    return drafted(drafters.NGram(), settings.k or 8, settings)


def draft(model, settings):
    """a small model drafts"""
    small = loaded(folder_of("draft", settings), model, settings)
    return drafted(drafters.SmallLM(small, model), settings.k or 4, settings)


def prism_chain_or_tree(model, settings, name="prism"):
    """modules trained on the model's hidden states draft, one for each draft step"""
    trained = _trained(name, prism.PrismConfig, model, settings)
    depth = settings.k or trained.config.depth
    drafter = prism.PrismDrafter(trained, model, depth, name)
    if not 0 <= settings.tree <= MAX_NODES:
        raise ValueError(f"tree must be 0 to {MAX_NODES} drafts, got {settings.tree}")
    if settings.tree:
        width = max(round(settings.tree ** 0.5), 2)
        drafter = prism.PrismTreeDrafter(trained, model, depth, width, name)
    return drafted(drafter, settings.tree or depth, settings)


def eagle(model, settings):
    """one module for all draft steps; EAGLE-2 trees with --tree"""
    return prism_chain_or_tree(model, settings, "eagle")


def specdiff_windows(model, settings):
    """a diffusion model drafts a window in one forward; several chains of drafts"""
    trained = _trained("specdiff", specdiff.SpecDiffConfig, model, settings)
    drafter = specdiff.SpecDiffDrafter(trained, model, settings.k, settings.k_drafts,
                                       settings.draft_temperature)
    return drafted(drafter, drafter.gamma * drafter.width, settings)


def self_speculation(model, settings):
    """the model drafts for itself with sparse attention (PillarAttn)"""
    return partial(specgen.SpecGen, k=settings.k or 8, sparsity=settings.sparsity,
                   min_budget=settings.min_budget, select=settings.select, schedule=settings.schedule,
                   delayed=settings.delayed)


def adaptive(model, settings):
    """the drafter with most expected tokens/s, chosen every round"""
    file = costs_of(settings)
    if not os.path.exists(file):
        raise ValueError(f"there is no cost table {file}; this measures one: python bench.py profile "
                         f"--model {settings.model} --device {settings.device}")
    cost = CostTable(read_costs(file))
    k = settings.k or 16
    check_k(k)
    candidates = []
    for name, drafter in chain_drafters(model, settings, k).items():
        if name in cost.drafters:
            candidates.append(drafter)
        else:
            print(f"adaptive: {name} is left out: {file} has no price for it", file=sys.stderr)
    return drafted(Adaptive(candidates, cost, k), k, settings)


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
    """The engine of method `name` for a loaded target, or the decoder of a diffusion model.
    settings: a namespace with the arguments below."""
    if name not in DIFFUSION:
        scheduler = METHODS[name](model, settings)
        return Engine(model, scheduler, batch_size, settings.cache_tokens, admission=settings.admission)

    threshold = settings.threshold
    if threshold is None and name == "cdlm":
        threshold = cdlm.THRESHOLD
    folder = folder_of(name, settings)
    trained = loaded(folder, model, settings)
    mask_id = Tokenizer.load(folder).mask_id
    if mask_id >= trained.config.vocab_size:
        raise ValueError(f"{folder}: the mask token {mask_id} is not in the vocabulary of the weights, "
                         f"{trained.config.vocab_size} tokens")
    return cdlm.Decoder(trained, mask_id, cdlm.METHODS[name], threshold=threshold, order=settings.order,
                        batch_size=batch_size, block_size=settings.block_size)


def loaded(folder, model, settings):
    """The model in a folder, or `model` itself if the settings name this folder. ValueError if their
    vocabularies differ; ids that only one tokenizer has, such as padding, are ignored."""
    if folder == settings.model:
        return model
    other = checkpoints.load(folder, model.device, model.dtype)
    ours, theirs = map(Tokenizer.load, (folder, settings.model))
    for i in ours.known & theirs.known:
        if ours.decode_bytes([i]) != theirs.decode_bytes([i]):
            raise ValueError(f"{folder} has another vocabulary than {settings.model}: token {i} differs")
    return other


def folder_of(name, settings):
    """The folder of a method's trained part: --drafter, or the default for this model."""
    if settings.drafter:
        return settings.drafter
    if name in DIFFUSION:
        name = f"cdlm/{cdlm.METHODS[name]}"
    return kept(f"{ROOT}checkpoints", settings.model) + f"/{name}"


def costs_of(settings):
    """The cost table: --cost, or the default for this model and device."""
    return settings.cost or results_of(settings, f"{ROOT}results") + "/costs.json"


def results_of(settings, root):
    """The folder under root for results of this model and device."""
    folder = kept(root, settings.model)
    return folder if settings.device == "cpu" else f"{folder}/gpu"


def kept(root, model):
    """The folder under root for files of this model."""
    if os.path.realpath(model) == os.path.realpath(SHIPPED):
        return root
    return f"{root}/{os.path.basename(os.path.abspath(model))}"


def _trained(name, config_class, model, settings):
    """The drafter of a method. ValueError says how to train one if it is missing."""
    folder = folder_of(name, settings)
    if not os.path.exists(folder):
        raise ValueError(f"there is no drafter for {settings.model} in {folder}; this trains one: python "
                         f"{TRAINED[name]} --target {settings.model} --out {folder} --minutes 60")
    drafter = drafter_files.load_drafter(folder, model, config_class)
    trained_for, this = drafter.config.target, checkpoints.fingerprint(model)
    if trained_for != this:
        raise ValueError(f"the target of the drafter in {folder} must be {trained_for}, got {this}")
    return drafter


# -- which of them can run here ----------------------------------------

def ready(settings):
    """The methods, without `ar`, whose trained part or cost table exists if they need one."""
    needed = {name: folder_of(name, settings) for name in ("draft", *TRAINED, *DIFFUSION)}
    needed["adaptive"] = costs_of(settings)
    names = [*METHODS, *DIFFUSION]
    return [name for name in names if name != "ar" and os.path.exists(needed.get(name, "."))]


def chain_drafters(model, settings, k):
    """{name: drafter} of all ready methods whose drafter proposes chains, of up to k drafts. A window has its
    length of training."""
    chains = argparse.Namespace(**vars(settings))
    found = {}
    for name in ready(settings):
        if name not in ("ngram", "draft", *TRAINED):
            continue
        chains.k = None if name == "specdiff" else k
        try:
            found[name] = make_engine(name, model, chains, 1).scheduler.drafter
        except ValueError as e:
            print(f"{name} is left out: {e}", file=sys.stderr)
    return found


# -- settings ----------------------------------------

def add_arguments(parser):
    """The settings of all methods, for argparse: a group for each kind of method."""
    about = {name: build.__doc__ for name, build in METHODS.items()} | DIFFUSION
    add = parser.add_argument_group("method and model").add_argument
    add("--method", default="ar", metavar="NAME", choices=(*METHODS, *DIFFUSION),
        help="; ".join(f"{name}: {text}" for name, text in about.items()))
    add("--model", default=SHIPPED,
        help="target: a Hugging Face folder, a GGUF file, or smollm2 (default: smollm2 where it is installed "
             f"and suits, else {SHIPPED})")
    add_device(parser)
    add("--dtype", choices=("float32", "bfloat16"),
        help="dtype of the weights (default: float32 on the CPU, bfloat16 on a GPU; for bench.py also "
             "bfloat16 for a real model on a CPU with bfloat16 products)")
    add("--drafter", metavar="DIR",
        help="trained part of the method: a drafter, the small model of draft, the diffusion model of cdlm "
             "and dlm (default: the method's name, or cdlm/student and cdlm/teacher, in checkpoints; for "
             "another model in checkpoints/MODEL)")

    add = parser.add_argument_group("batch and cache").add_argument
    add("--admission", default="reserve", choices=POLICIES,
        help="rule by which requests enter the cache and leave a full one (default %(default)s)")
    add("--cache-tokens", type=positive,
        help="size of the cache in tokens (default: --batch times the longest request)")

    add = parser.add_argument_group("drafting").add_argument
    add("--k", type=positive,
        help="draft tokens of a chain, draft steps of a tree, per round (default: specgen 8, ngram 8, draft 4, "
             "trained drafters as in training; adaptive at most 16)")
    add("--prompt-lookup", type=int, default=0,
        help="draft, prism, eagle, specdiff: tokens per forward copied from the text, shared by the batch, "
             "that are verified next to the drafts (default %(default)s)")
    add("--cost", metavar="FILE",
        help="cost table of adaptive, made by bench.py profile (default results/costs.json, for another "
             "model results/MODEL/costs.json, on a GPU in its folder gpu)")

    add = parser.add_argument_group("trained drafters: prism, eagle, specdiff").add_argument
    add("--tree", type=int, default=0,
        help="prism, eagle: likeliest drafts of a tree that are verified, 0 is a chain (default %(default)s)")
    add("--k-drafts", type=int, default=1, help="specdiff: chains per round (default %(default)s)")
    add("--draft-temperature", type=float,
        help="specdiff: temperature of the drafts (default: the target's; 1 for several independent chains)")

    add = parser.add_argument_group("self-speculation: specgen").add_argument
    add("--sparsity", type=float, default=0.05,
        help="share of the context that a draft step reads (default %(default)s)")
    add("--min-budget", type=int, default=64,
        help="positions that a draft step reads at least (default %(default)s)")
    add("--select", default="ahead", choices=specgen.SELECTIONS,
        help="selection of these positions (default %(default)s; pillar is the paper's)")
    add("--schedule", default="unified", choices=specgen.SCHEDULES,
        help="schedule of draft and verification phases (default %(default)s)")
    add("--delayed", action="store_true", help="verify the drafts of one forward while the next one runs")

    add = parser.add_argument_group("diffusion models: cdlm, dlm").add_argument
    add("--threshold", type=float,
        help="confidence above which a masked slot is revealed "
             f"(default: cdlm {cdlm.THRESHOLD}, dlm one token per step)")
    add("--order", default=cdlm.ORDER, choices=cdlm.ORDERS,
        help="slot to reveal if none is above the threshold: the first masked one, or the most confident, as "
             "in the papers (default %(default)s)")
    add("--block-size", type=positive, help="slots of a block (default: as in training)")


# Options that only some methods have.
OF_METHODS = {
    "k": tuple(name for name in METHODS if name != "ar"),
    **dict.fromkeys(("admission", "cache_tokens"), tuple(METHODS)),
    "drafter": ("draft", *TRAINED, *DIFFUSION),
    "prompt_lookup": ("draft", *TRAINED),
    "tree": ("prism", "eagle"),
    "cost": ("adaptive",),
    "k_drafts": ("specdiff",),
    "draft_temperature": ("specdiff", "adaptive"),
    **dict.fromkeys(("sparsity", "min_budget", "select", "schedule", "delayed"), ("specgen",)),
    **dict.fromkeys(("threshold", "order", "block_size"), tuple(DIFFUSION)),
}


def given(args):
    """{name: option} of the settings that differ from their defaults."""
    return {name: f"--{name.replace('_', '-')}"
            for name, usual in vars(settings()).items() if getattr(args, name) != usual}


def settings(*options, **changes):
    """The settings above as a namespace: from the options, else from `changes`, else the defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options, argparse.Namespace(**changes))
