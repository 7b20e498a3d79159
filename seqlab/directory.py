"""A run's directory: which configuration and data it belongs to, and who is at work in it."""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from seqlab.commandline import Job, leaves, part_of_the_run

if TYPE_CHECKING:
    from seqlab.tasks.base import Task

CONFIG_FILE, LOCK_FILE = "config.yaml", "lock"
DATA = "data_digest"
"""In the saved configuration: which text it was."""


def check_directory(job: Job) -> None:
    """Raises ValueError where somebody is at work in the run's directory, or it holds another configuration's run."""
    file = job.directory / CONFIG_FILE
    if set("[]*?") & set(str(job.directory.absolute())):  # Orbax would take it for a pattern and lose the checkpoint
        raise ValueError(f"{job.directory.absolute()} has one of []*? in it, with which no checkpoint can be kept")
    if (job.directory / LOCK_FILE).exists():
        lock = os.open(job.directory / LOCK_FILE, os.O_RDONLY)
        try:
            _take(lock, job.directory, fcntl.LOCK_SH)
        finally:
            os.close(lock)
    if job.config.overwrite or not file.exists():
        return
    before, now = (dict(leaves(OmegaConf.to_container(tree))) for tree in (saved(job.directory), resolved(job)))
    before.pop(DATA, None)
    changed = [f"{k} was {before.get(k)} and is {now.get(k)}" for k in {**before, **now} if before.get(k) != now.get(k)]
    if changed:
        raise ValueError(f"{job.directory} was made with another config ({'; '.join(changed)}); use overwrite=true")


@contextmanager
def locked(job: Job) -> Iterator[None]:
    """Makes the run's directory, which until the end is this process's alone; a kill frees it.

    Raises:
        ValueError: another process is at work in it, or it cannot be written.
    """
    with _writing(job):
        job.directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(job.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(lock, job.directory, fcntl.LOCK_EX)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def _take(lock: int, directory: Path, kind: int) -> None:
    deadline = time.monotonic() + 0.5  # another process may be looking whether it is free
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(lock, 1000, 0).decode()
                raise ValueError(f"{directory} is in the hands of {holder}; wait for it or stop it") from None
        time.sleep(0.05)


def prepare_directory(job: Job, task: "Task") -> None:
    """Writes the configuration into the run's directory, after emptying it where it is to be overwritten.

    Raises:
        ValueError: it holds a run on other data, or cannot be written.
    """
    file = job.directory / CONFIG_FILE
    config = resolved(job)
    config[DATA] = digest(task)
    with _writing(job):
        if job.config.overwrite:
            for path in job.directory.iterdir():
                if path.name != LOCK_FILE:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not file.exists():
            unfinished = file.with_suffix(".tmp")
            OmegaConf.save(config, unfinished)
            unfinished.replace(file)  # whole or not at all
            return
    if OmegaConf.select(saved(job.directory), DATA) != config[DATA]:
        raise ValueError(f"{job.directory} was trained on other data than its task holds now; use overwrite=true")


def saved(directory: Path) -> DictConfig:
    """The configuration that a run was made with.

    Raises:
        ValueError: it cannot be read.
    """
    file = directory / CONFIG_FILE
    try:
        config = OmegaConf.load(file)
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}); use overwrite=true to start anew") from error
    if not isinstance(config, DictConfig) or not config:
        raise ValueError(f"{file} is damaged (it says nothing); use overwrite=true to start anew")
    return config


@contextmanager
def _writing(job: Job) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"runs={job.config.runs}: {error.filename} cannot be written ({error.strerror})"
        raise ValueError(f"{where}; use runs=DIRECTORY that can") from error


def resolved(job: Job) -> DictConfig:
    """What the run is made of, with every interpolation filled in."""
    config = OmegaConf.masked_copy(job.config, [str(key) for key in job.config if part_of_the_run(str(key))])
    OmegaConf.resolve(config)
    del config.population.max_parallel
    return config


def digest(task: "Task") -> str | None:
    """What tells the data that a task holds (a text) from others; None for a task that makes its own."""
    import jax

    held = jax.tree.leaves(task)
    if not held:
        return None
    parts = [repr(task.vocab.words).encode(), *(np.asarray(array).tobytes() for array in held)]
    return sha256(b"".join(parts)).hexdigest()[:16]
