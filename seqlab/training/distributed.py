"""Several processes as one program: how they find each other, agree, and which of them writes.

Each runs the same command; what they compute together is the mesh's business. Where there is one process only, JAX is
not imported to find that out.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np

WORDS = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}


def initialize(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the other processes, if there are any: those named here or in the environment (JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES, JAX_PROCESS_ID), or those of a SLURM step, a TPU pod or an indexed Kubernetes job. With
    coordinator="auto" JAX looks for them where this function does not. Must come before anything is computed.

    Raises:
        ValueError: some of the three are given and not all, or the process is none of them.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    given = {word: os.environ.get(WORDS[word]) if value is None else value for word, value in given.items()}
    missing = [word for word, value in given.items() if value is None]
    named = given["coordinator"] != "auto" and len(missing) < len(given)
    if named and missing:
        word = missing[0]
        raise ValueError(f"distributed.{word} is missing; give coordinator, processes and process, or {WORDS[word]}=")
    if not named and given["coordinator"] != "auto" and not detected(os.environ):
        return
    import jax

    if jax.distributed.is_initialized():  # by the job before this one in a sweep
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # which other backends do not ask for
    if not named:
        jax.distributed.initialize()
        return
    count, index = int(given["processes"] or 0), int(given["process"] or 0)
    if not 0 <= index < count:
        raise ValueError(f"distributed.process={index} is none of the distributed.processes={count}; they count from 0")
    if count > 1:
        jax.distributed.initialize(str(given["coordinator"]), count, index)


def detected(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several processes that something else has started."""
    tasks = int(environment.get("SLURM_NTASKS", 1))
    # a batch script is a step of one task, whatever the job has
    slurm = "SLURM_PROCID" in environment and min(tasks, int(environment.get("SLURM_STEP_NUM_TASKS", tasks))) > 1
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    pod = "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    return slurm or pod or (indexed and find_spec("kubernetes") is not None)


def processes() -> int:
    """Those of one program; nobody has joined others without JAX."""
    return sys.modules["jax"].process_count() if "jax" in sys.modules else 1


def is_writer() -> bool:
    """Whether this process is the one that writes and speaks."""
    return processes() == 1 or sys.modules["jax"].process_index() == 0


def agree(value: int) -> int:
    """The largest of all processes' values, once all have called this: also a place to wait for each other."""
    if processes() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


@contextmanager
def writer_first() -> Iterator[bool]:
    """A block that all processes leave together; True in the one that writes.

    Raises:
        ValueError: in the others, where that one could not finish the block.
    """
    failed = True
    try:
        yield is_writer()
        failed = False
    finally:
        if agree(failed) and not failed:
            raise ValueError("the first process says why it stopped")
