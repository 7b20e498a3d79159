"""Attention against numpy written from the formula, against PyTorch, and its cache against whole sequences."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.attention import Attention
from seqlab.mixers.base import NoStepError
from seqlab.model import compute_in
from seqlab.positions import T5, ALiBi, NoPosition, Position
from seqlab.rotary import RoPE
from seqlab.types import Places

NONE = NoPosition()
B, T, H, K = 2, 9, 4, 4
D = H * K
# scores are sums of 4 products, outputs of 16, of numbers of a few units: some 50 roundings of 2^-24 of at most 10
ATOL = 3e-5


# to compile is most of what takes time here
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def randomised(**options):
    """All parameters random, and of a size that makes softmax neither flat nor one-hot."""
    mixer = Attention(D, **({"heads": H} | options), rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = jax.random.normal(keys(), param.shape) * (D**-0.5 if param.shape[0] == D else 1.0)
    return mixer


def compiled(mixer, method="__call__"):
    graph, params = nnx.split(mixer)

    def call(params, *args):
        return getattr(nnx.merge(graph, params), method)(*args)

    return partial(jax.jit(call, compiler_options=QUICK), params)


def with_gradients(mixer, x, readout):
    graph, params = nnx.split(mixer)

    def both(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, *pull(jnp.asarray(readout))

    return jax.jit(both, compiler_options=QUICK)(params, jnp.asarray(x))


@dataclass(frozen=True)
class Case:
    """One set of options, as the formula has them."""

    position: Position = NONE
    causal: bool = True
    window: int | None = None
    kv_heads: int = H
    qk_norm: bool = False
    temperature: int | float = 1.0
    soft_cap: int | float | None = None

    def __str__(self):
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name))


CASES = [
    Case(),
    Case(causal=False),
    Case(RoPE(), kv_heads=2),
    Case(RoPE(), causal=False, kv_heads=1, qk_norm=True),
    Case(ALiBi(), window=3, temperature=0.5),
    Case(ALiBi(), causal=False, window=3),
    Case(T5(8, 16), soft_cap=1.5, temperature=3),
    Case(T5(8, 16), causal=False, qk_norm=True),
    Case(window=1),
    Case(soft_cap=2, qk_norm=True, window=5),
]


def turned(x):
    """x [T, K]."""
    angle = np.arange(len(x))[:, None] / 10_000 ** (2 * np.arange(K // 2) / K)
    z = (x[:, : K // 2] + 1j * x[:, K // 2 :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def added(case, mixer, head, t, s):
    """By the position scheme, to the score of two places below 8 apart."""
    if isinstance(case.position, ALiBi):
        return -abs(t - s) * 2.0 ** (-8 * (head + 1) / H)
    if isinstance(case.position, T5):
        single, after = (4, 0) if case.causal else (2, 4 * (s > t))
        grown = np.log(max(abs(t - s), 1) / single) / np.log(16 / single) * (single if case.causal else 2)
        bucket = after + (abs(t - s) if abs(t - s) < single else single + int(grown + 1e-9))
        return float(mixer.position_params[bucket, head])
    return 0.0


def formula(case, mixer, x):
    """The outputs for one sequence x [T, D], token by token and head by head, in float64."""
    weights = {
        name: (np.float64(getattr(mixer, name).kernel[...]), np.float64(getattr(mixer, name).bias[...]))
        for name in ("query", "key", "value", "out")
    }
    q, k, v = (x @ weights[name][0] + weights[name][1] for name in ("query", "key", "value"))
    mixed = np.zeros((len(x), D))
    for head in range(H):
        own, shared = head, head // (H // case.kv_heads)
        q_head, k_head, v_head = (y[:, i * K : (i + 1) * K] for y, i in ((q, own), (k, shared), (v, shared)))
        if case.qk_norm:
            q_head, k_head = (
                y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * np.float64(norm.scale[...])
                for y, norm in ((q_head, mixer.query_norm), (k_head, mixer.key_norm))
            )
        if isinstance(case.position, RoPE):
            q_head, k_head = turned(q_head), turned(k_head)
        for t in range(len(x)):
            seen = [
                s
                for s in range(len(x))
                if (s <= t or not case.causal) and (case.window is None or abs(t - s) < case.window)
            ]
            score = np.array([q_head[t] @ k_head[s] / np.sqrt(K) for s in seen])
            if case.soft_cap:
                score = case.soft_cap * np.tanh(score / case.soft_cap)
            score = score + [added(case, mixer, head, t, s) for s in seen]
            weight = np.exp(score / case.temperature)
            mixed[t, head * K : (head + 1) * K] = weight / weight.sum() @ v_head[seen]
    return mixed @ weights["out"][0] + weights["out"][1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula_head_by_head(case):
    mixer = randomised(**vars(case))
    x = random(B, 8, D, seed=20)
    segments = np.array([[1] * 8, [5] * 3 + [2] * 4 + [0]])  # row 1: two sequences, and padding
    actual = np.asarray(compiled(mixer)(jnp.float32(x), Places.of(jnp.asarray(segments))))
    np.testing.assert_allclose(actual[0], formula(case, mixer, x[0]), atol=ATOL, rtol=0)
    np.testing.assert_allclose(actual[1, :3], formula(case, mixer, x[1, :3]), atol=ATOL, rtol=0)
    np.testing.assert_allclose(actual[1, 3:7], formula(case, mixer, x[1, 3:7]), atol=ATOL, rtol=0)
    # without places each row is one sequence
    np.testing.assert_allclose(compiled(mixer)(jnp.float32(x))[0], actual[0], atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_finite_differences_of_the_formula(case):
    mixer = randomised(**vars(case))
    x, readout, way = (random(8, D, seed=seed) for seed in range(3))
    _, by_param, by_x = with_gradients(mixer, jnp.float32(x)[None], jnp.float32(readout)[None])

    def slope(change, size):
        """Along a change of everything, from the change's two sides."""
        return ((change(size) - change(-size)) * readout).sum() / (2 * size)

    # the formula is float64: a difference this wide is off by its square, 1e-8, the gradient by 64 products of ATOL
    expected = slope(lambda size: formula(case, mixer, x + size * way), 1e-4)
    assert np.vdot(by_x[0], way) == pytest.approx(expected, abs=64 * ATOL)
    if mixer.position_params is not None:
        table = mixer.position_params[...]

        def moved(size):
            mixer.position_params[...] = table + size
            return formula(case, mixer, x)

        # softmax does not see a shift of all scores, so that one bucket moves alone
        mask = np.zeros(table.shape, np.float32)
        mask[1] = 1
        expected = slope(lambda size: moved(jnp.asarray(size * mask)), 2.0**-8)  # 2^-16, of a few units
        assert float(by_param["position_params"][...][1].sum()) == pytest.approx(expected, abs=1e-3)


