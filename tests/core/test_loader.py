"""A watched loader behaves as before wherever a pass is left."""

from __future__ import annotations

import itertools

from torch.utils.data import DataLoader

from resume_adapters.core import loader


def test_a_pass_that_is_left_early_leaves_the_workers_known() -> None:
    """Batches that were fetched ahead are thrown away with what they carried, and the next pass goes on."""
    plain = DataLoader(list(range(16)), batch_size=1, num_workers=2, persistent_workers=True)
    watch = loader.watch(plain)
    assert [int(batch) for batch in itertools.islice(plain, 1)] == [0]
    assert [int(batch) for batch in plain] == list(range(16))
    assert set(watch.position(16)["pool"]) == {0, 1}
