"""Shared by the scripts: arguments and outputs that are checked before the work, and exits with one line."""
import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from minispec.tools.files import written_to


# -- the terminal ----------------------------------------

def visible(text):
    """The text with control characters and lone surrogates spelled out: a terminal shows them and does not
    obey them."""
    unseen = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
    return re.sub(unseen, lambda match: f"\\x{ord(match[0]):02x}", text)


# -- arguments ----------------------------------------

class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows the module's docstring as it is, and errors as one line without usage."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)             # --trace for --traces would be another command

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        for name, value in vars(args).items():
            values = value if isinstance(value, list) else [value]
            if name != "prompt" and "" in values:        # of a shell variable that is not set
                self.error(f"argument --{name.replace('_', '-')}: must not be empty")
        return args

    def error(self, message):
        line = " ".join(message.split())
        self.exit(2, visible(f"{self.prog}: {line}\n"))


def positive(text):
    """The type of an option that is a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


def check_writable(path, inputs=()):
    """ValueError if the output `path` cannot be written, is one of the `inputs` (paths; None is skipped) or
    is in a folder of model weights. Scripts call it before the work."""
    real = Path(written_to(path))
    if real in [Path(os.path.realpath(file)) for file in inputs if file]:
        raise ValueError(f"cannot write {path}: it is an input")
    for folder in real.parents:
        if any(folder.glob("model.safetensors*")):       # or its index; a loose file is no model
            raise ValueError(f"cannot write {path}: {folder} is a model folder")
    try:
        tempfile.TemporaryFile(dir=real.parent).close()
        with contextlib.suppress(FileNotFoundError):
            os.stat(real)                                # an error if the name is too long
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def add_device(parser):
    """The option --device, for all scripts alike."""
    import torch
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu or cuda (default: cuda where there is a GPU)")


def check_device(name):
    """Make this the current device. ValueError unless it is the CPU or a GPU of this machine."""
    import torch
    if name == "cpu":
        return
    try:
        # Kernels and streams go to the current device.
        torch.cuda.set_device(torch.zeros(1, device=name).device)
    except (ValueError, RuntimeError, AssertionError) as e:
        raise ValueError(f"device must be cpu or a GPU of this machine, got {name} "
                         f"({str(e).splitlines()[0]})") from None


# -- exits ----------------------------------------

def fault(error, smaller):
    """The line for an error of input, files or memory; None for all others, which are bugs."""
    text = " ".join(str(error).split())                  # one line, whatever it quotes
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return f"out of memory; try a smaller {smaller}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or 'the output'}"
    if isinstance(error, (ValueError, OSError)):
        return text
    return None


def run_main(main, interrupted="interrupted", smaller="--batch, --max-new-tokens or --cache-tokens"):
    """Run a script's main. A ValueError, which is a user's mistake, or an error of a file becomes one line
    and exit code 2; Ctrl-C becomes 130, a closed pipe 141.

    interrupted: the line for Ctrl-C. smaller: the options that take memory."""
    sys.stdout = sys.stdout or open(os.devnull, "w")     # None if it is closed, as by >&-
    # Characters that the terminal's encoding lacks are shown as "?"; bytes that are no text read as U+FFFD.
    for stream in (sys.stdout, sys.stdin):
        if hasattr(stream, "reconfigure"):               # a file
            stream.reconfigure(errors="replace")
    # A shell's background jobs ignore Ctrl-C by default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            main()
        finally:
            sys.stdout.flush()                           # a full disk fails here, not when Python is gone
    except BrokenPipeError:
        _forget_output()
        sys.exit(141)                                    # the reader has ended, as in `| head -1`
    except (ValueError, OSError, MemoryError, RuntimeError) as e:
        line = fault(e, smaller)
        if line is None:
            raise
        _forget_output()
        print(visible(f"{os.path.basename(sys.argv[0])}: {line}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        sys.exit(130)


def _forget_output():
    """Point stdout to nowhere, because flushing its buffer would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
