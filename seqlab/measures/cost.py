"""What a model costs: parameters, bytes of state a sequence, floating-point operations a token."""

# pyright: reportAttributeAccessIssue=false
# JAX declares the abstract values of a traced program without their shape and dtype.

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from seqlab.mixers.base import NoStepError
from seqlab.model import SequenceModel

FREE = frozenset(
    (
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice"),
        *("concatenate", "pad", "gather", "scatter", "rev", "copy", "convert_element_type", "iota", "stop_gradient"),
        *("split", "stack", "unstack", "tile"),
    )
)
"""Primitives that move numbers and compute none."""


def parameters(model: SequenceModel) -> int:
    """How many numbers are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def state_bytes(model: SequenceModel, length: int) -> int | None:
    """Bytes of the state that one sequence of `length` tokens leaves behind; None for a model without a step."""
    graph, params = nnx.split(model)
    try:
        state = jax.eval_shape(lambda params: nnx.merge(graph, params).init_state(1, length), params)["layers"]
    except NoStepError:
        return None
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def flops_per_token(model: SequenceModel, length: int, scored: int) -> float:
    """Operations of one forward pass over `length` tokens with `scored` predictions, divided by `length`.

    Counted from the traced program, loops times their length: XLA's own cost analysis counts the body of a loop once.
    A multiply-add is two operations, any other number computed is one.
    """
    graph, params = nnx.split(model)
    tokens, positions = (jax.ShapeDtypeStruct((1, size), jnp.int32) for size in (length, scored))
    forward = jax.make_jaxpr(lambda params, *inputs: nnx.merge(graph, params).predict(*inputs))
    return count_flops(forward(params, tokens, positions)) / length


def count_flops(program: ClosedJaxpr | Jaxpr) -> int:
    """Floating-point operations of a traced program."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    return sum(_flops(equation) for equation in jaxpr.eqns)


def _flops(equation: JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    inner = [p for p in jax.tree.leaves(list(params.values()), is_leaf=_is_program) if _is_program(p)]
    if inner:
        repeats = params["length"] if name == "scan" else 1
        return repeats * sum(map(count_flops, inner))
    outputs = [v.aval for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating)]
    size = sum(math.prod(aval.shape) for aval in outputs)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    if name.startswith(("reduce", "cum", "arg")):
        return sum(math.prod(v.aval.shape) for v in equation.invars)
    return 0 if name in FREE else size


def _is_program(value: object) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)
