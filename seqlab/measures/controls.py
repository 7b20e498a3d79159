"""Exact controls: what theory says must come out of a model, whatever it has learnt.

Each is a relative size: zero means at most `ZERO` (a causal model's view of the future must be 0.0), non-zero at least
`NONZERO`. A control that does not hold means that the architecture is not what it claims to be.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqlab.measures.cost import state_bytes
from seqlab.model import SequenceModel
from seqlab.tasks.base import Task
from seqlab.types import Curve, Places, PRNGKey, Stream

ZERO, NONZERO = 1e-5, 1e-3
Expected = Literal["zero", "nonzero"]


@dataclass(frozen=True)
class Controls:
    """Runs every control that applies to a model, on a few test sequences:

    - future: the gradient of y_t with respect to x_s for s > t, t in the middle;
    - order: f(permuted x) against permuted f(x);
    - shift: outputs with all positions shifted by half the length, or as far as there are positions;
    - padding: outputs with padding around the sequence;
    - packing: outputs with another sequence before it in the same row;
    - token_by_token: the step form against the parallel form, for a causal model that has one.
    """

    task_type: ClassVar[type] = object
    sequences: int = 4

    def __call__(self, model: SequenceModel, task: Task, key: PRNGKey) -> dict[str, Curve]:
        data_key, order_key, probe_key = jax.random.split(key, 3)
        tokens = task.sample(data_key, self.sequences, "test").inputs
        length = tokens.shape[1]
        x = model.embed(tokens)
        y = model.hidden(x)
        half = length // 2
        padded, packed = in_company(model, x, half)
        order = jax.random.permutation(order_key, length)
        values = {
            "future": future(model, x, probe_key),
            "order": distance(model.hidden(x[:, order]), y[:, order]),
            "padding": distance(padded, y),
            "packing": distance(packed, y),
        }
        shift = free_positions(model, length)
        if shift:
            values["shift"] = distance(model.hidden(x, Places(jnp.arange(length)[None] + shift)), y)
        if state_bytes(model, 1) is not None:
            start = model.init_state(self.sequences, length)
            stepped = jax.lax.scan(model.step, start, tokens.T)[1].swapaxes(0, 1)
            values["token_by_token"] = distance(stepped, model.unembed(y))
        return {name: Curve(value) for name, value in values.items()}


def expected(model: SequenceModel, length: int) -> dict[str, Expected]:
    """What each control must show for this model on sequences of `length` tokens."""

    def nonzero_if(condition: bool) -> Expected:
        return "nonzero" if condition else "zero"

    outcomes: dict[str, Expected] = {
        "future": nonzero_if(not model.causal),
        "order": nonzero_if(model.sees_order),
        "padding": "zero",
        "packing": "zero",
    }
    if free_positions(model, length):
        outcomes["shift"] = nonzero_if(model.position.absolute)
    if state_bytes(model, 1) is not None:
        outcomes["token_by_token"] = "zero"
    return outcomes


def free_positions(model: SequenceModel, length: int) -> int:
    limit = model.position.limit
    return length // 2 if limit is None else min(length // 2, limit - length)


def holds(name: str, expectation: Expected, value: float) -> bool:
    """Whether a value is what was expected; NaN is neither zero nor non-zero."""
    if expectation == "nonzero":
        return value >= NONZERO
    return value == 0.0 if name == "future" else value <= ZERO


def future(model: SequenceModel, x: Stream, key: PRNGKey) -> Float[Array, ""]:
    """Share of the gradient of a random read-out of the middle position that falls on later positions."""
    middle = (x.shape[1] - 1) // 2
    probe = jax.random.normal(key, x[:, middle].shape)
    gradient = jax.grad(lambda x: (model.hidden(x)[:, middle] * probe).sum())(x)
    return jnp.linalg.norm(gradient[:, middle + 1 :]) / jnp.linalg.norm(gradient)


def in_company(model: SequenceModel, x: Stream, others: int) -> tuple[Stream, Stream]:
    """The outputs of x with `others` places of padding around it, and with a sequence of that length before it."""
    length, before = x.shape[1], others // 2
    padding = ((0, 0), (before, others - before), (0, 0))
    rows = jnp.concatenate([jnp.pad(x, padding), jnp.concatenate([x[:, ::-1][:, :others], x], axis=1)])
    alone = jnp.pad(jnp.ones(length, jnp.int32), padding[1])
    second = jnp.where(jnp.arange(others + length) < others, 1, 2)
    segments = jnp.stack([alone, second])
    y = model.hidden(rows, Places.of(jnp.repeat(segments, len(x), axis=0)))
    return y[: len(x), before : before + length], y[len(x) :, others:]


def distance(y: Array, reference: Array) -> Float[Array, ""]:
    """Relative L2 distance."""
    return jnp.linalg.norm(y - reference) / jnp.linalg.norm(reference)
