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
def differences():
    """The paths at which two states differ by a bit: `assert not differences(ours, theirs)`."""

    def of(ours, theirs):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
        return [jax.tree_util.keystr(path) for (path, a), b in pairs if content(a) != content(b)]

    def content(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()

    return of
