"""Files are never half of anything: what is written appears whole or not at all; damaged input is named."""
import contextlib
import gzip
import json
import os
import uuid
import zlib


# -- writing ----------------------------------------

def written_to(path):
    """Where writing to `path` ends, with links followed. ValueError if something other than a regular file is
    there: a device or a pipe would be replaced by a file."""
    real = os.path.realpath(path)
    if os.path.exists(real) and not os.path.isfile(real):
        raise ValueError(f"cannot write {path}: it is not a regular file")
    return real


@contextlib.contextmanager
def replaced(path):
    """Yields the name of a temporary file next to `path`. It becomes `path` if all went well and is removed
    if not: a reader sees the old file or the new one. Every writer has a temporary file of its own; of two,
    the last one wins. ValueError if it cannot be written, for example because the disk is full."""
    path = written_to(path)
    temporary = os.path.join(os.path.dirname(path), f"{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception as e:
        from safetensors import SafetensorError          # here, because bounds.py works without it

        # safetensors and torch.save wrap the errors of the system.
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
    write_text(path, json.dumps(data, indent=1) + "\n")


# -- reading ----------------------------------------

@contextlib.contextmanager
def blame(path):
    """A file that cannot be read or has another form than expected raises all sorts of errors; inside the
    block they become one ValueError that names the file."""
    try:
        yield
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    except ValueError as e:
        line = str(e)
        raise ValueError(line if str(path) in line else f"{path}: {line}") from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__}: {e}") from None


def read_json(path, missing=None):
    """What a JSON file holds, or `missing`, if given, where there is no file. ValueError names the file and
    what is wrong with it."""
    if missing is not None and not os.path.exists(path):
        return missing
    with blame(path), open(path, encoding="utf-8-sig") as f:     # -sig: with or without a byte-order mark
        return json.load(f)


def read_rows(file):
    """[(where it is, for messages; the object)] of a file of JSON lines, or of one JSON array. ValueError
    names the file and the line or object that is wrong."""
    opener = gzip.open if str(file).lower().endswith(".gz") else open
    try:
        with opener(file, "rt", encoding="utf-8-sig") as f:
            text = f.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {file}: {getattr(e, 'strerror', None) or e}") from None
    if text.lstrip().startswith("["):
        rows = [(f"{file}, object {i}", row) for i, row in enumerate(_parse(text, file), 1)]
    else:
        lines = [(f"{file}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(where, _parse(line, where)) for where, line in lines]
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON object is needed, this is a {type(row).__name__}")
    return rows


def _parse(text, where):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where}: not JSON ({e})") from None


@contextlib.contextmanager
def opened(file):
    """A safetensors file, mapped into memory."""
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
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} holds values that are not finite numbers")
    return tensors
