"""train_prism.py, train_specdiff.py and the recording of answers as a user meets them, on a toy target:
all arms and objectives train, a killed run resumes to the same weights, one drafter starts from another,
and bad input is one clear line."""

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
from unittest import mock

import pytest
import torch
from conftest import TARGET as SHIPPED
from conftest import (dense_logits, dies_after, outcome, record_here, refusal, refused, run_script, same,
                      table, toy_model, train_toy, weights, words)
from safetensors.torch import load_file
from test_trained import toy_prism, toy_specdiff

import decode
import train_prism
import train_specdiff
from minispec import prism, specdiff
from minispec.core.engine import Engine
from minispec.core.scheduler import SyncScheduler
from minispec.data import magpie, recorded, rollouts, tasks
from minispec.data.loops import loops
from minispec.data.recorded import most_frequent
from minispec.data.tokenizer import GPT2, TEXT_ALONE, Tokenizer, byte_letters
from minispec.tools import checkpoints, drafter_files, methods, training
from minispec.tools.drafter_files import load_drafter, save_drafter

KINDS = {  # script, config, usual arguments, learning rate
    "prism": (train_prism, prism.PrismConfig, "--unroll 3", "2e-2"),
    "specdiff": (train_specdiff, specdiff.SpecDiffConfig, "--windows 8 --gamma 4", "4e-2"),
}
both = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.usefixtures("usual_blocks")


def train(folder, out, *args, kind="prism"):
    script, *_, usual, _ = KINDS[kind]
    return train_toy(script, folder, out, f"--prompts 24 {usual}", *words(*args))


def killed(folder, out, *args, kind="prism"):
    """A training that dies at its second checkpoint."""
    with dies_after(1, drafter_files, "save_drafter"), pytest.raises(KeyboardInterrupt):
        train(folder, out, *args, kind=kind)


def loaded(folder, out, kind="prism"):
    return load_drafter(folder / out, checkpoints.load(folder / "target"), KINDS[kind][1])


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# -- a training and its folder -------------------------------------------------------------------------------


@both
def test_training_learns_and_a_killed_run_resumes_to_the_same_weights(kind, folder, capsys):
    before = (folder / "target" / "model.safetensors").read_bytes()
    command = f"--lr {KINDS[kind][-1]} --temperature 0 --responses {folder}/greedy"
    log = train(folder, f"{kind}-whole", command, kind=kind)
    first, last = (row["heldout_tau"] for row in (log[0], log[-1]))
    if kind == "specdiff":
        first, last = first["greedy"], last["greedy"]
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert 1 <= first < last <= 6
    shards = {file: file.stat().st_mtime for file in (folder / "greedy").glob("*-0-*.safetensors")}
    assert {file.stem for file in shards} == {"train-0-24", "heldout-0-4"}

    killed(folder, f"{kind}-parts", command, kind=kind)
    capsys.readouterr()
    again = train(folder, f"{kind}-parts", command, kind=kind)
    assert "resuming at step 6" in capsys.readouterr().out
    assert same(weights(folder / f"{kind}-whole"), weights(folder / f"{kind}-parts"))
    assert [{**row, "seconds": 0} for row in log] == [{**row, "seconds": 0} for row in again]
    assert all(time == file.stat().st_mtime for file, time in shards.items())  # made once
    assert f"train_{kind}.py --target" in (folder / f"{kind}-whole" / "command.txt").read_text()
    assert before == (folder / "target" / "model.safetensors").read_bytes()


def test_a_folder_with_a_model_of_no_training_here_is_left_alone(folder):
    before = (folder / "target" / "model.safetensors").read_bytes()
    with refused("target holds a model already"):
        train(folder, "target")
    assert (folder / "target" / "model.safetensors").read_bytes() == before
    # A large model has an index of its files.
    (folder / "large").mkdir()
    (folder / "large" / "model.safetensors.index.json").touch()
    with refused("large holds a model already"):
        train(folder, "large")


