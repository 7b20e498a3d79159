"""Models learn what the literature says they learn: small, from data alone, and judged on examples never trained on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.measures.text import BitsPerByte
from seqlab.mixers.attention import Attention
from seqlab.mixers.mamba import Mamba2
from seqlab.mixers.rnn import GRU
from seqlab.mixers.ssm import LRU
from seqlab.model import SequenceModel
from seqlab.positions import Sinusoidal
from seqlab.tasks.mqar import MQAR
from seqlab.tasks.text import read_text
from seqlab.training.optimizer import AdamW
from seqlab.training.program import Program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes():
    # optax raises float32 decay rates to an int32 count of steps, which strict promotion refuses
    with jax.numpy_dtype_promotion("standard"):
        yield


def trained(task, build, learning_rate, steps, batch_size, members):
    """The program and its population after all steps."""
    program = Program(partial(build, task.vocab.size), AdamW(learning_rate, floor=0.2), steps, batch_size)
    states = program.init(np.arange(members), np.full(members, learning_rate))
    return program, program.advance(states, task, jnp.int32(steps))[0]


def test_a_transformer_of_two_layers_recalls():
    """Two layers of attention solve MQAR (Arora et al. 2023): one moves the key beside its value, one looks it up."""
    task = MQAR(length=32, pairs=4, vocab_size=65)
    build = partial(SequenceModel, width=64, depth=2, mixer=partial(Attention, heads=2), position=Sinusoidal())
    program, states = trained(task, build, 3e-3, steps=500, batch_size=64, members=2)
    accuracy = program.evaluate(states, task, jax.random.key(0), 64, "test")["accuracy"]  # 16,384 answers
    assert (accuracy > 0.99).all(), accuracy


ONE_LAYER = {
    "attention": partial(SequenceModel, convolution=3, mixer=partial(Attention, heads=2)),
    "mamba2": partial(SequenceModel, mixer=partial(Mamba2, heads=2, state_size=32)),
}


@pytest.mark.parametrize("name", ONE_LAYER)
def test_one_layer_recalls_after_a_short_convolution(name):
    """It puts key and value side by side, for which attention alone needs a layer (Arora et al. 2023, sec. 4.3)."""
    task = MQAR(length=32, pairs=4, vocab_size=65)
    build = partial(ONE_LAYER[name], width=64, depth=1)
    program, states = trained(task, build, 3e-3, steps=500, batch_size=64, members=2)
    accuracy = program.evaluate(states, task, jax.random.key(0), 64, "test")["accuracy"]
    assert (accuracy > 0.98).all(), accuracy


@pytest.mark.parametrize("mixer", [GRU, partial(LRU, state_size=32)], ids=["gru", "ssm"])
def test_a_recurrence_recalls_more_than_guessing_among_the_values_it_saw(mixer):
    """Which is right in 0.56 of the cases, more than blind chance, 0.125. Of 4,096 sequences with two answers each a
    guesser gets a share right whose standard deviation is at most sqrt(.56 x .44 / 4096) = .0078, so that five of them
    lie between a guesser and this bound.
    """
    task = MQAR(length=16, pairs=2, vocab_size=17)
    program, states = trained(task, partial(SequenceModel, width=32, depth=2, mixer=mixer), 1e-2, 800, 64, members=2)
    accuracy = program.evaluate(states, task, jax.random.key(0), 64, "test")["accuracy"]
    bound = task.ceilings()["in_context_guess"] + 5 * 0.0078
    assert (accuracy > bound).all(), (accuracy, bound)


def test_text_comes_below_three_bits_a_character():
    """On the whole test split; pairs of characters alone need 3.4 bits, and context in disorder helps less."""
    task = read_text(length=64).asked_of(causal=True)
    program, states = trained(task, partial(SequenceModel, width=64, depth=1, mixer=GRU), 1e-2, 400, 32, members=1)
    curves = program.measure(BitsPerByte(), states, task, jax.random.key(0))
    bits = {name: curve.values.item() for name, curve in curves.items()}
    assert bits["bits_per_character"] < 3.0
    assert bits["bits_per_character"] < task.ceilings()["bigram"]
    assert bits["bits_per_byte"] < bits["bits_per_byte_shuffled_words"]
