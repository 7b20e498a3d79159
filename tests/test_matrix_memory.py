"""Matrix memories against loops and sums over pairs of tokens in float64, and against Hugging Face's delta rule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.matrix_memory import delta_rule, exponential_gating, linear_attention
from seqlab.recurrence import Marks

T, B, H, K, W = 11, 3, 2, 4, 5
# a number is a sum of some 60 products, each rounded twice on its way: 120 roundings of 2^-24 of the largest
ROUNDING = 8e-6
# the loop in float64 is differenced over steps of 1e-5: an error of 1e-10, beside which float32 is all that counts
STEP = 1e-5

SEGMENTS = np.array([[1] * T, [1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0], [0] * T])
# to compile is all that takes time here
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
FORMS = [("sequential", 1), ("associative", 1), *(("chunked", size) for size in (1, 4, 7, T))]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def inputs(seed=0, correlated=False):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, T, B, H, K))
    if correlated:
        k = k[:1] + 0.1 * k
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return {
        "q": q,
        "k": k,
        "v": rng.normal(size=(T, B, H, W)),
        "gate": -np.exp(rng.normal(size=(T, B, H))),
        "gates": -np.exp(rng.normal(size=(T, B, H, K))),
        "beta": sigmoid(2 * rng.normal(size=(T, B, H))),
        "input": 3 * rng.normal(size=(T, B, H)),
        "memory": rng.normal(size=(B, H, K, W)),
        "scale": rng.normal(size=(B, H)),
    }


def step_by_step(transition, write, x, segments):
    """o_t = S_t^T q_t of S_t = transition_t S_{t-1} + k_t write_t^T, and the last S."""
    o = np.zeros((T, B, H, W))
    last = x["memory"].copy()
    for b in range(B):
        for h in range(H):
            state, sequence = x["memory"][b, h], None
            for t in range(T):
                if segments is not None and not segments[b, t]:
                    continue
                if segments is not None and sequence not in (None, segments[b, t]):
                    state = np.zeros((K, W))
                sequence = None if segments is None else segments[b, t]
                state = transition(x, t, b, h) @ state + np.outer(x["k"][t, b, h], write(x, t, b, h))
                o[t, b, h] = state.T @ x["q"][t, b, h]
            last[b, h] = state
    return last, o


def householder(x, t, b, h):
    return np.eye(K) - x["beta"][t, b, h] * np.outer(x["k"][t, b, h], x["k"][t, b, h])


def paired(x, segments):
    """mLSTM's sums over all earlier tokens (and the first state as one more), each scaled by its largest gate."""
    o, scales = np.zeros((T, B, H, W)), np.zeros((T, B, H))
    last, last_scale = x["memory"].copy(), x["scale"].copy()
    for b in range(B):
        for h in range(H):
            real = np.arange(T) if segments is None else np.flatnonzero(segments[b])
            for t in real:
                same = [s for s in real if s <= t and (segments is None or segments[b, s] == segments[b, t])]
                whole = same[0] == real[0]
                gates = [x["gate"][s + 1 : t + 1, b, h].sum() + x["input"][s, b, h] for s in same]
                begin = x["gate"][same[0] : t + 1, b, h].sum() + (x["scale"][b, h] if whole else 0.0)
                scale = max(begin, *gates)
                state = np.exp(begin - scale) * x["memory"][b, h] if whole else np.zeros((K, W))
                for s, gate in zip(same, gates, strict=True):
                    state = state + np.exp(gate - scale) * np.outer(x["k"][s, b, h], x["v"][s, b, h])
                o[t, b, h], scales[t, b, h] = state.T @ x["q"][t, b, h], scale
                last[b, h], last_scale[b, h] = state, scale
    return (last, last_scale), (o, scales)


@dataclass(frozen=True)
class Kind:
    needs: tuple[str, ...]
    run: Callable
    """Of seqlab, as run(the needed inputs, marks, scan=, chunk=)."""
    oracle: Callable


def linear(x, marks, gate=None, **options):
    return linear_attention(x["memory"], x["q"], x["k"], x["v"], x[gate] if gate else None, marks, **options)


def delta(x, marks, gate=None, **options):
    return delta_rule(x["memory"], x["q"], x["k"], x["v"], x["beta"], x[gate] if gate else None, marks, **options)


def exponential(x, marks, **options):
    state = x["memory"], x["scale"]
    return exponential_gating(state, x["q"], x["k"], x["v"], x["input"], x["gate"], marks, **options)


def value(x, t, b, h):
    return x["v"][t, b, h]