def test_every_epoch_reads_every_text_once_in_batches_that_fit():
    lengths = [5 + 7 * i % 40 for i in range(300)]
    plan = [batch for batch, _ in recorded.schedule(1, lengths, 100, 2 * sum(lengths))]
    rows, longest = sum(plan, []), [max(lengths[row] for row in batch) for batch in plan]
    assert sorted(rows[:300]) == sorted(rows[300:]) == [*range(300)] and rows[:300] != rows[300:]
    assert all(len(batch) * n <= 100 for batch, n in zip(plan, longest))
    assert longest[:20] != sorted(longest[:20])


# An option, and how the two values are called.
OTHER = """
--lr 1e-2 | lr 0.004, not 0.01
--seed 7 | seed 1337, not 7
--tokens 1800 | tokens 900.0, not 1800.0
--tokens 100 | tokens 900.0, not 100.0
--arm ttt1 | arm prism2, not ttt1
--batch-tokens 300 | batch_tokens 200, not 300
--draft-vocab 50 | draft_vocab 4000, not 50
--last-layer | last_layer False, not True
"""


def test_a_training_is_not_resumed_with_other_settings(folder):
    """The one that differs is named, and nothing is touched. Those that change no weights may differ, and
    of a complete one all."""
    command = "--tokens 900 --batch-tokens 200 --save-every 1"
    killed(folder, "other", command)
    before = (folder / "other" / "resume.pt").read_bytes()
    for option, message in table(OTHER):
        with refused(f"the folder was begun with {message}; ", "or use another --out"):
            train(folder, "other", f"{command} {option}")
    # Nor with more answers: its batches would be other ones.
    more = mock.patch.object(recorded, "record", lambda args, real=recorded.record: 2 * real(args))
    with more, refused("the folder was begun with recorded_tokens "):
        train(folder, "other", command)
    assert (folder / "other" / "resume.pt").read_bytes() == before
    log = train(folder, "other", f"{command} --save-every 2")
    assert log[0]["step"] == 1 and len(log) > 2
    # A training that is complete does nothing more.
    model = folder / "other" / "model.safetensors"
    made = model.stat().st_mtime_ns
    assert train(folder, "other", f"{command} --lr 1e-3") == log
    assert model.stat().st_mtime_ns == made


def test_a_resumed_training_keeps_its_draft_vocabulary(folder, monkeypatch):
    """The head's rows are those of the drafter's tokens."""
    command = "--tokens 900 --draft-vocab 40 --batch-tokens 200 --save-every 1"
    monkeypatch.setattr(recorded, "most_frequent", lambda *args: torch.arange(40))
    killed(folder, "first", command)
    monkeypatch.setattr(recorded, "most_frequent", lambda *args: torch.arange(20, 60))
    with mock.patch.object(prism, "unrolled_loss", wraps=prism.unrolled_loss) as loss:
        train(folder, "first", command)
    own = loss.call_args.args[0].draft_head
    head = checkpoints.load(folder / "target").head.weight[:40]
    assert torch.equal(own.tokens(torch.arange(40)), torch.arange(40))
    assert torch.equal(own.head.weight, head.to(own.head.weight.dtype))


# Kind, name, options of the training, method, options of decoding.
VARIANTS = """
prism | ttt1 | --arm ttt1 | eagle |
prism | prism2 | --arm prism2 | prism | --tree 12
prism | prism3 | --arm prism3 | prism |
prism | stack2 | --arm stack2 | eagle | --tree 12
specdiff | kl | | specdiff |
specdiff | mdlm | --objective mdlm --blind | specdiff | --rule walk
specdiff | ce | --objective ce --draft-vocab 500 | specdiff | --k 6 --rule selection --k-drafts 4
specdiff | streak | --objective streak | specdiff |
specdiff | log-streak | --objective log-streak | specdiff |
specdiff | streak-rs | --objective streak-rs | specdiff | --k-drafts 3 --draft-temperature 0.7
"""


@pytest.mark.parametrize("kind, name, options, method, shape", table(VARIANTS))
def test_every_variant_trains_and_decodes(kind, name, options, method, shape, folder, capsys):
    log = train(folder, name, f"{options} --tokens 1500", kind=kind)
    assert math.isfinite(log[-1]["loss"])
    c = loaded(folder, name, kind).config
    if kind == "prism":
        modules = max(train_prism.ARMS[name][0]) + 1
        assert (c.n_modules, c.n_layer) == (modules, 2 if name == "stack2" else 1)
    else:
        assert (c.reads, c.draft_vocab) == (name != "mdlm", 500 if name == "ce" else 0)
    models = f"--model {folder}/target --method {method} --drafter {folder}/{name}"
    run_script(decode, f"{models} {shape} --prompt x --max-new-tokens 16 --compare")
    shown = capsys.readouterr().out
    assert "output: identical to autoregressive" in shown and "16 tokens" in shown


