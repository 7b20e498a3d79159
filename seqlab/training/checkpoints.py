"""Checkpoints of a population through Orbax, each with digests of all that it holds: what is loaded is what was saved.

A checkpoint is the directory `<step>/`. It is written under another name, digested, and renamed, so that a kill at any
moment leaves a whole one or none.
"""

import errno
import json
import logging
import os
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from seqlab.training.distributed import writer_first
from seqlab.training.mesh import ONE_DEVICE, Layout
from seqlab.training.program import TrainState

logging.getLogger("absl").setLevel(logging.CRITICAL)  # where Orbax repeats, at length, what it raises

DIGESTS = "digests.json"
UNFINISHED, DAMAGED = ".unfinished", ".damaged"
SECONDS = "train_seconds"


class DamagedError(Exception):
    """A checkpoint is not what was saved: which file, and how."""


class Checkpoints:
    """The checkpoints of one run; the newest few are kept.

    They hold whole arrays, so that what was written on some devices can be read on others. Of several processes, which
    must share the directory, all call every method and the first one writes.
    """

    def __init__(self, directory: Path, layout: Layout = ONE_DEVICE, keep: int = 2):
        self._directory, self._layout, self._keep = directory.absolute(), layout, keep
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, states: TrainState, train_seconds: float) -> None:
        """Writes in the background, from a copy that the next donated step cannot overwrite; at once where several
        processes must meet, as Orbax lets them.

        Raises:
            OSError: the save before this one could not be written.
        """
        self.wait()
        arrays = {**self._layout.gather(_named(states)), SECONDS: np.array(train_seconds, np.float64)}
        self._writing = self._writer.submit(self._write, step, arrays)
        if jax.process_count() > 1:
            self.wait()

    def check(self) -> None:
        """Raises OSError where a save has failed since."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises OSError where it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def restore(self, like: TrainState) -> tuple[TrainState, float] | None:
        """The newest state that is whole, shaped `like` this one (which may be abstract), and the seconds trained until
        then; None where there is no checkpoint. Those that are damaged are named on standard error.

        Raises:
            ValueError: there are checkpoints and all are damaged, or one is of another shape or type.
        """
        damaged = []
        for step in sorted(self._steps(), reverse=True):
            try:
                found = self._load(step, like)
            except DamagedError as error:
                _say(f"checkpoint {step} of {self._directory} is damaged: {error}")
                damaged.append(step)
                continue
            if damaged:
                _say(f"falling back to step {step}")
            return found
        if damaged:
            raise ValueError(f"{self._directory} has no checkpoint that is whole; use overwrite=true to start anew")
        return None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()
        self.wait()

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._directory.glob("*") if path.name.isdigit()]

    def _write(self, step: int, arrays: dict[str, np.ndarray]) -> None:
        broken = [name for name, array in arrays.items() if _trained(name) and not _finite(array)]
        if broken:
            _say(f"no checkpoint of step {step}: {broken[0]} is not finite")
            return
        unfinished = self._directory / f"{step}{UNFINISHED}"
        try:
            with writer_first() as writer:
                if writer:
                    self._clear_away_unfinished()
                    self._check_room(arrays)
            ocp.save(str(unfinished), arrays)
            with writer_first() as writer:
                if writer:
                    self._commit(step, unfinished, arrays)
        except (OSError, ValueError) as error:  # Orbax says in a ValueError that a disk is full
            self._clear_away_unfinished()
            told = error.strerror if isinstance(error, OSError) else None
            reason = told or str(error).partition(" [")[0].rpartition(": ")[2]
            where = f"checkpoint {step} cannot be written to {self._directory}"
            raise OSError(f"{where}: {reason}; earlier ones are untouched") from error

    def _check_room(self, arrays: dict[str, np.ndarray]) -> None:
        """Raises OSError where there is no room; when Orbax finds that out, its abandoned tasks tell it at length."""
        self._directory.mkdir(parents=True, exist_ok=True)
        newest = max(self._steps(), default=0)
        files = [path.stat() for path in (self._directory / str(newest)).rglob("*") if path.is_file()]
        needed = max(sum(array.nbytes + 1024 for array in arrays.values()), sum(512 * file.st_blocks for file in files))
        if shutil.disk_usage(self._directory).free < needed + 2**16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _commit(self, step: int, unfinished: Path, arrays: dict[str, np.ndarray]) -> None:
        leaves = {name: [array.dtype.name, array.shape, _digest(array)] for name, array in arrays.items()}
        _write_digests(unfinished, {"files": _file_digests(unfinished), "leaves": leaves})
        for void in self._steps():
            if void >= step:  # it is damaged, or a later step of such a one: the run went on from before it
                _move_aside(self._directory / str(void))
        unfinished.rename(self._directory / str(step))
        for old in sorted(self._steps())[: -self._keep]:
            shutil.rmtree(self._directory / str(old))

    def _clear_away_unfinished(self) -> None:
        for path in self._directory.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _load(self, step: int, like: TrainState) -> tuple[TrainState, float]:
        directory = self._directory / str(step)
        digests = _read_digests(directory)
        shapes = {**jax.eval_shape(_named, like), SECONDS: jax.ShapeDtypeStruct((), np.float64)}
        expected = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        _check_kinds(
            directory, {name: (kind, tuple(shape)) for name, (kind, shape, _) in digests["leaves"].items()}, expected
        )
        loaded = ocp.load(str(directory), expected)
        for name, (*_, digest) in digests["leaves"].items():
            if _digest(np.asarray(loaded[name])) != digest:
                raise DamagedError(f"{directory}: {name} is not what was saved")
        leaves = [
            jax.random.wrap_key_data(jnp.asarray(loaded[name])) if _is_key(leaf) else loaded[name]
            for name, leaf in _leaves(like)
        ]
        states = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return self._layout.place(states), float(loaded[SECONDS])


def _file_digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != DIGESTS)
    return {path.relative_to(directory).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def _write_digests(directory: Path, digests: dict[str, Any]) -> None:
    """With a digest of themselves in the first line."""
    content = json.dumps(digests, indent=1)
    with (directory / DIGESTS).open("w") as file:
        file.write(f"{sha256(content.encode()).hexdigest()}\n{content}")
        file.flush()
        os.fsync(file.fileno())


def _read_digests(directory: Path) -> dict[str, Any]:
    """The digests of a checkpoint all of whose files are as they were written.

    Raises:
        DamagedError: one is not.
    """
    try:
        own, _, content = (directory / DIGESTS).read_bytes().partition(b"\n")
    except OSError as error:
        raise DamagedError(f"{directory / DIGESTS}: {error.strerror}") from error
    if sha256(content).hexdigest().encode() != own:
        raise DamagedError(f"{directory / DIGESTS} is not as it was written")
    digests = json.loads(content)
    for name, digest in digests["files"].items():
        try:
            found = sha256((directory / name).read_bytes()).hexdigest()
        except OSError as error:
            raise DamagedError(f"{directory / name}: {error.strerror}") from error
        if found != digest:
            raise DamagedError(f"{directory / name} is not as it was written")
    return digests


def _check_kinds(directory: Path, found: dict[str, tuple], expected: dict[str, np.ndarray]) -> None:
    """Raises ValueError where arrays are missing, too many, or of another type or shape."""
    wanted = {name: (array.dtype.name, array.shape) for name, array in expected.items()}
    differences = [
        f"{name} is {_kind(found.get(name))} in the checkpoint and {_kind(wanted.get(name))} in this run"
        for name in {**found, **wanted}
        if found.get(name) != wanted.get(name)
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        listed = "; ".join(differences[:3])
        raise ValueError(f"{directory} is of another model: {listed}{more}; use overwrite=true to start anew")


def _kind(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]}[{','.join(map(str, kind[1]))}]"


def _move_aside(path: Path) -> None:
    """Renames a damaged checkpoint to make room for another of its step; nothing is deleted."""
    names = (path.with_name(f"{path.name}{DAMAGED}{number or ''}") for number in range(sys.maxsize))
    path.rename(next(name for name in names if not name.exists()))


def _leaves(states: TrainState) -> list[tuple[str, Any]]:
    """Arrays, or their shapes where `states` is abstract."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(states)]


def _named(states: TrainState) -> dict[str, jax.Array]:
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in _leaves(states)}


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _trained(name: str) -> bool:
    return name.startswith((".params", ".opt_state"))


def _finite(array: np.ndarray) -> bool:
    return not np.issubdtype(array.dtype, np.inexact) or bool(np.isfinite(array).all())


def _digest(array: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