def share(x, t, b, h):
    return x["beta"][t, b, h] * x["v"][t, b, h]


COMMON = ("memory", "q", "k", "v")
KINDS = {
    "sum": Kind(COMMON, linear, partial(step_by_step, lambda *_: np.eye(K), value)),
    "scalar decay": Kind(
        (*COMMON, "gate"),
        partial(linear, gate="gate"),
        partial(step_by_step, lambda x, *i: np.exp(x["gate"][i]) * np.eye(K), value),
    ),
    "channel decay": Kind(
        (*COMMON, "gates"),
        partial(linear, gate="gates"),
        partial(step_by_step, lambda x, *i: np.diag(np.exp(x["gates"][i])), value),
    ),
    "delta": Kind((*COMMON, "beta"), delta, partial(step_by_step, householder, share)),
    "gated delta": Kind(
        (*COMMON, "beta", "gate"),
        partial(delta, gate="gate"),
        partial(step_by_step, lambda x, *i: np.exp(x["gate"][i]) * householder(x, *i), share),
    ),
    "exponential": Kind((*COMMON, "scale", "input", "gate"), exponential, paired),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def float32(x):
    return {name: jnp.asarray(array, jnp.float32) for name, array in x.items()}


def marks_of(segments):
    return None if segments is None else Marks.of(jnp.asarray(segments))


def real(segments):
    return np.ones((T, B), bool) if segments is None else segments.T > 0


def in_every_form(run, x, segments=None):
    for scan, chunk in FORMS:
        yield compiled(partial(run, marks=marks_of(segments), scan=scan, chunk=chunk))(float32(x))


def assert_same(actual, reference, segments, share=ROUNDING):
    """At tokens; what comes out at padding is nobody's business."""
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if len(ours) == T:
            ours, theirs = ours[real(segments)], theirs[real(segments)]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=share * max(1, abs(theirs).max()))


@kinds
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_every_form_is_the_loop_over_tokens(kind, segments):
    x = inputs()
    reference = kind.oracle(x, segments)
    for result in in_every_form(kind.run, x, segments):
        assert_same(result, reference, segments)


@kinds
@pytest.mark.parametrize(("scan", "chunk"), [("sequential", 1), ("chunked", 4), ("associative", 1)])
def test_gradients_are_the_differences_of_the_loop(kind, scan, chunk):
    x = {name: array for name, array in inputs(1).items() if name in kind.needs}
    rng = np.random.default_rng(2)
    _, o = kind.oracle(x, SEGMENTS)
    outputs = o if isinstance(o, tuple) else (o,)
    readout = rng.normal(size=outputs[0].shape) * real(SEGMENTS)[..., None, None]

    def read(x):
        """What does not depend on the scale of an exponentially gated memory, for that is a constant to gradients."""
        _, o = kind.oracle(x, SEGMENTS)
        return (o[0] * np.exp(o[1] - outputs[1])[..., None] if isinstance(o, tuple) else o) * readout

    def loss(x):
        _, o = kind.run(x, marks_of(SEGMENTS), scan=scan, chunk=chunk)
        return jnp.sum((o[0] if isinstance(o, tuple) else o) * jnp.asarray(readout, jnp.float32))

    gradients = compiled(jax.grad(loss))(float32(x))
    for name in x:
        if name == "scale":
            continue  # a state (S, m) stands for S exp(m): its scale belongs to the memory
        direction = rng.normal(size=x[name].shape)
        ahead, behind = (read(x | {name: x[name] + sign * STEP * direction}).sum() for sign in (1, -1))
        expected = (ahead - behind) / (2 * STEP)
        actual = (np.float64(gradients[name]) * direction).sum()
        size = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        assert abs(actual - expected) <= ROUNDING * max(1, size), name


@kinds
def test_gradients_stay_finite_over_rows_of_padding_and_endless_decay(kind):
    x = float32(inputs() | {"gate": -1e4 * np.ones((T, B, H)), "gates": -1e4 * np.ones((T, B, H, K))})

    def loss(x, scan, marks):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(kind.run(x, marks, scan=scan, chunk=4)))

    for scan in ("sequential", "chunked"):
        gradients = compiled(jax.grad(partial(loss, scan=scan, marks=marks_of(SEGMENTS))))(x)
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("name", "gate"), [("scalar decay", "gate"), ("channel decay", "gates"), ("gated delta", "gate")]
)
def test_neither_no_decay_nor_sudden_decay_leaves_the_loop(name, gate):
    x = inputs(3)
    x[gate] = np.random.default_rng(4).choice([0.0, -1e-4, -1.0, -200.0], size=x[gate].shape)
    reference = KINDS[name].oracle(x, None)
    for result in in_every_form(KINDS[name].run, x):
        # sums of up to 2000 are rounded to 2^-24 of that, and what is left after them is off by as large a share
        assert_same(result, reference, None, share=2000 * 2**-23)


