"""What the training scripts share around their loops: settings, optimiser, learning rate, log, checkpoints,
resuming, and a lock.

The loop itself stands in each script:

    with locked(folder):
        run = Run(args, folder, model, n_steps, lr)
        for step in run.steps():                    # only the steps that are still missing
            loss = ...
            loss.backward()
            run.update(progress, loss=loss)         # of the weights, and what is shown and logged
            if run.checkpoint_due():
                ...                                 # the script saves the model in its own format
                run.checkpoint()                    # log.jsonl and resume.pt

A folder then holds the model, log.jsonl (one record per checkpoint), resume.pt (weights and the optimiser's
state, from which the same command continues on the same loss curve), command.txt once it is finished, and the
lock."""
import contextlib
import json
import math
import os
import shlex
import statistics
import sys
import time
import zipfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from tqdm import tqdm

import minispec
from minispec.core.cpu import PACKED_TYPES
from minispec.tools.files import naming, read_json, replaced, write_json, write_text
from minispec.tools.script import add_device, check_device

MOST = 10 ** 10             # the largest number that a setting may be
MAY_BE_ZERO = ("lr", "seed", "minutes", "temperature", "draft_vocab", "markov")
# Settings with which a training may go on: they change no weights, or the folder of answers is checked.
INDIFFERENT = ("out", "device", "save_every", "responses", "target", "name")
WARMUP = 0.02               # of a run, in which the learning rate rises
TRIM = 100                  # steps between two returns of free memory


# -- settings ------------------------------------------------------------------------------------------------

def add_arguments(parser, lr, save_every):
    """The settings of every training, with their defaults."""
    add = parser.add_argument
    add("--out", required=True, help="folder to write to")
    add("--lr", type=float, default=lr, help="peak learning rate" + f" (default {lr})" * bool(lr))
    add("--seed", type=int, default=1337,
        help="random seed: weights, order of the data (default %(default)s)")
    add_device(parser)
    add("--save-every", type=int, default=save_every, help="steps between checkpoints (default %(default)s)")


def parsed(parser):
    """The settings of the command line. ValueError where a number is out of range, or the device is not
    there."""
    args = parser.parse_args()
    for name, value in vars(args).items():
        least = 0 if name in MAY_BE_ZERO else 1
        if type(value) in (int, float) and not least <= value <= MOST:
            raise ValueError(f"{name.replace('_', '-')} {value} is out of range; "
                             f"allowed is {least} or more, up to {MOST:.0e}")
    check_device(args.device)
    return args


def same_settings(folder, args, *names, **settings):
    """Write the settings of a folder of training data, those of `args` with these names and others, into it.
    ValueError where it was begun with others."""
    settings |= {name: getattr(args, name) for name in names}
    os.makedirs(folder, exist_ok=True)
    file = f"{folder}/settings.json"
    with naming(file):
        unchanged(read_json(file, settings), settings)
    if not os.path.exists(file):
        write_json(file, settings)


def unchanged(old, new):
    """ValueError names a setting that was another one when the work began."""
    for name, value in new.items():
        if old.get(name) != value:
            raise ValueError(f"the folder was begun with {name} {old.get(name)}, not {value}; "
                             "use another folder or the same settings")


def generator_of(args, step):
    """The random numbers of one step: a resumed run draws the same ones."""
    return torch.Generator().manual_seed(args.seed * 1000003 + step)


def fast_dtype(device):
    """bf16, or fp32 on a processor without bf16 products, which would take several times as long."""
    slow = device == "cpu" and torch.bfloat16 not in PACKED_TYPES
    return torch.float32 if slow else torch.bfloat16


def bf16(device):
    """Forward passes inside this context multiply in bf16, where that is fast; the weights stay in fp32."""
    return torch.autocast(device.split(":")[0], torch.bfloat16, fast_dtype(device) == torch.bfloat16)


# -- one training in a folder --------------------------------------------------------------------------------

@contextlib.contextmanager
def locked(folder):
    """Keep `folder` to one training: two would write their checkpoints over each other.

    The operating system holds the lock on the file `lock` and releases it when the process ends, even after
    kill -9, so a file that was left behind does no harm. A model without this file was not trained in this
    folder. ValueError if such a model would be replaced, or if another training is running."""
    os.makedirs(folder, exist_ok=True)
    lock = Path(folder, "lock")
    # A large model is in several files, with an index.
    if any(Path(folder).glob("model.safetensors*")) and not lock.exists():
        raise ValueError(f"{folder} holds a model already, and no training to continue; use another --out")
    with lock.open("w") as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:                              # on Windows
            pass
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another training; "
                             "wait until it ends or use another --out") from None
        yield


class Optimizer:
    """Muon for all matrices but embedding and head, which learns more from the same number of tokens, and
    AdamW for the rest, used like one optimiser. Gradients are clipped to norm 1."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        matrices, others = [], []
        for name, p in model.named_parameters():
            if p.ndim == 2 and not name.startswith(("embed.", "head.")):
                matrices.append(p)
            else:
                others.append(p)
        self.parts = [torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
                      torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")]

    def step(self, lr):
        """One update at learning rate `lr`; the gradients are cleared."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        # torch's Muon multiplies x.bfloat16(): on a processor without such products, two thirds of a step.
        dtype = fast_dtype(self.parameters[0].device.type)
        with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.to(dtype)):
            for part in self.parts:
                for group in part.param_groups:
                    group["lr"] = lr
                part.step()
                part.zero_grad()


