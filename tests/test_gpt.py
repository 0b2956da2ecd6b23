import copy
import json
import os
import pickle

import pytest
import torch
from conftest import TARGET, dense_logits, toy_model
from safetensors.torch import load_file, save_file

from minispec.core import cpu, gpt
from minispec.tools import checkpoints
from minispec.core.gpt import dense_attend


def test_rope_depends_on_distances_only():
    rope = gpt.Rope(gpt.GPTConfig(head_dim=16, block_size=200))
    cos, sin = rope.cos, rope.sin
    q, k = torch.randn(2, 1, 16)
    score = lambda i, j: (gpt.rotate(q, cos[i], sin[i]) * gpt.rotate(k, cos[j], sin[j])).sum()
    assert torch.allclose(score(7, 3), score(150, 146), atol=1e-4)
    assert not torch.allclose(score(7, 3), score(7, 4), atol=1e-3)


def test_attention_is_causal_and_grouped():
    model = toy_model()
    ids = list(range(20))
    full, cut = dense_logits(model, ids), dense_logits(model, ids[:11])
    assert torch.allclose(full[:11], cut, atol=1e-5)
    changed = dense_logits(model, ids[:10] + [60] + ids[11:])
    assert torch.equal(full[:10], changed[:10]) and not torch.allclose(full[10:], changed[10:], atol=1e-3)


SHAPES = [dict(), dict(tied=True), dict(qk_norm=True), dict(qkv_bias=True, n_kv_head=1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_save_and_load_keep_every_bit(tmp_path, shape):
    model = toy_model(**shape)
    checkpoints.save(model, tmp_path)
    again = checkpoints.load(str(tmp_path))
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert not [f for f in os.listdir(tmp_path) if f.endswith(".tmp")]


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same_logits(tmp_path, shape):
    """The folder is a Hugging Face folder: transformers, from its own code, agrees to 1e-4."""
    transformers = pytest.importorskip("transformers")
    model = toy_model(gain=2.0, **shape)
    checkpoints.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 64, (1, 50)).tolist()[0]
    with torch.inference_mode():
        assert (theirs(torch.tensor([ids])).logits[0] - dense_logits(model, ids)).abs().max() < 1e-4


def damage_truncate(folder):
    with open(folder / "model.safetensors", "r+b") as f:
        f.truncate(1000)
    return "damaged"


def damage_header(folder):
    with open(folder / "model.safetensors", "wb") as f:
        f.write(b"\xff" * 64)
    return "damaged"


def damage_missing_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    return "lacks model.layers.1.mlp.up_proj.weight"


def damage_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    return "shape of model.norm.weight must be"


def damage_config(folder):
    (folder / "config.json").write_text("{")
    return "config.json: not JSON"


def damage_family(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    return "got 'mamba'"


def damage_no_weights(folder):
    os.remove(folder / "model.safetensors")
    return "model.safetensors (.bin and .pt are pickles"


@pytest.mark.parametrize("damage", [damage_truncate, damage_header, damage_missing_tensor, damage_shape, damage_config,
                                    damage_family, damage_no_weights])
def test_damaged_folders_are_named(tmp_path, damage):
    checkpoints.save(toy_model(), tmp_path)
    message = damage(tmp_path)
    with pytest.raises(ValueError) as e:
        checkpoints.load(str(tmp_path))
    assert message in str(e.value) and "\n" not in str(e.value)


def test_shipped_target_loads(shipped):
    model, tokenizer = shipped
    assert model.config.vocab_size == tokenizer.vocab_size and model.config.eos_id == tokenizer.special["<|eos|>"]
    assert not model.config.qk_norm and model.config.block_size >= 8192
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(TARGET))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_products_and_follow_the_weights(dtype):
    torch.manual_seed(0)
    linear, x = cpu.Linear(48, 80).to(dtype), torch.randn(3, 9, 48, dtype=dtype)
    plain = lambda: torch.nn.functional.linear(x, linear.weight, linear.bias)
    close = lambda a, b: (a.float() - b.float()).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)
    with torch.no_grad():
        assert close(linear(x), plain())
        assert (linear._packed[1] is not None) == (dtype in cpu.PACKED_TYPES)
    opt = torch.optim.SGD(linear.parameters(), lr=0.5)
    linear(x).float().pow(2).mean().backward()           # gradients are those of the weights
    assert linear.weight.grad.abs().sum() > 0
    opt.step()
    with torch.no_grad():
        assert close(linear(x), plain())
        linear.load_state_dict(cpu.Linear(48, 80).to(dtype).state_dict())
        assert close(linear(x), plain())
        linear.weight.data = linear.weight.data + 1
        assert close(linear(x), plain()) and close(linear(x[0, :1]), plain()[0, :1])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert linear(x).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("n_out", [80, 12, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_a_lone_row_of_any_shape_is_multiplied(n_out, bias, dtype, most):
    linear, x = cpu.Linear(48, n_out, bias=bias).to(dtype), torch.randn(1, 48).to(dtype)
    want = torch.nn.functional.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    for row in (x, x[0], x[None]):
        out = linear(row)
        assert out.dtype == dtype and out.shape == (*row.shape[:-1], n_out)
        assert torch.allclose(out.flatten().double(), want[0], atol=most)
    assert linear._packed[1] is None                     # the matrix as it is, no copy of it
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


@torch.no_grad()
def test_a_lone_row_leaves_onednn_off_where_the_user_switched_it_off(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    cpu.row_product(torch.randn(1, 48).bfloat16(), torch.randn(80, 48).bfloat16(), None)
    assert not torch.backends.mkldnn.enabled


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_bf16_rows_are_multiplied_in_fp32_where_bf16_has_no_product(bias, monkeypatch):
    monkeypatch.setattr(cpu, "PACKED_TYPES", {torch.float32})
    linear = cpu.Linear(48, 80, bias=bias).bfloat16()
    x = torch.randn(cpu.CONVERT_ROWS, 48).bfloat16()
    exact = torch.nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float() if bias else None)
    assert torch.equal(linear(x), exact.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.bfloat16, 2 ** -7)])
def test_a_lone_row_is_normed_as_several_are(dtype, most):
    torch.manual_seed(0)
    norm = gpt.RMSNorm(48, 1e-5)
    torch.nn.init.normal_(norm.weight)
    norm, rows = norm.to(dtype), torch.randn(5, 48).to(dtype) * torch.tensor([[1e-3], [0.1], [1], [30], [0]]).to(dtype)
    exact = torch.nn.functional.rms_norm(rows.double(), (48,), norm.weight.double(), 1e-5)
    for row, want in zip(rows, exact):
        for x in (row[None], row[None, None]):
            assert norm(x).dtype == dtype and norm(x).shape == x.shape
            assert ((norm(x).flatten() - want).abs() <= most * want.abs().clamp(min=1e-3) * 2).all()


def test_a_model_that_has_decoded_can_be_copied_and_pickled():
    """The packed weights of Linear are neither copied nor pickled: both models make their own, of their own weights."""
    model, ids = toy_model(), list(range(12))
    before = dense_logits(model, ids)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(dense_logits(again, ids), before)
        with torch.no_grad():
            again.blocks[0].down.weight.mul_(2)
        assert not torch.equal(dense_logits(again, ids), before) and torch.equal(dense_logits(model, ids), before)