def assert_close(pairs):
    for actual, reference in pairs:
        reference = np.asarray(reference)
        # a gradient sums over up to B T tokens
        atol = ATOL * max(1, float(np.abs(reference).max()))
        np.testing.assert_allclose(actual, reference, atol=atol, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients_are_those_of_pytorch(causal):
    torch = pytest.importorskip("torch", reason="the reference is PyTorch: pip install 'seqlab[parity]'")
    mixer = randomised(causal=causal)
    x, readout = (np.float32(random(B, T, D, seed=seed)) for seed in range(2))

    network = torch.nn.MultiheadAttention(D, H, batch_first=True)
    inputs = (mixer.query, mixer.key, mixer.value)
    with torch.no_grad():
        for i, linear in enumerate(inputs):
            network.in_proj_weight[i * D : (i + 1) * D] = torch.tensor(np.array(linear.kernel[...].T))
            network.in_proj_bias[i * D : (i + 1) * D] = torch.tensor(np.array(linear.bias[...]))
        network.out_proj.weight.copy_(torch.tensor(np.array(mixer.out.kernel[...].T)))
        network.out_proj.bias.copy_(torch.tensor(np.array(mixer.out.bias[...])))
    torch_x = torch.tensor(x, requires_grad=True)
    future = torch.triu(torch.ones(T, T, dtype=torch.bool), 1) if causal else None
    torch_y = network(torch_x, torch_x, torch_x, attn_mask=future, need_weights=False)[0]
    (torch_y * torch.tensor(readout)).sum().backward()

    y, by_param, by_x = with_gradients(mixer, x, readout)
    by_input = [by_param[name] for name in ("query", "key", "value")]
    assert_close(
        [
            (y, torch_y.detach()),
            (by_x, torch_x.grad),
            (np.concatenate([part["kernel"][...].T for part in by_input]), network.in_proj_weight.grad),
            (np.concatenate([part["bias"][...] for part in by_input]), network.in_proj_bias.grad),
            (by_param["out"]["kernel"][...].T, network.out_proj.weight.grad),
        ]
    )


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_heads_are_those_of_pytorch(causal, kv_heads):
    torch = pytest.importorskip("torch", reason="the reference is PyTorch: pip install 'seqlab[parity]'")
    mixer = randomised(causal=causal, kv_heads=kv_heads)
    x, readout = (np.float32(random(B, T, D, seed=seed)) for seed in range(2))

    def linear(x, name):
        layer = getattr(mixer, name)
        return x @ torch.tensor(np.array(layer.kernel[...])) + torch.tensor(np.array(layer.bias[...]))

    torch_x = torch.tensor(x, requires_grad=True)
    q, k, v = (linear(torch_x, name).unflatten(-1, (-1, K)).transpose(1, 2) for name in ("query", "key", "value"))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch_y = linear(mixed.transpose(1, 2).flatten(2), "out")
    (torch_y * torch.tensor(readout)).sum().backward()

    y, _, by_x = with_gradients(mixer, x, readout)
    assert_close([(y, torch_y.detach()), (by_x, torch_x.grad)])


@pytest.mark.parametrize("position", [NoPosition(), RoPE()], ids=lambda position: position.name)
def test_a_temperature_undoes_a_scale_of_the_scores(position):
    # a = softmax(s / t): scores times c at temperature t are scores at temperature t / c
    x = jnp.asarray(random(B, T, D), jnp.float32)
    scaled, cooled = randomised(position=position, temperature=1.5), randomised(position=position, temperature=0.5)
    for param in (scaled.query.kernel, scaled.query.bias):
        param[...] = 3 * param[...]
    np.testing.assert_allclose(compiled(scaled)(x), compiled(cooled)(x), atol=ATOL, rtol=0)
    assert np.abs(compiled(randomised(position=position, temperature=1.5))(x) - compiled(cooled)(x)).max() > 0.01


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_token_alone_is_given_its_own_value(case):
    mixer = randomised(**vars(case))
    x = jnp.asarray(random(B, 1, D), jnp.float32)
    values = jnp.repeat(mixer.value(x).reshape(B, 1, case.kv_heads, K), H // case.kv_heads, axis=2)
    np.testing.assert_allclose(compiled(mixer)(x), mixer.out(values.reshape(B, 1, D)), atol=ATOL, rtol=0)


def test_a_very_low_temperature_looks_up_one_key_and_a_very_high_one_the_mean():
    x = jnp.asarray(random(1, T, D), jnp.float32)
    mixer = randomised(causal=False, temperature=1e9)
    mean = mixer.out(jnp.broadcast_to(mixer.value(x).mean(1, keepdims=True), x.shape))
    np.testing.assert_allclose(compiled(mixer)(x), mean, atol=ATOL, rtol=0)
    mixer = randomised(causal=False, temperature=1e-4)
    q, k, v = (np.asarray(y[0]) for y in mixer.project(x, jnp.arange(T)[None]))
    best = np.einsum("THK,SHK->HTS", q, k).argmax(-1)  # H T
    chosen = np.stack([v[best[head], head] for head in range(H)], 1).reshape(1, T, D)
    np.testing.assert_allclose(compiled(mixer)(x), mixer.out(jnp.asarray(chosen)), atol=ATOL, rtol=0)


@pytest.mark.parametrize("kv_heads", [H, 2])
def test_keys_and_values_permuted_together_change_nothing(kv_heads):
    mixer = randomised(causal=False, kv_heads=kv_heads)
    places = Places.along(T)
    q, k, v = mixer.project(jnp.asarray(random(B, T, D), jnp.float32), places.positions)
    y = mixer.look_up(q, k, v, places, places)
    order = np.random.default_rng(1).permutation(T)
    np.testing.assert_allclose(mixer.look_up(q, k[:, order], v[:, order], places, places), y, atol=ATOL, rtol=0)
    assert np.abs(mixer.look_up(q, k[:, order], v, places, places) - y).max() > 0.01


def test_swapped_payloads_are_retrieved_swapped():
    # at a low temperature each query reads one slot; the weights do not look at the values
    mixer = randomised(causal=False, temperature=1e-4)
    places = Places.along(T)
    q, k, v = mixer.project(jnp.asarray(random(1, T, D), jnp.float32), places.positions)
    swapped = v.at[:, 2].set(v[:, 5]).at[:, 5].set(v[:, 2])
    back = jnp.asarray([0, 1, 5, 3, 4, 2, *range(6, T)])
    there, here = (mixer.look_up(q, keys, swapped, places, places) for keys in (k[:, back], k))
    np.testing.assert_allclose(there, mixer.look_up(q, k, v, places, places), atol=ATOL, rtol=0)
    assert np.abs(here - there).max() > 0.01


@pytest.mark.parametrize(
    "case", [Case(), Case(causal=False), Case(RoPE(), window=2, qk_norm=True, soft_cap=2)], ids=str
)
def test_a_row_of_nothing_but_padding_gives_zero_and_finite_gradients(case):
    mixer = randomised(**vars(case))
    graph, params = nnx.split(mixer)
    places = Places.of(jnp.asarray([[0] * T, [1] * 4 + [0] * (T - 4)]))

    @partial(jax.jit, compiler_options=QUICK)
    def with_gradients(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, places), params, x)
        return y, pull(jnp.ones_like(y))

    for size in (1.0, 1e4, 1e-40):
        y, gradients = with_gradients(params, jnp.asarray(size * random(B, T, D), jnp.float32))
        np.testing.assert_array_equal(y[0], np.tile(mixer.out.bias[...], (T, 1)))
        assert (gradients[1][0] == 0).all()
        for leaf in jax.tree.leaves((y, gradients)):
            assert jnp.isfinite(leaf).all()


def test_no_score_is_large_enough_to_leak():
    # a forbidden key outscores the allowed ones by far: the future, another sequence, padding
    mixer = compiled(randomised())
    x = jnp.asarray(random(1, T, D), jnp.float32)
    places = Places.of(jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0]]))
    loud = x.at[:, 6:].set(1e6)
    np.testing.assert_array_equal(mixer(loud, places)[:, :6], mixer(x, places)[:, :6])


