"""Toy models for tests: tiny, untied and drawn with large weights, so that their greedy output wanders
instead of repeating a token, and sampled distributions are neither flat nor peaked."""
import contextlib
import gc
import io
import json
import os
import pty
import random
import shlex
import subprocess
import sys
import threading
from unittest import mock

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")          # two processes share the cores
os.environ["CUDA_VISIBLE_DEVICES"] = ""                         # scripts would take a GPU, and answer in bf16

from root import ROOT  # noqa: E402  before torch
import pytest  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from beside import pytest_sessionstart  # noqa: E402, F401  a hook
from minispec.core import gpt  # noqa: E402
from minispec.core.attention import FullKeys, packed_attend  # noqa: E402
from minispec.core.kv_cache import BLOCK, KVCache  # noqa: E402
from minispec.data import rollouts, tasks  # noqa: E402
from minispec.data.tokenizer import Tokenizer  # noqa: E402
from minispec.specgen import SELECTIONS, SpecGen  # noqa: E402
from minispec.tools import checkpoints  # noqa: E402
from minispec.tools.script import run_main  # noqa: E402

TARGET = f"{ROOT}/checkpoints/target"
DRAFT = f"{ROOT}/checkpoints/draft"


def pytest_collection_modifyitems(items):
    """The long setups come first, where the two processes (beside.py) do not meet: else both might make
    them."""
    first = "test_bench.py test_engine.py test_graphs.py test_kernels.py test_prism.py test_specdiff.py"
    items.sort(key=lambda item: item.path.name not in first)


