"""Lets a trained model go on from a prompt: `python -m seqlab.generate runs/text/ssm/defaults --prompt "In the "`."""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from omegaconf import DictConfig, OmegaConf

from seqlab.commandline import OK, REFUSED, Job
from seqlab.directory import CONFIG_FILE, DATA, digest, saved
from seqlab.model import SequenceModel
from seqlab.record import members
from seqlab.run import build, use_compilation_cache
from seqlab.tasks.base import Task
from seqlab.training.checkpoints import Checkpoints
from seqlab.types import PRNGKey, Segments


def generate(
    model: SequenceModel,
    prompt: Int[Array, "B T"],
    length: int,
    key: PRNGKey,
    *,
    temperature: int | float = 1.0,
    top_k: int | None = None,
    top_p: int | float | None = None,
    segments: Segments = None,
) -> Int[Array, "B length"]:
    """The `length` tokens that a causal model puts after each prompt, one loop of `step` after one `prefill`.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens may be drawn (Fan et al. 2018).
        top_p: only the fewest tokens whose probabilities sum to p, after top_k (Holtzman et al. 2020, sec. 3.1).
        segments: where prompts differ in length, 1 at their tokens and 0 at the padding.

    Raises:
        ValueError: the model sees both directions, the prompt is empty, or a number is out of its range.
    """
    if not model.causal:
        raise ValueError("a model that sees both directions does not generate; use a causal one")
    if prompt.shape[1] < 1:
        raise ValueError("the prompt is empty; give at least one token")
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    state, x = model.prefill(model.init_state(len(prompt), prompt.shape[1] + length), prompt, segments)
    index = jnp.arange(prompt.shape[1])[None]
    last = jnp.max(index if segments is None else jnp.where(segments > 0, index, 0), axis=1, keepdims=True)
    newest = jnp.take_along_axis(x, jnp.broadcast_to(last, (len(x), 1))[..., None], axis=1)[:, 0]

    def go_on(carry, key):
        state, token = carry
        state, logits = model.step(state, token)
        token = draw(logits, key)
        return (state, token), token

    first_key, *keys = jax.random.split(key, length)
    first = draw(model.unembed(newest), first_key)
    rest = jax.lax.scan(go_on, (state, first), jnp.stack(keys))[1] if keys else jnp.zeros((0, len(prompt)), first.dtype)
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def sample(
    logits: Float[Array, "B V"],
    key: PRNGKey,
    *,
    temperature: int | float = 1.0,
    top_k: int | None = None,
    top_p: int | float | None = None,
) -> Int[Array, " B"]:
    """One token of each row; see `generate`."""
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be 0 or more")
    if top_k is not None and not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k={top_k} must be from 1 to the {logits.shape[1]} tokens of the vocabulary")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    if temperature == 0:
        return logits.argmax(axis=1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / temperature
    order = jnp.argsort(logits, axis=1, descending=True)
    logits = jnp.take_along_axis(logits, order, axis=1)
    if top_k is not None:
        logits = jnp.where(jnp.arange(logits.shape[1])[None] < top_k, logits, -jnp.inf)
    if top_p is not None:
        p = jax.nn.softmax(logits)
        logits = jnp.where(jnp.cumsum(p, axis=1) - p < top_p, logits, -jnp.inf)  # the first one always stays
    drawn = jax.random.categorical(key, logits)[:, None]
    return jnp.take_along_axis(order, drawn, axis=1)[:, 0].astype(jnp.int32)


def load(directory: Path, member: int) -> tuple[SequenceModel, Task]:
    """One trained member of a run, from its newest checkpoint, and its task.

    Raises:
        ValueError: there is no such run or member, it has no checkpoint, or its text has changed.
    """
    file = directory / CONFIG_FILE
    if not file.exists():
        raise ValueError(f"{directory} is no run: it has no {CONFIG_FILE}; train one with python -m seqlab.run")
    here = {"mesh": {"population": 1, "data": 1, "model": 1}, "population": {"max_parallel": 1}}  # whatever it was then
    config = OmegaConf.merge(saved(directory), here)
    assert isinstance(config, DictConfig)
    job = Job(config, {"model": "", "task": ""}, directory, "")
    task, program = build(job)
    if digest(task) != config[DATA]:
        raise ValueError(f"{directory} was trained on other data than its task holds now")
    rates, seeds = zip(*members(job), strict=True)
    if not 0 <= member < len(seeds):
        raise ValueError(f"member={member}: {directory} has members 0 to {len(seeds) - 1}")
    with Checkpoints(directory / "checkpoints") as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(program.init, np.array(seeds), np.array(rates)))
    if restored is None:
        raise ValueError(f"{directory} has no checkpoint yet")
    return program.model(jax.tree.map(lambda leaf: leaf[member], restored[0].params)), task


def main(arguments: list[str] | None = None) -> int:
    """Prints the prompt and what the model puts after it; returns the exit code: 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m seqlab.generate", description="Lets a trained model go on.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory, runs/<task>/<model>/<...>")
    parser.add_argument("--prompt", required=True, help="characters of a text, or words of another task's vocabulary")
    parser.add_argument("--length", type=int, default=200, help="tokens to generate (200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits; 0: the likeliest token (1)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that sum to p only")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--member", type=int, default=0, help="of the population (0)")
    options = parser.parse_args(arguments)
    use_compilation_cache()
    try:
        model, task = load(options.run, options.member)
        prompt = jnp.array([task.vocab.encode(options.prompt)], jnp.int32)
        settings = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        go_on = jax.jit(partial(generate, length=options.length, **settings))
        tokens = go_on(model, prompt, key=jax.random.key(options.seed))
    except (ValueError, OSError) as error:
        print(f"seqlab.generate: {error}", file=sys.stderr)
        return REFUSED
    print(task.vocab.separator.join([options.prompt, task.vocab.decode(np.asarray(tokens[0]))]))
    return OK


if __name__ == "__main__":
    sys.exit(main())