STATEFUL = [
    Case(),
    Case(RoPE(), kv_heads=2, qk_norm=True),
    Case(window=3),
    Case(RoPE(), window=3, kv_heads=1),
    Case(ALiBi(), window=4, soft_cap=2),
    Case(T5(8, 16), window=16),
    Case(T5(8, 16), temperature=2),
]


@pytest.mark.parametrize("case", STATEFUL, ids=str)
@pytest.mark.parametrize("cuts", [(0, 0, 4, 4, 7), (1, 8), (0, 2, 3, 3, 8), (8, 8)], ids=str)
def test_any_split_into_prefill_and_steps_gives_the_outputs_of_the_sequence(case, cuts):
    """Prefill from cut to cut, steps from the last one on."""
    mixer = randomised(**vars(case))
    prefill, step = compiled(mixer, "prefill"), compiled(mixer, "step")
    x = jnp.asarray(random(B, 12, D), jnp.float32)
    state, ys = mixer.init_state(B, 12), []
    for start, stop in pairwise((0, *cuts)):
        state, y = prefill(state, x[:, start:stop])
        ys.append(y)
    for t in range(cuts[-1], 12):
        state, y = step(state, x[:, t])
        ys.append(y[:, None])
    np.testing.assert_allclose(jnp.concatenate(ys, axis=1), compiled(mixer)(x), atol=ATOL, rtol=0)
    assert state["length"].tolist() == [12, 12]


