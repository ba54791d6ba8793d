"""What a module declares is read alike from its class, its instance and CREDIT's names."""

import pytest
from torch import nn

from credit_like.errors import UserError
from credit_like.nn.layer import Layer, TensorSplit, is_shard_unit, recomputation, tensor_split


class Ours(Layer):
    shard_unit = True
    recompute = "never"
    tensor_columns, tensor_rows, tensor_copies = ("a",), ("b", "c.0"), ("d",)


class Theirs(nn.Module):
    _fsdp2_shard = True
    _recompute = False
    _tp_col, _tp_row, _tp_copy = "a", ("b", "c.0"), ("d",)


@pytest.mark.parametrize("declaring", [Ours, Theirs])
def test_both_names_of_a_declaration_mean_the_same(declaring):
    module = declaring()
    assert is_shard_unit(module)
    assert recomputation(module) == "never"
    assert tensor_split(module) == TensorSplit(("a",), ("b", "c.0"), ("d",))


@pytest.mark.parametrize("silent", [Layer, nn.Identity])
def test_a_module_that_declares_nothing_has_the_defaults(silent):
    module = silent()
    assert not is_shard_unit(module)
    assert recomputation(module) == "forward"
    assert not tensor_split(module)


@pytest.mark.parametrize("name", ["shard_unit", "_fsdp2_shard"])
def test_an_instance_may_declare_itself(name):
    module = nn.Linear(2, 2)
    setattr(module, name, True)
    assert is_shard_unit(module)
    assert not is_shard_unit(nn.Linear(2, 2))


def test_an_unknown_way_to_recompute_is_refused_with_those_that_there_are():
    module = nn.Identity()
    module.recompute = "always"
    with pytest.raises(UserError, match=r"Identity.recompute: expected one of forward, kernels, never, got 'always'"):
        recomputation(module)