def test_a_drafter_starts_from_another(folder):
    still = "--lr 0 --tokens 1"
    train(folder, "one", "--arm ttt1 --tokens 1500")
    train(folder, "two", f"--init {folder}/one {still}")
    one, two = (weights(folder / name) for name in ("one", "two"))
    assert all(torch.equal(x, one[name.replace("bank.1.", "bank.0.")]) for name, x in two.items())
    train(folder, "short", "--objective ce --tokens 1500", kind="specdiff")
    train(folder, "longer", f"--init {folder}/short --gamma 6 {still}", kind="specdiff")
    assert same(weights(folder / "short"), weights(folder / "longer"))
    assert [loaded(folder, out, "specdiff").config.gamma for out in ("short", "longer")] == [4, 6]
    args = argparse.Namespace(init=f"{folder}/longer", gamma=None, markov=0, blind=False, last_layer=False)
    assert train_specdiff.drafter_of(args, checkpoints.load(folder / "target")).config.gamma == 6
    train(folder, "chained", f"--markov 2 {still}", kind="specdiff")
    assert loaded(folder, "chained", "specdiff").config.rank == 2
    # A window drafter from an EAGLE head.
    train(folder, "from-head", f"--init {folder}/one {still}", kind="specdiff")
    made = loaded(folder, "from-head", "specdiff")
    head = loaded(folder, "one").bank[0]
    assert (made.config.n_layer, made.config.reads) == (2, True)
    assert torch.equal(made.join.weight, head.join.weight)
    assert torch.equal(made.blocks[0].qkv.weight, head.blocks[0].qkv.weight)
    assert not made.blocks[1].out.weight.any() and not made.blocks[1].down.weight.any()
    for kind, init, message in table("""
        prism | one --arm stack2 | has n_layer 1; this training needs 2
        prism | one --last-layer | has feature_layers (0, 1); this training needs ()
        specdiff | one --blind | reads the target's states; --blind cannot change that
        specdiff | short --blind | reads the target's states; --blind cannot change that
        specdiff | short --last-layer | reads three layers; --last-layer cannot change that
        specdiff | chained --markov 3 | has rank 2, not 3
        specdiff | short --markov 3 | has rank 0, not 3
        prism | two --arm ttt1 | has 2 modules; ttt1 has 1
    """):
        with refused(message):
            train(folder, "refused", f"--init {folder}/{init}", kind=kind)


@both
def test_a_trained_drafter_goes_on_at_a_third_of_the_learning_rate(kind, monkeypatch):
    """At the whole one it forgets in a hundred steps what it had learned."""
    rates = []
    for more in ("", "--init x", "--init x --lr 1e-3"):
        monkeypatch.setattr("sys.argv", words(f"train.py --out x {more}"))
        rates.append(KINDS[kind][0].parse_args().lr)
    assert rates == [2e-3, 2e-3 / 3, 1e-3]


def test_a_training_by_the_clock_ends_with_a_checkpoint(folder):
    """Half of the minutes for answers, of which one shard is always made, half for steps."""
    log = train(folder, "clock", f"--minutes 0.0001 --responses {folder}/clocked")
    assert [row["step"] for row in log] == [1]
    assert (folder / "clock" / "command.txt").exists()
    assert [*(folder / "clocked").glob("train*")]


def test_a_training_by_the_clock_goes_on(folder, monkeypatch):
    """It asks for no more answers, also if it has no checkpoint yet."""
    command, minutes = "--minutes 60 --tokens 4000 --save-every 1", []
    noted = lambda command, **kw: minutes.append(command[-1]) or record_here(command, **kw)
    monkeypatch.setattr("conftest.record_here", noted)
    with dies_after(0, drafter_files, "save_drafter"), pytest.raises(KeyboardInterrupt):
        train(folder, "later", command)
    assert len(train(folder, "later", command)) > 1
    assert minutes == ["30.0", "0"]


