"""The pure training program: a population of models as one state, advanced many steps by one compiled call.

Everything is a function of the state and the task: data are drawn on the device from `fold_in(key, step)`, so the state
alone says what comes next. The program asks neither which task nor which architecture it trains.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jaxtyping import Array, Float, Int, UInt

from seqlab.measures.base import Measure
from seqlab.model import SequenceModel, compute_in
from seqlab.tasks.base import Task
from seqlab.types import Batch, Curve, PRNGKey, Split

Metrics = dict[str, Float[Array, "..."]]

ALIVE = -1
COMPUTE_DTYPES = ("float32", "bfloat16")


@struct.dataclass
class TrainState:
    """All that training carries from one step to the next, for one member; a population has a leading axis P."""

    step: Int[Array, "..."]
    key: PRNGKey
    learning_rate: Float[Array, "..."]
    params: nnx.State
    opt_state: optax.OptState
    diverged_at: Int[Array, "..."]
    """The step whose loss or gradient was not finite, from which the member stands still; `ALIVE` if none was."""


@runtime_checkable
class Optimizer(Protocol):
    learning_rate: float

    def transformation(self, steps: int) -> optax.GradientTransformation:
        """The update for a peak learning rate of 1."""
        ...


@dataclass(frozen=True)
class Program:
    """What is trained and how; its methods are compiled functions of whole populations.

    Args:
        build: makes a model from `rngs=`.
        optimizer: gives the update rule for a run of `steps`.
        compute_dtype: the forward pass's type; parameters and recurrences stay in float32.
    """

    build: Callable[..., SequenceModel]
    optimizer: Optimizer
    steps: int
    batch_size: int
    compute_dtype: str = "float32"

    def __post_init__(self):
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(f"train.compute_dtype={self.compute_dtype} is unknown; use {' or '.join(COMPUTE_DTYPES)}")

    @cached_property
    def abstract_model(self) -> SequenceModel:
        """The model with shapes in the place of arrays: what can be known of it without computing."""
        return nnx.eval_shape(lambda: self.build(rngs=nnx.Rngs(0)))

    @cached_property
    def graph(self) -> nnx.GraphDef[SequenceModel]:
        return nnx.graphdef(self.abstract_model)

    @cached_property
    def update_rule(self) -> optax.GradientTransformation:
        return self.optimizer.transformation(self.steps)

    def model(self, params: nnx.State, dtype: str = "float32") -> SequenceModel:
        """One member's model."""
        return nnx.merge(self.graph, compute_in(jnp.dtype(dtype), params))

    def init(self, seeds: Int[Array | np.ndarray, " P"], learning_rates: Float[Array | np.ndarray, " P"]) -> TrainState:
        """A population before its first step, one member for each pair (seed, learning rate)."""

        def member(seed: UInt[Array, ""], learning_rate: Float[Array, ""]) -> TrainState:
            params_key, key = jax.random.split(jax.random.key(seed))
            params = nnx.state(self.build(rngs=nnx.Rngs(params_key)))
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                key=key,
                learning_rate=learning_rate,
                params=params,
                opt_state=self.update_rule.init(params),
                diverged_at=jnp.full((), ALIVE, jnp.int32),
            )

        return jax.jit(jax.vmap(member))(jnp.asarray(seeds, jnp.uint32), jnp.asarray(learning_rates, jnp.float32))

    def score(self, params: nnx.State, task: Task, batch: Batch, key: PRNGKey | None) -> tuple[Array, Metrics]:
        """The task's loss and metrics for one member; `key` turns dropout on."""
        model = self.model(params, self.compute_dtype)
        return task.loss(model.predict(batch.inputs, batch.scored, batch.segments, key), batch)

    def train_step(self, state: TrainState, task: Task) -> tuple[TrainState, Metrics]:
        """One step of one member. A step that is not finite changes nothing but the member's mark."""
        sample_key, dropout_key = jax.random.split(jax.random.fold_in(state.key, state.step))
        batch = task.sample(sample_key, self.batch_size, "train")
        gradient, metrics = jax.grad(self.score, has_aux=True)(state.params, task, batch, dropout_key)
        norm = optax.tree.norm(gradient)
        healthy = (state.diverged_at == ALIVE) & jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        updates, opt_state = self.update_rule.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, jax.tree.map(lambda u: u * state.learning_rate, updates))
        keep = partial(jax.tree.map, lambda new, old: jnp.where(healthy, new, old))
        state = replace(
            state,
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            diverged_at=jnp.where(healthy | (state.diverged_at != ALIVE), state.diverged_at, state.step),
        )
        return state, {**metrics, "gradient_norm": norm}

    def metric_names(self, task: Task) -> list[str]:
        """What `train_step` reports, found without tracing the model."""

        def metrics() -> Metrics:
            batch = task.sample(jax.random.key(0), self.batch_size, "train")
            return task.loss(jnp.zeros((*batch.scored.shape, task.vocab.size)), batch)[1]

        return [*jax.eval_shape(metrics), "gradient_norm"]

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def advance(self, states: TrainState, task: Task, steps: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        """`steps` steps of the whole population, and the mean over them of each metric [P]. Takes `states` over."""
        one_step = jax.vmap(self.train_step, in_axes=(0, None))

        def body(_, carry):
            states, totals = carry
            states, metrics = one_step(states, task)
            return states, jax.tree.map(jnp.add, totals, metrics)

        zeros = {name: jnp.zeros(states.step.shape) for name in self.metric_names(task)}
        states, totals = jax.lax.fori_loop(0, steps, body, (states, zeros))
        return states, jax.tree.map(lambda total: total / steps.astype(jnp.float32), totals)

    @partial(jax.jit, static_argnums=(0, 4, 5))
    def evaluate(self, states: TrainState, task: Task, key: PRNGKey, batches: int, split: Split) -> Metrics:
        """Mean metrics [P] over `batches` batches of a split, the same examples for every member."""

        def one_batch(key: PRNGKey) -> Metrics:
            batch = task.sample(key, self.batch_size, split)
            return jax.vmap(lambda params: self.score(params, task, batch, None)[1])(states.params)

        metrics = jax.lax.map(one_batch, jax.random.split(key, batches))
        return jax.tree.map(lambda m: m.mean(axis=0), metrics)

    @partial(jax.jit, static_argnums=(0, 1, 5))
    def measure(
        self, measure: Measure, states: TrainState, task: Task, key: PRNGKey, dtype: str = "float32"
    ) -> dict[str, Curve]:
        """A measure of each member: `Curve.values` has the member axis first."""
        return jax.vmap(lambda params: measure(self.model(params, dtype), task, key))(states.params)
