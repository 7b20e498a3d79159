"""Both directions against two passes by hand."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.attention import Attention
from seqlab.mixers.base import Bidirectional, NoStepError
from seqlab.mixers.rnn import GRU
from seqlab.types import Places

B, T, D = 2, 6, 4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("merge", ["sum", "concat"])
def test_it_is_a_pass_over_the_sequence_and_one_over_its_reverse(merge, packed):
    mixer = Bidirectional(D, mixer=GRU, merge=merge, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    rows = [[(0, 4)], [(0, 1), (1, 6)]] if packed else [[(0, T)]] * B
    segments = jnp.array([[1, 1, 1, 1, 0, 0], [5, 2, 2, 2, 2, 2]])
    actual = mixer(jnp.asarray(x), Places.of(segments) if packed else None)
    for row, sequences in enumerate(rows):
        for first, end in sequences:
            alone = x[row : row + 1, first:end]
            forward = np.asarray(mixer.forward(jnp.asarray(alone)))
            reverse = np.asarray(mixer.backward(jnp.asarray(alone[:, ::-1].copy())))
            assert not np.allclose(forward[:, ::-1], reverse, atol=1e-2)  # two networks, not one
            expected = forward + reverse[:, ::-1]
            if merge == "concat":
                joined = np.concatenate([forward, reverse[:, ::-1]], -1)
                expected = joined @ np.asarray(mixer.join.kernel[...]) + np.asarray(mixer.join.bias[...])
            # a sum of at most 8 products of numbers below 1: 8 roundings of 2^-24
            np.testing.assert_allclose(actual[row, first:end], expected[0], atol=1e-6, rtol=0)


def test_an_unknown_merge_is_named():
    with pytest.raises(ValueError, match=r"^model\.bidirectional=mean is unknown; use false, true, sum or concat$"):
        Bidirectional(D, mixer=GRU, merge="mean", rngs=nnx.Rngs(0))


def test_an_encoder_is_not_run_both_ways():
    encoder = partial(Attention, heads=2, causal=False)
    with pytest.raises(ValueError, match=r"sees both directions already; leave model\.bidirectional=false$"):
        Bidirectional(D, mixer=encoder, rngs=nnx.Rngs(0))


def test_what_has_no_token_by_token_form_says_so():
    mixer = Bidirectional(D, mixer=GRU, rngs=nnx.Rngs(0))
    for call in (lambda: mixer.init_state(1, 1), lambda: mixer.step(None, jnp.ones((1, D)))):
        with pytest.raises(NoStepError, match=r"^Bidirectional has no token-by-token form; use a causal model"):
            call()