def test_answers_are_recorded_by_a_process_of_their_own(folder):
    write_rows(folder / "p.jsonl", [{"prompt": f"one {i}"} for i in range(30)])
    command = (f"--target {folder}/target --responses {folder}/apart --prompt-file {folder}/p.jsonl "
               f"--prompts 6 --heldout 2 --max-new-tokens 8 --tokens 300 --device cpu --out {folder}/apart")
    assert outcome(train_prism, command).returncode == 0
    assert (folder / "apart" / "train-0-6.safetensors").exists()


# -- answers -------------------------------------------------------------------------------------------------


def test_data_prefixes_are_nested_and_answers_belong_to_their_target(folder, tmp_path):
    ids = {}
    for n in (10, 14):
        train(folder, f"prompts{n}", f"--tokens 100 --prompts {n} --responses {folder}/r2")
        shard = load_file(folder / "r2" / f"train-0-{n}.safetensors")
        ids[n] = [shard[f"{i}.ids"].tolist() for i in range(n)]
    assert ids[14][:10] == ids[10]
    other = write_rows(tmp_path / "p.jsonl", [{"prompt": f"Say {i}."} for i in range(20)])
    few = write_rows(tmp_path / "few.jsonl", [{"prompt": f"Say {i}."} for i in range(4)])
    more = f"--prompts 10 --responses {folder}/grown --prompt-file {few}"
    train(folder, "grown", f"--tokens 100 {more}")
    few.write_text(other.read_text())
    with refused("holds other texts"):
        train(folder, "grown", f"--tokens 100 {more}")
    for options, message in table(f"""
        --max-new-tokens 9 | with max_new_tokens 24, not 9; use another folder or the same settings
        --prompt-file {other} | holds other texts; use another folder for the answers
    """):
        with refused(message):
            train(folder, "wrong", f"--prompts 10 --responses {folder}/r2 {options}")


def test_given_answers_are_read_and_trained_on(folder, tmp_path, capsys, tokenizer):
    rows = [{"prompt": f"one {i}", "answer": f"two {i} three"} for i in range(20)]
    where = f"--tokens 300 --responses {folder}/r3 --given"
    train(folder, "given", where, write_rows(tmp_path / "g.jsonl", rows))
    read = [row for row in rows if not tasks.is_heldout(row["prompt"] + "\n")]
    assert f"{24 + len(read)} texts" in capsys.readouterr().out
    states = load_file(folder / "r3" / f"given-0-{len(read)}.safetensors")
    target = checkpoints.load(folder / "target", "cpu", training.fast_dtype("cpu"))
    prompt = tokenizer.prompt_ids(read[0]["prompt"] + "\n")
    answer = tokenizer.encode(read[0]["answer"]) + [target.config.eos_id]
    want = rollouts.read(target, prompt, answer, 1)
    assert all(torch.equal(states[f"0.{name}"], want[name]) for name in recorded.Batch._fields)
    # A text ends with the target's context.
    long = rollouts.read(target, prompt, [1] * 600, 1)
    assert [len(x) for x in long.values() if x.dim()] == [512] * (len(long) - 1)
    # Other texts, as many: the states in the folder are not theirs.
    others = write_rows(tmp_path / "h.jsonl", [{**row, "answer": "four"} for row in rows])
    empty = write_rows(tmp_path / "i.jsonl", [{"prompt": "one"}])
    for file, message in ((tmp_path / "not there", "cannot read"), (others, "holds other texts"),
                          (empty, "prompt 1 has no answer")):
        with refused(message):
            train(folder, "given2", where, file)
    args = argparse.Namespace(given=tmp_path / "g.jsonl", max_new_tokens=9, target="small")
    small = mock.Mock(**{"config.vocab_size": 3})
    with refused("has tokens for which small has no weights"):
        rollouts.given(args, small, tokenizer)


