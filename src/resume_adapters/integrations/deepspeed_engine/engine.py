"""State of a DeepSpeed engine, for every adapter that uses one: a loop of its own, or another framework.

All private names of the engine that we need are used in this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from resume_adapters.core.patching import replaced, wrapped
from resume_adapters.core.recovery.attempt import between_attempts, running_attempt
from resume_adapters.core.requirements import refuse
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.core.session.trace import StepTrace
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.sharded_digest import fingerprint
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.errors import NotRestored
from resume_adapters.integrations.deepspeed_engine import files, recovery, universal
from resume_adapters.integrations.deepspeed_engine.beta_powers import BetaPowers
from resume_adapters.integrations.deepspeed_engine.names import EngineRankState
from resume_adapters.integrations.deepspeed_engine.supported import require_supported

between_attempts(recovery.reset_deepspeed)


def attach_engine(engine: Any, run_directory: Path) -> EngineState:
    """Return the state of an engine that another framework drives.

    Raises:
        UnsupportedSetting: with one of the settings a resume cannot be exact.
    """
    require_supported(engine, str(run_directory))
    scatters = '"use_node_local_storage": true scatters a checkpoint over nodes, which only ResumeHooks supports'
    refuse({scatters: engine.use_node_local_storage()})
    return EngineState(engine)


_ELSEWHERE = ("optimizer.params.", "train_batch_size")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return found


class LossScale:
    """The state of the loss scalers: ZeRO's own, and autocast's.

    Args:
        engine: a DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def _scalers(self) -> dict[str, Any]:
        # ZeRO replaces its scaler when it loads, so look it up each time.
        optimizer = self._engine.optimizer
        held = {name: getattr(optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")}
        return {name: scaler for name, scaler in held.items() if scaler is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of each scaler."""
        numbers = {
            name: {key: value for key, value in vars(scaler).items() if value is None or isinstance(value, int | float)}
            for name, scaler in self._scalers().items()
        }
        autocast = self._engine.torch_autocast_z0_gradscaler
        return {**numbers, "autocast": autocast.state_dict() if autocast else None}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore them; DeepSpeed's own load leaves some out."""
        for name, scaler in self._scalers().items():
            vars(scaler).update(saved[name])
        if saved["autocast"] is not None:
            self._engine.torch_autocast_z0_gradscaler.load_state_dict(saved["autocast"])


class EngineState:
    """The state of a DeepSpeed engine.

    Args:
        engine: what ``deepspeed.initialize`` returned.

    Attributes:
        stage: ZeRO's stage.
        invariants: settings that a resume must find unchanged, by the names that users know.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.stage = int(engine.zero_optimization_stage())
        self.invariants = {"ZeRO stage": self.stage}
        self._powers = BetaPowers(engine.basic_optimizer)
        self._steps = engine.global_steps
        self._accumulation = int(engine.gradient_accumulation_steps())
        self._checked: set[str] = set()
        self._replaced = contextlib.ExitStack()
        self._attempt = running_attempt()
        if self._attempt is not None:
            self._replaced.enter_context(recovery.watching_updates(engine, self._attempt.updates))

    def foreign(self, within: str) -> files.ForeignCheckpoints:
        """Return what recognises the checkpoints of a bare framework, with DeepSpeed's files in a directory of them."""
        return files.ForeignCheckpoints(self.engine.dp_world_size, self.stage, within=within)

    def close(self) -> None:
        """Undo what was wrapped in the engine."""
        self._replaced.close()

    def arguments(self) -> dict[str, Any]:
        """Return what its configuration says, by dotted names, but for the optimizer's settings and derived sizes."""
        found = _flat(self.engine._config._param_dict)  # seam: deepspeed 0.19: a configuration may be a file
        return {name: each for name, each in found.items() if not name.startswith(_ELSEWHERE)}

    def settings(self) -> LaunchSettings:
        """Return what the engine was given; DeepSpeed decides which optimizer can load the state of which."""
        schedulers = [] if self.engine.lr_scheduler is None else [self.engine.lr_scheduler]
        return read_settings(
            self.arguments(), [self.engine.basic_optimizer], schedulers, [self.engine.module], is_fixed=False
        )

    def has_stepped(self, trace: StepTrace | None = None) -> bool:
        """Return whether the engine has counted a step since the last call; a step that overflowed counts.

        Args:
            trace: gets the norm of the gradients.
        """
        if trace is not None:
            trace.set_grad_norm(self.engine.get_global_grad_norm())
        before, self._steps = self._steps, self.engine.global_steps
        if self._steps == before:
            return False
        self._powers.observe(self.engine.was_step_applied())
        return True

    def is_accumulating(self) -> bool:
        """Return whether the engine is accumulating gradients, which it does not save."""
        engine = self.engine
        if not engine.managed_gradient_accumulation():
            return bool(engine._unmanaged_backward_count > 0)  # seam: deepspeed 0.19
        if engine._is_gradient_accumulation_boundary is not None:  # seam: deepspeed 0.19: set by the script
            return not engine._is_gradient_accumulation_boundary  # seam: deepspeed 0.19
        return bool(engine.micro_steps % engine.gradient_accumulation_steps() != 0)

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
        """Return tensors with the names, types and unsharded shapes of the model's, but without data."""
        named = [*self.engine.module.named_parameters(), *self.engine.module.named_buffers()]
        return {
            name: torch.empty(getattr(each, "ds_shape", each.shape), dtype=each.dtype, device="meta")
            for name, each in named
        }

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Return the context in which ``save_checkpoint`` writes data only, also where the engine's groups are gone.

        Raises:
            Exception: the first error of this rank's writes.
        """
        is_left = self._attempt is not None and self._attempt.is_left
        with recovery.saving_after_failure(self.engine) if is_left else contextlib.nullcontext(), self.data_only():
            yield

    @contextlib.contextmanager
    def data_only(self) -> Iterator[files.DataCheckpointEngine]:
        """Return the context in which ``save_checkpoint`` and ``load_checkpoint`` use data, and no pickled code.

        Raises:
            Exception: the first error of this rank's writes.
        """
        ours = files.DataCheckpointEngine(self.engine._config, self._checked)  # seam: deepspeed 0.19
        copies = wrapped(  # seam: deepspeed 0.19
            self.engine, "_copy_recovery_script", lambda native, path: ours.attempt(lambda: native(path))
        )
        with replaced(self.engine, "checkpoint_engine", ours), copies:
            yield ours
        ours.require_written()

    def rank_state(self) -> EngineRankState:
        """Return the state of this rank that DeepSpeed does not save."""
        accumulation = int(self.engine.gradient_accumulation_steps())
        windows, begun = divmod(self.engine.micro_steps, accumulation)
        return EngineRankState(
            windows=windows,
            powers=self._powers.state_dict(),
            random=get_cuda_rng_tracker().get_states(),
            accumulation=[self._accumulation, accumulation, begun],
        )

    def parts(self) -> dict[str, Stateful]:
        """Return the loss scale, and the buffers if DeepSpeed would load rank zero's on all ranks."""
        found: dict[str, Stateful] = {"scaler": LossScale(self.engine)}
        if self.stage < 3 and self.engine.world_size > 1 and any(True for _ in self.engine.module.buffers()):
            found["buffers"] = ModuleBuffers({0: self.engine.module})
        return found

    # ---- Loading

    def load(self, context: RestoreContext, directory: Path, tag: str) -> None:
        """Call ``load_checkpoint``, let it read data only, and verify what it loaded.

        Args:
            directory: DeepSpeed's ``load_dir``.
            tag: the directory in it.

        Raises:
            NotRestored: it loaded nothing or something else, or the ranks are at different steps.
        """
        with self.loading(context, directory / tag):
            self.engine.load_checkpoint(str(directory), tag=tag)

    @contextlib.contextmanager
    def loading(self, context: RestoreContext, shards: Path) -> Iterator[None]:
        """Return the context in which ``load_checkpoint`` reads data only; then verify what it loaded.

        Args:
            shards: the directory of DeepSpeed's files. What was sharded for other ranks is loaded converted.

        Raises:
            NotRestored: it loaded nothing or something else, or the ranks are at different steps.
        """
        checkpoint, engine = context.checkpoint, self.engine
        files.require_named(context.files)
        context.rescale.schedules.remember(engine.lr_scheduler)
        is_resharded = self.stage and context.has_other_ranks
        resharded = universal.resharding(context, engine, shards) if is_resharded else contextlib.nullcontext()
        with self.data_only() as checkpoint_engine, resharded:
            yield
        steps = context.ranks.gather(engine.global_steps if checkpoint_engine.read else None)
        if set(steps) != {checkpoint.step}:
            raise NotRestored(
                f"expected DeepSpeed to load step {checkpoint.step} from {checkpoint.path.name}, but the ranks are at "
                f"{steps} (None: nothing was loaded). Compare the ZeRO settings with those it was saved with",
                path=checkpoint.path,
                step=checkpoint.step,
            )
        if context.verify:
            self._verify(checkpoint_engine.read)
        self._steps = engine.global_steps
        if context.rank_state is None:
            self._powers.replay(None)

    def _verify(self, read: dict[str, Any]) -> None:
        engine = self.engine
        for name, content in read.items():
            if name.endswith("_optim_states.pt"):
                verify_equal("optimizer", content["optimizer_state_dict"], engine.optimizer.state_dict())
                continue
            live = engine.module_state_dict()
            # At stage 3 the optimizer's partitions hold the weights; modules hold them only at times.
            keys = content["buffer_names"] if self.stage == 3 else content["module"]
            saved = {key: content["module"][key] for key in keys}
            verify_equal("model", saved, {key: live[key] for key in keys})
            if content["optimizer"] is not None:
                verify_equal("optimizer", content["optimizer"], engine.optimizer.state_dict())
            if engine.lr_scheduler is not None:
                verify_equal("scheduler", content["lr_scheduler"], engine.lr_scheduler.state_dict())

    def add_proof(self, context: RestoreContext) -> None:
        """Have it proven that this rank holds what it holds now, which was verified when it was loaded.

        What DeepSpeed has read is not kept for it: it may be as large as all that trains.
        """
        if not context.verify:
            return
        before = self._digests()

        def proof() -> None:
            if self._digests() != before:
                raise NotRestored("what DeepSpeed had loaded has been changed since")

        context.add_proof(proof, is_shared=True)

    def _digests(self) -> list[str | None]:
        engine, optimizer = self.engine, self.engine.basic_optimizer
        buffers = [] if "buffers" in self.parts() else engine.module.named_buffers()
        held: list[Any] = [{name: each.detach() for name, each in (*engine.module.named_parameters(), *buffers)}]
        for group in optimizer.param_groups if optimizer is not None else ():
            held += [each.detach() for each in group["params"]]
            held.append({name: value for name, value in group.items() if name != "params"})
        held += optimizer.state.values() if optimizer is not None else ()
        if engine.lr_scheduler is not None:
            held.append(engine.lr_scheduler.state_dict())
        return [fingerprint(each) for each in held]

    def load_rank_state(self, state: EngineRankState) -> None:
        """Restore what :meth:`rank_state` returned."""
        engine, (given, found, begun) = self.engine, state.accumulation or (0, 0, 0)
        if given == self._accumulation != found:  # else this launch asks for another one
            engine.set_train_batch_size(found * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
        accumulation = int(engine.gradient_accumulation_steps())
        # Batches count as begun where one that is longer now was set just before the save.
        engine.micro_steps = state.windows * accumulation + (begun if accumulation == found else 0)
        self._powers.replay(state.powers)
        if state.random:
            get_cuda_rng_tracker().set_states(state.random)
