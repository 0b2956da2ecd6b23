"""What the scripts share: arguments and outputs that fail in one line before the work, exits that say why."""
import argparse
import os
import re
import signal
import sys

from minispec.tools.files import written_to


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows the module's docstring as it stands, and errors as one line without the usage text."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def check_writable(path):
    """Fail before the work, not after it: ValueError where `path` cannot be written."""
    real = written_to(path)
    try:
        with open(real + ".tmp", "w"):
            pass
        os.remove(real + ".tmp")
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def check_device(name):
    """ValueError unless `name` is the CPU or a CUDA device of this machine."""
    import torch
    if name == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d{1,3})?", name):
        raise ValueError(f"unknown device '{name}'; choose cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device on this machine; use --device cpu")
    if int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ValueError(f"no device {name} on this machine; it has {torch.cuda.device_count()}")


def fault(error, smaller):
    """What a user is told of an error that is no bug: of bad input, of files and of memory. None for all others."""
    import torch
    text = " ".join(str(error).split())                          # one line, whatever it quotes
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or isinstance(error, RuntimeError) and "can't allocate memory" in text:
        return f"out of memory; try a smaller {smaller}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}, while writing the output"
    return text if isinstance(error, (ValueError, OSError)) else None


def run_main(main, interrupted="interrupted", smaller="--batch, --max-new-tokens or --cache-tokens"):
    """Run a script's main: what the user got wrong is a ValueError and becomes one line and exit code 2, as do files that cannot be
    read or written; Ctrl-C 130. smaller: the settings that take memory."""
    signal.signal(signal.SIGINT, signal.default_int_handler)     # also where a shell started us in the background
    name = os.path.basename(sys.argv[0])
    try:
        main()
        sys.stdout.flush()                                       # a full disk fails here, not when Python is gone
    except (ValueError, OSError, MemoryError, RuntimeError) as e:
        line = fault(e, smaller)
        if line is None:
            raise
        if isinstance(e, OSError):                               # what is still in the buffer would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(print(f"{name}: {line}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(print(f"\n{interrupted}", file=sys.stderr) or 130)