def toy_model(vocab=64, seed=0, gain=4.0, **changes):
    torch.manual_seed(seed)
    shape = {**gpt.SIZES["tiny"], "vocab_size": vocab, "block_size": 512, "tied": False, **changes}
    model = gpt.GPT(gpt.GPTConfig(**shape)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(gain)
    return model


def near_toy(scale):
    """toy_model() with other weights, to `scale`, added: a drafter that is often right."""
    model = toy_model()
    with torch.no_grad():
        for p, other in zip(model.parameters(), toy_model(seed=9).parameters()):
            p.add_(scale * other)
    return model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def dense_logits(model, ids):
    """Logits (T, V) of one sequence without any cache: the slow, obvious reference."""
    with torch.inference_mode():
        return model.logits(model(torch.tensor([ids])))[0]


def prompts(n=8, vocab=64, seed=0):
    """Random prompts of several lengths."""
    rng = random.Random(seed)
    lengths = [1, 2, 9, 16, 17, 40, 100]
    return [[rng.randrange(vocab) for _ in range(rng.choice(lengths))] for _ in range(n)]


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Scripts collect often, and would look through all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Short texts span several blocks of the cache."""
    monkeypatch.setattr("minispec.core.kv_cache.BLOCK", 4)


@pytest.fixture
def usual_blocks(small_blocks, monkeypatch):
    """For scripts and shipped models: the blocks that users have, which take less time."""
    monkeypatch.setattr("minispec.core.kv_cache.BLOCK", BLOCK)


def only_keys(cache, start, n, **kw):
    """FullKeys of the only request of a cache, which has all of it."""
    if not hasattr(cache, "only"):
        cache.only = cache.open(cache.n_slots)
    return FullKeys(cache, cache.only, start, n, **kw)


def attend_alone(keys):
    """attend over the rows of one request."""
    return packed_attend([(0, keys.n, keys)])


def cached_kv(cache, blocks, n):
    """Keys and values (2, L, G, n, D) of the first n positions of a request."""
    return cache.kv[:, :, :, cache.slots_of(blocks, range(n))]


def fresh_kv(model, tokens, *more):
    """Keys and values of some tokens of a text, read in one forward of a new cache; more: other inputs."""
    n = len(tokens)
    cache = KVCache(model.config, n)
    model(torch.tensor(tokens), torch.arange(n), attend_alone(only_keys(cache, 0, n)), *more)
    return cached_kv(cache, cache.only, n)


def ids_of(generations):
    return [g.token_ids for g in generations]


def steps_of(generations):
    return [s for g in generations for s in g.rounds]


def chi_square(counts, probs):
    """p-value of the observed counts (n,) under probabilities (n,). Cells that expect fewer than 5 are
    pooled."""
    counts, expected = counts.double(), probs.double() * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        if expected[-1] < 5:                # too little even together: nothing may be there but a handful
            if counts[-1] > 20:
                return 0.0
            counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


def toy_target(**changes):
    """(random target, tokenizer) with the vocabulary and the ends of the shipped ones."""
    tokenizer = Tokenizer.load(TARGET)
    ends = {f"{name}_id": tokenizer.special[f"<|{name}|>"] for name in ("bos", "eos")}
    return toy_model(vocab=tokenizer.vocab_size, **ends, **changes), tokenizer


def save_toy_target(folder, **changes):
    """A random target with the shipped tokenizer, in folder/target, which is returned."""
    model, _ = toy_target(**changes)
    checkpoints.save(model, f"{folder}/target", TARGET)
    return f"{folder}/target"


@pytest.fixture(scope="session")
def verdicts():
    """{name: "" or what was wrong} of the checks of test_kernels.py and test_graphs.py, run as a script in
    Triton's interpreter: that must be chosen before triton is imported, and cannot compile."""
    file = f"{ROOT}/tests/test_graphs.py"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    p = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stderr[-2000:]
    return json.loads(p.stdout.splitlines()[-1])


def table(text):
    """Rows of a table of text: cells [str, ..] that are separated by bars."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def values(text):
    """The same of a table whose cells are JSON."""
    return [[json.loads(cell) for cell in row] for row in table(text)]


def words(line="", *more):
    """Arguments of a script: those of a command line, then others as they are."""
    return [*shlex.split(str(line)), *map(str, more)]


def python(*args, cwd=ROOT, env=None):
    """A process of Python with these arguments, and how it ended."""
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True)


def run_script(script, *args):
    """main() of an imported script with these words."""
    with mock.patch.object(sys, "argv", [script.__name__ + ".py", *words(*args)]):
        script.main()


@contextlib.contextmanager
def refused(*parts):
    """Inside, a ValueError of one line that has these parts."""
    with pytest.raises(ValueError) as e:
        yield
    line = str(e.value)
    assert "\n" not in line and all(str(part) in line for part in parts), line


def refusal(script, *args, **more):
    """The line in which a script, given these words, says why it does not run."""
    p = outcome(script, *args, **more)
    name, _, line = p.stderr.partition(": ")
    assert (p.returncode, name) == (2, f"{script.__name__}.py") and line.count("\n") == 1, p
    return line[:-1]


def outcome(script, *args, cwd=ROOT, out=None, **env):
    """What subprocess.run says of an imported script with these words, but in this process, because importing
    torch takes seconds. out: its stdout, if not kept."""
    out = out or io.StringIO()
    err = io.StringIO()
    code = 0
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with pytest.MonkeyPatch.context() as patch, redirected[0], redirected[1]:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [script.__name__ + ".py", *words(*args)])
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            run_main(script.main)
        except SystemExit as e:
            code = e.code
    shown = out.getvalue() if isinstance(out, io.StringIO) else None
    return subprocess.CompletedProcess(args, code, shown, err.getvalue())


def decoded(folder, *args):
    """The result of decode.py with these words, and its output."""
    import decode
    p = outcome(decode, *args, "--json", f"{folder}/o.json")
    assert p.returncode == 0, p.stderr
    with open(f"{folder}/o.json", encoding="utf-8") as f:
        return json.load(f), p.stdout


def whole(drafter):
    """A drafter without its early stop: random models are unsure of every draft."""
    drafter.min_confidence = 0.0
    return drafter


def record_here(command, **kw):
    """In the place of subprocess.run: the answers of a training are made in this process, because importing
    torch takes seconds."""
    assert command[1:3] == ["-m", "minispec.data.rollouts"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        run_script(rollouts, *command[3:])
    return subprocess.CompletedProcess(command, 0, shown.getvalue())


def spoil_ngram(patch, owner, name):
    """Engines of ngram that owner.name makes commit token 7 in every round."""
    def make(method, *args, real=getattr(owner, name)):
        engine = real(method, *args)
        if method == "ngram":
            engine.verify = lambda segments, logits: [([], 7) for _ in segments]
        return engine

    patch.setattr(owner, name, make)


def log_of(folder):
    """The records of a training."""
    with open(folder / "log.jsonl", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    """Whether the tensors {name: tensor} of two files are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def dies_after(n, owner, name):
    """A patch: the process is interrupted in the call of owner.name that follows the first n."""
    effects = [mock.DEFAULT] * n + [KeyboardInterrupt]
    return mock.patch.object(owner, name, wraps=getattr(owner, name), side_effect=effects)


def train_toy(script, folder, out, *args):
    """A short training with an imported script, for the target in `folder`; returns its log. `args` have the
    last word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "FAMILIES", ("revise", "arith"))
        patch.setattr("minispec.data.recorded.subprocess.run", record_here)
        usual = (f"--target {folder}/target --out {folder}/{out} --responses {folder}/responses --heldout 4 "
                 "--max-new-tokens 24 --tokens 20e3 --batch-tokens 1200 --save-every 6 --lr 4e-3 "
                 "--device cpu")
        run_script(script, usual, *words(*args))
    return log_of(folder / out)


def on_a_terminal(script, *args, **env):
    """What a script, which must succeed, shows on a terminal: bytes."""
    leader, follower = pty.openpty()
    shown = []

    def read():
        with contextlib.suppress(OSError):              # the way a closed terminal says that it is
            while chunk := os.read(leader, 4096):
                shown.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with open(follower, "w") as terminal:
        p = outcome(script, *args, out=terminal, **env)
    reader.join()
    assert p.returncode == 0, p.stderr
    return b"".join(shown)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Folder of a random target with the shipped tokenizer."""
    return save_toy_target(tmp_path_factory.mktemp("toy"), gain=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target with the shipped tokenizer in folder/target, and room for drafters beside it."""
    folder = tmp_path_factory.mktemp("drafters")
    save_toy_target(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """The shipped one, which most toys have, too."""
    return Tokenizer.load(TARGET)


@pytest.fixture(scope="session")
def shipped(tokenizer):
    """(target, tokenizer) of the checkpoints that come with the repository."""
    return checkpoints.load(TARGET, dtype=torch.float32), tokenizer


class Arbitrary(SpecGen):
    """SpecGen that may also select at random: its output must not change."""
    selections = (*SELECTIONS, "random")

    def _select(self, r, keys, accepted):
        state = super()._select(r, keys, accepted)
        if self.select == "random" and state.selected is not None:
            shape = (*keys.scores.shape[:2], r.n_cached - state.recent)
            scores = torch.rand(shape, generator=seeded(r.n_cached + r.sampling.seed))
            state.selected = scores.topk(state.selected.shape[-1], dim=-1).indices
        return state