@dataclass
class Run:
    """One training in a folder: which steps are missing, what is shown and logged, and its checkpoints. If
    the folder has a resume.pt, the weights and the optimiser's state are loaded from it at once. ValueError
    if it is damaged or another run's."""
    args: Namespace
    folder: str
    model: torch.nn.Module
    n_steps: int
    lr: float                         # at the peak
    minutes: float = None             # of all steps; None: no limit
    once: bool = False                # a finished run is complete, also if more steps are asked for
    step = 0                          # the one at work; before the first one, how many earlier runs did
    last = False                      # whether it is the last one, because of its number or the time
    finished = False                  # whether an earlier run did its last step

    def __post_init__(self):
        self.optimizer = Optimizer(self.model)
        self.log = ""                 # log.jsonl
        self.recent = []              # what the steps since the last checkpoint logged
        self.resume_file = Path(self.folder, "resume.pt")
        self.started = time.time()
        if self.resume_file.exists():
            try:
                self._resume()
            except Exception as e:                             # a damaged archive may raise anything
                text = f"{self.resume_file} is damaged or of another run; remove it to start over, or use"
                raise ValueError(f"{text} another --out ({type(e).__name__}: {e})"[:600]) from None
            if not self.complete:
                print(f"resuming at step {self.step} of {self.n_steps}")

    @property
    def complete(self):
        return self.finished and (self.once or self.step >= self.n_steps or self.progress(0) >= 1)

    def _resume(self):
        if zipfile.ZipFile(self.resume_file).testzip():        # torch.load does not look at the check sums
            raise ValueError("a check sum is wrong")
        saved = torch.load(self.resume_file, map_location="cpu", weights_only=True)      # nothing but tensors
        self.step, self.log = saved["step"], saved["log"]
        self.finished = saved["finished"]
        self.started -= saved["seconds"]
        if not self.complete:
            settings = {k: v for k, v in vars(self.args).items() if k not in INDIFFERENT}
            unchanged(saved["settings"], settings)
            for part, state in zip(self.optimizer.parts, saved["optimizers"], strict=True):
                part.load_state_dict(state)
        self.model.load_state_dict(saved["model"])

    def steps(self):
        """The numbers of the steps that are still missing, with a progress bar."""
        first = self.step
        if self.complete:
            print(f"the training in {self.folder} is complete")
            return
        self.bar = tqdm(range(first, self.n_steps), self.folder, initial=first, total=self.n_steps,
                        unit="step")
        for self.step in self.bar:
            yield self.step
            if self.last:
                break

    def progress(self, done):
        """How much of the run is over, 0 to 1: `done`, or the part of its minutes, if that is more."""
        if self.minutes:
            done = max(done, (time.time() - self.started) / (60 * self.minutes))
        return min(done, 1)

    def update(self, progress, **values):
        """One step of the optimiser, `progress` (up to 1) being how much of all data is used up with it.
        values: scalar tensors of this step; they are shown, and their means logged at the next
        checkpoint."""
        # Linear warm-up, then a cosine down to a twentieth of the peak.
        done = self.progress(progress)
        falling = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
        self.optimizer.step(self.lr * min(done / WARMUP, falling))
        if self.step % TRIM == 0:
            minispec.trim()
        self.recent.append({name: x.item() for name, x in values.items()})
        self.bar.set_postfix(self.recent[-1])

    def checkpoint_due(self):
        """Whether a checkpoint follows this step: every save_every steps and after the last one. ValueError
        where the weights are no longer finite, so that the last good checkpoint is kept."""
        done = self.step + 1
        self.last = done == self.n_steps or self.progress(0) >= 1
        due = done % self.args.save_every == 0 or self.last
        if due and not all(p.isfinite().all() for p in self.model.parameters()):
            raise ValueError(f"after {done} steps the weights are not finite numbers any more; "
                             "try a smaller --lr and another --out")
        return due

    def checkpoint(self, **results):
        """Write the log, with `results` in this record, at the end the command, and last what a resumed run
        starts from: killed in between, it does these steps again."""
        means = {name: round(statistics.fmean(values[name] for values in self.recent), 5)
                 for name in self.recent[-1]}
        seconds = time.time() - self.started
        record = {"step": self.step + 1, **means, **results, "seconds": round(seconds)}
        self.log += json.dumps(record) + "\n"
        write_text(f"{self.folder}/log.jsonl", self.log)
        if self.last:
            command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
            write_text(f"{self.folder}/command.txt", f"{command}\n")
        state = {"step": self.step + 1, "seconds": seconds, "finished": self.last, "log": self.log,
                 "model": self.model.state_dict(), "settings": vars(self.args),
                 "optimizers": [part.state_dict() for part in self.optimizer.parts]}
        with replaced(self.resume_file) as temporary, open(temporary, "wb") as file:
            torch.save(state, file)
        self.recent = []                  # a resumed run starts without them too, so both log the same means
