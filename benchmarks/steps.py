"""What a training step costs, and what the ways not taken would: `python -m benchmarks.steps [--write FILE] [NAME]`.

Every number is a ratio within one run: see `benchmarks/timing.py`. Run it from the root of a checkout.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hydra import compose, initialize_config_dir
from rich.table import Table

from benchmarks.startup import second_start
from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.commandline import CONFIG_PATH, Job
from seqlab.mixers.ssm import LRU
from seqlab.recurrence import linear_recurrence
from seqlab.run import build
from seqlab.tasks.base import Task
from seqlab.training.program import Program, TrainState
from seqlab.types import Batch

SMALL = ("model=transformer", "train.batch_size=16")
SCANS = ("sequential", "associative")


def composed(*overrides: str) -> tuple[Task, Program]:
    """The task and the program that the command line with these words would run."""
    with initialize_config_dir(CONFIG_PATH, version_base="1.3"):
        config = compose("config", list(overrides))
    return build(Job(config, {"model": "of the benchmark"}, Path(), ""))


def population(program: Program, members: int) -> TrainState:
    return program.init(np.arange(members), np.full(members, 1e-3))


def advancing(step: Callable[[Any], Any], states: Any) -> Callable[[], Any]:
    """A call that moves its own donated state on."""

    def call() -> Any:
        nonlocal states
        states = step(states)
        return states

    return call


def fused_steps(rounds: int) -> list[Table]:
    steps = 20
    task, program = composed(*SMALL)
    one_step = jax.jit(jax.vmap(program.train_step, in_axes=(0, None)), donate_argnums=0)

    def step_by_step(states: TrainState) -> TrainState:
        for _ in range(steps):
            states, _ = one_step(states, task)
        return states

    model = program.build(rngs=nnx.Rngs(0))
    # as much work as the program's own rule, whose mask needs the types of parameters, which nnx.Optimizer strips
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model: nnx.Module, optimizer: nnx.Optimizer, key: jax.Array):
        batch = task.sample(key, program.batch_size, "train")
        gradient = nnx.grad(lambda model: task.loss(model.predict(batch.inputs, batch.scored), batch)[0])(model)
        optimizer.update(model, gradient)

    def nnx_step_by_step() -> jax.Array:
        for i in range(steps):
            nnx_step(model, optimizer, jax.random.fold_in(jax.random.key(0), i))
        return model.embedding[...]

    candidates = {
        "fused: one call for 20 steps": advancing(
            lambda states: program.advance(states, task, jnp.int32(steps))[0], population(program, 1)
        ),
        "jax.jit, a call a step": advancing(step_by_step, population(program, 1)),
        "nnx.jit, a call a step": nnx_step_by_step,
    }
    return [ratios(f"A step, {' '.join(SMALL)}", take_turns(candidates, rounds, steps))]


def sampling(rounds: int) -> list[Table]:
    steps, samples = 5, 200  # a sample alone is too short to be timed a few at a time

    def compare(name: str) -> Table:
        task, program = composed(f"task={name}", "model=transformer")

        @jax.jit
        def sample(key: jax.Array) -> jax.Array:
            def body(step, total):
                batch = task.sample(jax.random.fold_in(key, step), program.batch_size, "train")
                return total + sum(leaf.sum().astype(jnp.float32) for leaf in jax.tree.leaves(batch))

            return jax.lax.fori_loop(0, samples, body, jnp.float32(0))

        train = advancing(lambda states: program.advance(states, task, jnp.int32(steps))[0], population(program, 1))
        seconds = take_turns({"step": train, "sampling": partial(sample, jax.random.key(0))}, rounds)
        each = {"step": seconds["step"] / steps, "sampling": seconds["sampling"] / samples}
        return ratios(f"Sampling, task={name} model=transformer", each, Goal("sampling", 0.02))

    return [compare(name) for name in ("mqar", "roles", "text")]


def scans(rounds: int) -> list[Table]:
    batch, length, states, width = 16, 512, 64, 64
    keys = jax.random.split(jax.random.key(0), 3)
    decay = (jnp.full(states, 0.9), jnp.full(states, 0.1))
    drive = tuple(jax.random.normal(key, (length, batch, states)) for key in keys[:2])
    start = (jnp.zeros((batch, states)),) * 2
    x = jax.random.normal(keys[2], (batch, length, width))
    mixers = {scan: nnx.split(LRU(width, state_size=states, scan=scan, rngs=nnx.Rngs(0))) for scan in SCANS}

    def recurrence(scan: str, decay: Any, drive: Any) -> Any:
        def coefficients(drive: Any) -> Any:
            return jax.tree.map(lambda part, d: jnp.broadcast_to(part, d.shape), decay, drive), drive

        return linear_recurrence(coefficients, start, drive, scan=scan)[1]

    def mixer(scan: str, params: nnx.State, x: jax.Array) -> Any:
        return nnx.merge(mixers[scan][0], params)(x)

    def compare(what: str, function: Callable[..., Any], arguments: Any, backward: bool) -> Table:
        def timed(scan: str) -> Callable[[], object]:
            def scalar(*arguments: Any) -> Any:
                # a square, since the gradient of a sum would not need the states
                return sum((leaf**2).sum() for leaf in jax.tree.leaves(function(scan, *arguments)))

            of = jax.grad(scalar, argnums=(0, 1)) if backward else partial(function, scan)
            return partial(jax.jit(of), *arguments)

        candidates = {scan: timed(scan) for scan in SCANS}
        passes = "forward and backward" if backward else "forward"
        shape = f"B={batch} T={length} N={states} complex"
        return ratios(f"{what}, {passes}, {shape}", take_turns(candidates, rounds))

    kinds = (
        ("Linear recurrence", recurrence, (decay, drive)),
        ("LRU mixer", mixer, (mixers["sequential"][1], x)),
    )
    return [compare(*kind, backward) for kind in kinds for backward in (False, True)]


def scored_positions(rounds: int) -> list[Table]:
    overrides = ("model=transformer", "task.vocab_size=8192", "train.batch_size=16")
    task, program = composed(*overrides)
    params = nnx.state(program.build(rngs=nnx.Rngs(0)))
    batch = task.sample(jax.random.key(0), program.batch_size, "train")
    rows = jnp.arange(program.batch_size)[:, None]

    def at_scored(params: nnx.State) -> jax.Array:
        return task.loss(program.model(params).predict(batch.inputs, batch.scored), batch)[0]

    def everywhere(params: nnx.State) -> jax.Array:
        spread_out = jnp.zeros_like(batch.inputs, jnp.float32).at[rows, batch.scored].set(batch.weights)
        targets = jnp.zeros_like(batch.inputs).at[rows, batch.scored].set(batch.targets)
        whole = Batch(batch.inputs, batch.scored, targets, spread_out, {})
        return task.loss(program.model(params)(batch.inputs), whole)[0]

    candidates = {
        "logits at scored positions": partial(jax.jit(jax.grad(at_scored)), params),
        "logits at every position": partial(jax.jit(jax.grad(everywhere)), params),
    }
    return [ratios(f"Loss and gradient, {' '.join(overrides)}", take_turns(candidates, rounds))]


BENCHMARKS = {
    "fused_steps": fused_steps,
    "sampling": sampling,
    "scans": scans,
    "scored_positions": scored_positions,
    "second_start": second_start,
}


if __name__ == "__main__":
    main("What a step costs", BENCHMARKS)
