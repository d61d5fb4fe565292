"""The SRU twin against the equations written out, its gradient, and the `sru` package where asked for."""

import os

import pytest
import torch
from foregate.predictors.sru import SruLayer


def run_slowly(layer: SruLayer, x_TBD, c0_BC=None, mask_TB=None):
    """Follow the paper one scalar equation at a time, direction by direction."""
    num_tokens, batch, _ = x_TBD.shape
    hidden_size, output_size = layer.hidden_size, layer.output_size
    weight = layer.weight.view(layer.input_size, output_size, layer.num_matrices)
    hidden = torch.zeros(num_tokens, batch, output_size, dtype=x_TBD.dtype)
    last = torch.zeros(batch, output_size, dtype=x_TBD.dtype)
    for direction in range(2 if layer.bidirectional else 1):
        units = slice(direction * hidden_size, (direction + 1) * hidden_size)
        c = torch.zeros(batch, hidden_size, dtype=x_TBD.dtype) if c0_BC is None else c0_BC[:, units]
        order = range(num_tokens) if direction == 0 else reversed(range(num_tokens))
        for t in order:
            x = x_TBD[t]
            f = torch.sigmoid(
                x @ weight[:, units, 1] + layer.weight_c[:output_size][units] * c + layer.bias[:output_size][units]
            )
            r = torch.sigmoid(
                x @ weight[:, units, 2] + layer.weight_c[output_size:][units] * c + layer.bias[output_size:][units]
            )
            new = f * c + (1 - f) * (x @ weight[:, units, 0])
            skip = x @ weight[:, units, 3] if layer.num_matrices == 4 else x[:, units] * layer.scale_x
            h = r * new + (1 - r) * skip
            keep = torch.ones(batch, 1, dtype=torch.bool) if mask_TB is None else mask_TB[t][:, None]
            c = torch.where(keep, new, c)
            hidden[t, :, units] = torch.where(keep, h, torch.zeros_like(h))
        last[:, units] = c
    return hidden, last


def make(input_size=5, hidden_size=4, bidirectional=False, seed=0):
    torch.manual_seed(seed)
    layer = SruLayer(input_size, hidden_size, bidirectional=bidirectional).double()
    with torch.no_grad():
        layer.bias.normal_()
    return layer


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("input_size", [4, 8, 5])
def test_follows_the_equations(input_size, bidirectional):
    layer = make(input_size, 4, bidirectional)
    x, c0 = torch.randn(7, 3, input_size).double(), torch.randn(3, layer.output_size).double()
    mask = torch.arange(7)[:, None] < torch.tensor([7, 4, 1])
    for args in [(x,), (x, c0), (x, c0, mask)]:
        for ours, slow in zip(layer(*args), run_slowly(layer, *args), strict=True):
            torch.testing.assert_close(ours, slow)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradient_is_the_one_of_the_equations(bidirectional):
    layer = make(bidirectional=bidirectional)
    x = torch.randn(6, 2, 5, dtype=torch.float64, requires_grad=True)
    c0 = torch.randn(2, layer.output_size, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(6)[:, None] < torch.tensor([6, 3])
    leaves = [x, c0, *layer.parameters()]
    ours = torch.autograd.grad(sum((out**2).sum() for out in layer(x, c0, mask)), leaves)
    slow = torch.autograd.grad(sum((out**2).sum() for out in run_slowly(layer, x, c0, mask)), leaves)
    for a, b in zip(ours, slow, strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck():
    layer = make(3, 2)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    c0 = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *args: layer(*args), (x, c0))


def test_steps_equal_the_sequence():
    layer = make(5, 4).float()
    x, c = torch.randn(9, 2, 5), torch.zeros(2, 4)
    hidden, last = layer(x)
    for t in range(9):
        h, c = layer.step(x[t], c)
        torch.testing.assert_close(h, hidden[t])
    torch.testing.assert_close(c, last)


def test_padding_changes_nothing_before_it():
    layer = make(5, 4, bidirectional=True)
    x = torch.randn(6, 1, 5).double()
    padded = torch.cat([x, torch.randn(3, 1, 5).double()])
    mask = (torch.arange(9) < 6)[:, None]
    torch.testing.assert_close(layer(padded, mask_TB=mask)[0][:6], layer(x)[0])


@pytest.mark.skipif(
    os.environ.get("FOREGATE_TEST_SRU") != "1", reason="importing sru compiles for 30 s; set FOREGATE_TEST_SRU=1"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("input_size", [8, 5])
def test_equals_the_sru_package(input_size, bidirectional):
    from sru import SRUCell

    theirs = SRUCell(input_size, 4, bidirectional=bidirectional, highway_bias=-1.0)
    ours = SruLayer(input_size, 4, bidirectional=bidirectional, highway_bias=-1.0)
    assert {n: p.shape for n, p in theirs.state_dict().items()} == {n: p.shape for n, p in ours.state_dict().items()}
    torch.testing.assert_close(ours.scale_x, theirs.scale_x)
    ours.load_state_dict(theirs.state_dict())
    x, c0 = torch.randn(6, 3, input_size), torch.randn(3, ours.output_size)
    mask = torch.arange(6)[:, None] < torch.tensor([6, 3, 1])
    for a, b in zip(ours(x, c0, mask), theirs(x, c0, mask_pad=~mask), strict=True):
        torch.testing.assert_close(a, b)
