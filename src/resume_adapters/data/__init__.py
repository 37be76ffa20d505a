"""Samplers and datasets whose order and position do not depend on the number of ranks and workers.

Pass :class:`ElasticSampler` (or :class:`ElasticBatchSampler`) to an ordinary ``torch.utils.data.DataLoader``, or use
:class:`ElasticShards` as its dataset. A run can then resume on a different number of ranks, and trains on every
remaining sample exactly once.

Each epoch has one global order, consumed from start to end. As long as ranks times batch size times
accumulation stays the same, every optimizer step sees the same samples, whatever the number of ranks.
"""

from resume_adapters.data.samplers import ElasticBatchSampler, ElasticSampler
from resume_adapters.data.seeds import SeededPerSample
from resume_adapters.data.shards import ElasticShards

__all__ = ["ElasticBatchSampler", "ElasticSampler", "ElasticShards", "SeededPerSample"]
