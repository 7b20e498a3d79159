"""Every mixer and every position scheme, each as small as its laws can be tested on. A new one is one line here."""

from functools import partial

from seqlab.mixers.attention import Attention
from seqlab.mixers.delta import DeltaNet, GatedDeltaNet
from seqlab.mixers.hyena import Hyena
from seqlab.mixers.linear_attention import GLA, LinearAttention
from seqlab.mixers.mamba import Mamba, Mamba2
from seqlab.mixers.minimal import MinGRU, MinLSTM
from seqlab.mixers.rglru import RGLRU
from seqlab.mixers.rnn import GRU, LSTM, Elman
from seqlab.mixers.ssm import LRU, S4D, S5
from seqlab.mixers.xlstm import MLSTM, SLSTM
from seqlab.positions import T5, ALiBi, Learned, NoPosition, Sinusoidal
from seqlab.rotary import LinearRoPE, NTKRoPE, RoPE, YaRN

SCANNED = {
    "ssm": partial(LRU, state_size=6),
    "s4d": partial(S4D, state_size=4),
    "s5": partial(S5, state_size=6),
    "mingru": partial(MinGRU, state_size=6),
    "minlstm": partial(MinLSTM, state_size=6),
    "mamba": partial(Mamba, state_size=3),
    "rglru": partial(RGLRU, heads=2, eigenvalue_range=(-1, 1)),
    "mamba2": partial(Mamba2, state_size=4, heads=4, groups=2),
    "mlstm": partial(MLSTM, heads=2),
    "linear_attention": partial(LinearAttention, heads=2),
    "gla": partial(GLA, heads=2),
    "deltanet": partial(DeltaNet, heads=2),
    "gated_deltanet": partial(GatedDeltaNet, heads=2),
}
"""Recurrences that are linear in their state, and so can run in several forms: `scan=`, `chunk=`."""

STEPPED = {"rnn": Elman, "gru": GRU, "lstm": LSTM, "slstm": partial(SLSTM, heads=2)}
"""Recurrences that can only go step by step."""

ATTENDING = {
    "attention": partial(Attention, heads=2),
    "multi_query": partial(Attention, heads=2, kv_heads=1, qk_norm=True, temperature=0.5, soft_cap=3.0),
    "sliding_window": partial(Attention, heads=2, window=3),
    "encoder": partial(Attention, heads=2, causal=False),
}

MIXERS = SCANNED | STEPPED | ATTENDING | {"hyena": Hyena}

POSITIONS = {
    "none": NoPosition(),
    "sinusoidal": Sinusoidal(),
    "learned": Learned(length=20),
    "rope": RoPE(),
    "rope_linear": LinearRoPE(factor=2.0),
    "rope_ntk": NTKRoPE(factor=2.0),
    "yarn": YaRN(factor=2.0, original_length=8),
    "alibi": ALiBi(),
    "t5": T5(num_buckets=8, max_distance=6),
}
