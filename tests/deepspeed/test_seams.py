"""Each private seam of the installed version: a clear failure here when a release moves one."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from torch.utils.data import DataLoader

from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.deepspeed import framework
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import recovery, supported

import contract

VERSION = f"in deepspeed {deepspeed.__version__}"


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever adapter drives it."""
    contract.older_framework_is_refused(supported, deepspeed, monkeypatch)


@pytest.mark.parametrize("keyword", ["collate", "plain"])
def test_the_loader_of_training_data_makes_the_loader_that_is_kept(keyword: str) -> None:
    """The same arguments give the same batches, so that one loader can stand for those of all passes."""
    collate = {"collate_fn": list} if keyword == "collate" else {}
    outer = DeepSpeedDataLoader(
        list(range(10)), 3, False, -1, None, num_local_io_workers=0, dataloader_drop_last=True, **collate
    )
    ours: Any = framework._torch_loader(outer)
    native: Any = outer._create_dataloader()
    assert type(native) is DataLoader and outer.dataloader is native, f"passes begin otherwise {VERSION}"
    assert isinstance(ours.batch_sampler, type(native.batch_sampler))
    names = ("dataset", "batch_size", "sampler", "num_workers", "pin_memory", "drop_last", "collate_fn", "timeout")
    for name in (*names, "worker_init_fn", "generator", "prefetch_factor", "persistent_workers"):
        assert getattr(ours, name) == getattr(native, name), f"{name} differs {VERSION}"
    assert "_create_dataloader()" in inspect.getsource(DeepSpeedDataLoader.__iter__), (
        f"passes begin otherwise {VERSION}"
    )
    assert "next(self.data)" in inspect.getsource(DeepSpeedDataLoader.__next__), f"batches come otherwise {VERSION}"


def test_saving_and_loading_go_through_the_checkpoint_engine() -> None:
    """Every file but the recovery scripts, and those through a method of their own."""
    for method in (DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._save_zero_checkpoint):
        source = inspect.getsource(method)
        assert "self.checkpoint_engine.save(" in source and "torch.save(" not in source, f"{method} {VERSION}"
    for method in (DeepSpeedEngine._load_checkpoint, DeepSpeedEngine._get_all_zero_checkpoint_state_dicts):
        source = inspect.getsource(method)
        assert "self.checkpoint_engine" in source and "torch.load(" not in source, f"{method} {VERSION}"
    assert "self._copy_recovery_script(save_path)" in inspect.getsource(DeepSpeedEngine._save_zero_checkpoint)
    assert list(inspect.signature(TorchCheckpointEngine.__init__).parameters) == ["self", "config_params"]
    for name in ("save", "load"):
        assert list(inspect.signature(getattr(TorchCheckpointEngine, name)).parameters)[1] in ("state_dict", "path")


def test_a_universal_checkpoint_is_made_and_loaded_as_the_adapter_does_it() -> None:
    converter = inspect.getsource(ds_to_universal)
    used = {"input_folder", "output_folder", "num_extract_workers", "num_merge_workers", "inject_missing_state"}
    assert set(re.findall(r"args\.(\w+)", converter)) == {*used, "keep_temp_folder", "strict"}, f"options {VERSION}"
    assert 'for state in ("fp32", "exp_avg", "exp_avg_sq")' in converter, f"it converts other state {VERSION}"
    assert "self._config.load_universal_checkpoint" in inspect.getsource(DeepSpeedEngine.load_universal_checkpoint)


def test_the_engine_counts_as_the_adapter_reads() -> None:
    source = inspect.getsource(DeepSpeedEngine)
    for name in ("_unmanaged_backward_count", "_is_gradient_accumulation_boundary", "torch_autocast_z0_gradscaler"):
        assert f"self.{name} =" in source, f"{name} is gone {VERSION}"
    assert "self._config = config_class" in source, f"_config is gone {VERSION}"
    assert "self._param_dict = config" in inspect.getsource(DeepSpeedConfig.__init__), f"_param_dict is gone {VERSION}"
    step = inspect.getsource(DeepSpeedEngine._take_model_step)
    assert step.index("self.optimizer.step()") < step.index("lr_scheduler.step(") < step.index("self.global_steps += 1")


