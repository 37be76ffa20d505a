"""What the tests of ``core/devices.py`` do on the test device, each in a process of its own.

Usage: cases.py NAME.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from device import walled
from resume_adapters.core import devices
from resume_adapters.core.devices import RandomStates
from resume_adapters.core.observed.leaves import LeafKind, can_be_made, capture
from resume_adapters.core.saving.block import Block
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.comparison import first_difference, verify_equal
from resume_adapters.core.state.rng import GeneratorState, generator_of
from resume_adapters.errors import UnsupportedSetting

from launch import is_installed


def through_disk(state: Any) -> Any:
    document, tensors = encoding.encode(state)
    return encoding.decode(document, load(save(tensors)) if tensors else {})


def draw(index: int = 0) -> list[float]:
    return torch.randn(3, device=f"walled:{index}").tolist()


def see(count: int, current: int = 0) -> None:
    """Let this process see so many devices, and train on one of them."""
    torch.walled.device_count = lambda: count
    torch.accelerator.set_device_index(current)


# ---- Random state


def the_same_numbers_follow_on_every_device() -> None:
    torch.manual_seed(3)
    draw(0), draw(1), draw(1)
    state = rng.capture()
    expected = draw(0), draw(1)
    torch.manual_seed(4)
    rng.restore(through_disk(state))
    assert (draw(0), draw(1)) == expected
    assert expected[0] != expected[1]


def capturing_draws_nothing_and_does_not_move() -> None:
    torch.manual_seed(3)
    expected = draw(), draw()
    torch.manual_seed(3)
    state = rng.capture()
    digest = encoding.digest_of(state)
    assert (draw(), draw()) == expected
    assert encoding.digest_of(state) == digest


def fewer_devices_are_seen() -> None:
    torch.manual_seed(3)
    draw(0)
    state = rng.capture()
    expected = draw(0)
    see(1)
    rng.restore(through_disk(state))
    assert draw(0) == expected


def more_devices_are_seen() -> None:
    see(1)
    draw(0)
    state = rng.capture()
    expected = draw(0)
    see(2)
    rng.restore(through_disk(state))
    assert draw(0) == expected


def the_device_has_another_number() -> None:
    """As where each rank saw all devices of the machine, and sees its own alone now."""
    see(2, current=1)
    draw(1)
    state = rng.capture()
    expected = draw(1)
    see(1)
    rng.restore(through_disk(state))
    assert draw(0) == expected


def the_device_that_was_drawn_from_was_not_the_current_one() -> None:
    draw(1)
    state = rng.capture()
    expected = draw(1)
    see(1)
    rng.restore(through_disk(state))
    assert draw(0) == expected


def several_were_drawn_from_and_are_not_seen() -> None:
    draw(0), draw(1)
    state = through_disk(rng.capture())
    see(1)
    message = refusal(state)
    assert "from 2 walled devices, of index [0, 1]" in message and "sees 1" in message, message
    see(2, current=1)
    assert "trains on that of index 1" in refusal(state)


def an_older_list_of_states() -> None:
    """Earlier versions saved those of all CUDA devices, and not which of them was used."""
    see(2, current=1)
    draw(1)
    states = [torch.walled.get_rng_state(index) for index in range(2)]
    older = RandomStates.from_tree(states)
    fresh = torch.Generator("walled").manual_seed(3)
    assert older == ("cuda", None, states) and RandomStates.from_tree([]) is None
    expected = draw(1)
    devices.restore_random_states(older._replace(kind="walled"))
    assert draw(1) == expected
    see(1)
    devices.restore_random_states(older._replace(kind="walled"))
    assert draw(0) == expected
    see(2, current=1)
    devices.restore_random_states(RandomStates("walled", None, states[1:]))
    assert draw(1) == expected, "one was seen, and the second of two is trained on"
    see(2)
    devices.restore_random_states(older._replace(kind="walled"))
    assert draw(0) == expected, "the second of two was drawn from, and the first is trained on"
    devices.restore_random_states(RandomStates("walled", None, [fresh.get_state()] * 2))
    draw(0), draw(1)
    both = [torch.walled.get_rng_state(index) for index in range(2)]
    see(1)
    assert "2 walled devices" in refusal({**rng.capture(), "devices": RandomStates("walled", None, both)._asdict()})


def bare_accelerate_saved_it() -> None:
    """Under the name of the kind, as a list of the states of all devices."""
    if not is_installed("accelerate"):
        return
    from resume_adapters.accelerate.files import restore_random_states

    draw(0)
    states = {"random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    states["torch_manual_seed"] = torch.get_rng_state()
    states["torch_walled_manual_seed"] = [torch.walled.get_rng_state(index) for index in range(2)]
    torch.save(states, "random_states_0.pkl")
    expected = draw(0), torch.rand(3).tolist()
    restore_random_states(Path(), 0)
    assert (draw(0), torch.rand(3).tolist()) == expected


def refusal(state: Any) -> str:
    try:
        rng.restore(state)
    except UnsupportedSetting as error:
        return str(error)
    raise AssertionError("it was restored")


def the_checkpoint_is_of_another_kind_of_device() -> None:
    """The test reads what is said."""
    torch.manual_seed(3)
    expected = draw()
    torch.manual_seed(3)
    state = {**rng.capture(), "devices": [torch.zeros(16, dtype=torch.uint8)]}
    for _ in range(2):
        rng.restore(state)
    assert draw() == expected, "it draws as it would have"


def the_checkpoint_is_of_no_device() -> None:
    """The test reads what is said."""
    rng.restore_with({"process": {**rng.capture(), "devices": []}, "registered": {}}, {})


def a_device_without_random_state_is_named() -> None:
    del torch.walled.get_rng_state
    state = rng.capture()
    assert state["devices"] == []
    rng.resume(state)
    note = devices.missing()
    assert note is not None and note.startswith("torch.walled has no get_rng_state: after a resume, dropout"), note


def a_rank_that_had_no_random_state_gets_its_own() -> None:
    saved = rng.capture()
    made = [rng.forked(saved, rank) for rank in (1, 2, 1)]
    assert first_difference(made[0], made[2]) is None
    drawn = []
    for state in (saved, *made[:2]):
        rng.restore(through_disk(state))
        drawn.append(draw())
    assert len(set(map(tuple, drawn))) == 3
    other = {**saved, "devices": [torch.zeros(16, dtype=torch.uint8)]}
    assert rng.forked(other, 1)["devices"]["states"] == other["devices"], "of a device that is not here"


# ---- Generators


def restore(generator: GeneratorState, saved: Any) -> None:
    generator.load_state_dict(saved)
    verify_equal("noise", generator.as_restored(saved), generator.state_dict())


def a_generator_comes_back_on_its_device() -> None:
    generator = torch.Generator("walled:1").manual_seed(5)
    torch.rand(2, generator=generator, device="walled:1")
    saved = through_disk(capture(generator, LeafKind.STATEFUL))
    expected = torch.rand(2, generator=generator, device="walled:1").tolist()
    fresh = torch.Generator("walled:0")
    restore(GeneratorState(fresh), saved)
    assert can_be_made("Generator", saved, LeafKind.STATEFUL)
    made = generator_of("Generator", saved)
    assert made.device == generator.device
    for each in (fresh, made):
        GeneratorState(each).load_state_dict(saved)
        assert torch.rand(2, generator=each, device=each.device).tolist() == expected
    see(1)
    assert generator_of("Generator", saved).device == torch.device("walled:0"), "where the process trains"
    saved["device"] = "cuda:0"
    assert generator_of("Generator", saved) is None


def a_generator_is_of_another_kind_of_device() -> None:
    """The test reads what is said."""
    saved = GeneratorState(torch.Generator().manual_seed(1)).state_dict()
    generator = torch.Generator("walled").manual_seed(5)
    before = generator.get_state()
    restore(GeneratorState(generator), through_disk(saved))
    assert torch.equal(generator.get_state(), before)


def an_older_state_of_a_generator_does_not_say_its_device() -> None:
    saved = GeneratorState(torch.Generator("walled").manual_seed(1)).state_dict()
    del saved["device"]
    generator = torch.Generator("walled")
    restore(GeneratorState(generator), saved)
    assert torch.equal(generator.get_state(), saved["state"])
    assert generator_of("Generator", {"state": saved["state"][:16]}) is None


# ---- Memory, streams, health


def a_copy_is_there_when_it_is_waited_for() -> None:
    block = Block(4096)
    source = torch.arange(16, dtype=torch.uint8, device="walled")
    block.copy(0, source)
    source.zero_()  # what the training does afterwards does not reach the copy
    assert block.tensor(0, 16).sum() == 0, "the test device is late"
    block.wait()
    assert block.tensor(0, 16).tolist() == list(range(16))
    block.copy(64, torch.ones(16, dtype=torch.uint8, device="walled:1"))
    block.close()
    assert block.tensor(64, 16).sum() == 16
    torch.ops.walled.unregister(0)  # of what is not registered, it is nothing
    later = torch.empty(16, dtype=torch.uint8)
    later.copy_(torch.ones_like(source), non_blocking=True)
    assert later.sum() == 16, "memory that is not pinned is there at once"


def a_copy_on_a_side_stream_needs_an_order() -> None:
    """Else what is done to the source meanwhile is copied: a fault that this device shows."""
    for is_ordered in (False, True):
        block, side = Block(64), torch.Stream("walled")
        source = torch.ones(16, dtype=torch.uint8, device="walled")
        with side:
            block.copy(0, source)
        if is_ordered:
            torch.accelerator.current_stream().wait_stream(side)
        source.zero_()
        block.wait()
        assert block.tensor(0, 16).sum() == 16 * is_ordered
    with side:
        source.fill_(3)
        block.copy(0, source)
        source.zero_()  # behind the copy, as all on its stream
    block.wait()
    assert block.tensor(0, 16).sum() == 48


def a_device_that_cannot_pin_is_waited_for() -> None:
    del torch.walled.cudart
    block = Block(64)
    block.copy(0, torch.ones(16, dtype=torch.uint8, device="walled"))
    assert block.tensor(0, 16).sum() == 16
    block.close()


def the_device_is_known_and_answers() -> None:
    assert devices.kind() == devices.kind_in_use() == "walled"
    devices.require_device(60.0)
    torch.walled.is_initialized = lambda: False
    assert devices.kind() == "walled" and devices.kind_in_use() is None
    state = rng.capture()
    assert state["devices"] == []
    rng.resume(state)


def its_memory_is_not_the_hosts() -> None:
    """The test sees how this process dies."""
    import ctypes

    ctypes.string_at(torch.ones(4, device="walled").data_ptr(), 4)


if __name__ == "__main__":
    assert walled.NAME == "walled"
    globals()[sys.argv[1]]()
