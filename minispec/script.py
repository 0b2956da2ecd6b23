"""What the scripts share: arguments that fail in one line, outputs that cannot be half-written, exits that say why."""
import argparse
import os
import signal
import sys


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows the module's docstring as it stands, and errors as one line without the usage text."""

    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def check_writable(path):
    """Fail before the work, not after it: ValueError where `path` cannot be written."""
    try:
        with open(path + ".tmp", "w"):
            pass
        os.remove(path + ".tmp")
        if os.path.isdir(path):
            raise IsADirectoryError(21, "Is a directory")
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def run_main(main, interrupted="interrupted"):
    """Run a script's main: what the user got wrong is a ValueError and becomes one line and exit code 2, Ctrl-C 130."""
    import torch
    signal.signal(signal.SIGINT, signal.default_int_handler)     # also where a shell started us in the background
    name = os.path.basename(sys.argv[0])
    try:
        main()
    except ValueError as e:
        sys.exit(print(f"{name}: {e}", file=sys.stderr) or 2)
    except torch.OutOfMemoryError:
        sys.exit(print(f"{name}: out of memory; use a smaller batch or shorter texts", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(print(f"\n{interrupted}", file=sys.stderr) or 130)
