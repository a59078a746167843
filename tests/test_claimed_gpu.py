"""The GPU that is not there: right values, and the refusals of CUDA."""

import numpy as np
import pytest
import torch

MIXTURES = {
    "sum": lambda there, here: there + here,
    "into the host's": lambda there, here: here.add_(there),
    "into one value of the host": lambda there, here: here.sum().add_(there.sum()),
    "cat": lambda there, here: torch.cat([there, here]),
    "product": lambda there, here: torch.outer(there, here),
    "module": lambda there, here: torch.nn.Linear(3, 3)(there),
    "mask": lambda there, here: there.masked_fill(here > 0, 0.0),
    "selection": lambda there, here: there.masked_select(here.sum() > 0),
    "index to scatter": lambda there, here: there.scatter_(0, here[0].long(), 0.5),
    "value to scatter": lambda there, here: there.scatter_add_(0, there[0].long(), here[0]),
    "gradient": lambda there, here: setattr(there, "grad", here),
    "embedding": lambda there, here: torch.nn.functional.embedding(here.long(), there[:, None]),
    "numbers": lambda there, here: torch.rand(3, generator=torch.Generator(), device="cuda"),
    "equality": torch.equal,
}


@pytest.fixture(autouse=True)
def claimed(claimed_gpu):
    with claimed_gpu() as memory:
        yield memory


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_tensors_of_two_devices_do_not_meet(name, inference):
    with torch.inference_mode(inference):
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(RuntimeError, match=r"same device|Expected a .* generator"):
            MIXTURES[name](there, here)


@pytest.mark.parametrize("read", [lambda t: t.numpy(), np.asarray])
def test_an_array_needs_a_copy_on_the_host(read):
    there = torch.arange(3, device="cuda")
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        read(there)
    assert read(there.cpu()).tolist() == there.tolist() == [0, 1, 2]


def test_native_code_gets_no_address():
    there = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="which native code cannot read"):
        there.data_ptr()
    with pytest.raises(RuntimeError, match="which native code cannot read"):
        list(map(torch.Tensor.data_ptr, [there[1:]]))
    assert there.cpu().data_ptr()