def test_gates_of_any_size_stay_within_range():
    x = inputs(5)
    x["input"] *= 100.0  # up to exp(900)
    reference = paired(x, SEGMENTS)
    for result in in_every_form(exponential, x, SEGMENTS):
        # gates are differences of numbers up to 900, off by 2^-24 of that
        assert_same(result, reference, SEGMENTS, share=900 * 2**-23)


@pytest.mark.parametrize("largest", [1, 2])
def test_keys_that_are_nearly_the_same_leave_the_delta_rule_exact(largest):
    x = inputs(6, correlated=True)
    x["beta"] = largest * (1 - 0.01 * x["beta"])  # where powers of I + L would lose digits
    reference = step_by_step(householder, share, x, None)
    for result in in_every_form(delta, x):
        assert_same(result, reference, None)


def test_the_delta_rule_replaces_what_stands_under_a_key_and_beta_2_reflects():
    key = jnp.zeros((T, 1, 1, K)).at[..., 0].set(1.0)
    values = jax.random.normal(jax.random.key(0), (T, 1, 1, W))
    empty, ones = jnp.zeros((1, 1, K, W)), jnp.ones((T, 1, 1))
    _, o = delta_rule(empty, key, key, values, ones, scan="chunked", chunk=4)
    np.testing.assert_allclose(o, values, atol=ROUNDING * 3)
    start = empty.at[..., 0, :].set(1.0)
    _, o = delta_rule(start, key, key, 0 * values, 2 * ones, scan="chunked", chunk=4)
    np.testing.assert_allclose(o[:, 0, 0, 0], (-1.0) ** np.arange(1, T + 1), atol=ROUNDING)


@pytest.mark.parametrize("rule", ["chunk", "recurrent"])
@pytest.mark.parametrize(("scan", "chunk"), [("sequential", 1), ("chunked", 4)])
def test_the_gated_delta_rule_is_that_of_hugging_face(rule, scan, chunk):
    reason = "the reference is Hugging Face's Qwen3-Next: pip install 'seqlab[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason=reason)
    x = float32(inputs(7))

    def to_torch(array):
        return torch.tensor(np.array(array.swapaxes(0, 1)))  # T B -> B T

    options = {"chunk_size": 8} if rule == "chunk" else {}
    o, last = getattr(qwen, f"torch_{rule}_gated_delta_rule")(
        *(to_torch(x[name]) for name in ("q", "k", "v")),
        g=to_torch(x["gate"]),
        beta=to_torch(x["beta"]),
        initial_state=torch.tensor(np.array(x["memory"])),
        output_final_state=True,
        **options,
    )
    x["q"] = x["q"] / K**0.5  # which is part of the rule there
    reference = last.numpy(), o.numpy().swapaxes(0, 1)
    assert_same(delta(x, None, gate="gate", scan=scan, chunk=chunk), reference, None)


@kinds
def test_a_memory_is_kept_in_float32(kind):
    x = {name: array.astype(jnp.bfloat16) for name, array in float32(inputs()).items()}
    x |= {name: x[name].astype(jnp.float32) for name in ("memory", "scale")}
    for scan in ("sequential", "chunked"):
        assert {leaf.dtype for leaf in jax.tree.leaves(kind.run(x, None, scan=scan))} == {jnp.dtype("float32")}


@kinds
def test_a_state_that_is_passed_on_continues_the_sequence(kind):
    x = float32(inputs(8))
    whole = kind.run(x, None, scan="chunked", chunk=4)
    first = {name: array[:5] if len(array) == T else array for name, array in x.items()}
    state, _ = kind.run(first, None, scan="chunked", chunk=4)
    rest = {name: array[5:] if len(array) == T else array for name, array in x.items()}
    rest |= dict(zip(("memory", "scale"), state if isinstance(state, tuple) else (state,), strict=False))
    state, o = kind.run(rest, None, scan="chunked", chunk=2)
    assert_same(state, whole[0], None)
    assert_same(o, jax.tree.map(lambda o: o[5:], whole[1]), None)


@kinds
def test_unknown_forms_and_empty_chunks_are_refused(kind):
    x = float32(inputs())
    with pytest.raises(ValueError, match="scan=fast is unknown; use one of auto, sequential"):
        kind.run(x, None, scan="fast")
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        kind.run(x, None, chunk=0)
