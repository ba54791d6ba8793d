"""The one arithmetic of layouts: what a file, a mesh and a loader are told of a world size is the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_like.errors import UserError
from credit_like.layout import Degrees, accumulation, degree_findings, divide
from credit_like.parallel.mesh import degrees
from credit_like.schema.trainer import Parallelism

sizes = st.integers(1, 6)


@given(sizes, sizes, sizes, sizes)
def test_ranks_lie_as_in_an_array_of_data_ensemble_tensor_and_domain(data, ensemble, tensor, domain):
    layout = divide(Degrees("ddp", tensor, domain, ensemble=ensemble), data * ensemble * tensor * domain)
    expected = np.ndindex(data, ensemble, tensor, domain)
    assert [layout.coordinates(rank) for rank in range(layout.world)] == list(expected)


@given(sizes, sizes, sizes, sizes, st.sampled_from(["fsdp2", "ddp", "none"]), st.integers(1, 48))
def test_a_block_is_refused_as_a_mesh_exactly_where_its_section_has_a_finding(
    ensemble, tensor, domain, copies, mode, world
):
    block = {"data": mode, "ensemble": ensemble, "tensor": tensor, "domain": domain}
    block |= {"replicate": copies} if mode == "fsdp2" else {}
    found = list(degree_findings(Parallelism.model_validate(block).degrees, world))
    if not found:
        assert degrees(block, world) == (world // (ensemble * tensor * domain), tensor, domain)
        return
    path, message = found[0]
    with pytest.raises(UserError) as refused:
        degrees(block, world)
    assert str(refused.value) == f"{'.'.join(path)}: {message}"


@given(st.integers(1, 40), sizes, sizes)
def test_a_global_batch_is_its_micro_batches(total, micro, replicas):
    if total in range(0, total + 1, micro * replicas):
        assert sum(micro for _ in range(accumulation(total, micro, replicas)) for _ in range(replicas)) == total
    else:
        with pytest.raises(UserError, match=f"{micro} × {replicas} = {micro * replicas}, got {total}"):
            accumulation(total, micro, replicas)


@given(sizes, sizes, sizes)
def test_a_block_of_rows_and_columns_is_a_number_of_ranks(data, rows, columns):
    """A file, its section, and what a section is written as give the same grid; one band of columns is none."""
    block = {"data": "ddp", "domain": [rows, columns]}
    section = Parallelism.model_validate(block)
    assert section.domain == ((rows, columns) if columns > 1 else rows)
    assert Degrees.parse(block) == section.degrees == Degrees.parse(section.model_dump(mode="json"))
    layout = divide(section.degrees, data * rows * columns)
    assert (layout.data, layout.domain, layout.shape) == (data, rows * columns, (rows, columns))