def test_files_of_prompts_come_in_turn_instead_of_own_ones(tmp_path):
    texts = {name: [f"{name} {i}" for i in range(n)] for name, n in (("a", 40), ("b", 10))}
    files = [str(write_rows(tmp_path / name, [{"prompt": x} for x in some])) for name, some in texts.items()]
    own = [f"own {i}" for i in range(100)]
    prompts = lambda split: [x.strip() for x in rollouts.prompts_of(files, split, iter(own))]
    turns = [x for some in itertools.zip_longest(*texts.values()) for x in some if x]
    assert turns[:4] == ["a 0", "b 0", "a 1", "b 1"]
    train, heldout = prompts("train"), prompts("heldout")
    assert train == [x for x in turns if x in train]
    # each once
    assert sorted(train + heldout) == sorted(turns) and len(heldout) > 5
    # Own prompts are split like those of a file, which end with a newline.
    kept = [x for x in own if not tasks.is_heldout(x + "\n")]
    assert [*rollouts.prompts_of([], "train", iter(own))] == kept


def test_a_prompt_longer_than_the_context_is_left_out(folder, tmp_path, capfd):
    """And a line says how many."""
    rows = [{"prompt": f"{i} " + "word " * (900 if i % 3 == 0 else 3)} for i in range(60)]
    record(folder, tmp_path / "r", write_rows(tmp_path / "p.jsonl", rows), 12)
    said = capfd.readouterr().err
    assert "train prompts of 512 tokens or more are left out" in said
    texts = recorded.texts_of(tmp_path / "r" / "train-0-12.safetensors")
    assert len(texts) == 12 and max(len(text["ids"]) for text in texts) < 100


def record(folder, out, prompts, n, *args):
    """Short answers to n prompts of a file."""
    run_script(rollouts, f"--target {folder}/target --out {out} --prompt-file {prompts} --prompts {n} "
               "--heldout 2 --max-new-tokens 8 --device cpu", *words(*args))


def test_prompts_of_which_none_is_held_out_are_refused_before_the_answers(folder, tmp_path):
    some = [f"Is {i} odd?" for i in range(40) if not tasks.is_heldout(f"Is {i} odd?\n")]
    file = write_rows(tmp_path / "p.jsonl", [{"prompt": text} for text in some])
    with refused("no prompt is held out"):
        record(folder, tmp_path / "r", file, 4)
    assert os.listdir(tmp_path / "r") == ["settings.json"]


def test_a_long_prompt_fits_into_the_pool_of_few_prompts(folder, tmp_path):
    rows = [{"prompt": f"{i} " + "a7 " * 200} for i in range(40)]
    record(folder, tmp_path / "r", write_rows(tmp_path / "p.jsonl", rows), 1, "--heldout 1")
    assert len([*(tmp_path / "r").glob("*.safetensors")]) == 2


def test_recorded_texts_have_the_states_of_the_target(folder, tokenizer):
    """Prompts of several lengths, greedy and sampled: log_p is the log-probability at the temperature of the
    answer."""
    target = checkpoints.load(folder / "target", "cpu", torch.float32)
    args = argparse.Namespace(max_new_tokens=12, temperature=None)
    asked = [tokenizer.prompt_ids("word " * n) for n in (1, 3, 40, 7)]
    for i, text in enumerate(rollouts.answers(args, Engine(target, SyncScheduler), tokenizer, asked, 0)):
        ids, n, temperature = text["ids"].tolist(), len(asked[i]), rollouts.TEMPERATURES[i]
        assert ids[:n] == asked[i]
        assert len(ids) > n
        assert text["lower"].shape[1] == 2 * text["hidden"].shape[1]
        assert (target.logits(text["hidden"].float()) - dense_logits(target, ids)).abs().max() < 0.2
        logits = dense_logits(target, ids)[n - 1 : -1]
        assert torch.equal(text["best"][n - 1 : -1], logits.argmax(-1))
        log_p = torch.zeros(len(ids))
        if temperature:
            log_p[n:] = (logits / temperature).log_softmax(-1)[torch.arange(len(ids) - n), ids[n:]]
        assert (text["log_p"] - log_p).abs().max() < 1e-4


