"""Traces are read while they grow."""

from __future__ import annotations

import json

import pytest

from resume_adapters.cli.drill.job import TraceReader, loss_of


def test_reads_each_line_once_and_leaves_a_torn_one(tmp_path, traces):
    file = tmp_path / "trace.jsonl"
    reader = TraceReader(file)
    assert reader.read() == []
    one, two, three = (json.dumps(traces.step(step)).encode() + b"\n" for step in (1, 2, 3))
    file.write_bytes(one + two[:30])
    assert [event["step"] for event in reader.read()] == [1]
    with file.open("ab") as stream:
        stream.write(two[30:] + three)
    assert [event["step"] for event in reader.read()] == [2, 3]
    assert reader.read() == []
    assert [event["step"] for event in reader.events] == [1, 2, 3]


def test_the_loss_of_a_step_is_the_mean_over_micro_batches_and_ranks_and_of_the_last_time_that_it_was_done(traces):
    run = traces.altered(traces.run(range(1, 4), range(2, 4), ranks=2), 2, 3, loss=[(1.0).hex(), (2.0).hex()])
    run = traces.altered(run, 2, 3, rank=1, loss=[(3.0).hex(), None])
    assert run.losses[3] == pytest.approx((1.5 + 3.0) / 2)
    assert list(run.losses) == [1, 2, 3]
    assert loss_of(traces.altered(run, 1, 1, loss=[None, None]).steps[0]) is None