@pytest.mark.parametrize("case", STATEFUL, ids=str)
def test_a_state_goes_on_with_the_first_sequence_of_a_row_and_keeps_the_last(case):
    mixer = randomised(**vars(case))
    prefill, step = compiled(mixer, "prefill"), compiled(mixer, "step")
    first, second, third = (jnp.asarray(random(1, 14, D, seed=seed), jnp.float32) for seed in range(3))
    padding = jnp.full((1, 8, D), 1e3)
    alone = compiled(mixer)(jnp.concatenate([first, second, third]))
    state = mixer.init_state(3, 14)
    state, _ = prefill(state, jnp.concatenate([x[:, :4] for x in (first, second, third)]))
    rows = [
        [first[:, 4:6], third[:, :1], second[:, :5]],  # 0: first goes on, then two others start
        [second[:, 4:9], padding[:, :3]],
        [padding],
    ]
    segments = [[3, 3, 1, 9, 9, 9, 9, 9], [1, 1, 1, 1, 1, 0, 0, 0], [0] * 8]
    rows = jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows])
    state, y = prefill(state, rows, Places.of(jnp.asarray(segments), state["length"]))
    expected = [(0, 0, alone[0][4:6]), (0, 2, alone[2][:1]), (0, 3, alone[1][:5]), (1, 0, alone[1][4:9])]
    for row, start, reference in expected:
        np.testing.assert_allclose(y[row, start : start + len(reference)], reference, atol=ATOL, rtol=0)
    assert state["length"].tolist() == [5, 9, 4]
    for t in range(5):
        state, y = step(state, jnp.stack([second[0, 5 + t], second[0, 9 + t], third[0, 4 + t]]))
        reference = jnp.stack([alone[1][5 + t], alone[1][9 + t], alone[2][4 + t]])
        np.testing.assert_allclose(y, reference, atol=ATOL, rtol=0)


