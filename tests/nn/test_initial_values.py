"""Torch's layers start as torch itself starts them, whatever else the model has."""

import numpy as np
import pytest
import torch
from torch import nn

from credit_like.errors import UserError
from credit_like.nn.init import allocate, initialise, own_parameters, refuse_lost_values, refuse_unfilled

STOCK = {
    "linear": lambda: nn.Linear(48, 64),
    "conv1d": lambda: nn.Conv1d(8, 16, 5),
    "conv2d": lambda: nn.Conv2d(8, 16, 3, groups=2),
    "conv3d": lambda: nn.Conv3d(4, 16, 3),
    "transposed1d": lambda: nn.ConvTranspose1d(16, 8, 5),
    "transposed2d": lambda: nn.ConvTranspose2d(8, 16, 3, groups=2),
    "transposed3d": lambda: nn.ConvTranspose3d(16, 4, 3),
    "layer norm": lambda: nn.LayerNorm(32),
    "rms norm": lambda: nn.RMSNorm(32),
    "group norm": lambda: nn.GroupNorm(4, 32),
    "batch norm": lambda: nn.BatchNorm2d(32),
    "embedding": lambda: nn.Embedding(400, 16, padding_idx=3),
    "attention": lambda: nn.MultiheadAttention(64, 4, add_bias_kv=True),
    "prelu": lambda: nn.PReLU(4, 0.1),
    "cross attention": lambda: nn.MultiheadAttention(64, 4, kdim=48, vdim=32),
}


@pytest.mark.parametrize("name", list(STOCK))
def test_the_distribution_is_that_of_torch(name):
    """The same spread as torch's own draws: standard deviation, and largest value where that is bounded."""
    draws = [STOCK[name]().state_dict() for _ in range(16)]
    ours = [initialise(STOCK[name](), seed).state_dict() for seed in range(16)]
    for key in draws[0]:
        expected = torch.stack([d[key].float() for d in draws]).flatten()
        found = torch.stack([d[key].float() for d in ours]).flatten()
        if expected.unique().numel() == 1:  # a constant
            assert torch.equal(found, expected), key
            continue
        assert float(found.std() / expected.std()) == pytest.approx(1, abs=0.15), key
        assert abs(float(found.mean())) < 0.15 * float(found.std()), key
        if float(expected.abs().max() / expected.std()) < 1.8:  # uniform: the bound is sqrt(3) deviations
            assert float(found.abs().max()) == pytest.approx(float(expected.abs().max()), rel=0.05), key


def test_the_padding_row_of_an_embedding_is_zero():
    rows = initialise(STOCK["embedding"](), 0).weight
    assert not rows[3].any()
    assert rows.any(1).sum() == 399


@torch.no_grad()
def test_a_value_depends_on_the_seed_and_the_name_alone():
    def model(*names):
        return nn.ModuleDict({name: STOCK[name]() for name in names})

    torch.manual_seed(1)
    few = initialise(model("linear", "attention"), 7).state_dict()
    torch.manual_seed(2)
    many = initialise(model("embedding", "attention", "conv2d", "linear"), 7).state_dict()
    assert all(torch.equal(many[key], value) for key, value in few.items())
    other = initialise(model("linear", "attention"), 8).state_dict()
    assert not torch.equal(other["linear.weight"], few["linear.weight"])
    assert not torch.equal(few["attention.in_proj_weight"][:64], few["attention.out_proj.weight"])


def test_a_model_of_torch_s_layers_comes_from_the_meta_device_as_it_was():
    names = [name for name in STOCK if name != "cross attention"]
    with torch.device("meta"):
        blank = nn.ModuleDict({name: STOCK[name]() for name in names})
    blank.to_empty(device="cpu")
    for tensor in blank.state_dict().values():
        tensor.fill_(7)
    found = initialise(blank, 3).state_dict()
    expected = initialise(nn.ModuleDict({name: STOCK[name]() for name in names}), 3).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Otherwise(nn.Linear):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


@pytest.mark.parametrize(
    ("module", "leaf"), [(Scaled(), "scale"), (Otherwise(2, 3), "weight"), (nn.ParameterList([torch.ones(3)]), "0")]
)
def test_a_layer_that_torch_has_not_is_named_with_what_it_lacks(module, leaf):
    with pytest.raises(UserError, match=rf"part\.{leaf}: .*{type(module).__name__}.*define(s)? `initial"):
        initialise(nn.ModuleDict({"part": module}), 0)


