"""train_prism.py as a user meets it, on a toy target: every arm trains, a killed run resumes to the same weights, one drafter starts
from another, and bad input of training and decoding is one clear line."""
import argparse
import contextlib
import functools
import itertools
import json
import os

import pytest
import torch
from conftest import TARGET as SHIPPED
from conftest import run_script, toy_model, train_toy
from safetensors.torch import load_file
from test_prism import toy_drafter

import decode
import train_prism
from minispec import prism
from minispec.core.words import most_frequent
from minispec.core.words import Words
from minispec.data import magpie, recorded, rollouts, tasks
from minispec.data.loops import loops
from minispec.data.tokenizer import GPT2, TEXT_ALONE, Tokenizer, byte_letters
from minispec.tools import checkpoints, methods, training
from minispec.tools.checkpoints import load_drafter

script = functools.partial(run_script, train_prism)


def train(folder, out, *args):
    return train_toy(train_prism, folder, out, "--prompts", 24, "--unroll", 3, *args)


def test_training_learns_and_a_killed_run_resumes_to_the_same_weights(folder, monkeypatch, capsys):
    log = train(folder, "whole", "--lr", "2e-2")
    assert log[-1]["loss"] < 0.8 * log[0]["loss"] and 1 <= log[0]["tau"] < log[-1]["tau"] <= 4
    made = {f: os.path.getmtime(folder / "responses" / f) for f in os.listdir(folder / "responses")}
    assert {f for f in made if "given" not in f} == {"settings.json", "train-0-24.safetensors", "heldout-0-4.safetensors"}

    calls, loss = [], prism.unrolled_loss
    def killed(*args):
        calls.append(1)
        if len(calls) == 9:                                        # some steps behind the first checkpoint
            raise KeyboardInterrupt
        return loss(*args)
    monkeypatch.setattr(prism, "unrolled_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        train(folder, "parts", "--lr", "2e-2")
    monkeypatch.undo()
    capsys.readouterr()
    again = train(folder, "parts", "--lr", "2e-2")
    assert "resuming at step 6" in capsys.readouterr().out
    a, b = (load_file(folder / out / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(a[n], b[n]) for n in a)
    drop = lambda rows: [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert drop(log) == drop(again)
    assert all(made[f] == os.path.getmtime(folder / "responses" / f) for f in made if f != "settings.json")                                   # made once
    assert "train_prism.py --target" in (folder / "whole" / "command.txt").read_text()


def test_a_folder_with_a_model_of_no_training_here_is_left_alone(folder, capsys):
    """Of the target itself, say, or of a clone."""
    before = (folder / "target" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="target holds a model already"):
        train(folder, "target")
    assert (folder / "target" / "model.safetensors").read_bytes() == before
    # A training that is complete does nothing more.
    train(folder, "done", "--tokens", "300")
    made = (folder / "done" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    train(folder, "done", "--tokens", "300")
    assert "is complete" in capsys.readouterr().out and (folder / "done" / "model.safetensors").stat().st_mtime_ns == made


def killed_behind_the_first_checkpoint(folder, out, *args):
    loss = prism.unrolled_loss

    def killed(*args):
        if (folder / out / "resume.pt").exists():
            raise KeyboardInterrupt
        return loss(*args)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prism, "unrolled_loss", killed)
        train(folder, out, *args)


def test_a_training_is_not_resumed_with_other_settings(folder):
    """The one that differs is named, and nothing is touched. Those that change no weights may differ, and of a complete one all."""
    command = ("other", "--tokens", "900", "--batch-tokens", "200", "--save-every", "1")
    killed_behind_the_first_checkpoint(folder, *command)
    before = (folder / "other" / "resume.pt").read_bytes()
    for name, value, was, now in (("lr", "1e-2", 0.004, 0.01), ("seed", "7", 1337, 7), ("tokens", "1800", 900.0, 1800.0), ("batch-tokens", "300", 200, 300),
                                  ("arm", "ttt1", "prism2", "ttt1"), ("draft-vocab", "50", 4000, 50), ("given-answers", "3", None, 3), ("last-layer", "", False, True)):
        with pytest.raises(ValueError) as e:
            train(folder, *command, f"--{name}", *value.split())
        assert "or use another --out (" in str(e.value) and f"the folder was begun with {name.replace('-', '_')} {was}, not {now}; " in str(e.value)
    assert (folder / "other" / "resume.pt").read_bytes() == before
    log = train(folder, *command, "--save-every", "2")
    assert log[0]["step"] == 1 and len(log) > 2
    assert train(folder, *command, "--lr", "1e-3") == log


def test_a_resumed_training_keeps_its_draft_vocabulary(folder, monkeypatch):
    """Also where there are more answers by now: the head's rows are those of the drafter's tokens."""
    words = []
    monkeypatch.setattr(train_prism, "Words", lambda *args: words.append(Words(*args)) or words[-1])
    monkeypatch.setattr(recorded, "most_frequent", lambda answers, n, size: torch.arange(40))
    command = ("first", "--tokens", "900", "--draft-vocab", "40", "--batch-tokens", "200", "--save-every", "1")
    killed_behind_the_first_checkpoint(folder, *command)
    monkeypatch.setattr(recorded, "most_frequent", lambda answers, n, size: torch.arange(20, 60))
    train(folder, *command)
    target = checkpoints.load(folder / "target")
    assert torch.equal(words[-1].tokens(torch.arange(40)), torch.arange(40))
    assert torch.equal(words[-1].head.weight.float(), target.head.weight[:40].to(words[-1].head.weight.dtype).float())


@pytest.mark.parametrize("arm", train_prism.ARMS)
def test_every_arm_trains_and_decodes(arm, folder, capsys, tmp_path):
    train(folder, arm, "--arm", arm, "--tokens", "2000")
    made = load_drafter(folder / arm, checkpoints.load(folder / "target"), prism.PrismConfig)
    assert made.config.n_modules == {"prism2": 2, "prism3": 3}.get(arm, 1) and made.config.n_layer == (2 if arm == "stack2" else 1)
    method = "prism" if arm.startswith("prism") else "eagle"
    for shape in ([], ["--tree", "12"]):
        decode.main(["--model", str(folder / "target"), "--method", method, "--drafter", str(folder / arm), "--prompt", "one two", "--max-new-tokens", "16",
                     "--compare", "--json", str(tmp_path / "o.json"), *shape])
        d = json.loads((tmp_path / "o.json").read_text())
        assert d["identical"] and d["new_tokens"] == 16 and "output: identical to autoregressive" in capsys.readouterr().out


def test_a_drafter_can_start_from_one_with_fewer_modules(folder):
    train(folder, "one", "--arm", "ttt1", "--tokens", "3000")
    train(folder, "two", "--arm", "prism2", "--tokens", "1", "--init", str(folder / "one"), "--lr", "0", "--unroll", "2")
    one, two = load_file(folder / "one" / "model.safetensors"), load_file(folder / "two" / "model.safetensors")
    for name, x in two.items():
        assert torch.equal(x, one[name.replace("bank.1.", "bank.0.")])
    with pytest.raises(ValueError, match="has n_layer 1; this training needs 2"):
        train(folder, "three", "--arm", "stack2", "--init", str(folder / "one"))
    with pytest.raises(ValueError, match=r"has feature_layers \(0, 1\); this training needs \(\)"):
        train(folder, "four", "--arm", "prism2", "--last-layer", "--init", str(folder / "one"))


def test_data_prefixes_are_nested_and_answers_belong_to_their_target(folder, tmp_path):
    first = lambda split, n: list(itertools.islice(rollouts.prompts_of([], split, rollouts.procedural(split)), n))
    assert first("train", 7) == first("train", 30)[:7] and not set(first("train", 30)) & set(first("heldout", 30))
    train(folder, "all", "--tokens", "100")
    train(folder, "short", "--tokens", "100", "--prompts", "10", "--responses", str(folder / "r2"))
    train(folder, "longer", "--tokens", "100", "--prompts", "14", "--responses", str(folder / "r2"))
    ids = {}
    for where, n in (("r2", 10), ("r2", 14), ("responses", 24)):
        shard = load_file(folder / where / f"train-0-{n}.safetensors")
        ids[n] = [shard[f"{i}.ids"].tolist() for i in range(n)]
    assert ids[14] == ids[24][:14] and ids[10] == ids[24][:10]
    with pytest.raises(ValueError, match="was begun with max_new_tokens 24, not 9; use another folder or the same settings"):
        train(folder, "short", "--max-new-tokens", "9")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(20)))
    with pytest.raises(ValueError, match="is of other texts; use another --responses folder"):
        train(folder, "short", "--prompt-file", str(tmp_path / "p.jsonl"), "--prompts", "10", "--responses", str(folder / "r2"))


def test_given_answers_are_read_and_trained_on(folder, tmp_path, capsys, monkeypatch):
    rows = [{"prompt": f"one {i}", "answer": f"two {i} three"} for i in range(20)]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []
    monkeypatch.setattr(recorded, "most_frequent", lambda answers, *args: seen.extend(answers) or most_frequent(answers, *args))
    train(folder, "given", "--tokens", "300", "--given", str(tmp_path / "g.jsonl"))
    read = [row for row in rows if not tasks.is_heldout(row["prompt"] + "\n")]
    assert f"{24 + len(read)} texts" in capsys.readouterr().out and len(seen) == 24 + len(read)      # drafts are of the words of all answers
    states, target = load_file(folder / "responses" / f"given-0-{len(read)}.safetensors"), checkpoints.load(folder / "target", "cpu", training.fast_dtype("cpu"))
    tokenizer = Tokenizer.load(folder / "target")
    prompt, answer = tokenizer.prompt_ids(read[0]["prompt"] + "\n"), tokenizer.encode(read[0]["answer"]) + [target.config.eos_id]
    want = rollouts.read(target, prompt, answer, 1)
    assert all(torch.equal(states[f"0.{name}"], want[name]) for name in recorded.Batch._fields) and (want["log_p"][len(prompt):] < 0).all()
    again = functools.partial(train, folder, "given2", "--tokens", "300", "--given")
    with pytest.raises(ValueError, match="cannot read"):
        again(str(tmp_path / "not there"))
    # Other texts, as many: the states in the folder are not theirs.
    (tmp_path / "h.jsonl").write_text("".join(json.dumps({**row, "answer": "four"}) + "\n" for row in rows))
    with pytest.raises(ValueError, match="is of other texts; use another --responses folder"):
        again(str(tmp_path / "h.jsonl"))
    (tmp_path / "i.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")
    with pytest.raises(ValueError, match="prompt 1 has no answer"):
        again(str(tmp_path / "i.jsonl"))


def test_files_of_prompts_come_in_turn_instead_of_own_ones(tmp_path):
    texts = {name: [f"{name} {i}" for i in range(n)] for name, n in (("a", 40), ("b", 10), ("own", 100))}
    for name in "ab":
        (tmp_path / name).write_text("".join(json.dumps({"prompt": x}) + "\n" for x in texts[name]))
    own = texts.pop("own")
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    got = {split: [x.strip() for x in rollouts.prompts_of(files, split, iter(own))] for split in ("train", "heldout")}
    turns = [x for some in itertools.zip_longest(*texts.values()) for x in some if x]
    assert turns[:4] == ["a 0", "b 0", "a 1", "b 1"] and got["train"] == [x for x in turns if x in got["train"]]
    assert sorted(got["train"] + got["heldout"]) == sorted(sum(texts.values(), [])) and len(got["heldout"]) > 5     # each once, in one split
    assert list(rollouts.prompts_of([], "train", iter(own))) == [x for x in own if not tasks.is_heldout(x)]


def test_states_kept_while_decoding_are_those_of_reading(folder):
    """Rows of a batch of prompts of several lengths, greedy and sampled: what decoding kept is what reading the text gives."""
    target = checkpoints.load(folder / "target", "cpu", torch.float32)
    args = argparse.Namespace(max_new_tokens=12, temperature=None)
    tokenizer = Tokenizer.load(folder / "target")
    prompts = [tokenizer.prompt_ids("word " * n) for n in (1, 3, 40, 7)]
    for i, (prompt, text) in enumerate(zip(prompts, rollouts.answers(args, target, tokenizer, prompts, 0))):
        ids = text["ids"].tolist()
        want = rollouts.read(target, prompt, ids[len(prompt):], rollouts.TEMPERATURES[i])
        assert ids[:len(prompt)] == prompt and len(ids) > len(prompt)
        assert all(torch.equal(text[name], want[name]) for name in ("ids", "learn", "best"))
        assert torch.allclose(text["log_p"], want["log_p"], atol=1e-4)
        for name in ("lower", "hidden"):
            assert torch.allclose(text[name][:-1].float(), want[name][:-1].float(), atol=0.05)
        assert text["lower"].shape[1] == 2 * text["hidden"].shape[1]


def test_a_greedy_answer_ends_where_it_loops(folder):
    """Three times the same eight tokens, not twice; sampled answers go on."""
    piece = list(range(8))
    assert loops(piece * 3) and not loops(piece * 2) and not loops(piece * 3 + [9]) and loops([1] * 10) and not loops([1] * 9)
    target = checkpoints.load(folder / "target", "cpu", torch.float32)
    with torch.no_grad():
        target.blocks[-1].down.weight.zero_(), target.blocks[-1].out.weight.zero_()
        target.blocks[0].down.weight.zero_(), target.blocks[0].out.weight.zero_()           # the next token depends on the last one alone
    tokenizer = Tokenizer.load(folder / "target")
    prompt = tokenizer.prompt_ids("word")
    args = argparse.Namespace(max_new_tokens=200, temperature=0)
    [greedy] = rollouts.answers(args, target, tokenizer, [prompt], 0)
    n = int(greedy["learn"].sum())
    assert n < 200 and loops(greedy["ids"][len(prompt):].tolist()) and not loops(greedy["ids"][len(prompt):-1].tolist())


# -- a target of one's own -----------------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder of a random Qwen3 of 300 tokens with a chat template."""
    folder = tmp_path_factory.mktemp("own") / "qwen3"
    letters = byte_letters()
    vocab = {letter: i for i, letter in enumerate(letters)}
    special = [{"id": 256 + i, "content": name} for i, name in enumerate(("<|im_start|>", "<|im_end|>"))]
    split = {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": GPT2}}
    pre = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}
    target = toy_model(vocab=300, qk_norm=True, n_layer=2, gain=1.0, bos_id=256, eos_id=257)
    checkpoints.save(target, folder)
    tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": special, "pre_tokenizer": pre}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    return folder


def test_one_command_for_an_own_target_and_what_it_writes(qwen3, monkeypatch, tmp_path, capsys):
    """Prompts, answers, states and a drafter, which decodes; killed on the way, the same command goes on and ends with the same."""
    for name, value in (("TURNS", 48), ("LONGEST", 80), ("SHARD", 4)):
        monkeypatch.setattr(magpie if name != "SHARD" else rollouts, name, value)
    def command(out):
        script("--target", qwen3, "--out", out, "--draft-vocab", 100, "--max-new-tokens", 20, "--prompts", 12, "--heldout", 2, "--tokens", 2000, "--batch-tokens", 300)
    command(tmp_path / "whole")
    made = sorted(os.listdir(tmp_path / "whole" / "responses"))
    assert {"own-00000.json", "train-0-4.safetensors", "train-8-12.safetensors", "heldout-0-2.safetensors", "settings.json"} <= set(made)
    shards = [load_file(tmp_path / "whole" / "responses" / f"train-{part}.safetensors") for part in ("0-4", "4-8", "8-12")]
    assert [bool(shards[1][f"{i}.log_p"].any()) for i in range(4)] == [False, True] * 2          # greedy, drawn, ..
    drafter = load_drafter(tmp_path / "whole", checkpoints.load(qwen3), prism.PrismConfig)
    answers = [shard[f"{i}.ids"][shard[f"{i}.learn"]].tolist() for shard in shards for i in range(4)]
    assert drafter.config.draft_vocab == 100 and torch.equal(drafter.vocabulary, most_frequent(answers, 100, 300))
    decode.main(["--model", str(qwen3), "--method", "prism", "--drafter", str(tmp_path / "whole"), "--prompt", "hello", "--max-new-tokens", "30", "--compare"])
    assert "output: identical to autoregressive" in capsys.readouterr().out

    # Stopped at a second write of every kind, then continued.
    for module, name in [(magpie, "write_json"), (rollouts, "save_file"), (checkpoints, "save_drafter")]:
        write, calls = getattr(module, name), []
        def dies(*args, **kw):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return write(*args, **kw)
        monkeypatch.setattr(module, name, dies)
        with contextlib.suppress(KeyboardInterrupt):
            command(tmp_path / "parts")
        monkeypatch.setattr(module, name, write)
    command(tmp_path / "parts")
    assert sorted(os.listdir(tmp_path / "parts" / "responses")) == made
    a, b = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_prompts_that_the_target_writes(qwen3, monkeypatch, tmp_path):
    """They follow the template's opening, end by themselves, do not repeat, and are written once."""
    monkeypatch.setattr(magpie, "TURNS", 48)
    monkeypatch.setattr(magpie, "LONGEST", 80)
    target, tokenizer = checkpoints.load(qwen3), Tokenizer.load(qwen3)
    before, end = magpie.opening(tokenizer)
    assert tokenizer.decode(before) == "<|im_start|>user\n" and end == 257
    prompts = list(itertools.islice(magpie.written(target, tokenizer, tmp_path), 8))
    assert len(set(prompts)) == 8 and all(x.strip() == x and x for x in prompts)
    monkeypatch.setattr(magpie, "_write", lambda *args: pytest.fail("written again"))
    assert list(itertools.islice(magpie.written(target, tokenizer, tmp_path), 8)) == prompts
    monkeypatch.setattr(magpie, "_write", lambda *args: ["Hi, you!", "Hi, you!", ""])
    more = tmp_path / "more"
    more.mkdir()
    with pytest.raises(ValueError, match="of 48 turns that the target wrote for a user none is a new prompt; give some with --prompt-file"):
        list(magpie.written(target, tokenizer, more))
    assert next(magpie.written(target, tokenizer, more)) == "Hi, you!"
    tokenizer.chat_template = TEXT_ALONE
    with pytest.raises(ValueError, match="has no chat template, so the model cannot write prompts; give some with --prompt-file"):
        magpie.opening(tokenizer)


def test_a_training_by_the_clock_ends_with_a_checkpoint(folder, monkeypatch):
    """Half of the minutes for answers, of which one shard is always made, half for steps."""
    log = train(folder, "clock", "--minutes", "0.0001", "--responses", str(folder / "clocked"))
    assert len(log) == 1 and log[0]["step"] == 1 and (folder / "clock" / "command.txt").exists()
    assert [f for f in os.listdir(folder / "clocked") if f.startswith("train")] != []


BAD = {"arm": (["--arm", "ttt9"], "invalid choice"), "target": (["--target", "nowhere"], "cannot read nowhere/config.json"),
       "steps": (["--unroll", "0"], "unroll 0 is out of range; allowed is 1 or more"),
       "file": (["--prompt-file", "none.jsonl"], "cannot read none.jsonl: No such file"), "minutes": (["--minutes", "-1"], "minutes -1 is out of range"),
       "init": (["--init", "nowhere"], "cannot read nowhere/config.json")}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_training_is_named_before_anything_is_written(name, folder, tmp_path, capsys):
    args, message = BAD[name]
    with pytest.raises((ValueError, SystemExit)) as e:
        script("--target", str(folder / "target"), "--out", str(tmp_path / "x"), *args)
    said = str(e.value) if isinstance(e.value, ValueError) else capsys.readouterr().err
    assert message in said and said.rstrip().count("\n") == 0 and not (tmp_path / "x").exists()


@pytest.mark.parametrize("args, message", [
    (["--tree", "1000"], "k 1000 is out of range; allowed is 1 to 256 "), (["--depth", "33"], "depth 33 is out of range; allowed is 1 to 32"),
    (["--model", SHIPPED], "made for a target with d_model 32, this one has 256")])
def test_bad_input_of_decoding_is_one_line(args, message, folder, capsys):
    target = checkpoints.load(folder / "target")
    checkpoints.save_drafter(toy_drafter(target), folder / "random", target)
    with pytest.raises(ValueError) as e:
        decode.main(["--model", str(folder / "target"), "--method", "prism", "--drafter", str(folder / "random"), "--prompt", "x", *args])
    assert message in str(e.value) and "\n" not in str(e.value)


def test_a_model_without_a_drafter_says_how_to_train_one(folder):
    """Drafters of a model are kept in checkpoints/MODEL; those of the shipped one in checkpoints itself."""
    for method, command in (("prism", "train_prism.py"), ("eagle", "train_prism.py --arm ttt1"), ("specdiff", "train_specdiff.py")):
        kept = os.path.join("checkpoints", "target", method)
        with pytest.raises(ValueError) as e:
            decode.main(["--model", str(folder / "target"), "--method", method, "--prompt", "x"])
        assert str(e.value) == f"there is no drafter for {folder / 'target'} in {kept}; this trains one: python {command} --target {folder / 'target'} --out {kept} --minutes 60"
    assert {"prism", "eagle", "specdiff"} <= set(methods.ready(methods.settings(model=SHIPPED)))
    assert not {"prism", "eagle", "specdiff"} & set(methods.ready(methods.settings(model=str(folder / "target"))))
