"""Data whose order and position do not depend on the number of ranks and workers.

Pass :class:`ElasticSampler` (or :class:`ElasticBatchSampler`) to an ordinary ``torch.utils.data.DataLoader``, or let
:class:`ElasticShards` be its dataset. A run that was stopped on some ranks then continues on any other number of them,
and trains on every sample that is left exactly once.

Each epoch has one global order, consumed from its beginning to its end. As long as ranks times batch size times
accumulation stays the same, every optimizer step sees the same samples, whatever the number of ranks.
"""

from resume_adapters.data.order import ElasticBatchSampler, ElasticSampler
from resume_adapters.data.seeds import SeededPerSample
from resume_adapters.data.shards import ElasticShards

__all__ = ["ElasticBatchSampler", "ElasticSampler", "ElasticShards", "SeededPerSample"]