def test_each_row_has_its_own_length_in_the_cache():
    # rows at different lengths step as they would alone
    mixer = randomised(position=RoPE())
    x = jnp.asarray(random(2, T, D), jnp.float32)
    whole = compiled(mixer)(x)
    state, _ = compiled(mixer, "prefill")(mixer.init_state(2, T), x[:, :3])
    state["length"] = jnp.asarray([3, 2])  # row 1 takes its last token back
    state, y = compiled(mixer, "step")(state, jnp.stack([x[0, 3], x[1, 2]]))
    np.testing.assert_allclose(y, jnp.stack([whole[0, 3], whole[1, 2]]), atol=ATOL, rtol=0)
    assert state["length"].tolist() == [4, 3]


@pytest.mark.parametrize(("window", "slots"), [(None, 20), (5, 5), (30, 20)])
def test_the_cache_is_as_long_as_what_can_be_seen(window, slots):
    state = randomised(window=window, kv_heads=2).init_state(3, 20)
    assert state["keys"].shape == state["values"].shape == (3, slots, 2, K)
    assert state["length"].tolist() == [0, 0, 0]
    for leaf in jax.tree.leaves(state):
        assert (leaf == 0).all()


@pytest.mark.parametrize("window", [None, 6])
def test_more_tokens_than_the_cache_holds_are_refused(window):
    mixer = randomised(window=window)
    with pytest.raises(
        ValueError, match=r"^7 tokens do not fit the cache of 5; use init_state\(batch, max_length=7\)$"
    ):
        mixer.prefill(mixer.init_state(1, 5), jnp.ones((1, 7, D)))


