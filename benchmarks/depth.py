"""What scanning over stacked layers saves: `python -m benchmarks.depth [--write FILE] [NAME]`.

Every number is a ratio within one run: see `benchmarks/timing.py`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from rich.table import Table

from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.mixers.attention import Attention
from seqlab.mixers.ssm import LRU
from seqlab.mlp import MLP
from seqlab.model import SequenceModel

BATCH, LENGTH, VOCABULARY, WIDTH = 16, 256, 256, 128
MIXERS = {"transformer": partial(Attention, heads=4), "ssm": partial(LRU, state_size=WIDTH)}


def build(mixer: Callable[..., Any], depth: int) -> SequenceModel:
    return SequenceModel(VOCABULARY, width=WIDTH, depth=depth, mixer=mixer, mlp=MLP, rngs=nnx.Rngs(0))


def loss(model: SequenceModel, tokens: jax.Array, scanned: bool) -> jax.Array:
    if scanned:
        logits = model(tokens)
    else:
        graph, stacked = nnx.split(model.blocks)
        x = model.embed(tokens)
        for i in range(model.repeats):
            for block in nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked)):
                x = block(x)
        logits = model.unembed(model.norm(x))
    return -jax.nn.log_softmax(logits)[..., 0].mean()


def step(mixer: Callable[..., Any], depth: int, scanned: bool) -> tuple[Any, Any, Any]:
    """A compilable step of gradient descent and its arguments."""
    graph, params = nnx.split(build(mixer, depth))
    tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, VOCABULARY)

    def update(params: nnx.State, tokens: jax.Array) -> nnx.State:
        gradient = jax.grad(lambda params: loss(nnx.merge(graph, params), tokens, scanned))(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient)

    return jax.jit(update), params, tokens


def scanned_layers(rounds: int) -> list[Table]:
    def compare(name: str, depth: int) -> Table:
        def timed(scanned: bool) -> Callable[[], Any]:
            update, params, tokens = step(MIXERS[name], depth, scanned)
            return lambda: update(params, tokens)

        candidates = {"unrolled": timed(False), "scan over layers": timed(True)}
        question = f"A step of {depth} layers with MLP, {name}, B={BATCH} T={LENGTH} D={WIDTH}"
        return ratios(question, take_turns(candidates, rounds), Goal("scan over layers", 1 / 2.7))

    return [compare(name, 8) for name in MIXERS]


def compiling(rounds: int) -> list[Table]:
    """Seconds to compile a step, without the persistent cache."""

    def once(name: str, depth: int) -> float:
        update, *arguments = step(MIXERS[name], depth, True)
        lowered = update.lower(*arguments)
        start = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - start

    def compare(name: str) -> Table:
        seconds = {f"{depth} layers": np.array([once(name, depth) for _ in range(min(rounds, 3))]) for depth in (2, 24)}
        return ratios(f"Compiling a step, {name}", seconds, Goal("24 layers", 1.5))

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # what was configured before is forgotten only so
    return [compare(name) for name in MIXERS]


BENCHMARKS = {"scanned_layers": scanned_layers, "compiling": compiling}

if __name__ == "__main__":
    main("Depth", BENCHMARKS)
