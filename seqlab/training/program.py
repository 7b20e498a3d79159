"""The pure training program: a population of models as one state, advanced many steps by one compiled call.

Everything is a function of the state and the task: data are drawn on the device from `fold_in(key, step)`, so the state
alone says what comes next. The program asks neither which task nor which architecture it trains.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.stages import Compiled
from jaxtyping import Array, Float, Int, UInt

from seqlab.measures.base import Measure
from seqlab.mixers.base import divisors
from seqlab.model import SequenceModel, compute_in
from seqlab.tasks.base import Task
from seqlab.training.memory import fits
from seqlab.training.mesh import ONE_DEVICE, Layout
from seqlab.types import Batch, Curve, PRNGKey, Split

Metrics = dict[str, Float[Array, "..."]]

ALIVE = -1
UNSOLVED = -1
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
    """The step that was not finite, from which the member stands still; `ALIVE` if none was."""
    solved_at: Int[Array, "..."]
    """The step of the first validation at which the task was solved; `UNSOLVED` before."""


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
        accumulation: a step's gradient is taken in so many parts of its batch, one after another.
        max_parallel: how many members are trained at once, at most; the others wait. None: all.
        layout: the devices.

    Raises:
        ValueError: the type is unknown, or the parts are not equal.
    """

    build: Callable[..., SequenceModel]
    optimizer: Optimizer
    steps: int
    batch_size: int
    compute_dtype: str = "float32"
    accumulation: int = 1
    max_parallel: int | None = None
    layout: Layout = ONE_DEVICE

    def __post_init__(self):
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"train.accumulation={self.accumulation} does not divide train.batch_size={self.batch_size}; "
                f"numbers that do: {divisors(self.batch_size)}"
            )
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
                solved_at=jnp.full((), UNSOLVED, jnp.int32),
            )

        members = jax.vmap(member)
        arguments = jnp.asarray(seeds, jnp.uint32), jnp.asarray(learning_rates, jnp.float32)
        places = self.layout.mesh and self.layout.shardings(jax.eval_shape(members, *arguments))
        return jax.jit(members, out_shardings=places)(*arguments)

    def score(self, params: nnx.State, task: Task, batch: Batch, key: PRNGKey | None) -> tuple[Array, Metrics]:
        """The task's loss and metrics for one member; `key` turns dropout on."""
        model = self.model(self.layout.at_use(params), self.compute_dtype)
        logits = model.predict(batch.inputs, batch.scored, batch.segments, key, pin=self.layout.spread)
        return task.loss(logits, batch)

    def gradient(self, params: nnx.State, task: Task, batch: Batch, key: PRNGKey) -> tuple[nnx.State, Metrics]:
        """The loss's gradient and the metrics of one member, whose batch may be taken in parts.

        A part counts by its weights, so that the parts' mean losses add up to that of the whole batch.
        """
        slope = jax.grad(self.score, has_aux=True)
        if self.accumulation == 1:
            return slope(params, task, self.layout.spread(batch), key)

        def divide(x: Array) -> Array:
            """Every k-th example, so that each part is spread over the devices as the whole is."""
            return jnp.moveaxis(x.reshape(-1, self.accumulation, *x.shape[1:]), 1, 0)

        def add(sums, part):
            batch, key = part
            share = batch.weights.sum() / total
            return jax.tree.map(lambda x, y: x + share * y, sums, slope(params, task, batch, key)), None

        total = jnp.maximum(batch.weights.sum(), 1e-9)
        parts = self.layout.spread(jax.tree.map(divide, batch), axis=1)
        zeros = jax.tree.map(jnp.zeros_like, params), {name: jnp.zeros(()) for name in self.loss_names(task)}
        return jax.lax.scan(add, zeros, (parts, jax.random.split(key, self.accumulation)))[0]

    def train_step(self, state: TrainState, task: Task) -> tuple[TrainState, Metrics]:
        """One step of one member. A step that is not finite changes nothing but the member's mark."""
        sample_key, dropout_key = jax.random.split(jax.random.fold_in(state.key, state.step))
        batch = task.sample(sample_key, self.batch_size, "train")
        gradient, metrics = self.gradient(state.params, task, batch, dropout_key)
        norm = optax.tree.norm(gradient)
        updates, opt_state = self.update_rule.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, jax.tree.map(lambda u: u * state.learning_rate, updates))
        finite = jnp.isfinite(jnp.stack([metrics["loss"], norm, optax.tree.norm(params)])).all()
        healthy = (state.diverged_at == ALIVE) & finite
        keep = partial(jax.tree.map, lambda new, old: jnp.where(healthy, new, old))
        state = replace(
            state,
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            diverged_at=jnp.where(healthy | (state.diverged_at != ALIVE), state.diverged_at, state.step),
        )
        return state, {**metrics, "gradient_norm": norm}

    def loss_names(self, task: Task) -> list[str]:
        """The metrics that the task's loss comes with, found without tracing the model."""

        def metrics() -> Metrics:
            batch = task.sample(jax.random.key(0), self.batch_size, "train")
            return task.loss(jnp.zeros((*batch.scored.shape, task.vocab.size)), batch)[1]

        return list(jax.eval_shape(metrics))

    def width(self, members: int) -> int:
        """How many of the members are trained at once.

        Raises:
            ValueError: they would be fewer than the devices that members are spread over.
        """
        most = members if self.max_parallel is None else self.max_parallel
        fitting = [n for n in divisors(members) if n <= most and n % self.layout.population == 0]
        if not fitting:
            raise ValueError(
                f"population.max_parallel={most} leaves nothing for some devices of mesh.population="
                f"{self.layout.population}; use at least {self.layout.population}"
            )
        return fitting[-1]

    def each_member(self, look: Callable[[Any], Any], width: int) -> Callable[[Any], Any]:
        """`look` at each of so many members, whose axis comes first."""
        if width > 1:
            return jax.vmap(look, spmd_axis_name=self.layout.member_axis)

        # products over a batch of one are slower than products: Mamba's on a CPU more than twice
        return lambda one: jax.tree.map(lambda x: x[None], look(jax.tree.map(lambda x: x[0], one)))

    def each_group(self, look: Callable[[nnx.State], Any], params: nnx.State) -> Any:
        """What `look` sees in all members' parameters, of which it gets those of one group after another.

        Member g + G i is the i-th of group g of G, so that each device has members of every group.
        """
        members = len(jax.tree.leaves(params)[0])
        width = self.width(members)
        if width == members:
            return look(params)
        grouped = jax.tree.map(lambda x: x.reshape(width, -1, *x.shape[1:]), params)
        seen = jax.lax.map(lambda g: look(jax.tree.map(lambda x: x[:, g], grouped)), jnp.arange(members // width))
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(members, *x.shape[2:]), seen)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def advance(self, states: TrainState, task: Task, steps: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        """`steps` steps of the whole population, and the mean over them of each metric [P]. Takes `states` over.

        One group of members (as in `each_group`) takes all its steps before the next begins, in the place of its old
        states: what a step needs of memory is there for one group.
        """
        members = len(states.step)
        width = self.width(members)
        one_step = self.each_member(partial(self.train_step, task=task), width)
        names = [*self.loss_names(task), "gradient_norm"]

        def one_group(states: TrainState) -> tuple[TrainState, Metrics]:
            def body(_, carry):
                states, totals = carry
                states, metrics = one_step(states)
                return states, jax.tree.map(jnp.add, totals, metrics)

            return jax.lax.fori_loop(0, steps, body, (states, {name: jnp.zeros(states.step.shape) for name in names}))

        def at(g, carry):
            groups = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, g, 1, keepdims=False), carry[0])
            return jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, g, 1), carry, one_group(groups)
            )

        if width == members:
            states, totals = one_group(states)
        else:
            grouped = jax.tree.map(lambda x: x.reshape(width, -1, *x.shape[1:]), states)
            zeros = {name: jnp.zeros(grouped.step.shape) for name in names}
            done = jax.lax.fori_loop(0, members // width, at, (grouped, zeros))
            states, totals = jax.tree.map(lambda x: x.reshape(members, *x.shape[2:]), done)
        means = jax.tree.map(lambda total: total / steps.astype(jnp.float32), totals)
        return self.layout.constrain(states), self.layout.repeat(means)

    def compiled(self, states: TrainState, task: Task) -> tuple["Program", Compiled]:
        """`advance` compiled for these arguments, and the program that it is of. Without `max_parallel` it trains all
        members at once, or as many as the device's memory holds; on a CPU, which one member keeps busy, one at a time.
        """
        program = self
        if self.max_parallel is None and jax.default_backend() == "cpu":
            program = replace(self, max_parallel=self.layout.population)
        while True:
            width = program.width(len(states.step))
            narrower = [n for n in divisors(len(states.step)) if 2 * n <= width and n % self.layout.population == 0]
            last = self.max_parallel is not None or not narrower
            try:
                advance = Program.advance.lower(program, states, task, np.int32(1)).compile()
            except jax.errors.JaxRuntimeError as error:  # a TPU's compiler finds out by itself
                if last or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
            else:
                if last or fits(advance):
                    return program, advance
            program = replace(program, max_parallel=narrower[-1])

    @partial(jax.jit, static_argnums=(0, 4, 5))
    def evaluate(self, states: TrainState, task: Task, key: PRNGKey, batches: int, split: Split) -> Metrics:
        """Mean metrics [P] over `batches` batches of a split, the same examples for every member."""

        width = self.width(len(states.step))

        def one_batch(params: nnx.State, key: PRNGKey) -> Metrics:
            batch = self.layout.spread(task.sample(key, self.batch_size, split))
            return self.each_member(lambda params: self.score(params, task, batch, None)[1], width)(params)

        def one_group(params: nnx.State) -> Metrics:
            metrics = jax.lax.map(partial(one_batch, params), jax.random.split(key, batches))
            return jax.tree.map(lambda m: m.mean(axis=0), metrics)

        return self.layout.repeat(self.each_group(one_group, states.params))

    @partial(jax.jit, static_argnums=(0, 1, 5))
    def measure(
        self, measure: Measure, states: TrainState, task: Task, key: PRNGKey, dtype: str = "float32"
    ) -> dict[str, Curve]:
        """A measure of each member: `Curve.values` has the member axis first."""
        width = self.width(len(states.step))
        look = self.each_member(lambda params: measure(self.model(params, dtype), task, key), width)
        return self.layout.repeat(self.each_group(look, states.params))
