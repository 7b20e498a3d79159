"""AdamW against its formula in numpy, and what weight decay leaves alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from seqlab.mixers.attention import Attention
from seqlab.mixers.base import Recurrence
from seqlab.mixers.rnn import GRU, LSTM
from seqlab.mixers.ssm import LRU
from seqlab.mlp import MLP
from seqlab.model import SequenceModel
from seqlab.training.optimizer import AdamW, decayed

STEPS, WARMUP_STEPS = 20, 4
RULE = AdamW(learning_rate=1.0, b1=0.8, b2=0.95, weight_decay=0.1, clip_norm=1.0, warmup=0.2, floor=0.25)


def parameters():
    """A matrix, a bias and a recurrence's parameter, at random."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = {"kernel": (nnx.Param, (3, 2)), "bias": (nnx.Param, (2,)), "nu": (Recurrence, (2,))}
    named = zip(keys, draw.items(), strict=True)
    return nnx.State({name: kind(jax.random.normal(key, shape)) for key, (name, (kind, shape)) in named})


def gradient(step):
    """Of norm 0.5, which is left as it is, or of norm 5, which is clipped."""
    drawn = jax.tree.map(lambda x: jax.random.normal(jax.random.key(step), x.shape), parameters())
    return jax.tree.map(lambda x: x * (0.5, 5.0)[step % 2] / optax.tree.norm(drawn), drawn)


def cosine_schedule(step):
    """From 0 by a straight line to 1 after the warm-up, then by half a cosine to the floor at the end."""
    if step < WARMUP_STEPS:
        return step / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS))
    return 0.25 + 0.75 * 0.5 * (1 + np.cos(np.pi * progress))


def test_the_update_is_adamw_behind_a_clip():
    """Loshchilov & Hutter 2019, algorithm 2, with the gradient scaled to norm 1 where it is longer."""
    rule, params = RULE.transformation(STEPS), parameters()
    state = rule.init(params)
    decay = {"kernel": 0.1, "bias": 0.0, "nu": 0.0}
    x = {name: np.asarray(params[name][...], np.float64) for name in decay}
    m, v = ({name: np.zeros_like(value) for name, value in x.items()} for _ in range(2))
    for step in range(8):  # four of them beyond the warm-up
        drawn = gradient(step)
        updates, state = rule.update(drawn, state, params)
        params = optax.apply_updates(params, updates)
        g = {name: np.asarray(drawn[name][...], np.float64) for name in x}
        norm = np.sqrt(sum((value**2).sum() for value in g.values()))
        for name in x:
            clipped = g[name] / max(1.0, norm)
            m[name] = 0.8 * m[name] + 0.2 * clipped
            v[name] = 0.95 * v[name] + 0.05 * clipped**2
            m_hat, v_hat = m[name] / (1 - 0.8 ** (step + 1)), v[name] / (1 - 0.95 ** (step + 1))
            x[name] = x[name] - cosine_schedule(step) * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay[name] * x[name])
            # float32 against float64 over a dozen operations a step
            np.testing.assert_allclose(params[name][...], x[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_the_schedule_ends_at_its_floor(steps):
    """Read off a unit gradient's step, which Adam makes the learning rate itself; also where there is hardly a step."""
    rule = AdamW(1.0, weight_decay=0.0, clip_norm=1e9, warmup=0.2, floor=0.25).transformation(steps)
    params = nnx.State({"kernel": nnx.Param(jnp.zeros((1, 1)))})
    ones, state, rates = jax.tree.map(jnp.ones_like, params), rule.init(params), []
    for _ in range(steps + 1):
        updates, state = rule.update(ones, state, params)
        rates.append(-updates["kernel"][...].item())
    assert rates[0] == 0.0
    assert max(rates) <= 1.0 + 1e-6  # Adam's bias correction in float32
    if steps == STEPS:
        np.testing.assert_allclose(rates, [cosine_schedule(step) for step in range(steps + 1)], atol=1e-5)
        assert rates[-1] == pytest.approx(0.25, abs=1e-5)


MATRICES = {"kernel", "embedding", "b_re", "b_im", "c_re", "c_im"}
"""Names of the parameters that map one space to another; all else is a norm, a bias, a vector or a recurrence's."""


@pytest.mark.parametrize(
    "mixer",
    [partial(Attention, heads=2), GRU, LSTM, partial(LRU, state_size=4)],
    ids=["attention", "gru", "lstm", "ssm"],
)
@pytest.mark.parametrize("norm", [nnx.RMSNorm, nnx.LayerNorm])
def test_matrices_and_embeddings_decay_and_nothing_else(mixer, norm):
    build = partial(SequenceModel, 5, width=4, depth=3, mixer=mixer, norm=norm, mlp=partial(MLP, expansion=2))
    params = nnx.state(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
    mask = dict(nnx.to_flat_state(decayed(params)))
    found = {path: mask[path].get_value() for path, _ in nnx.to_flat_state(params)}
    expected = {
        path: path[-1] in MATRICES and not isinstance(param, Recurrence) for path, param in nnx.to_flat_state(params)
    }
    assert found == expected
    assert sum(expected.values()) >= 4


def test_what_does_not_decay_does_not_move_without_a_gradient():
    build = partial(SequenceModel, 5, width=4, depth=2, mixer=GRU, norm=nnx.LayerNorm)
    abstract = nnx.state(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
    params = jax.tree.map(lambda x: jnp.full(x.shape, 3.0), abstract)
    zero = jax.tree.map(jnp.zeros_like, params)
    rule = AdamW(1.0, weight_decay=0.5, warmup=0.0).transformation(4)

    @jax.jit
    def two_steps(moved):  # the first step of the warm-up has the learning rate 0
        state = rule.init(params)
        for _ in range(2):
            updates, state = rule.update(zero, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved

    moved = two_steps(params)
    for (path, before), (_, after) in zip(nnx.to_flat_state(params), nnx.to_flat_state(moved), strict=True):
        if path[-1] in MATRICES:
            np.testing.assert_allclose(after[...], 1.5, rtol=1e-6, err_msg=str(path))  # one product
        else:
            np.testing.assert_array_equal(after[...], before[...], err_msg=str(path))
