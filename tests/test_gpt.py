import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import dense_logits, toy_model

from minispec.core import cpu, gpt
from minispec.tools import checkpoints


def test_rope_depends_on_distances_only():
    torch.manual_seed(0)
    rope = gpt.Rope(gpt.GPTConfig(head_dim=16, block_size=200))
    pair = torch.randn(2, 16)
    score = lambda *at: gpt.rotate(pair, rope.cos[[*at]], rope.sin[[*at]]).prod(0).sum()
    assert torch.allclose(score(7, 3), score(150, 146), atol=1e-4)
    assert not torch.allclose(score(7, 3), score(7, 4), atol=1e-3)


SHAPES = [dict(), dict(tied=True), dict(qk_norm=True), dict(qkv_bias=True, n_kv_head=1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_save_and_load_keep_every_bit(tmp_path, shape):
    model = toy_model(**shape)
    checkpoints.save(model, tmp_path)
    again = checkpoints.load(str(tmp_path))
    assert again.config == model.config
    for a, b in zip(model.state_dict().values(), again.state_dict().values()):
        assert torch.equal(a, b)


def test_shipped_target_loads(shipped):
    model, tokenizer = shipped
    assert model.config.vocab_size == tokenizer.vocab_size
    assert model.config.eos_id == tokenizer.special["<|eos|>"]
    assert not model.config.qk_norm
    assert model.config.block_size >= 8192


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_packed_products_are_products_and_follow_the_weights(dtype, tolerance):
    torch.manual_seed(0)
    linear, other = (cpu.Linear(48, 80).to(dtype) for _ in range(2))
    x = torch.randn(3, 9, 48, dtype=dtype)

    @torch.no_grad()
    def check():
        want = F.linear(x, linear.weight, linear.bias)
        assert (linear(x).float() - want.float()).abs().max() < tolerance

    check()
    assert (linear._packed[1] is not None) == (dtype in cpu.PACKED_TYPES)
    opt = torch.optim.SGD(linear.parameters(), lr=0.5)
    linear(x).float().pow(2).mean().backward()  # gradients are those of the weights
    assert linear.weight.grad.abs().sum() > 0
    opt.step()
    check()
    linear.load_state_dict(other.state_dict())
    check()
    linear.weight.data = linear.weight.data + 1
    check()
    # Weights that were rounded often lie where the old ones did, and have the same version.
    for _ in range(30):
        torch.nn.init.normal_(linear.weight)
        check()
        linear.bfloat16().to(dtype)
        check()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert linear(x).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("n_out", [80, 12, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("intel", [True, False])
def test_a_single_row_of_any_shape_is_multiplied(n_out, bias, dtype, tolerance, intel, monkeypatch):
    as_it_is = {torch.float32} if intel else {torch.float32, torch.bfloat16}
    monkeypatch.setattr(cpu, "INTEL", intel)
    monkeypatch.setattr(cpu, "ROW_TYPES", as_it_is)
    linear = cpu.Linear(48, n_out, bias=bias).to(dtype)
    x = torch.randn(1, 48).to(dtype)
    want = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    for row in (x, x[0], x[None]):
        out = linear(row)
        assert (out.dtype, out.shape) == (dtype, (*row.shape[:-1], n_out))
        assert torch.allclose(out.flatten().double(), want[0], atol=tolerance)
    # Multiplied as it is, a matrix has no copy.
    assert (linear._packed[1] is None) == (dtype in as_it_is or dtype not in cpu.PACKED_TYPES)
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


@torch.no_grad()
def test_a_single_row_leaves_onednn_off_where_the_user_switched_it_off(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(cpu, "INTEL", False)
    cpu.row_product(torch.randn(1, 48).bfloat16(), torch.randn(80, 48).bfloat16(), None)
    assert not torch.backends.mkldnn.enabled


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_bf16_rows_are_multiplied_in_fp32_where_bf16_has_no_product(bias, monkeypatch):
    monkeypatch.setattr(cpu, "PACKED_TYPES", {torch.float32})
    linear = cpu.Linear(48, 80, bias=bias).bfloat16()
    x = torch.randn(cpu.CONVERT_ROWS, 48).bfloat16()
    exact = F.linear(x.float(), linear.weight.float(), linear.bias.float() if bias else None)
    assert torch.equal(linear(x), exact.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_the_norm_of_few_rows_is_torchs(dtype, tolerance):
    torch.manual_seed(0)
    norm = gpt.RMSNorm(48, 1e-5)
    torch.nn.init.normal_(norm.weight)
    norm = norm.to(dtype)
    rows = (torch.randn(5, 48) * torch.tensor([[1e-3], [0.1], [1], [30], [0]])).to(dtype)
    want = F.rms_norm(rows.double(), (48,), norm.weight.double(), 1e-5)
    for x in (rows, rows[:, None]):
        out = norm(x)
        assert out.dtype == dtype
        assert out.shape == x.shape
        assert ((out.view(5, 48) - want).abs() <= tolerance * want.abs().clamp(min=1e-3) * 2).all()


def test_a_model_that_has_decoded_can_be_copied_and_pickled():
    """The packed weights of Linear are neither copied nor pickled: each model packs its own weights."""
    model = toy_model()
    ids = list(range(12))
    before = dense_logits(model, ids)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(dense_logits(again, ids), before)
        with torch.no_grad():
            again.blocks[0].down.weight.mul_(2)
        assert not torch.equal(dense_logits(again, ids), before)
        assert torch.equal(dense_logits(model, ids), before)
