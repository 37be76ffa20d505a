"""``export`` writes plain weights, whatever framework saved them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from resume_adapters.core.run.run import ResumableRun

from miniature import GivenContent

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([1.5, -2.5])}
SHARDED = {
    "layer.weight": torch.arange(15.0).reshape(5, 3),
    "half": torch.arange(7).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "steps": torch.arange(4),
}
TIED = torch.arange(4.0)


def hf(path):
    save_file(WEIGHTS, path / "model.safetensors")


def sharded(path):
    for number, name in enumerate(WEIGHTS):
        save_file({name: WEIGHTS[name]}, path / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(WEIGHTS)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def compiled(path):
    torch.save({f"module._orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()}, path / "pytorch_model.bin")


def zero(path):
    torch.save({"module": WEIGHTS, "global_steps": 10}, path / "mp_rank_00_model_states.pt")


def shard(rank, directory):
    """Save a rank's part, as FSDP2 does, below each of three keys."""
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = torch.distributed.FileStore(str(directory / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    parts = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in SHARDED.items()}
    for key in ("model", "state_dict", "optimizer"):
        writer = FileSystemWriter(directory / key / "model_0")
        save({key: parts, "other": {"x": torch.ones(3)}}, storage_writer=writer)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Return what writes the shards of two ranks, below a key."""
    made = tmp_path_factory.mktemp("shards")
    torch.multiprocessing.spawn(shard, (made,), nprocs=2)
    return lambda key: lambda path: shutil.copytree(made / key, path, dirs_exist_ok=True)


def save(directory, write):
    run = ResumableRun(directory)
    run.open()
    run.saver.save("checkpoint-10", 10, GivenContent(write))
    run.close()


@pytest.mark.parametrize("write", [hf, sharded, compiled, zero])
def test_the_weights_of_a_directory(command, tmp_path, write):
    save(tmp_path / "run", write)
    out = tmp_path / "plain.safetensors"
    done = command("export", tmp_path / "run", "-o", out, "--json")
    assert done.code == 0, done.err
    assert (done.json["checkpoint"], done.json["step"], done.json["tensors"]) == ("checkpoint-10", 10, 2)
    found = load_file(out)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "checkpoint": "checkpoint-10", "step": "10"}


def test_the_weights_of_a_lightning_file(command, tmp_path):
    run = ResumableRun(tmp_path)
    run.open()
    content = GivenContent(lambda path: torch.save({"state_dict": WEIGHTS, "epoch": 0}, path))
    run.saver.save("epoch=0-step=10.ckpt", 10, content, is_file=True)
    run.close()
    assert command("export", tmp_path, "-o", tmp_path / "out.safetensors").code == 0
    assert torch.equal(load_file(tmp_path / "out.safetensors")["a.bias"], WEIGHTS["a.bias"])


def test_tied_weights_are_written_under_each_name(command, tmp_path):
    save(tmp_path / "run", lambda path: torch.save({"in": TIED, "out": TIED}, path / "pytorch_model.bin"))
    assert command("export", tmp_path / "run", "-o", tmp_path / "out").code == 0
    found = load_file(tmp_path / "out")
    assert torch.equal(found["in"], TIED)
    assert torch.equal(found["out"], TIED)


def test_damaged_weights_are_not_exported(command, tmp_path, flip):
    save(tmp_path / "run", hf)
    flip(tmp_path / "run" / "checkpoint-10" / "model.safetensors")
    done = command("export", tmp_path / "run", "-o", tmp_path / "out")
    assert done.code == 1
    assert "model.safetensors has the digest" in done.err
    assert not (tmp_path / "out").exists()


def test_an_existing_file_is_not_replaced(command, tmp_path):
    save(tmp_path / "run", hf)
    (tmp_path / "out").write_text("precious")
    done = command("export", tmp_path / "run", "-o", tmp_path / "out")
    assert done.code == 2
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_weights_in_shards_of_several_ranks(command, tmp_path, shards, key):
    save(tmp_path / "run", shards(key))
    out = tmp_path / "plain.safetensors"
    done = command("export", tmp_path / "run", "-o", out, "--json")
    assert done.code == 0, done.err
    found = load_file(out)
    assert {name: (each.dtype, each.tolist()) for name, each in found.items()} == {
        name: (each.dtype, each.tolist()) for name, each in SHARDED.items()
    }


def test_shards_without_a_model_are_refused(command, tmp_path, shards):
    save(tmp_path / "run", shards("optimizer"))
    done = command("export", tmp_path / "run", "-o", tmp_path / "out")
    assert done.code == 2 and "shards, but none of a model" in " ".join(done.err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_damaged_shard_is_not_exported(command, tmp_path, shards, flip):
    save(tmp_path / "run", shards("model"))
    flip(next((tmp_path / "run" / "checkpoint-10").rglob("*.distcp")))
    done = command("export", tmp_path / "run", "-o", tmp_path / "out")
    assert done.code == 1 and "has the digest" in done.err
    assert not (tmp_path / "out").exists()


def test_files_of_a_given_size(command, tmp_path, shards):
    save(tmp_path / "run", shards("model"))
    out = tmp_path / "plain"
    done = command("export", tmp_path / "run", "-o", out, "--shard-size", "64", "--json")
    assert done.code == 0, done.err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted({*index["weight_map"].values()}) == sorted(path.name for path in out.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in SHARDED.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], SHARDED[name])
    assert done.json["bytes"] == sum(path.stat().st_size for path in out.iterdir())


def test_one_file_is_enough_for_a_size_above_all(command, tmp_path):
    save(tmp_path / "run", hf)
    assert command("export", tmp_path / "run", "-o", tmp_path / "out", "--shard-size", "5 gb").code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("size", ["0", "-1", "5TB of", ""])
def test_a_size_that_is_none(command, tmp_path, size):
    save(tmp_path / "run", hf)
    done = command("export", tmp_path / "run", "-o", tmp_path / "out", f"--shard-size={size}")
    assert done.code == 2 and "expected a number with KB, MB or GB" in " ".join(done.err.split())


@pytest.mark.parametrize("is_all", [False, True])
def test_no_code_is_run_from_a_pickle(command, tmp_path, is_all):
    class Malice:
        def __reduce__(self):
            return print, ("malice",)

    save(tmp_path / "run", lambda path: torch.save(Malice() if is_all else {"x": Malice()}, path / "pytorch_model.bin"))
    done = command("export", tmp_path / "run", "-o", tmp_path / "out")
    assert done.code == 2
    assert "malice" not in done.out
    assert "without running code" in done.err


def test_whole_weights_beside_listed_shards_are_not_taken(command, tmp_path):
    save(tmp_path / "run", sharded)
    save_file({"a.weight": torch.zeros(2, 3)}, tmp_path / "run" / "checkpoint-10" / "model.safetensors")
    out = tmp_path / "plain.safetensors"
    assert command("export", tmp_path / "run", "-o", out).code == 0
    assert all(torch.equal(load_file(out)[name], WEIGHTS[name]) for name in WEIGHTS)
    done = command("verify", tmp_path / "run")
    assert (done.code, "its manifest does not name model.safetensors" in " ".join(done.out.split())) == (0, True)


@pytest.mark.parametrize("shard", ["../../plain.safetensors", "{outside}"])
def test_an_index_that_leads_out_of_the_checkpoint_is_refused(command, tmp_path, shard):
    outside = tmp_path / "plain.safetensors"
    save_file(WEIGHTS, outside)

    def write(path):
        index = {"weight_map": dict.fromkeys(WEIGHTS, shard.format(outside=outside))}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    save(tmp_path / "run", write)
    done = command("export", tmp_path / "run", "-o", tmp_path / "new.safetensors")
    assert done.code == 1 and "which is outside the checkpoint" in " ".join(done.err.split())


def test_states_of_deepspeed_that_no_manifest_names_are_refused(command, tmp_path):
    save(tmp_path / "run", zero)
    torch.save({}, tmp_path / "run" / "checkpoint-10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    done = command("export", tmp_path / "run", "-o", tmp_path / "new.safetensors")
    assert done.code == 1 and "not in its manifest" in " ".join(done.err.split())


def test_torn_weights_of_the_bare_framework_are_damaged(command, tmp_path):
    save(tmp_path / "run", hf)
    checkpoint = tmp_path / "run" / "checkpoint-10"
    shutil.rmtree(checkpoint / "resume")
    shutil.rmtree(tmp_path / "run" / ".resume")
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b"x")
    done = command("export", tmp_path / "run", "-o", tmp_path / "new.safetensors")
    assert done.code == 1 and "model.safetensors is damaged" in " ".join(done.err.split())
