"""Loss and every gradient of a small model whose sequences are cut, against the same model in one process.

It is: what a rank runs for any causal language model of transformers, with and without padding on the left. It is not:
which architectures there are (`tests/small_models.py`), or a Trainer (`test_context_parallel.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.plugins.context import ContextParallel
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.ranks.model_parity import SEED, Fp64, cut, require_close
from tests.small_models import VOCAB, build_small

ROWS, TOKENS = 2, 11
IGNORED = -100


def batch_of(padded: bool) -> dict[str, Tensor]:
    """Ids of 11 tokens; with `padded` the first row has 3 tokens of padding in front and the second one behind.

    What is predicted from padding does not count: what a token that sees none is given differs between kernels.
    """
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(4))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, -1:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, 3] = IGNORED
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Next-token cross entropy in fp64, of what is no padding."""
    with Fp64():
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


def compare(rank: int, world: int, model_type: str, padded: bool, changes: dict[str, Any], method: str) -> None:
    """Raise unless loss and gradients on `world` ranks equal one process.

    Args:
        changes: to the small config.
        method: layout field `context_method`.
    """
    reference, model = build_small(model_type, **changes), build_small(model_type, **changes)
    if model_type == "falcon":  # its eager attention adds ALiBi twice, to the mask and to the scores; the default once
        reference.config._attn_implementation = "sdpa"
    torch.manual_seed(SEED)  # some routers draw random numbers
    expected = loss_of(reference, batch_of(padded))
    expected.backward()
    mesh = Mesh.build(Layout(context_parallel_size=world, context_method=method).resolve(world), rank)
    try:
        plugin = next(p for p in cut(model, mesh) if isinstance(p, ContextParallel))
        part = plugin.shard_batch(batch_of(padded), mesh=mesh)
        torch.manual_seed(SEED)
        with plugin.running():
            plugin.begin(0)
            loss = plugin.whole_output(loss_of(model, part))
            loss.backward()
        require_close(loss.detach(), expected.detach(), "loss")
        for fqn, wanted in ((n, p.grad) for n, p in reference.named_parameters() if p.grad is not None):
            found = model.get_parameter(fqn).grad
            found = torch.zeros_like(wanted) if found is None else found
            mesh["cp"].all_reduce(found)
            require_close(found / world, wanted, f"gradient of {fqn}")
    finally:
        mesh.close()