def test_in_bfloat16_all_but_the_softmax_is_bfloat16():
    mixer = randomised(position=T5(8, 16), qk_norm=True)
    graph, params = nnx.split(mixer)
    rounded = nnx.merge(graph, compute_in(jnp.dtype(jnp.bfloat16), params))
    x = jnp.asarray(random(B, T, D), jnp.bfloat16)
    y, exact = compiled(rounded)(x), compiled(mixer)(x.astype(jnp.float32))
    state, stepped = compiled(rounded, "step")(rounded.init_state(B, T), x[:, 0])
    assert {leaf.dtype for leaf in (y, stepped, state["keys"], state["values"])} == {jnp.dtype(jnp.bfloat16)}
    # some ten roundings of 2^-8 on the way, of numbers of a few units
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=10 * 2**-8 * 4)


def test_a_window_and_a_position_show_an_encoder_the_order():
    assert Attention(D, heads=H, rngs=nnx.Rngs(0)).sees_order
    assert not Attention(D, heads=H, causal=False, rngs=nnx.Rngs(0)).sees_order
    assert Attention(D, heads=H, causal=False, window=2, rngs=nnx.Rngs(0)).sees_order
    assert Attention(D, heads=H, causal=False, position=ALiBi(), rngs=nnx.Rngs(0)).sees_order
    # and so it does: reversal is all that a symmetric window cannot tell
    mixer, x = compiled(randomised(causal=False, window=2)), jnp.asarray(random(1, T, D), jnp.float32)
    np.testing.assert_allclose(mixer(x[:, ::-1])[:, ::-1], mixer(x), atol=ATOL, rtol=0)
    order = np.random.default_rng(1).permutation(T)
    assert np.abs(mixer(x[:, order]) - mixer(x)[:, order]).max() > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"model\.width=8 cannot be split into model\.heads=3; heads that fit: \[1, 2, 4, 8\]"),
        ({"heads": 0}, r"model\.width=8 cannot be split into model\.heads=0; heads that fit: \[1, 2, 4, 8\]"),
        ({"heads": 16}, r"model\.width=8 cannot be split into model\.heads=16; heads that fit: \[1, 2, 4, 8\]"),
        ({"kv_heads": 3}, r"model\.heads=4 cannot share model\.kv_heads=3; kv_heads that fit: \[1, 2, 4\]"),
        ({"kv_heads": 0}, r"model\.heads=4 cannot share model\.kv_heads=0; kv_heads that fit: \[1, 2, 4\]"),
        ({"window": 0}, r"model\.window=0 shows a token nothing; use at least 1, or null for no window"),
        ({"temperature": 0}, r"model\.temperature=0 must be above 0"),
        ({"temperature": float("nan")}, r"model\.temperature=nan must be above 0"),
        ({"soft_cap": -1}, r"model\.soft_cap=-1 must be above 0, or null for no cap"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Attention(8, **({"heads": 4} | options), rngs=nnx.Rngs(0))


def test_an_encoder_has_no_step():
    with pytest.raises(NoStepError, match=r"^attention to both sides has no token-by-token form; use a causal model$"):
        randomised(causal=False).init_state(1, 1)


def test_an_odd_head_width_cannot_turn():
    with pytest.raises(ValueError, match=r"model\.width / model\.heads must be even, not 3$"):
        Attention(6, heads=2, position=RoPE(), rngs=nnx.Rngs(0))(jnp.ones((1, 2, 6)))
