"""Does everything work on this machine? `python -m seqlab.devices` says so, on a CPU in about two minutes.

Exit code 0 where each line is ok, 1 where one FAILED; one that fails does not stop the rest.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hydra import compose, initialize_config_dir
from jaxtyping import Array
from rich.console import Console
from rich.markup import escape

from seqlab.commandline import CONFIG_PATH, Job, fill_pattern
from seqlab.recurrence import linear_recurrence
from seqlab.run import build, use_compilation_cache
from seqlab.training.memory import bytes_of_memory
from seqlab.training.mesh import Layout
from seqlab.training.program import ALIVE, COMPUTE_DTYPES

TINY = ["model.width=16", "task.length=32", "task.pairs=4", "train.batch_size=8", "train.steps=2"]
Check = Callable[[], str]


def main() -> None:
    models = sorted(path.stem for path in (Path(CONFIG_PATH) / "model").glob("*.yaml"))
    parser = argparse.ArgumentParser(prog="python -m seqlab.devices", description="Does everything work here?")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="train these alone; none: all")
    chosen = parser.parse_args().models or models
    for model in chosen:
        if model not in models:
            parser.error(f"{model} is unknown; use {', '.join(models)}")
    use_compilation_cache()
    sys.exit(report({**machine(), **{f"train {model}": partial(train, model) for model in chosen}}))


def machine() -> dict[str, Check]:
    """What does not depend on a model."""
    products = {f"matmul {dtype}": partial(matmul, dtype) for dtype in COMPUTE_DTYPES}
    return {"backend": backend, "memory": memory, "mesh": mesh, **products, "scan": scan}


def report(checks: dict[str, Check]) -> int:
    """Runs all, prints a line for each, and returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    failed = 0
    for name, check in checks.items():
        console.print(f"{name:24}", end="")  # which it is, if it hangs
        start = time.perf_counter()
        try:
            outcome, said = "[green]ok    [/]", check()
        except Exception as error:  # whatever it is, it is what is looked for
            failed += 1
            told = next(iter(str(error).strip().splitlines()), "")
            outcome, said = "[red]FAILED[/]", f"{type(error).__name__}: {told}"
        console.print(f"{outcome} {time.perf_counter() - start:5.1f} s  {escape(said)}")
    console.print(f"{failed} of {len(checks)} FAILED" if failed else f"all {len(checks)} ok")
    return int(failed > 0)


def backend() -> str:
    devices = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    return (
        f"{jax.default_backend()}: {len(devices)} x {kinds}, {jax.process_count()} process(es), jax {jax.__version__}"
    )


def memory() -> str:
    size = bytes_of_memory()
    return "the backend does not say" if size is None else f"{size / 2**30:.1f} GiB a device"


def mesh() -> str:
    """A sum over all devices, as `mesh=auto` would spread it."""
    count = jax.device_count()
    layout = Layout.over(count, members=1, examples=count, splits=[1])
    total = jax.jit(lambda x: layout.spread(x).sum())(np.ones(count, np.float32))
    _agrees(total, float(count), 0.0)
    return f"{count} devices as {layout}" if count > 1 else "one device, no mesh"


def matmul(dtype: str, size: int = 1024) -> str:
    """At the highest precision the platform has for the type, against float64 on the host."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    product = jax.jit(partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32))
    seconds, found = _timed(product, a, b)
    # a sum of `size` products in float32, which are exact but for one rounding each
    error = _agrees(found, np.asarray(a, np.float64) @ np.asarray(b, np.float64), 1e-5)
    return f"{2 * size**3 / seconds / 1e9:,.0f} GFLOP/s, off by {error:.1e}"


def scan(length: int = 1024) -> str:
    """A recurrence step by step and in parallel, against each other and float64 on the host."""
    decay = jax.random.uniform(jax.random.key(0), (length, 8, 128), minval=0.5, maxval=0.99)
    drive = jax.random.normal(jax.random.key(1), decay.shape)
    expected, state = np.empty(decay.shape), np.zeros(decay.shape[1:])
    for t, (a, b) in enumerate(zip(np.asarray(decay, np.float64), np.asarray(drive, np.float64), strict=True)):
        expected[t] = state = a * state + b
    said = []
    for form in ("sequential", "associative"):
        run = jax.jit(partial(linear_recurrence, lambda drive: drive, jnp.zeros(decay.shape[1:]), scan=form))
        seconds, (_, found) = _timed(run, (decay, drive))
        said.append(f"{form} {1e3 * seconds:.2f} ms, off by {_agrees(found, expected, 1e-5):.1e}")
    return "; ".join(said)


def train(model: str) -> str:
    """Two steps of a tiny one on associative recall, built as `python -m seqlab.run` builds it."""
    # on a CPU compiling would take most of the time, and little can go wrong
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    with initialize_config_dir(CONFIG_PATH, version_base="1.3"):
        config = compose("config", [f"model={model}", "population.seeds=2", *TINY])
        fill_pattern(config)
    task, program = build(Job(config, {"model": model, "task": "mqar", "measure": "recall"}, Path(), ""))
    states = program.init(np.arange(2), np.full(2, program.optimizer.learning_rate))
    program, advance = program.compiled(states, task)
    losses = []
    for _ in range(2):
        states, metrics = advance(states, task, np.int32(1))
        losses.append(np.asarray(metrics["loss"]).mean())
    if not np.isfinite(losses).all() or (np.asarray(states.diverged_at) != ALIVE).any():
        raise FloatingPointError(f"a loss of {losses[0]}, then {losses[1]}")
    return f"loss {losses[0]:.3f}, then {losses[1]:.3f}"


def _timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """The shortest of three calls, in seconds, after one that compiles; and the result."""
    result = jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def _agrees(found: Array | np.ndarray, expected: np.ndarray | float, tolerance: float) -> float:
    """The largest error relative to the largest number expected.

    Raises:
        ArithmeticError: it is above the tolerance, or not a number.
    """
    error = float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())
    if not error <= tolerance:
        raise ArithmeticError(f"off by {error:.1e}, where {tolerance:.0e} is allowed")
    return error


if __name__ == "__main__":
    main()
