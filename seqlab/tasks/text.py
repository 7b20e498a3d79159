"""Real text, character by character: name the next one, or the masked ones."""

import math
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from seqlab.tasks.base import Vocabulary, cross_entropy
from seqlab.tasks.corpora import read_corpus, read_file
from seqlab.types import Batch, PRNGKey, Split

OBJECTIVES = ("auto", "next", "masked")
MASK = "<mask>"
"""The last id of every vocabulary; longer than a character, so no text contains it."""


@struct.dataclass
class Text:
    """Windows of `length` characters of one text, from three contiguous splits.

    `next`: the model reads a window and names the character after each position. `masked`: in each window the same
    number of characters, round(mask_rate * length) but at least one, is replaced by the mask symbol, and the model
    names them (Devlin et al. 2019, without their 10 % random and 10 % unchanged, so that what is scored is never
    seen). Both objectives have the same vocabulary, the mask symbol included.

    The main metric is bits per character, log2(e) times the cross-entropy.
    """

    tokens: UInt[Array, " characters"]
    """The whole text."""
    vocab: Vocabulary = struct.field(pytree_node=False)
    bounds: tuple[int, int, int, int] = struct.field(pytree_node=False)
    """Where the training, validation and test split begin, and where the text ends."""
    source: str = struct.field(pytree_node=False, default="text")
    """What the text is called in messages."""
    length: int = struct.field(pytree_node=False, default=128)
    objective: str = struct.field(pytree_node=False, default="auto")
    mask_rate: float = struct.field(pytree_node=False, default=0.15)
    main_metric: str = struct.field(pytree_node=False, default="bits_per_character")
    higher_is_better: bool = struct.field(pytree_node=False, default=False)

    def __post_init__(self):
        if not isinstance(self.length, int) or self.length < 2:
            raise ValueError(f"task.length={self.length}: use a whole number of characters, 2 or more")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"task.objective={self.objective}: use one of {', '.join(OBJECTIVES)}")
        if not 0 < self.mask_rate < 1:
            raise ValueError(f"task.mask_rate={self.mask_rate}: use a share above 0 and below 1")
        smallest = min(get_args(Split), key=lambda split: len(self.part(split)))
        if len(self.part(smallest)) <= self.length:
            raise ValueError(
                f"{self.source} is too short for task.length={self.length}: its {smallest} split holds "
                f"{len(self.part(smallest))} characters and needs {self.length + 1}; "
                f"use a longer text or a shorter task.length"
            )

    def part(self, split: Split) -> range:
        """Where a split lies in `tokens`."""
        start = get_args(Split).index(split)
        return range(self.bounds[start], self.bounds[start + 1])

    def asked_of(self, causal: bool) -> "Text":
        """`auto` becomes `next` for a causal model and `masked` for a bidirectional one.

        A causal model may be asked for masked characters: it then names each one from the characters left of it, of
        which a share of `mask_rate` is masked too; so its loss bounds its next-character loss from above and is no
        fair rival of a bidirectional model's.

        Raises:
            ValueError: a bidirectional model is asked for next characters, which it reads at the next position.
        """
        if self.objective == "auto":
            return replace(self, objective="next" if causal else "masked")
        if self.objective == "next" and not causal:
            raise ValueError(
                "task.objective=next lets a bidirectional model see its answer: use task.objective=masked (or auto), "
                "or a causal model such as model=transformer"
            )
        return self

    @property
    def masked(self) -> bool:
        if self.objective == "auto":
            raise ValueError("task.objective=auto is open until the model is known: call task.asked_of(model.causal)")
        return self.objective == "masked"

    @property
    def masks(self) -> int:
        """Masked characters a window."""
        return max(1, round(self.mask_rate * self.length))

    @property
    def utf8_bytes(self) -> Int[Array, " V"]:
        """Bytes that each character takes in UTF-8; none for the mask symbol, which stands in no text."""
        return jnp.array([len(word.encode()) for word in self.vocab.words[:-1]] + [0], jnp.int32)

    def sample(self, key: PRNGKey, batch_size: int, split: Split) -> Batch:
        """Windows that begin anywhere in the split, each beginning equally likely."""
        start_key, mask_key = jax.random.split(key)
        part = self.part(split)
        span = self.length if self.masked else self.length + 1
        starts = jax.random.randint(start_key, (batch_size,), part.start, part.stop - span + 1)
        characters = self._cut(starts, span)
        if not self.masked:
            scored = jnp.broadcast_to(jnp.arange(self.length), (batch_size, self.length))
            inputs, targets = characters[:, :-1], characters[:, 1:]
        else:
            scored = jax.lax.top_k(jax.random.uniform(mask_key, characters.shape), self.masks)[1]
            inputs, targets = self._hide(characters, scored), jnp.take_along_axis(characters, scored, axis=1)
        return Batch(inputs, scored, targets, jnp.ones(targets.shape, jnp.float32), labels={})

    def loss(self, logits: Float[Array, "B Q V"], batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Cross-entropy in nats; beside it the accuracy and the bits per character."""
        loss, metrics = cross_entropy(logits, batch)
        return loss, {**metrics, "bits_per_character": loss / math.log(2)}

    def ceilings(self) -> dict[str, float]:
        """Bits per character, on the test split (all but its first character), of three readers of no or one character.

        uniform: every character of the alphabet equally likely. unigram: the frequencies of the training split.
        bigram: these after the previous character. Counts are raised by one (Laplace), so that what the training
        split lacks costs finitely many bits.
        """
        tokens, alphabet = np.asarray(self.tokens).astype(np.int64), self.vocab.size - 1
        train, test = (tokens[part.start : part.stop] for part in (self.part("train"), self.part("test")))
        counts = np.bincount(train, minlength=alphabet)
        unigram = (counts + 1) / (len(train) + alphabet)

        # Pairs are counted sparsely: an alphabet of thousands of characters has too many for a table.
        pairs, pair_counts = np.unique(train[:-1] * alphabet + train[1:], return_counts=True)
        asked = test[:-1] * alphabet + test[1:]
        found = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
        seen = np.where(pairs[found] == asked, pair_counts[found], 0)
        followed = counts - (np.arange(alphabet) == train[-1])
        bigram = (seen + 1) / (followed[test[:-1]] + alphabet)
        return {
            "uniform": math.log2(alphabet),
            "unigram": float(-np.log2(unigram[test[1:]]).mean()),
            "bigram": float(-np.log2(bigram).mean()),
        }

    def windows(self, split: Split) -> int:
        """How many windows score every character of a split exactly once (but the first, for `next`)."""
        size, stride = len(self.part(split)), self.length - self.length // 2
        if self.masked:
            return math.ceil(size / self.length) * math.ceil(self.length / self.masks)
        return 1 + math.ceil((size - 1 - self.length // 2) / stride)

    def window(
        self, split: Split, index: Int[Array, " B"], key: PRNGKey, shuffled: Bool[Array, ""] | bool = False
    ) -> Batch:
        """The windows `index` of the `windows(split)` that cover a split; beyond them all weights are 0.

        next: windows advance by half their length and score their second half; the first scores its first half too
        (as window 0). So every scored character has at least length // 2 + 1 characters of context, unless it lies that
        close to the beginning of the split. masked: windows tile the split; each comes several times, always with as
        many masks as in training, until every character was masked. The last windows are moved back to end with the
        split; what they would score again has weight 0.

        `shuffled` puts words in random order and leaves every target as it is, at the same place of `targets`. A word
        is what stands up to the next white space, with that white space. next: words of the unscored first half, that
        is, of the context older than half a window. masked: words of the window, the masks moving with their
        characters. The first and the last word of such a stretch stay, since its edges may have cut them.
        """
        return (self._masked_window if self.masked else self._next_window)(split, index, key, shuffled)

    def _next_window(
        self, split: Split, index: Int[Array, " B"], key: PRNGKey, shuffled: Bool[Array, ""] | bool
    ) -> Batch:
        part, context = self.part(split), self.length // 2
        stride = self.length - context
        # Window i owns the `stride` input positions from `due` on: at each it names the character after it.
        due = context + (index - 1) * stride
        start = jnp.clip(due - context, 0, len(part) - 1 - self.length)
        scored = jnp.where(index == 0, 0, context)[:, None] + jnp.arange(stride)[None]
        position = start[:, None] + scored
        owned = (position >= due[:, None]) & (position < due[:, None] + stride)

        characters = self._cut(part.start + start, self.length + 1)
        targets = jnp.take_along_axis(characters, scored + 1, axis=1)
        inputs = characters[:, :-1]
        order = self._word_order(inputs, jnp.where(index == 0, 0, context), _fold_in(key, index), shuffled)
        inputs = jnp.take_along_axis(inputs, order, axis=1)
        return Batch(inputs, scored, targets, owned.astype(jnp.float32), labels={})

    def _masked_window(
        self, split: Split, index: Int[Array, " B"], key: PRNGKey, shuffled: Bool[Array, ""] | bool
    ) -> Batch:
        part, passes = self.part(split), math.ceil(self.length / self.masks)
        tile, turn = index // passes, index % passes
        due = tile * self.length
        start = jnp.clip(due, 0, len(part) - self.length)
        # One random order of a tile's positions, dealt out over its passes: the key must not know the pass.
        mask_keys, order_keys = (_fold_in(half, tile) for half in jax.random.split(key))
        dealt = jax.vmap(lambda key: jax.random.permutation(key, self.length))(mask_keys)
        first = jnp.minimum(turn * self.masks, self.length - self.masks)
        place = first[:, None] + jnp.arange(self.masks)[None]
        scored = jnp.take_along_axis(dealt, place, axis=1)
        owned = (place >= turn[:, None] * self.masks) & (start[:, None] + scored >= due[:, None])

        characters = self._cut(part.start + start, self.length)
        targets = jnp.take_along_axis(characters, scored, axis=1)
        whole = jnp.full(index.shape, self.length)
        order = self._word_order(characters, whole, order_keys, shuffled)
        inputs = jnp.take_along_axis(self._hide(characters, scored), order, axis=1)
        scored = jnp.take_along_axis(jnp.argsort(order, axis=1), scored, axis=1)
        return Batch(inputs, scored, targets, owned.astype(jnp.float32), labels={})

    def _cut(self, starts: Int[Array, " B"], span: int) -> Int[Array, "B span"]:
        cut = jax.vmap(lambda start: jax.lax.dynamic_slice(self.tokens, (start,), (span,)))
        return cut(starts).astype(jnp.int32)

    def _hide(self, characters: Int[Array, "B T"], positions: Int[Array, "B Q"]) -> Int[Array, "B T"]:
        return jax.vmap(lambda row, at: row.at[at].set(self.vocab.size - 1))(characters, positions)

    def _word_order(
        self,
        characters: Int[Array, "B T"],
        stretch: Int[Array, " B"],
        keys: Shaped[Array, " B"],
        shuffled: Bool[Array, ""] | bool,
    ) -> Int[Array, "B T"]:
        """Where each position's character comes from when the words before `stretch` are put in random order."""
        space = jnp.array([word.isspace() for word in self.vocab.words])[characters]
        order = jax.vmap(_word_order)(keys, space, stretch)
        return jnp.where(shuffled, order, jnp.arange(self.length)[None])


def _fold_in(key: PRNGKey, numbers: Int[Array, " B"]) -> Shaped[Array, " B"]:
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def _word_order(key: PRNGKey, space: Bool[Array, " T"], stretch: Int[Array, ""]) -> Int[Array, " T"]:
    begins = jnp.concatenate([jnp.zeros(1, bool), space[:-1] & ~space[1:]])
    word = jnp.cumsum(begins)
    moves = (word > 0) & (word < word[jnp.maximum(stretch - 1, 0)])
    # One random number a word, so that a stable sort moves words and keeps them whole; -1 and 1 lie outside [0, 1).
    rank = jax.random.uniform(key, space.shape)[word]
    rank = jnp.where(moves, rank, jnp.where(word == 0, -1.0, 1.0))
    return jnp.argsort(rank, stable=True)


def read_text(
    corpus: str = "asv",
    path: str | None = None,
    length: int = 128,
    objective: str = "auto",
    mask_rate: float = 0.15,
    held_out: float = 0.1,
) -> Text:
    """Reads a text and cuts it, in its own order, into training, validation and test split.

    Args:
        corpus: `asv`, the American Standard Version of the Bible (1901, public domain; 4.2 million characters), or
            `python_docs`, the language reference that comes with Python (its text differs a little between versions).
        path: a UTF-8 file to read in the place of the corpus.
        length: characters a window.
        objective: `next`, `masked`, or `auto`: a causal model is asked the first, a bidirectional one the second.
        mask_rate: the share of masked characters.
        held_out: the share of the text that is not trained on: its first half validates, its second half tests.

    The alphabet is that of the whole text, so that every character has a probability; nothing else about the held-out
    splits is known in training.

    Raises:
        ValueError: no such corpus or file, not UTF-8, empty, or too short for the length.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"task.held_out={held_out}: use a share above 0 and below 1")
    source = f"task.corpus={corpus}" if path is None else f"task.path={path}"
    text = read_corpus(corpus) if path is None else read_file(path)

    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    occurs = np.bincount(codes) > 0
    words = tuple(chr(code) for code in np.flatnonzero(occurs))
    ids = (np.cumsum(occurs) - 1).astype(np.min_scalar_type(len(words)))
    valid, test = (round(len(codes) * (1 - share)) for share in (held_out, held_out / 2))
    return Text(
        jnp.asarray(ids[codes]),
        Vocabulary((*words, MASK), separator=""),
        bounds=(0, valid, test, len(codes)),
        source=source,
        length=length,
        objective=objective,
        mask_rate=mask_rate,
    )
