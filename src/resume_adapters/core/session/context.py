"""The checkpoint that a training call resumes from, and the parts of it that this launch may load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.layout import CheckpointState, state_of
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.records import LaunchState, RankState
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.constants import CONSTANTS, is_captured
from resume_adapters.core.state.loading import copied
from resume_adapters.core.state.records import Source
from resume_adapters.core.state.sharded_digest import shard_digest, verify_shards
from resume_adapters.core.state.stateful import ModuleBuffers
from resume_adapters.core.state.weights import architecture, load_weights, require_architecture, resize, verify_weights
from resume_adapters.errors import NotRestored, StateMismatch

_THERE = (CheckpointState.COMMITTED, CheckpointState.SUPERSEDED)


class BestCheckpoint:
    """The best checkpoint that is there: retention protects what a manifest names."""

    def __init__(self, run: ResumableRun) -> None:
        self._run = run
        self._existing: str | None = None
        self._named: str | None = None

    def of_manifest(self, best: str | None, name: str, resumed: str | None) -> str | None:
        """Return the best checkpoint for a manifest: the one that the loop names, or the last one that was there.

        The save of the one that the loop names may have failed.

        Args:
            best: what the loop names.
            resumed: what the manifest of the checkpoint names from which this launch resumed.
        """
        for each in (self._named or resumed, best):
            if each is not None and state_of(self._run.storage, self._run.directory / each) in _THERE:
                self._existing = each
        self._named = best
        return name if best == name else self._existing


class RestoreContext:
    """What is being restored. A framework loads from it; the loop reads its own state of this rank in it.

    Args:
        run: the run, opened.
        kind: the record of the state that each rank saved.
        verify: compare what is restored with what was saved.
        rescale: what follows from a different global batch size; it knows the schedules.

    Attributes:
        rank_state: what this rank saved; ``None`` in a foreign checkpoint. Where fewer ranks saved, what another rank
            saved.
        launch: what the session had added to it, likewise.
        own_buffers: the ids of the buffers that are restored from what each rank has saved for itself.
    """

    def __init__(
        self,
        run: ResumableRun,
        checkpoint: Checkpoint,
        kind: type[RankState],
        *,
        verify: bool,
        rescale: Rescale,
    ) -> None:
        self.run = run
        self.checkpoint = checkpoint
        self.verify = verify
        self.rescale = rescale
        self.rank_state: Any = None
        self.launch: LaunchState | None = None
        self._kind = kind
        self._trees: list[Mapping[str, Any]] = []
        self.own_buffers: set[int] = set()
        self._proofs: list[Callable[[], None]] = []
        self._is_shared = False
        self._own_tree = (
            self.reader.rank_tree(self.ranks.rank % self.saved_by) if checkpoint.manifest is not None else None
        )
        if self._own_tree is not None:
            self.rank_state = kind.from_tree(self._own_tree, self.source)
            self.launch = LaunchState.from_tree(self._own_tree, self.source)

    @property
    def path(self) -> Path:
        """The checkpoint's path."""
        return self.checkpoint.path

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.checkpoint.step

    @property
    def ranks(self) -> Ranks:
        """The ranks of this launch."""
        return self.run.ranks

    @property
    def saved_by(self) -> int:
        """The number of ranks that saved; this launch's, for a foreign checkpoint."""
        manifest = self.checkpoint.manifest
        return manifest.world_size if manifest is not None else self.ranks.world_size

    @property
    def has_other_ranks(self) -> bool:
        """Whether a different number of ranks saved."""
        return self.saved_by != self.ranks.world_size

    @property
    def reader(self) -> CheckpointReader:
        """Reads what the checkpoint holds beside the framework's files."""
        return self.run.reader(self.checkpoint)

    @property
    def files(self) -> CheckpointFiles:
        """The checkpoint's files, the framework's among them."""
        return self.reader.files

    @property
    def source(self) -> Source:
        """Where this rank's state was read, for errors."""
        return self.reader.rank_source(self.ranks.rank % self.saved_by)

    def load_state(self, name: str, thing: Any, saved: Any) -> None:
        """Load a saved tree into what has ``load_state_dict()``, to be proven.

        It is given a copy: what trains neither lies in a mapped file nor is what proves the load.
        """
        thing.load_state_dict(copied(saved))
        self.add_proof(lambda: verify_equal(name, saved, thing.state_dict()))

    def add_proof(self, proof: Callable[[], None], *, is_shared: bool = False) -> None:
        """Remember how something that is loaded is compared with what was saved.

        Args:
            proof: raises :class:`NotRestored` where it differs.
            is_shared: each rank has a part of it, and all compare and load it together.
        """
        self._proofs.append(proof)
        self._is_shared |= is_shared

    def drop_proofs(self) -> None:
        """Forget what was saved: it is trained from now on."""
        self._proofs.clear()

    def prove(self) -> None:
        """Compare what was loaded with what was saved.

        Raises:
            NotRestored: it differs.
        """
        found = self._difference() if self.verify else None
        if found is not None:
            raise found

    def verify_loaded(self, load: Callable[[], None]) -> None:
        """Compare what was loaded with what was saved when the training goes on, and load it again if it differs.

        What a script or a hook does at the start of a training or of an epoch, such as to initialize weights, was done
        already when it was saved.

        Args:
            load: loads it once more.

        Raises:
            NotRestored: it differs after that, too.
        """
        found = self._difference()
        differs = found is not None
        if any(self.ranks.gather(differs)) if self._is_shared else differs:
            load()
            self.prove()
        if found is not None:
            logger.info(
                "This start had changed what was loaded; what it did was done already when that was saved, so it has "
                "been loaded again: %s",
                found,
            )

    def _difference(self) -> NotRestored | None:
        found = []
        for proof in self._proofs:
            try:
                proof()
            except NotRestored as error:  # the other proofs follow: ranks compare together
                found.append(error)
        return found[0] if found else None

    def all_rank_states(self) -> list[Any]:
        """Return what each rank saved, in rank order. Every rank asks."""
        return [self._kind.from_tree(tree, self.source) for tree in self._all_trees()]

    def _all_trees(self) -> list[Mapping[str, Any]]:
        manifest = self.checkpoint.manifest
        assert manifest is not None, "a foreign checkpoint holds no state of ranks"
        if not self._trees and manifest.ranks is not None:
            self._trees = [each or {} for each in self.ranks.gather(self._own_tree)]  # no rank sees the files of all
        elif not self._trees:
            self._trees = [self.reader.rank_tree(rank) or {} for rank in range(manifest.world_size)]
        return self._trees

    def require_parts(self) -> None:
        """Check the parts that this package saved for itself, as far as nothing else checks them.

        Raises:
            CheckpointDamaged: one is not what this package writes.
        """
        for name in ("trackers", "architecture"):
            found = self.reader.part(name)
            if found is not None and not isinstance(found, Mapping):
                raise self.source.damaged(f"{name}.json holds a {type(found).__name__}, expected a mapping")
        for name in ("buffers", "held_buffers"):
            found = self.reader.part(name)
            if found is not None and not ModuleBuffers.is_state(found):
                raise self.source.damaged(f"{name}.json does not hold tensors by name")
        constants = self.reader.part(CONSTANTS)
        if constants is not None and not is_captured(constants):
            raise self.source.damaged(f"{CONSTANTS}.json does not hold digests and tensors by name")
        shapes = self.launch.resized if self.launch is not None else None
        if any(size < 0 for each in (shapes or {}).values() for size in each):
            raise self.source.damaged("resized in the state of a rank holds a size below 0")

    def mismatch(self, differences: Sequence[str], why: str) -> StateMismatch:
        """Return the error that the checkpoint was saved with other settings than this launch has."""
        return StateMismatch(
            f"{self.path.name} was saved with {'; '.join(differences)}: {why}. Launch as before, or start another run "
            "directory",
            path=self.path,
            step=self.step,
        )

    def prepare_model(self, live: Mapping[str, Any], modules: Iterable[Any]) -> None:
        """Refuse a checkpoint of a different model, and give tensors the shapes that training had given them.

        Args:
            live: tensors with the names, dtypes and whole shapes of the model's.
            modules: the modules that are trained.

        Raises:
            StateMismatch: with the first tensors that differ; none was touched.
        """
        saved = self.reader.part("architecture")
        if saved is not None:
            require_architecture(saved, architecture(dict(live)), self.path)
        if self.launch is not None:
            resize(modules, self.launch.resized or {})

    def load_weights(self, model: Any, content: dict[str, Any]) -> None:
        """Load weights that were read from the checkpoint, whatever wraps the model, to be proven.

        Raises:
            StateMismatch: they do not fit the model.
        """
        load_weights(model, content, self.path)
        self.add_proof(lambda: verify_weights(model, content, self.path, self.own_buffers))

    def verify_shards(self, live: Callable[[], Mapping[str, Any]]) -> None:
        """Verify that sharded state came back, on whatever number of ranks. Every rank calls it.

        Args:
            live: returns the sharded state of now, by the name of the component.

        Raises:
            NotRestored: naming the first component that differs; on every rank.
        """
        if self.launch is not None:
            shares = self.ranks.gather(shard_digests(live(), self.ranks.rank))
            saved = [LaunchState.from_tree(tree, self.source).shard_digests for tree in self._all_trees()]
            verify_shards(saved, shares, self.path, self.step)


def shard_digests(state: Mapping[str, Any], rank: int) -> dict[str, int]:
    """Return a rank's shares of the digests of sharded state, by the name of the component."""
    return {name: shard_digest(component, is_first=rank == 0) for name, component in state.items()}


def setting_differences(
    saved: Mapping[str, int], here: Mapping[str, int], lacks: Callable[[str], Exception]
) -> list[str]:
    """Return in words which settings were different when a checkpoint was saved.

    Args:
        saved: the settings then.
        lacks: returns the error that a setting was not saved.
    """
    missing = [name for name in here if name not in saved]
    differing = [name for name in here if name in saved and saved[name] != here[name]]
    if missing and not differing:
        raise lacks(missing[0])
    return [f"{name} {saved[name]}, this launch has {here[name]}" for name in differing]
