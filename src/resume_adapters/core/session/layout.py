"""Over which ranks a training is spread, by dimension: another than those of a framework that are exact is refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from resume_adapters.errors import UnsupportedSetting

UNNAMED = "without a name"
"""A dimension of a device mesh that has no names."""


@dataclass(frozen=True)
class Layout:
    """Over how many ranks a training is spread in each dimension, by the names that its framework has for them.

    Attributes:
        sizes: the ranks in each dimension.
        data: dimensions whose ranks read batches of their own.
        exact: further dimensions in which a resume is exact: a test shows it for each.

    Raises:
        UnsupportedSetting: the training is spread over a dimension that is neither.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    data: Collection[str] = ()
    exact: Collection[str] = ()

    def __post_init__(self) -> None:
        known = {*self.data, *self.exact}
        found = [f"{size} ranks in `{name}`" for name, size in self.sizes.items() if size > 1 and name not in known]
        if found:
            raise UnsupportedSetting(
                f"the training is spread over {' and '.join(found)}, a dimension that this package does not save and "
                f"restore exactly here, where it knows {', '.join(sorted(known - {UNNAMED})) or 'none'}: train with "
                "DDP, FSDP2 or ZeRO, or leave this package out. docs/limits.md has a table of what is exact where"
            )

    @property
    def sharing(self) -> int:
        """Ranks that read the same batches."""
        return math.prod(size for name, size in self.sizes.items() if name not in self.data)


def spread_over(modules: Iterable[Any]) -> dict[str, int]:
    """Return the dimensions of the device meshes over which parameters are spread: their ranks, by name."""
    meshes = [each.device_mesh for module in modules for each in module.parameters() if hasattr(each, "device_mesh")]
    return {
        name: size
        for mesh in meshes
        for name, size in zip(mesh.mesh_dim_names or (UNNAMED,) * mesh.ndim, mesh.shape, strict=True)
    }