def test_the_optimizers_in_c_are_called_as_they_are_replayed() -> None:
    call = "adam_update(self.opt_id, state['step'], group['lr'], beta1, beta2, group['eps'],"
    assert call in inspect.getsource(DeepSpeedCPUAdam.step), f"DeepSpeedCPUAdam steps otherwise {VERSION}"
    call = "group['lr'], beta1, beta2, group['eps'], state['step'], self.adam_w_mode,"
    assert call in inspect.getsource(FusedAdam.step), f"FusedAdam steps otherwise {VERSION}"


# ---- Within a restartable block


def test_what_deepspeed_keeps_for_the_whole_process_is_reset() -> None:
    assert groups._WORLD_GROUP is None and parameter_offload.FWD_MODULE_STACK == [], f"it begins otherwise {VERSION}"
    kept = {name: vars(Init)[name] for name in (*recovery._COUNTERS, "apply_param_persistence")}
    assert not any(kept.values()), f"it begins otherwise {VERSION}"
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.add("a script's own", 3)
    for name in kept:
        setattr(Init, name, True)
    parameter_offload.FWD_MODULE_STACK.append(torch.nn.Identity())
    recovery.reset_deepspeed()
    assert {name: vars(Init)[name] for name in kept} == kept
    assert parameter_offload.FWD_MODULE_STACK == [] and tracker.get_states() == {}


def test_an_engine_is_destroyed_though_its_groups_are_gone() -> None:
    """ZeRO asks for its rank to print that it has removed its hooks, which would keep the weights."""

    class Engine:
        _take_model_step = rank = None

        def destroy(self) -> None:
            self.rank = deepspeed.comm.get_rank()

    engine = Engine()
    with recovery.watching_updates(engine, UpdateWatch()):
        pass
    assert not deepspeed.comm.is_initialized()
    recovery.reset_deepspeed()
    assert engine.rank == 0 and not deepspeed.comm.is_initialized()


def test_an_update_and_a_save_are_what_they_are_taken_for() -> None:
    assert "self._take_model_step(" in inspect.getsource(DeepSpeedEngine.step), f"another method updates {VERSION}"
    save, name = DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._get_zero_ckpt_name
    assert "if self.save_non_zero_checkpoint:" in inspect.getsource(save), f"another rank writes the model {VERSION}"
    assert "get_rank(group=self.optimizer.dp_process_group)" in inspect.getsource(name), f"named otherwise {VERSION}"
    of_stage_3 = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert "self.sub_group_process_groups[" in of_stage_3, f"stage 3 keeps its groups elsewhere {VERSION}"
    events = {"checkpoint_event_prologue", "checkpoint_event_epilogue"}
    assert events <= vars(DeepSpeedZeroOptimizer_Stage3).keys(), f"stage 3 gathers elsewhere {VERSION}"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"mesh_device": object()}, "a device mesh"),
        ({"mpu": object()}, "a model parallel unit"),
        ({"zero_quantized_gradients": lambda: True}, r"ZeRO\+\+"),
        ({"zero_hpz_partition_size": lambda: 2}, r"ZeRO\+\+"),
        ({"is_deepcompile_enabled": lambda: True}, "DeepCompile"),
    ],
)
def test_what_keeps_groups_of_its_own_is_refused_within_a_block(setting: dict[str, Any], named: str) -> None:
    plain = {
        "mesh_device": None,
        "mpu": None,
        "zero_quantized_gradients": lambda: False,
        "zero_hpz_partition_size": lambda: 1,
        "is_deepcompile_enabled": lambda: False,
    }
    recovery.require_reenterable(SimpleNamespace(**plain))
    with pytest.raises(UnsupportedSetting, match=f"{named}.* @restartable cannot make again"):
        recovery.require_reenterable(SimpleNamespace(**{**plain, **setting}))
