"""Who did what to whom: the order of the words, and nothing else, tells the agent from the patient."""

from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from seqlab.tasks.base import Vocabulary, cross_entropy
from seqlab.types import Batch, PRNGKey, Split

MARKERS = ("was", "by")
QUERIES = ("agent", "patient")
VOICES = ("active", "passive")
SENTENCE_LENGTHS = (3, 5)

NOUNS = (
    *("dog", "man", "cat", "woman", "horse", "child", "wolf", "farmer"),
    *("bear", "king", "fox", "doctor", "goat", "queen", "bird", "teacher"),
)
# regular verbs only: their past and their participle are one word, so the bag of words shows no more than the voice
VERBS = ("chased", "watched", "followed", "helped", "pushed", "called", "trusted", "feared")
FILLERS = (
    *("now", "then", "here", "there", "today", "again", "often", "still"),
    *("perhaps", "indeed", "soon", "once", "never", "well", "yes", "oh"),
)


@struct.dataclass
class Roles:
    """`A V B` or `B was V by A` (A does it to B) at a random place among filler words, then the question.

    The last token asks for the `agent` or the `patient`; the noun is scored there (Q = 1). A pair of nouns that one
    split uses, in either order, no other uses. The splits are circulant: with the nouns in a ring of n, pairs at
    distance 1 and, for even n, n / 2 are the test split, those at distance n // 4 the validation split, the rest is
    for training. So each noun is as frequent as any other in every split: 80 + 16 + 24 pairs for 16 nouns.
    """

    length: int = struct.field(pytree_node=False, default=14)
    nouns: Sequence[str] = struct.field(pytree_node=False, default=NOUNS)
    verbs: Sequence[str] = struct.field(pytree_node=False, default=VERBS)
    fillers: Sequence[str] = struct.field(pytree_node=False, default=FILLERS)

    main_metric = "accuracy"
    higher_is_better = True

    def __post_init__(self):
        shortest = max(SENTENCE_LENGTHS) + 1
        if not isinstance(self.length, int) or self.length < shortest:
            raise ValueError(f"task.length={self.length} is too short; `A was V by B` and the question take {shortest}")
        for name, fewest in (("nouns", 8), ("verbs", 1), ("fillers", 1)):
            # YAML knows lists only, and what is static must be hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if len(getattr(self, name)) < fewest:
                raise ValueError(f"task.{name} has {len(getattr(self, name))} words; give at least {fewest}")
        words = self.vocab.words
        twice = [word for i, word in enumerate(words) if word in words[:i]]
        if twice:
            raise ValueError(f"task: {twice[0]!r} has two meanings; every noun, verb, filler and {MARKERS} must differ")

    @property
    def vocab(self) -> Vocabulary:
        return Vocabulary((*self.fillers, *self.nouns, *self.verbs, *MARKERS, *QUERIES))

    def noun_pairs(self, split: Split) -> Int[np.ndarray, "M 2"]:
        """The unordered pairs of nouns (indices into `nouns`) of a split."""
        n = len(self.nouns)
        test = {1, n // 2} if n % 2 == 0 else {1}
        distances = {"test": test, "valid": {n // 4}, "train": set(range(1, n // 2 + 1)) - test - {n // 4}}[split]
        # at distance n / 2 the ring is gone round twice: each pair once
        pairs = {frozenset((i, (i + distance) % n)) for distance in distances for i in range(n)}
        return np.array(sorted(sorted(pair) for pair in pairs), np.int32)

    def sample(self, key: PRNGKey, batch_size: int, split: Split) -> Batch:
        """Training rows are independent; in `valid` and `test` rows 2i and 2i + 1 differ in who does it to whom only.

        Labels: `voice` (0 active, 1 passive) and `query` (0 agent, 1 patient).

        Raises:
            ValueError: an odd `batch_size` for `valid` or `test`.
        """
        copies = 1 if split == "train" else 2
        if batch_size % copies:
            raise ValueError(f"batch size {batch_size} is odd; {split} rows come in pairs, use {batch_size + 1}")
        rows = batch_size // copies
        draws = jax.random.split(jax.random.fold_in(key, get_args(Split).index(split)), 5)
        vocab = self.vocab
        first_noun, first_verb = vocab.words.index(self.nouns[0]), vocab.words.index(self.verbs[0])
        was, by = (vocab.words.index(marker) for marker in MARKERS)

        pairs = jnp.asarray(self.noun_pairs(split))
        nouns = first_noun + pairs[jax.random.randint(draws[0], (rows,), 0, len(pairs))]
        swap, voice, query = jax.random.bernoulli(draws[1], shape=(3, rows)).astype(jnp.int32)
        verb = first_verb + jax.random.randint(draws[2], (rows,), 0, len(self.verbs))
        start = jax.random.randint(draws[3], (rows,), 0, self.length - jnp.array(SENTENCE_LENGTHS)[voice])
        filler = jax.random.randint(draws[4], (rows, self.length), 0, len(self.fillers))
        nouns, swap, voice, query, verb, start, filler = jax.tree.map(
            lambda x: jnp.repeat(x, copies, axis=0), (nouns, swap, voice, query, verb, start, filler)
        )
        swap = swap ^ (jnp.arange(batch_size) % copies)

        agent = jnp.take_along_axis(nouns, swap[:, None], axis=1)[:, 0]
        patient = jnp.take_along_axis(nouns, 1 - swap[:, None], axis=1)[:, 0]
        active = jnp.stack([agent, verb, patient, patient, patient], axis=1)
        passive = jnp.stack([patient, jnp.full_like(verb, was), verb, jnp.full_like(verb, by), agent], axis=1)
        sentence = jnp.where(voice[:, None] == 0, active, passive)
        place = jnp.arange(self.length)[None] - start[:, None]
        spoken = jnp.take_along_axis(sentence, place.clip(0, sentence.shape[1] - 1), axis=1)
        inputs = jnp.where((place >= 0) & (place < jnp.array(SENTENCE_LENGTHS)[voice][:, None]), spoken, filler)
        inputs = inputs.at[:, -1].set(vocab.words.index(QUERIES[0]) + query)

        return Batch(
            inputs=inputs,
            scored=jnp.full((batch_size, 1), self.length - 1),
            targets=jnp.where(query == 0, agent, patient)[:, None],
            weights=jnp.ones((batch_size, 1)),
            labels={"voice": voice[:, None], "query": query[:, None]},
        )

    def loss(self, logits: Float[Array, "B Q V"], batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        return cross_entropy(logits, batch)

    def ceilings(self) -> dict[str, float]:
        """Accuracy and, under `both_correct/`, the share of swapped pairs answered right twice, on closed splits.

        An order-blind reader gives both rows of a pair one answer, and they ask for different nouns: exactly one half
        and never both. Who always names the first noun is right for active agents and passive patients, in both rows
        or in neither. Adjacent words suffice, without their places: the verb (active) and `was` and `by` (passive)
        stand right beside the nouns, and no noun stands twice, so bigrams alone answer everything.
        """
        n = len(self.nouns)
        return {
            "chance": 1 / n,
            "bag_of_words": 0.5,
            "first_noun": 0.5,
            "bag_of_bigrams": 1.0,
            "oracle": 1.0,
            "both_correct/chance": 1 / n**2,
            "both_correct/bag_of_words": 0.0,
            "both_correct/first_noun": 0.5,
            "both_correct/bag_of_bigrams": 1.0,
            "both_correct/oracle": 1.0,
        }

    def asked_of(self, causal: bool) -> "Roles":
        # the question is the last token, so both kinds of model read the same
        return self
