"""The loop that all training scripts share: optimisers, learning rate, checkpoints, log, and going on where it stopped.

A script says what a step's loss is; `train` does the rest and leaves in `folder`
    the model (by the script's own `save`), log.jsonl (one record a checkpoint), command.txt when it is finished, and
    resume.pt, the weights and the optimisers' state, from which the same command continues on the same loss curve.
"""
import json
import math
import os
import shlex
import sys
import time
import zipfile

import torch
from tqdm import tqdm

from minispec.tools.files import blame, replaced


def optimizers(model, lr, matrix=lambda name: True):
    """Muon for the matrices whose name `matrix` accepts, AdamW for other matrices (embeddings) and, without weight decay,
    for the gains of norms."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and matrix(n)]
    tables = [p for n, p in named if p.ndim == 2 and not matrix(n)]
    vectors = [p for _, p in named if p.ndim < 2]
    groups = [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))]


def learning_rate(step, progress, peak, warmup):
    """Linear warm-up over `warmup` steps, then a cosine over `progress` (0 to 1) down to a twentieth of the peak."""
    return peak * min((step + 1) / max(warmup, 1), 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def resume(folder, model, opts, device):
    """(steps done, seconds spent, lines of the log) of the run in `folder`, its weights and optimisers' state put in place; (0, 0.0, [])
    for none. ValueError where resume.pt is damaged, or another run's."""
    file, log = os.path.join(folder, "resume.pt"), os.path.join(folder, "log.jsonl")
    if not os.path.exists(file):
        return 0, 0.0, []
    try:
        if zipfile.ZipFile(file).testzip():                    # torch.load does not look at the check sums
            raise ValueError("a check sum is wrong")
        saved = torch.load(file, map_location=device, weights_only=True)       # never unpickles anything but tensors
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["optimizers"], strict=True):
            opt.load_state_dict(state)
        step, seconds = saved["step"], saved["seconds"]
        if type(step) is not int or type(seconds) not in (int, float) or any(x.shape != p.shape for opt in opts for p, s in opt.state.items() for x in s.values() if torch.is_tensor(x) and x.ndim):
            raise ValueError("the steps or the optimisers' state are of another kind")
    except Exception as e:                                     # what a damaged archive raises is anybody's guess
        raise ValueError(f"{file} is damaged or of another run; remove it to begin anew, or use another --out ({type(e).__name__}: {e})"[:600]) from None
    if not os.path.exists(log):
        return step, seconds, []
    with blame(log), open(log, encoding="utf-8") as f:         # the log is written first; drop what is being done again
        return step, seconds, [line for line in f if json.loads(line)["step"] <= step]


def _write_lines(path, lines):
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as f:
        f.writelines(lines)


def train(folder, model, opts, steps, loss_of, rate_of, save, evaluate, save_every, device="cpu"):
    """Run the optimiser steps that are still missing.

    loss_of(step) -> {"loss": the tensor to minimise, other names: numbers to show and to log}; means of the last 50 steps
    are shown. rate_of(step) -> learning rate. save() writes the model, evaluate(step) -> more entries of the log's record,
    called every save_every steps and at the end.
    """
    os.makedirs(folder, exist_ok=True)
    first, spent, log = resume(folder, model, opts, device)
    if first:
        print(f"resuming at step {first} of {steps}")
    model.train()
    recent, started = [], time.time() - spent
    bar = tqdm(range(first, steps), initial=first, total=steps, unit="step", desc=os.path.basename(os.path.abspath(folder)))
    for step in bar:
        losses = loss_of(step)
        losses["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = rate_of(step)
            opt.step()
            opt.zero_grad(set_to_none=True)
        recent = recent[-49:] + [{name: x.item() if torch.is_tensor(x) else x for name, x in losses.items()}]
        mean = {name: sum(r[name] for r in recent) / len(recent) for name in losses}
        bar.set_postfix({name: f"{x:.3f}" for name, x in mean.items()})
        if (step + 1) % save_every == 0 or step + 1 == steps:
            recent = []                                        # so that a resumed run logs the same means
            if not all(p.isfinite().all() for p in model.parameters()):
                raise ValueError(f"after {step + 1} steps the weights are not finite numbers any more; try a smaller --lr (the last checkpoint is kept)")
            record = {"step": step + 1, **{name: round(x, 5) for name, x in mean.items()}, **evaluate(step), "seconds": round(time.time() - started)}
            log.append(json.dumps(record) + "\n")
            _checkpoint(folder, model, opts, save, record, log)
            model.train()
    _write_lines(os.path.join(folder, "command.txt"), [shlex.join(["python", os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\n"])


def _checkpoint(folder, model, opts, save, record, log):
    """The model, the log, and last what a resumed run starts from: killed in between, it does these steps again."""
    save()
    _write_lines(os.path.join(folder, "log.jsonl"), log)
    with replaced(os.path.join(folder, "resume.pt")) as temporary, open(temporary, "wb") as file:
        torch.save({"step": record["step"], "seconds": record["seconds"], "model": model.state_dict(), "optimizers": [o.state_dict() for o in opts]}, file)
