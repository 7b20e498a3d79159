"""One small program for all tests of training, so that it is compiled once."""

from functools import partial

import jax
import numpy as np
import pytest

from seqlab.mixers.rnn import GRU
from seqlab.model import SequenceModel
from seqlab.tasks.mqar import MQAR
from seqlab.training.optimizer import AdamW
from seqlab.training.program import Program


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes():
    # optax raises float32 decay rates to an int32 count of steps, which strict promotion refuses
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def task():
    return MQAR(length=16, pairs=2, vocab_size=17)


@pytest.fixture(scope="session")
def program():
    """With dropout, so that a step uses its key for more than its data."""
    build = partial(SequenceModel, 17, width=8, depth=2, mixer=GRU, dropout=0.1)
    return Program(build, AdamW(1e-2), steps=8, batch_size=4)


@pytest.fixture(scope="session")
def bits():
    """Everything that a state holds, as arrays that numpy compares bit by bit: {path: bytes as unsigned integers}."""

    def of(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        return {
            name: np.array(jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a).view(np.uint8)
            for name, a in arrays.items()
        }

    return of