def test_texts_are_padded_on_the_right_and_read_when_they_are_needed():
    """Texts without states, as a GPU records them, give the same batch, up to the rounding of the recorded
    states to bf16."""
    target = toy_model()
    texts = [rollouts.read(target, *row) for row in (([5, 6], [7, 8], 0.7), ([5], [7, 8, 9], 0))]
    want = recorded.padded(texts)
    assert want.ids[:, :5].tolist() == [[5, 6, 7, 8, 0], [5, 7, 8, 9, 0]] and not want.ids[:, 5:].any()
    assert want.learn.nonzero().tolist() == [[0, 2], [0, 3], [1, 1], [1, 2], [1, 3]]
    assert want.log_p[0, 2:4].lt(0).all() and want.log_p.count_nonzero() == 2
    bare = [{name: text[name] for name in ("ids", "learn", "temperature")} for text in texts]
    for some in (bare, [bare[0], texts[1]]):
        got = recorded.padded(some, "cpu", target)
        assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in ("ids", "learn", "best"))
        assert (got.log_p - want.log_p).abs().max() < 1e-5
        for name in ("lower", "hidden"):
            assert (getattr(got, name) - getattr(want, name))[:, :4].abs().max() < 0.02
    # An estimate is a mean over texts, whatever the chunks.
    run = mock.Mock(heldout=[*texts, *texts, texts[0]], args=mock.Mock(device="cpu"))
    learned = recorded.DrafterRun.heldout_mean(run, lambda b: {"n": b.learn.sum().item() / len(b.ids)})
    assert learned["n"] == pytest.approx(12 / 5)


def test_processes_share_the_shards(folder, tmp_path, monkeypatch):
    """Every N-th is one process's; together they write what one alone would."""
    monkeypatch.setattr(rollouts, "SHARD", 4)
    asked = write_rows(tmp_path / "p.jsonl", [{"prompt": f"{i} word"} for i in range(60)])
    files = []
    for part in ("0/2", "1/2", "0/1"):
        record(folder, tmp_path / part[-1], asked, 14, f"--part {part}")
        files.append({file.name: file.read_bytes() for file in (tmp_path / part[-1]).glob("*.safetensors")})
    assert set(files[0]) < set(files[1]) and files[1] == files[2]
    for wrong in ("2/2", "x", "1", "-1/2", "0/0"):
        with refused("part must be I/N, with I from 0 to N - 1, got"):
            rollouts.part_of(wrong)


def test_a_greedy_answer_ends_where_it_loops(folder, tokenizer):
    """Three times the same eight tokens, not twice."""
    piece = list(range(8))
    assert [loops(ids) for ids in (piece * 3, piece * 2, piece * 3 + [9])] == [True, False, False]
    target = checkpoints.load(folder / "target", "cpu", torch.float32)
    with torch.no_grad():
        for block in target.blocks:  # the next token depends on the last one alone
            block.down.weight.zero_(), block.out.weight.zero_()
    prompt = tokenizer.prompt_ids("word")
    args = argparse.Namespace(max_new_tokens=200, temperature=0)
    [greedy] = rollouts.answers(args, Engine(target, SyncScheduler), tokenizer, [prompt], 0)
    ids = greedy["ids"][len(prompt) :].tolist()
    assert len(ids) < 200 and loops(ids) and not loops(ids[:-1])


# -- a target of one's own -----------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


QWEN3 = """
{"model": {"type": "BPE", "merges": []},
 "added_tokens": [{"id": 256, "content": "<|im_start|>"}, {"id": 257, "content": "<|im_end|>"}],
 "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
  {"type": "Split", "behavior": "Isolated"},
  {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}}
"""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder of a random Qwen3 of 300 tokens with a chat template."""
    folder = tmp_path_factory.mktemp("own") / "qwen3"
    target = toy_model(vocab=300, qk_norm=True, n_layer=2, gain=1.0, bos_id=256, eos_id=257)
    checkpoints.save(target, folder)
    tokenizer = json.loads(QWEN3)
    tokenizer["model"]["vocab"] = {letter: i for i, letter in enumerate(byte_letters())}
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": GPT2}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return folder


def test_prompts_keep_the_date_of_their_folder(qwen3, tmp_path):
    """Templates of Llama 3 name today's date, and a training goes on the next day: the date is that of the
    folder's settings, as an older one shows."""
    shutil.copytree(qwen3, tmp_path / "target")
    dated = "{{ strftime_now('%Y') }} " + CHAT
    (tmp_path / "target" / "tokenizer_config.json").write_text(json.dumps({"chat_template": dated}))
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": str(i)} for i in range(40)])
    record(tmp_path, tmp_path / "r", prompts, 4)
    record(tmp_path, tmp_path / "r", prompts, 4)
    os.utime(tmp_path / "r" / "settings.json", (0, 0))
    with refused("holds other texts"):
        record(tmp_path, tmp_path / "r", prompts, 4)


