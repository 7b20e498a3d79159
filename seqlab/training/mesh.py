"""Where the arrays of a population live: a mesh of devices with the axes population, data and model.

One rule by name and shape gives every array its place; the compiler does the communication. So a poor place is slow,
never wrong. On one device there is no mesh, and nothing here changes anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from seqlab.mixers.base import Recurrence

OUT = ("out", "join")
"""Projections whose inputs lie apart, where those of all others are the residual stream: of heads or an MLP's units."""


@dataclass(frozen=True)
class Layout:
    """How many devices each axis has.

    Args:
        population: members are spread over it.
        data: the examples of a batch are, and the large matrices with their optimizer state (as in FSDP; Zhao et al.
            2023).
        model: the columns of projections from the residual stream, the rows of those back into it (Shoeybi et al. 2019,
            sec. 3), and the vocabulary or width of the embedding.
        shard_above: a matrix of no more numbers than this is whole on every device of its member.
    """

    population: int = 1
    data: int = 1
    model: int = 1
    shard_above: int = 2**16

    @classmethod
    def over(
        cls,
        devices: int,
        *,
        members: int,
        examples: int,
        splits: Sequence[int],
        population: int | str | None = "auto",
        data: int | str | None = "auto",
        model: int | str | None = "auto",
        shard_above: int = 2**16,
    ) -> "Layout":
        """The layout asked for. What is `auto` takes of the devices that are left, in this order, as many as divide
        the `members` trained at once, the `examples` of a (micro)batch, and the `splits` of the model: width and heads.

        Raises:
            ValueError: a number does not divide what it splits, or there are too few devices.
        """
        asked = {"population": population, "data": data, "model": model}
        divided = {"population": members, "data": examples, "model": gcd(*splits)}
        called = {
            "population": f"the {members} members trained at once",
            "data": f"the {examples} examples of a batch",
            "model": f"the model's width and heads, {', '.join(map(str, splits))}",
        }
        sizes = {}
        for axis, size in asked.items():
            if size in ("auto", None):
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh.{axis}={size} is no number of devices; use 1 or more, or auto")
            if divided[axis] % size:
                fitting = gcd(divided[axis], devices)
                raise ValueError(f"mesh.{axis}={size} does not divide {called[axis]}; use {fitting}, or auto")
            sizes[axis] = size
        if prod(sizes.values()) > devices:
            words = " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
            raise ValueError(f"{words} need {prod(sizes.values())} devices, and there are {devices}; use auto")
        left = devices // prod(sizes.values())
        for axis, number in divided.items():
            if axis not in sizes:
                sizes[axis] = gcd(number, left)
                left //= sizes[axis]
        layout = cls(**sizes, shard_above=shard_above)
        if jax.process_count() > 1 and layout.devices != devices:
            raise ValueError(
                f"of {devices} devices mesh={layout} would leave {devices - layout.devices} idle, which several "
                f"processes cannot; use numbers of members and examples that they divide"
            )
        return layout

    @property
    def devices(self) -> int:
        return self.population * self.data * self.model

    def __str__(self) -> str:
        return f"population {self.population} x data {self.data} x model {self.model}"

    @property
    def said(self) -> str:
        """For the end of the line that a run begins with; nothing where there is one device."""
        idle = jax.device_count() - self.devices
        return (f"; {self}" if self.devices > 1 else "") + (f"; {idle} devices idle" if idle else "")

    @cached_property
    def mesh(self) -> Mesh | None:
        """None on one device."""
        if self.devices == 1:
            return None
        sizes = (self.population, self.data, self.model)
        names = ("population", "data", "model")
        return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: self.devices])

    @property
    def member_axis(self) -> str | None:
        """For `vmap(spmd_axis_name=)` over members."""
        return None if self.mesh is None else "population"

    def spec(self, names: Sequence[str], shape: tuple[int, ...], recurrent: bool) -> PartitionSpec:
        """The place of one array [P, ...] of a member's parameters or optimizer, from its path and shape.

        A recurrence's own parameters stay whole: split, they would be communicated at every token.
        """
        if len(shape) < 2:  # a number for each member, which the host looks at
            return PartitionSpec()
        axes: list[str | None] = ["population"] + [None] * (len(shape) - 1)
        own = range(2 if "blocks" in names else 1, len(shape))  # behind members and layers
        if len(own) < 2 or recurrent or prod(shape[i] for i in own) <= self.shard_above:
            return PartitionSpec(*axes)
        *rest, rows, columns = own
        apart, stream = (rows, columns) if names[-1] == "embedding" or names[-2] in OUT else (columns, rows)
        for name, size, order in (
            ("model", self.model, [apart, stream]),
            # where it lies along the residual stream, which no device has a part of, the compiler gathers the matrix
            ("data", self.data, [stream, apart, *rest]),
        ):
            free = [i for i in order if axes[i] is None and shape[i] % size == 0]
            if size > 1 and free:
                axes[free[0]] = name
        return PartitionSpec(*axes)

    def shardings(self, tree: Any) -> Any:
        """The place of every array in `tree` (a population's state or a part of it, maybe abstract); needs a mesh."""
        assert self.mesh is not None
        mesh = self.mesh

        def place(path, leaf):
            names, recurrent = _names(path), isinstance(leaf, Recurrence)
            return jax.tree.map(lambda x: NamedSharding(mesh, self.spec(names, x.shape, recurrent)), leaf)

        return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def constrain(self, states: Any) -> Any:
        """Within a compiled function: the states where they belong."""
        if self.mesh is None:
            return states
        return jax.lax.with_sharding_constraint(states, self.shardings(states))

    def at_use(self, params: Any) -> Any:
        """Within a compiled function of one member: what is used outside the blocks, gathered over the data axis.

        Left to itself the compiler would rather move the examples, which lie on that axis too. In the blocks it gathers
        one layer at a time.
        """
        if self.mesh is None or self.data == 1:
            return params
        mesh = self.mesh

        def gathered(path, leaf, place):
            if "blocks" in _names(path):
                return leaf
            spec = PartitionSpec(*(None if axis == "data" else axis for axis in place.spec[1:]))
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

        members = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], params))
        return jax.tree_util.tree_map_with_path(gathered, params, self.shardings(members))

    def spread(self, batch: Any, axis: int = 0) -> Any:
        """Within a compiled function: examples, counted by `axis`, over the data axis."""
        if self.mesh is None:
            return batch
        return jax.lax.with_sharding_constraint(batch, NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "data")))

    def repeat(self, tree: Any) -> Any:
        """Within a compiled function: what the host is to read, whole on every device."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    def place(self, states: Any) -> Any:
        """A population's state from whole arrays, which every process has, to where they belong."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, states)
        return jax.tree.map(_put, states, self.shardings(states))

    def place_whole(self, tree: Any) -> Any:
        """The same for what every device needs: a task's text."""
        if self.mesh is None:
            return tree
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: _put(leaf, whole), tree)

    def gather(self, tree: Any) -> Any:
        """Whole numpy arrays, in every process, which all must call this; copies, that a donated step leaves alone."""
        return jax.tree.map(self._whole, tree)

    def _whole(self, leaf: jax.Array) -> np.ndarray:
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            assert self.mesh is not None
            # one at a time, so that no device holds more than one array whole
            leaf = jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, PartitionSpec()))(leaf)
        return np.array(leaf)


ONE_DEVICE = Layout()


def _names(path: Sequence[Any]) -> list[str]:
    """Those of modules and parameters; a position in a list is its number."""
    keys = (getattr(key, "key", getattr(key, "idx", None)) for key in path)
    return [str(key) for key in keys if key is not None]


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding))
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
