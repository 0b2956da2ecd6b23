"""Files that are never half of anything: what is written appears whole or not at all; what is read and is damaged is named."""
import contextlib
import json
import os


def written_to(path):
    """Where writing to `path` ends, links followed. ValueError for what is there and is no regular file: a device or a pipe would be
    replaced by a file."""
    real = os.path.realpath(path)
    if os.path.exists(real) and not os.path.isfile(real):
        raise ValueError(f"cannot write {path}: it is not a regular file")
    return real


@contextlib.contextmanager
def replaced(path):
    """Yields a temporary name to write to, which becomes `path` if all went well and is removed if not: a reader sees the old file
    or the new one, whenever the writer is killed. ValueError where it cannot be written, say because the disk is full."""
    path = written_to(path)
    temporary = path + ".tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception as e:
        from safetensors import SafetensorError                  # here, for bounds.py does without
        if not isinstance(e, (OSError, SafetensorError, RuntimeError)):      # the latter two are how safetensors and torch.save put it
            raise
        cause = e
        while cause and not isinstance(cause, OSError):
            cause = cause.__context__
        raise ValueError(f"cannot write {path}: {cause.strerror if cause else e}") from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


@contextlib.contextmanager
def blame(path):
    """Data of another form than expected raises all sorts of errors in the block; makes one ValueError of them that names the file."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__ + ': ' if not isinstance(e, ValueError) else ''}{e}") from None


def read_json(path):
    """What a JSON file holds. ValueError names the file and what is wrong with it."""
    try:
        with blame(path), open(path, encoding="utf-8") as f:
            return json.load(f)
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None


@contextlib.contextmanager
def opened(file):
    """A safetensors file, mapped into memory."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise ValueError(f"there is no {file}") from None
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{file} is damaged: {e}") from None


def read_tensors(path):
    """{name: tensor} of a safetensors file. ValueError names the file where it is damaged or holds what is no finite number."""
    with opened(path) as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} holds values that are not finite numbers")
    return tensors


def write_json(path, data):
    with replaced(path) as temporary, open(temporary, "w", encoding="utf-8") as f:
        json.dump(data, f, indent=1)
        f.write("\n")