@pytest.fixture
def short_turns(monkeypatch):
    monkeypatch.setattr(magpie, "TURNS", 48)
    monkeypatch.setattr(magpie, "LONGEST", 80)
    monkeypatch.setattr(rollouts, "SHARD", 4)


def test_one_command_for_an_own_target_and_what_it_writes(qwen3, short_turns, monkeypatch, tmp_path, capsys):
    """Prompts, answers, states and a drafter, which decodes; killed on the way, the same command goes on
    and ends with the same."""
    monkeypatch.setattr("minispec.data.recorded.subprocess.run", record_here)
    monkeypatch.setattr(magpie, "TURNS", 12)             # so prompts are written in several files

    def command(out):
        run_script(train_prism, f"--target {qwen3} --out {tmp_path}/{out} --draft-vocab 100 --prompts 12 "
                   "--heldout 2 --max-new-tokens 20 --tokens 2000 --batch-tokens 300 --save-every 2")
        return sorted(os.listdir(tmp_path / out / "responses"))

    made = command("whole")
    shards = [f"train-{i}-{i + 4}.safetensors" for i in (0, 4, 8)]
    assert [f for f in made if f[:3] != "own"] == ["heldout-0-2.safetensors", "settings.json", *shards]
    texts = sum((recorded.texts_of(tmp_path / "whole" / "responses" / f) for f in shards), [])
    assert [bool(text["log_p"].any()) for text in texts] == [False, True] * 6  # greedy, drawn, ..
    drafter = load_drafter(tmp_path / "whole", checkpoints.load(qwen3), prism.PrismConfig)
    answers = torch.cat([text["ids"][text["learn"]] for text in texts])
    assert torch.equal(drafter.vocabulary, most_frequent(answers, 100, 300))
    run_script(decode, f"--model {qwen3} --method prism --drafter {tmp_path}/whole --prompt hello "
               "--max-new-tokens 30 --compare")
    assert "output: identical to autoregressive" in capsys.readouterr().out

    # Stopped at a second write of every kind, then continued.
    for module, name in ((magpie, "write_json"), (rollouts, "save_file"), (drafter_files, "save_drafter")):
        with pytest.raises(KeyboardInterrupt), dies_after(1, module, name):
            command("parts")
    assert command("parts") == made
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_prompts_that_the_target_writes(qwen3, short_turns, monkeypatch, tmp_path):
    """They follow the template's opening, end by themselves, do not repeat, and are written once."""
    target = checkpoints.load(qwen3)
    tokenizer = Tokenizer.load(qwen3)
    before, end = magpie.opening(tokenizer)
    assert (tokenizer.decode(before), end) == ("<|im_start|>user\n", 257)
    first = lambda folder, n: [*itertools.islice(magpie.written(target, tokenizer, folder), n)]
    some = first(tmp_path, 8)
    assert len(set(some)) == 8 and all(x and x.strip() == x for x in some)
    monkeypatch.setattr(magpie, "_write", lambda *args: ["Hi, you!", "Hi, you!", ""])
    assert first(tmp_path, 8) == some
    (tmp_path / "more").mkdir()
    assert first(tmp_path / "more", 1) == ["Hi, you!"]
    assert first(tmp_path / "more", 2) == ["Hi, you!"]  # the next shard has no new one
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(magpie, "_write", lambda *args: [""])
    with refused("of 48 turns that the target wrote for a user none is a new prompt"):
        first(tmp_path / "none", 1)
    tokenizer.chat_template = TEXT_ALONE
    with refused("no chat template, so the model cannot write prompts; give some"):
        magpie.opening(tokenizer)


# -- bad input -----------------------------------------------------------------------------------------------

