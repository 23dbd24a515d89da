"""What `parallax verify` is shown of the example: the same module on a model small enough for 8 processes of a laptop.

    python -m parallax verify examples/verify_me.py:small --layout "tp2 pp2 dp2 zero1"
    python -m parallax verify examples/verify_me.py:small --all 8     # every layout of up to 8 ranks
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from causal_lm import CausalLM
from parallax.conf.schema import ModelConf, OptimConf
from text_data import Windows

TOKENS, SAMPLES, BATCH = 16, 256, 8


def small() -> tuple[CausalLM, DataLoader[dict[str, torch.Tensor]]]:
    """A Llama with eight layers, eight heads and four key-value heads, so that each axis can have eight ranks."""
    model = ModelConf(
        family="llama",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        max_positions=64,
    )
    windows = torch.randint(0, 256, (SAMPLES, TOKENS), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return CausalLM(model, OptimConf(warmup_steps=0)), DataLoader(Windows(windows), batch_size=BATCH, shuffle=True)
