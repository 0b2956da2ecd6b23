"""Files appear whole or not at all, also with two writers of one file, and a check touches no other file."""
import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import refusal, refused

from minispec.tools import files, script


def test_two_writers_of_one_path_do_not_mix(tmp_path):
    """The second writer begins while the first is at work. Each one's text is complete when it appears."""
    path = tmp_path / "race.json"
    with files.replaced(path) as second_name, open(second_name, "w") as b:
        with files.replaced(path) as first_name, open(first_name, "w") as a:
            assert first_name != second_name
            b.write('{"b": [1, 2')
            a.write('{"a":')
            b.write(", 3]}")
            a.write("1}")
        assert json.loads(path.read_text()) == {"a": 1}
        b.flush()
    assert json.loads(path.read_text()) == {"b": [1, 2, 3]}
    assert os.listdir(tmp_path) == ["race.json"]


def test_a_check_leaves_other_files_alone(tmp_path):
    """Not the temporary file of a writer at work, nor the user's own file of such a name."""
    path, own = tmp_path / "my.json", tmp_path / "my.json.tmp"
    own.write_text("precious")
    with files.replaced(path) as temporary:
        with open(temporary, "w") as f:
            f.write("1")
        script.check_writable(path)
    left = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert left == {path.name: "1", own.name: "precious"}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_get_the_mode_that_a_plain_open_gives(umask, tmp_path):
    before = os.umask(umask)
    try:
        files.write_json(tmp_path / "new.json", 1)
        (tmp_path / "plain").write_text("")
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "new.json").st_mode == os.stat(tmp_path / "plain").st_mode


def test_outputs_inside_a_model_folder_are_refused(tmp_path):
    """Whatever the file is called: a result has no place among weights."""
    model = tmp_path / "model"
    (model / "deeper").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "loose.safetensors").write_bytes(b"no model")          # another file in the folder above
    os.symlink(model, tmp_path / "link")
    for name in ("model/model.safetensors", "model/out.json", "model/deeper/out.json", "link/config.json"):
        with refused("cannot write ", f"{name}: ", "model is a model folder"):
            script.check_writable(tmp_path / name)
    assert (model / "model.safetensors").read_bytes() == b"weights"
    script.check_writable(tmp_path / "out.json")


def test_outputs_that_are_inputs_are_refused(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    os.symlink(questions, tmp_path / "link")
    for name in ("questions.jsonl", "link"):
        with refused("cannot write ", f"{name}: it is an input"):
            script.check_writable(tmp_path / name, inputs=[None, questions])
    os.symlink("loop", tmp_path / "loop")
    script.check_writable(tmp_path / "out.json", inputs=[None, questions, tmp_path / "loop"])


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path):
    with refused("cannot write ", "File name too long"):
        script.check_writable(tmp_path / ("x" * 300))


def test_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert files.read_json(tmp_path / "a.json") == {"a": 1}


def test_control_characters_are_shown_not_obeyed():
    shown = script.visible("a\x1b[31mb\r\x00\x7f\x9b\ttab\nline é 🙂")
    assert shown == "a\\x1b[31mb\\x0d\\x00\\x7f\\x9b\ttab\nline é 🙂"


def test_error_lines_are_shown_not_obeyed(capsys):
    main = mock.Mock(side_effect=ValueError("no folder \x1b[2Jx"))
    line = refusal(SimpleNamespace(main=main, __name__="x"))
    assert line == "no folder \\x1b[2Jx"
    with pytest.raises(SystemExit):
        script.Parser("").parse_args(["\x1b[2Jx"])
    assert capsys.readouterr().err.endswith(": unrecognized arguments: \\x1b[2Jx\n")
