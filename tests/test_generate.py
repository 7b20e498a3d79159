"""Generation against one long forward pass per token, and the draws against the distribution they name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from seqlab.generate import generate, main, sample
from seqlab.mixers.attention import Attention
from seqlab.mixers.rnn import GRU
from seqlab.model import SequenceModel
from seqlab.positions import Sinusoidal

B, T, V, LENGTH = 2, 5, 11, 4
PROMPT = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)))


def build(mixer=GRU, **settings):
    return SequenceModel(V, width=8, depth=2, mixer=mixer, position=Sinusoidal(), rngs=nnx.Rngs(0), **settings)


@pytest.mark.parametrize("mixer", [GRU, partial(Attention, heads=2)], ids=["gru", "attention"])
def test_the_likeliest_tokens_are_those_of_a_forward_pass_over_all_before(mixer):
    model = build(mixer)
    text = np.asarray(PROMPT)
    forward = jax.jit(model)
    for _ in range(LENGTH):
        text = np.concatenate([text, np.asarray(forward(jnp.asarray(text)))[:, -1:].argmax(-1)], axis=1)
    made = jax.jit(partial(generate, length=LENGTH, temperature=0))(model, PROMPT, key=jax.random.key(0))
    np.testing.assert_array_equal(made, text[:, T:])


def test_padded_prompts_go_on_as_they_do_alone():
    model = build()
    segments = jnp.array([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1]])
    greedy = partial(generate, model, length=LENGTH, key=jax.random.key(0), temperature=0)
    together = greedy(PROMPT, segments=segments)
    for row, places in enumerate(([0, 1, 3], [2, 3, 4])):
        np.testing.assert_array_equal(together[row], greedy(PROMPT[row : row + 1, jnp.array(places)])[0])


def test_a_key_gives_the_same_text_and_another_key_another():
    run = jax.jit(partial(generate, length=30))
    texts = [run(build(), PROMPT, key=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert (texts[0] == texts[1]).all() and (texts[0] != texts[2]).any()
    assert all(((text >= 0) & (text < V)).all() for text in texts)


LOGITS = np.log([0.4, 0.05, 0.3, 0.15, 0.1])


@pytest.mark.parametrize(
    ("settings", "p"),
    [
        ({}, [0.4, 0.05, 0.3, 0.15, 0.1]),
        ({"temperature": 0.5}, np.array([0.16, 0.0025, 0.09, 0.0225, 0.01]) / 0.285),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.5}, [4 / 7, 0, 3 / 7, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0, 0]),
        ({"top_p": 1.0}, [0.4, 0.05, 0.3, 0.15, 0.1]),
        ({"top_k": 3, "top_p": 0.8}, [4 / 7, 0, 3 / 7, 0, 0]),  # of .47, .35, .18 the first two sum to .82
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(settings, p):
    count, p = 20_000, np.asarray(p)
    logits = jnp.broadcast_to(jnp.float32(LOGITS), (count, 5))
    drawn = np.bincount(sample(logits, jax.random.key(0), **settings), minlength=5)
    assert (drawn[p == 0] == 0).all()
    if (p > 0).sum() > 1:
        # one fixed seed
        assert stats.chisquare(drawn[p > 0], count * p[p > 0] / p.sum()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"^temperature=-1\.0 must be 0 or more$"),
        ({"temperature": float("nan")}, r"^temperature=nan must be 0 or more$"),
        ({"top_k": 0}, r"^top_k=0 must be from 1 to the 11 tokens"),
        ({"top_k": 12}, r"^top_k=12 must be from 1 to the 11 tokens"),
        ({"top_p": 0.0}, r"^top_p=0\.0 must be above 0"),
        ({"top_p": 1.5}, r"^top_p=1\.5 must be above 0"),
        ({"length": 0}, r"^length=0 must be at least 1$"),
        ({"prompt": PROMPT[:, :0]}, r"^the prompt is empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), **{"prompt": PROMPT, "length": 2, "key": jax.random.key(0), **settings})


def test_a_model_that_sees_both_directions_does_not_generate():
    with pytest.raises(ValueError, match="sees both directions"):
        generate(build(bidirectional=True), PROMPT, 2, jax.random.key(0))


@pytest.fixture(scope="module")
def run_directory(command, tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    typed = command("model=gru task=roles experiment=smoke train.steps=2 train.chunk=2 runs=runs", directory)
    assert typed.code == 0, typed.lines
    (config,) = directory.glob("runs/roles/gru/*/config.yaml")
    return config.parent


def test_a_trained_run_goes_on_from_words(run_directory, capsys):
    words = ["--prompt", "dog chased", "--length", "7", "--seed", "3", "--member", "1"]
    for settings in ([], ["--top-k", "3", "--top-p", "0.9", "--temperature", "0.7"]):
        assert main([str(run_directory), *words, *settings]) == 0
        line = capsys.readouterr().out.splitlines()
        assert len(line) == 1 and line[0].startswith("dog chased ") and len(line[0].split()) == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "dog barked"], "'barked' is not in the vocabulary: "),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "dog", "--member", "9"], "member=9: "),
        (["--prompt", "dog", "--top-k", "0"], "top_k=0 must be"),
    ],
)
def test_bad_input_gets_one_line(run_directory, words, message, capsys):
    assert main([str(run_directory), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seqlab.generate: ") and message in line


def test_a_directory_without_a_run_is_named(tmp_path, capsys):
    assert main([str(tmp_path), "--prompt", "dog"]) == 2
    assert f"{tmp_path} is no run" in capsys.readouterr().err