class Holder(nn.Module):
    """A module with what is given in attributes and in a buffer."""

    def __init__(self, buffer=None, **attributes):
        super().__init__()
        self.register_buffer("numbers", buffer)
        for name, value in attributes.items():
            setattr(self, name, value)


def blank(make):
    with torch.device("meta"):
        return make()


def test_parameters_that_are_shared_stay_shared_and_start_as_the_first():
    def tied():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return model

    model = blank(tied)
    allocate(model, "cpu")
    found = initialise(model, 7)
    assert found["a"].weight is found["b"].weight
    assert found["a"].bias is not found["b"].bias
    assert torch.equal(found["a"].weight, initialise(nn.ModuleDict({"a": nn.Linear(3, 3)}), 7)["a"].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_a_buffer_that_nothing_fills_is_named(dtype):
    model = blank(lambda: nn.ModuleDict({"part": Holder(torch.ones(3, dtype=dtype))}))
    allocate(model, "cpu")
    with pytest.raises(UserError, match=r"^part.numbers: .*Holder.*define `reset_buffers"):
        refuse_unfilled(model)
    model["part"].numbers.copy_(torch.zeros(3))
    refuse_unfilled(model)


def test_a_buffer_with_values_keeps_them():
    values = torch.arange(3.0)
    model = blank(lambda: nn.ModuleDict({"part": Holder(values), "layer": nn.BatchNorm1d(3)}))
    allocate(model, "cpu")
    refuse_unfilled(initialise(model, 0))
    assert torch.equal(model["part"].numbers, values)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (lambda: {"angles": torch.ones(3)}, r"angles: .*register_buffer"),
        (lambda: {"angles": [{"first": torch.ones(3)}]}, r"angles: .*register_buffer"),
        (lambda: {"blocks": [nn.Linear(2, 2)]}, r"blocks: .*nn.ModuleList"),
        (lambda: {"scale": nn.Parameter(torch.ones(3, device="cpu"))}, r"scale: .*`initial\("),
    ],
)
def test_values_that_would_be_lost_are_named(attributes, said):
    model = blank(lambda: nn.ModuleDict({"part": Holder(**attributes())}))
    with pytest.raises(UserError, match=rf"^part.{said}"):
        refuse_lost_values(model)


class Ones(nn.GRU):
    """A recurrent layer, which lists its parameters in an attribute, of values of its own."""

    def initial(self, leaf, shape, generator):
        return torch.ones(shape)


class Known(nn.Module):
    """A module whose parameter has values where it is built, and the same as initial values."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.from_numpy(np.arange(3.0)))

    def initial(self, leaf, shape, generator):
        return torch.arange(3.0)


def test_values_that_are_given_again_are_not_lost():
    model = blank(lambda: nn.ModuleDict({"recurrent": Ones(2, 3), "known": Known()}))
    refuse_lost_values(model)
    allocate(model, "cpu")
    initialise(model, 0)
    serial = initialise(Ones(2, 3), 0)
    x = torch.ones(2, 2)
    assert torch.equal(model["recurrent"](x)[0], serial(x)[0])
    assert torch.equal(model["known"].scale, torch.arange(3.0).double())


def test_attributes_that_refer_to_what_is_registered_may_stay():
    def listed():
        layer = nn.Linear(2, 2)
        return nn.ModuleDict(
            {"layer": layer, "part": Holder(sizes=[1, 2], order=[layer], cpu=torch.ones(3, device="cpu"))}
        )

    refuse_lost_values(blank(listed))


def test_a_value_of_another_shape_is_refused():
    module = Scaled()
    module.initial = lambda leaf, shape, generator: torch.ones(4)
    with pytest.raises(UserError, match=r"scale: expected Scaled.initial to return shape \(3,\), got \(4,\)"):
        initialise(module, 0)


def test_every_parameter_is_found_at_the_module_that_owns_it():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.MultiheadAttention(4, 2)})
    found = {name: parameter for _, _, name, parameter in own_parameters(model)}
    assert found == dict(model.named_parameters())
