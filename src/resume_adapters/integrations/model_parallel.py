"""Lightning's ``ModelParallelStrategy``, FSDP2 and tensor parallelism: for Lightning and for Fabric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resume_adapters.core.session.layout import UNNAMED, Layout, spread_over

BESIDE_SHARDS = "meta.pt"  # seam: lightning 2.4-2.6
"""The file in a directory of shards with what is alike on all ranks."""


def is_model_parallel(strategy: Any) -> bool:
    """Return whether a strategy is one, under whichever name the script uses Lightning."""
    return any(kind.__name__ == "ModelParallelStrategy" for kind in type(strategy).__mro__)


def layout(strategy: Any, modules: Iterable[Any] = ()) -> Layout:
    """Return over which ranks a strategy, and the modules' own device meshes, spread the training.

    Raises:
        UnsupportedSetting: over others than those of data and of tensors.
    """
    if not is_model_parallel(strategy):
        return Layout()
    mesh = strategy.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    data = ("data_parallel", "dp_replicate", "dp_shard", UNNAMED)
    return Layout({**spread_over(modules), **sizes}, data=data, exact=("tensor_parallel",))


def invariants(strategy: Any, ranks: int) -> dict[str, int]:
    """Return what a resume must find unchanged: the ranks that share tensors, and all where some do."""
    if not is_model_parallel(strategy):
        return {}
    parallel = strategy.device_mesh["tensor_parallel"].size()
    return {"tensor_parallel_size": parallel, **({"number of ranks": ranks} if parallel > 1 else {})}


def saves_directories(strategy: Any) -> bool:
    """Return whether each rank writes its shards into a directory."""
    return bool(getattr(strategy, "_save_distributed_checkpoint", False))  # seam: lightning 2.4-2.6
