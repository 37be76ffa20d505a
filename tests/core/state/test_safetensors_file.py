"""A file of safetensors is, byte for byte, what the library writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from resume_adapters.core.state.safetensors_file import safetensors_bytes, safetensors_header

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint64, torch.bool),
]


@pytest.mark.parametrize("names", [["a", "b", "0.x"], ["ä", "z"], ["one"]], ids=str)
def test_a_file_is_what_the_library_writes(names: list[str]) -> None:
    tensors = {f"{name}.{dtype}": torch.arange(7).to(dtype) for name in names for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "matrix": torch.randn(3, 4)}
    for _ in range(2):  # the second time, the library is not asked
        assert safetensors_bytes(tensors) == save(tensors)


def test_another_shape_has_another_header() -> None:
    one, other = {"a": torch.zeros(2)}, {"a": torch.zeros(3)}
    assert safetensors_bytes(one) == save(one)
    assert safetensors_bytes(other) == save(other)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_metadata_is_in_the_header(metadata: dict[str, str] | None) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(1)}
    header, offsets = safetensors_header(tensors, metadata)
    whole = save(tensors, metadata)
    assert whole.startswith(header) and len(whole) == len(header) + 12
    assert offsets == {"a": 0, "b": 8}
