"""Positions and starts against a loop over the tokens of each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.types import Places, starts

B, T = 64, 12


def count(segments, first=None):
    """Positions and starts, token by token; None for padding."""
    positions, begins = [], []
    for row, segment in enumerate(segments):
        current, here, places, new = None, -1 if first is None else first[row] - 1, [], []
        for token in segment:
            begins_here = token > 0 and current is not None and token != current
            if token > 0:
                here = 0 if begins_here else here + 1
                current = token
            places.append(here if token > 0 else None)
            new.append(begins_here)
        positions.append(places)
        begins.append(new)
    return positions, np.array(begins, bool).reshape(segments.shape)


def packings(rows, length):
    """Random runs of numbered sequences with padding anywhere, some rows all padding or all one sequence."""
    rng = np.random.default_rng(0)
    change = rng.random((rows, length)) < rng.choice([0, 0.2, 0.6], (rows, 1))
    # numbers rise or fall, and not by 1: only whether they differ may matter
    segments = 1 + np.where(rng.random((rows, 1)) < 0.5, 1, -1) * 3 * change.cumsum(1)
    segments += 3 * length
    segments = np.where(rng.random((rows, length)) < rng.choice([0, 0.3, 0.8], (rows, 1)), 0, segments)
    segments[0] = 0
    return segments


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("length", [T, 1, 0])
def test_tokens_are_counted_within_their_sequence_and_padding_is_not(length, continued):
    segments = packings(B, length)
    first = np.random.default_rng(1).integers(0, 9, B) if continued else None
    places = jax.jit(Places.of)(jnp.asarray(segments), None if first is None else jnp.asarray(first))
    positions, begins = count(segments, first)
    assert places.positions.shape == segments.shape
    actual = np.where(segments > 0, places.positions, -1).tolist()
    assert actual == [[-1 if place is None else place for place in row] for row in positions]
    assert (np.asarray(places.positions) >= 0).all()  # padding's too, so that they may index
    assert (places.segments == segments).all()
    assert (np.asarray(starts(jnp.asarray(segments))) == begins).all()
    if length == T:  # the draw has what the laws are about
        assert begins.any() and (segments == 0).any(1).sum() > B // 4 and (begins.sum(1) > 2).any()


def test_a_row_without_segments_is_one_sequence():
    places = Places.along(4)
    assert places.positions.tolist() == [[0, 1, 2, 3]] and places.segments is None
    assert Places.along(3, jnp.array([0, 5])).positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert Places.along(0).positions.shape == (1, 0) and Places.along(0, jnp.array([2, 3])).positions.shape == (2, 0)


def test_the_first_token_of_a_row_goes_on_with_what_was_before():
    segments = jnp.array([[0, 0, 2, 2, 1]])
    assert starts(segments).tolist() == [[False, False, False, False, True]]
    assert Places.of(segments, jnp.array([7])).positions[0, 2:].tolist() == [7, 8, 0]


def test_one_sequence_goes_on_over_padding_within():
    segments = jnp.array([[3, 0, 3, 0, 5, 0, 5]])
    assert starts(segments).tolist() == [[False, False, False, False, True, False, False]]
    assert Places.of(segments).positions[0, ::2].tolist() == [0, 1, 0, 1]