BAD = """
prism | --arm ttt9 | invalid choice
prism | --unroll 0 | unroll 0 is out of range; allowed is 1 or more
prism | --unroll 33 --arm ttt1 | unroll 33 is out of range; allowed is 1 to 32 draft steps
prism | --unroll 1 | unroll 1 is out of range; allowed is 2 to 32 draft steps
prism | --prompt-file none.jsonl | cannot read none.jsonl: No such file
prism | --minutes -1 | minutes -1.0 is out of range
prism | --minutes 0 | minutes must be above 0, got 0
prism | --target nowhere | cannot read nowhere/config.json
specdiff | --target nowhere | cannot read nowhere/config.json
prism | --init nowhere | cannot read nowhere/config.json
prism | --prompt-file '' | argument --prompt-file: must not be empty
specdiff | --init nowhere | cannot read nowhere/config.json
specdiff | --objective best | invalid choice
specdiff | --gamma 1 | gamma 1 is out of range; allowed is 2 to 32
specdiff | --windows 0 | windows 0 is out of range; allowed is 1 or more
specdiff | --temperature -1 | temperature -1.0 is out of range
"""


@pytest.mark.parametrize("kind, args, message", table(BAD))
def test_bad_input_of_training_is_named_before_anything_is_written(kind, args, message, folder, tmp_path):
    assert message in refusal(KINDS[kind][0], f"--target {folder}/target --out {tmp_path}/x {args}")
    assert not (tmp_path / "x").exists()


BAD_DECODING = f"""
prism | --tree 1000 | tree must be 0 to 256 drafts, got 1000
prism | --tree -1 | tree must be 0 to 256 drafts, got -1
prism | --prompt-lookup 513 | prompt-lookup tokens must be 0 to 512, got 513
prism | --k 33 | k 33 is out of range; allowed is 1 to 32 drafts in a row
specdiff | --k 33 | k 33 is out of range; allowed is 1 to 32 drafts in a row
specdiff | --k-drafts 0 | k-drafts 0 is out of range; allowed is 1 to 16
specdiff | --k 16 --k-drafts 17 | k-drafts 17 is out of range; allowed is 1 to 16
specdiff | --draft-temperature -1 | draft-temperature -1.0 is out of range
specdiff | --drafter {SHIPPED} | this is not a drafter made by train_specdiff.py
prism | --model {SHIPPED} | d_model of the drafter must be 256 as in the target, got 32
"""


@pytest.mark.parametrize("kind, args, message", table(BAD_DECODING))
def test_bad_input_of_decoding_is_one_line(kind, args, message, folder):
    target = checkpoints.load(folder / "target")
    toy = toy_prism if kind == "prism" else toy_specdiff
    save_drafter(toy(target), folder / "random", target)
    usual = f"--model {folder}/target --method {kind} --drafter {folder}/random --prompt x"
    assert message in refusal(decode, f"{usual} {args}")


@pytest.mark.parametrize("method, command", table("""
    prism | train_prism.py
    eagle | train_prism.py --arm ttt1
    specdiff | train_specdiff.py
"""))
def test_a_model_without_a_drafter_says_how_to_train_one(method, command, folder):
    """Drafters of a model are kept in checkpoints/MODEL; those of the shipped one in checkpoints itself."""
    kept = os.path.join("checkpoints", "target", method)
    target = folder / "target"
    assert refusal(decode, f"--model {target} --method {method} --prompt x") == (
        f"there is no drafter for {target} in {kept}; this trains one: python {command} --target {target} "
        f"--out {kept} --minutes 60"
    )
    assert method in methods.ready(methods.settings(model=SHIPPED))
    assert method not in methods.ready(methods.settings(model=str(target)))


def test_a_killed_process_of_answers_is_named(folder, tmp_path, monkeypatch):
    codes = iter((2, -9))

    def run(command, **kw):
        assert "stderr" not in kw and "capture_output" not in kw  # its own line shows
        return subprocess.CompletedProcess(command, next(codes), "")

    monkeypatch.setattr(recorded.subprocess, "run", run)
    command = f"--target {folder}/target --out {tmp_path}/x"
    p = outcome(train_prism, command)
    assert (p.returncode, p.stderr) == (2, "")
    line = refusal(train_prism, command)
    assert line.startswith("the process that writes the answers was killed by signal 9, ")
