"""Multi-query associative recall: which value followed each key (MQAR; Arora et al. 2023, "Zoology")."""

from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from seqlab.tasks.base import Vocabulary, cross_entropy
from seqlab.types import Batch, PRNGKey, Split

SLOT_RULES = ("power", "distance")
FILLERS = ("blank", "random")
BLANK = 0


@struct.dataclass
class MQAR:
    """A context `k v k v ...` of N pairs, then (T - 2N)/2 slots, in N of which one of the keys is asked for its value.

    Token 0 is blank, the lower half of the others are keys (drawn without replacement), the upper half values (drawn
    with replacement, so that N of them carry N log2(values) bits). Each pair is queried once: its key stands at the
    first position of slot s, 2N + 2s, and is scored there; the answer is never shown.
    """

    length: int = struct.field(pytree_node=False, default=64)
    pairs: int = struct.field(pytree_node=False, default=8)
    vocab_size: int = struct.field(pytree_node=False, default=129)
    slots: str = struct.field(pytree_node=False, default="power")
    """Which slots are asked: by the law p(x) ~ x^(power - 1), or uniformly in the distance back to the value."""
    power: float = struct.field(pytree_node=False, default=0.01)
    filler: str = struct.field(pytree_node=False, default="blank")
    """What stands elsewhere: blanks, or random tokens that are none of the sequence's own keys."""
    eval_lengths: Sequence[int] = struct.field(pytree_node=False, default=())
    """Further lengths at which recall is measured."""
    eval_pairs: Sequence[int] = struct.field(pytree_node=False, default=())
    """Loads at which recall is measured; empty: the powers of two that fit."""

    main_metric = "accuracy"
    higher_is_better = True

    def __post_init__(self):
        # YAML knows lists only, and what is static must be hashable
        object.__setattr__(self, "eval_lengths", tuple(self.eval_lengths))
        object.__setattr__(self, "eval_pairs", tuple(self.eval_pairs))
        for name, choices in (("slots", SLOT_RULES), ("filler", FILLERS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"task.{name}={getattr(self, name)} is unknown; use {' or '.join(choices)}")
        if not self.power > 0:
            raise ValueError(f"task.power={self.power} must be positive; 1 asks evenly, 0.01 soon after the pairs")
        self._check_fit("task.length", self.length, "task.pairs", self.pairs)
        for length in self.eval_lengths:
            self._check_fit("task.eval_lengths", length, "task.pairs", self.pairs)
        for pairs in self.eval_pairs:
            self._check_fit("task.length", self.length, "task.eval_pairs", pairs)

    def _check_fit(self, length_name: str, length: int, pairs_name: str, pairs: int):
        for name, count in ((length_name, length), (pairs_name, pairs), ("task.vocab_size", self.vocab_size)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: {count} must be a positive whole number")
        if length % 2:
            raise ValueError(f"{length_name}: {length} is odd; use {length + 1}, as pairs and slots take two tokens")
        if 4 * pairs > length:
            most = f"at most {length // 4} pairs, or " if length >= 4 else ""
            raise ValueError(f"{pairs_name}: {pairs} do not fit {length_name} {length}; use {most}length {4 * pairs}")
        if pairs > self.key_count:
            most = f"at most {self.key_count} pairs, or " if self.key_count else ""
            raise ValueError(
                f"{pairs_name}: {pairs} need as many keys, task.vocab_size {self.vocab_size} has {self.key_count}; "
                f"use {most}vocab_size {2 * pairs + 1}"
            )

    @property
    def key_count(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def value_count(self) -> int:
        return self.vocab_size - 1 - self.key_count

    @property
    def slot_count(self) -> int:
        return (self.length - 2 * self.pairs) // 2

    @property
    def vocab(self) -> Vocabulary:
        keys = (f"k{i}" for i in range(self.key_count))
        values = (f"v{i}" for i in range(self.value_count))
        return Vocabulary(("_", *keys, *values))

    def sample(self, key: PRNGKey, batch_size: int, split: Split) -> Batch:
        """Scores Q = N positions a row, in the order of the pairs.

        Labels: `gap`, the query's position minus its value's (odd, 1 to T - 3), and `pair`, the index of the pair.
        """
        key = jax.random.fold_in(key, get_args(Split).index(split))
        key_of_keys, key_of_values, key_of_slots, key_of_filler = jax.random.split(key, 4)
        # the N largest of i.i.d. numbers lie at N distinct places, uniformly
        chances = jax.random.uniform(key_of_keys, (batch_size, self.key_count))
        keys = 1 + jax.lax.top_k(chances, self.pairs)[1]
        values = jax.random.randint(key_of_values, keys.shape, 1 + self.key_count, self.vocab_size)
        if self.slots == "power":
            slots = power_law_slots(key_of_slots, batch_size, self.pairs, self.slot_count, self.power)
        else:
            slots = uniform_distance_slots(key_of_slots, batch_size, self.pairs, self.slot_count)

        context = jnp.stack([keys, values], axis=-1).reshape(batch_size, 2 * self.pairs)
        shape = (batch_size, self.length - 2 * self.pairs)
        if self.filler == "blank":
            rest = jnp.full(shape, BLANK)
        else:
            rest = tokens_other_than(key_of_filler, keys, shape[1], self.vocab_size)
        inputs = jnp.concatenate([context, rest], axis=1)
        scored = 2 * self.pairs + 2 * slots
        inputs = inputs.at[jnp.arange(batch_size)[:, None], scored].set(keys)

        pair = jnp.broadcast_to(jnp.arange(self.pairs)[None], scored.shape)
        labels = {"gap": scored - (2 * pair + 1), "pair": pair}
        return Batch(inputs, scored, values, jnp.ones(scored.shape), labels)

    def loss(self, logits: Float[Array, "B Q V"], batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        return cross_entropy(logits, batch)

    def ceilings(self) -> dict[str, float]:
        """Accuracy of any value, of one of the values in the context, and of who remembers all pairs."""
        chance = 1 / self.value_count
        return {
            "chance": chance,
            "in_context_guess": 1 / self.pairs + (1 - 1 / self.pairs) * chance,
            "oracle": 1.0,
        }

    def asked_of(self, causal: bool) -> "MQAR":
        # no answer stands in the inputs after its pair: looking ahead tells nothing
        return self


def power_law_slots(key: PRNGKey, batch_size: int, pairs: int, slots: int, power: float) -> Int[Array, "B Q"]:
    """Draws a slot for each pair without replacement, slot x - 1 with probability ~ power x^(power - 1), x = 1, 2, ...

    Pair 0 draws first: the Q largest Gumbel-perturbed log-probabilities, in falling order, are Q successive draws
    without replacement (Gumbel top-k; Kool et al. 2019).
    """
    log_p = (power - 1) * jnp.log(jnp.arange(1, slots + 1, dtype=jnp.float32))
    return jax.lax.top_k(log_p[None] + jax.random.gumbel(key, (batch_size, slots)), pairs)[1]


def uniform_distance_slots(key: PRNGKey, batch_size: int, pairs: int, slots: int) -> Int[Array, "B Q"]:
    """Gives each pair a slot such that all distances between a value and its query are asked alike.

    Repeats for each pair: a distance uniformly among those that a free pair and a free slot still have, then such a
    pair and slot uniformly. With pairs counted from the context's end (age 0 the last), the distance is
    2 (age + slot) + 1, so `reach = age + slot` stands for it.
    """
    rows = jnp.arange(batch_size)
    reaches = jnp.arange(pairs + slots - 1)[None]

    def at(free: Bool[Array, "B X"], index: Int[Array, "B Y"]) -> Bool[Array, "B Y"]:
        inside = (index >= 0) & (index < free.shape[1])
        return inside & jnp.take_along_axis(free, index.clip(0, free.shape[1] - 1), axis=1)

    def draw(state, uniform):
        free_ages, free_slots, combinations, slot_of_age = state
        reach = choose(combinations > 0, uniform[0])
        age = choose(free_ages & at(free_slots, reach[:, None] - jnp.arange(pairs)[None]), uniform[1])
        slot = reach - age
        # keeping the counts costs O(pairs + slots) a draw, counting anew O(pairs * slots)
        combinations -= at(free_slots, reaches - age[:, None]).astype(jnp.int32)
        free_ages = free_ages.at[rows, age].set(False)
        combinations -= at(free_ages, reaches - slot[:, None]).astype(jnp.int32)
        free_slots = free_slots.at[rows, slot].set(False)
        return (free_ages, free_slots, combinations, slot_of_age.at[rows, age].set(slot)), None

    on_diagonal = jnp.minimum(jnp.minimum(reaches + 1, reaches[:, ::-1] + 1), min(pairs, slots))
    state = (
        jnp.ones((batch_size, pairs), bool),
        jnp.ones((batch_size, slots), bool),
        jnp.broadcast_to(on_diagonal, (batch_size, reaches.size)),
        jnp.zeros((batch_size, pairs), jnp.int32),
    )
    (*_, slot_of_age), _ = jax.lax.scan(draw, state, jax.random.uniform(key, (pairs, 2, batch_size)))
    return slot_of_age[:, ::-1]


def choose(allowed: Bool[Array, "B X"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The index of one of the allowed entries of each row, uniformly."""
    rank = jnp.cumsum(allowed, axis=1, dtype=jnp.float32)
    return jnp.argmax(rank > uniform[:, None] * rank[:, -1:], axis=1)


def tokens_other_than(key: PRNGKey, keys: Int[Array, "B Q"], count: int, vocab_size: int) -> Int[Array, "B count"]:
    """Uniform draws from the non-blank tokens that are not among the row's (distinct) keys."""
    batch_size, pairs = keys.shape
    rank = jax.random.randint(key, (batch_size, count), 1, vocab_size - pairs)
    # the rank-th token that is no key lies as many places further as keys come before it
    ranks_below = jnp.sort(keys, axis=1) - jnp.arange(pairs)[None]
    return rank + (rank[:, :, None] >= ranks_below[:, None, :]).sum(-1, dtype=jnp.int32)
