"""Files: a written file appears whole or not at all, and an error of a file is one line that names it."""
import contextlib
import gzip
import json
import os
import uuid
import zlib


# -- writing ----------------------------------------

def written_to(path):
    """The path behind the links of `path`. ValueError if it is a device, a pipe or a folder: writing would
    put a file in its place."""
    real = os.path.realpath(path)
    # Behind /dev/stdout may be a regular file, a log that others write.
    device = os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    if device or os.path.exists(real) and not os.path.isfile(real):
        raise ValueError(f"cannot write {path}: it is not a regular file")
    return real


@contextlib.contextmanager
def replaced(path):
    """Yields the name of a temporary file next to `path`, which becomes `path` after the block and is removed
    on an error: a reader sees the old file or the new one. Each writer has its own temporary file; the last
    of two writers wins. ValueError if the file cannot be written, for example because the disk is full."""
    path = written_to(path)
    temporary = f"{os.path.dirname(path)}/{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception as e:
        from safetensors import SafetensorError          # here, because bounds.py works without it

        # safetensors and torch.save wrap the system's errors.
        if not isinstance(e, (OSError, SafetensorError, RuntimeError)):
            raise
        cause = e
        while cause and not isinstance(cause, OSError):
            cause = cause.__context__
        raise ValueError(f"cannot write {path}: {cause.strerror if cause else e}") from None
    finally:
        with contextlib.suppress(OSError):               # it is `path` by now, or was never made
            os.remove(temporary)


def write_text(path, text):
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as f:
        f.write(text)


def write_json(path, data):
    write_text(path, f"{json.dumps(data, indent=1)}\n")


# -- reading ----------------------------------------

@contextlib.contextmanager
def naming(path):
    """Turns the errors of reading and understanding a file into a ValueError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None
    except ValueError as e:
        line = str(e)
        raise ValueError(line if str(path) in line else f"{path}: {line}") from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__}: {e}") from None


def read_json(path, missing=None):
    """The value in a JSON file; `missing`, if given, stands in for a file that is not there. ValueError names
    the file and its error."""
    if missing is not None and not os.path.exists(path):
        return missing
    with naming(path), open(path, encoding="utf-8-sig") as f:     # -sig: with or without a byte-order mark
        return _parsed(f.read())


def _parsed(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e})") from None


def read_rows(file):
    """[(place, object)] of a file of JSON lines or of one JSON array, gzipped or not. ValueError names the
    place, which is the file with a line or an object."""
    opener = gzip.open if str(file).lower().endswith(".gz") else open
    rows = []
    with naming(file), opener(file, "rt", encoding="utf-8-sig") as f:
        text = f.read()
        if text.lstrip().startswith("["):
            rows = [(f"{file}, object {i}", row) for i, row in enumerate(_parsed(text), 1)]
            text = ""
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with naming(f"{file}:{i}"):
                rows.append((f"{file}:{i}", _parsed(line)))
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
    return rows


@contextlib.contextmanager
def opened(file):
    """Yields a safetensors file, mapped into memory."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise ValueError(f"there is no {file} (.bin and .pt are pickles, which could run anything and are "
                         "never read)") from None
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{file} is damaged: {e}") from None


def read_tensors(path):
    """{name: tensor} of a safetensors file. ValueError names a file that is damaged or not finite."""
    with opened(path) as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}
    for name, x in tensors.items():
        if x.is_floating_point() and not x.float().isfinite().all():           # float8 has no isfinite
            raise ValueError(f"{path} is damaged: {name} holds values that are not finite numbers")
    return tensors
