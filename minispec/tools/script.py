"""What the scripts share: arguments and outputs that fail in one line before the work, exits that say why."""
import argparse
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from minispec.tools.files import written_to


# -- the terminal ----------------------------------------

def visible(text):
    """The text with control characters spelled out, so that a terminal shows them and does not obey them; and
    halves of characters, which it cannot show."""
    unseen = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
    return re.sub(unseen, lambda match: f"\\x{ord(match[0]):02x}", text)


# -- arguments ----------------------------------------

class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows the module's docstring as it is, and errors as one line without usage."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)             # --trace for --traces would be another command

    def error(self, message):
        self.exit(2, visible(f"{self.prog}: {message}\n"))


def positive(text):
    """The type of an option that is a number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is out of range; allowed is 1 or more")
    return number


def check_writable(path, inputs=()):
    """Fail before the work, not after it: ValueError if the output `path` cannot be written, is one of the
    `inputs` (paths; None is skipped) or lies in a folder of model weights."""
    real = Path(written_to(path))
    if real in [Path(file).resolve() for file in inputs if file]:
        raise ValueError(f"cannot write {path}: it is an input")
    for folder in real.parents:
        if any(folder.glob("model.safetensors*")):       # or its index; a loose file is no model
            raise ValueError(f"cannot write {path}: {folder} is a model folder")
    try:
        tempfile.TemporaryFile(dir=real.parent).close()
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def add_device(parser):
    """The option --device, for all scripts alike."""
    import torch
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu or cuda (default: cuda where there is a GPU)")


def check_device(name):
    """Work on this device. ValueError unless it is the CPU or a CUDA device of this machine."""
    import torch
    if name == "cpu":
        return
    try:
        # Kernels and streams go to the current device.
        torch.cuda.set_device(torch.zeros(1, device=name).device)
    except (ValueError, RuntimeError, AssertionError) as e:
        raise ValueError(f"no device {name} on this machine; choose cpu or cuda "
                         f"({str(e).splitlines()[0]})") from None


# -- exits ----------------------------------------

def fault(error, smaller):
    """What a user is told of an error that is no bug: of bad input, files and memory. None for all others."""
    text = " ".join(str(error).split())                  # one line, whatever it quotes
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return f"out of memory; try a smaller {smaller}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or 'the output'}"
    if isinstance(error, (ValueError, OSError)):
        return text
    return None


def run_main(main, interrupted="interrupted", smaller="--batch, --max-new-tokens or --cache-tokens"):
    """Run a script's main. A user's mistake is a ValueError and becomes one line and exit code 2, as do files
    that cannot be read or written. Ctrl-C is 130, a closed pipe 141.

    interrupted: what Ctrl-C prints. smaller: the settings that take memory."""
    # What the terminal's encoding lacks is shown as "?"; a byte that is no text reads as U+FFFD.
    for stream in (sys.stdout, sys.stdin):
        if hasattr(stream, "reconfigure"):               # a file
            stream.reconfigure(errors="replace")
    # Ctrl-C is an exception also where a shell started us in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            main()
        finally:
            sys.stdout.flush()                           # a full disk fails here, not when Python is gone
    except BrokenPipeError:
        _forget_output()
        sys.exit(141)                                    # the reader has gone, as in `| head -1`
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
    """Point stdout to nowhere: what is still in its buffer would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
