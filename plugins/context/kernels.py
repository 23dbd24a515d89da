"""The adapter to fused attention kernels: one call for one tile, forward and backward, with the log-sum-exp.

It is: a list of kernels in order of preference and `forward`, `backward`, which use the first that fits and hide what
they differ in: head dims (a value dim other than the key dim, as in MLA, and dims they want rounded are filled up with
zeros, which changes no score), shapes of the log-sum-exp, and rows that see no key. It is not: masks, blocks or
communication. All of them take grouped keys and values as they are.

A backward gets the output and log-sum-exp merged over all tiles of a row: the gradients of a tile are then its share of
the whole row's (Liu et al. 2023, *Ring Attention*, section 3).

Run here: the kernels for the CPU and `plain`. Written from the signatures of torch 2.13 and flash-attn 2 and 3 and
**not run**, for want of a GPU: the others.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from parallax.plugins.context import diagonal
from parallax.plugins.context.blocked import Blocked
from parallax.plugins.context.plain import Plain
from parallax.plugins.context.scores import Scoring

ATEN: Any = torch.ops.aten
PLAIN = Plain()
Grads = tuple[Tensor, Tensor, Tensor]
HALF = (torch.float16, torch.bfloat16)


class Kernel(Protocol):
    """One way to compute a tile.

    `q` [batch, heads, rows, dim], `k` [batch, kv_heads, columns, dim], `v` [batch, kv_heads, columns, value_dim]; `out`
    and `grad` [batch, heads, rows, value_dim]; `lse` [batch, heads, rows] in fp32 (fp64 for fp64): the natural
    logarithm of the sum of exponentials of a row's scores.
    """

    name: str
    equal_dims: bool
    """Needs value_dim == dim."""
    multiple: int
    """Head dims must be a multiple of this."""

    def fits(self, q: Tensor, biased: bool, softcap: float | None) -> bool: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring
    ) -> Grads: ...


class Aten:
    """What torch's own kernels have in common: no soft cap, one head dim."""

    equal_dims = True
    multiple = 8
    device = "cuda"
    dtypes: tuple[torch.dtype, ...] = HALF
    takes_bias = False

    def enabled(self) -> bool:
        return True

    def fits(self, q: Tensor, biased: bool, softcap: float | None) -> bool:
        suits = q.device.type == self.device and q.dtype in self.dtypes and self.enabled()
        return suits and softcap is None and (self.takes_bias or not biased)


class CpuFlash(Aten):
    name = "aten flash for cpu"
    multiple = 1
    device = "cpu"
    dtypes = (*HALF, torch.float32, torch.float64)
    takes_bias = True

    def forward(self, q: Any, k: Any, v: Any, how: Scoring) -> tuple[Tensor, Tensor]:
        return ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.causal, attn_mask=how.bias, scale=how.scale
        )

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, how: Scoring) -> Grads:
        def call(rows: diagonal.Rows, keys: tuple[Tensor, Tensor], causal: bool) -> Grads:
            grad, q, out, lse = rows
            return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, *keys, out, lse, 0.0, causal, attn_mask=how.bias, scale=how.scale
            )

        if how.causal and diagonal.worth(q):
            return diagonal.in_pieces(call, (grad, q, out, lse), (k, v))
        return call((grad, q, out, lse), (k, v), how.causal)


class CudaFlash(Aten):
    name = "aten flash"

    def enabled(self) -> bool:
        return torch.backends.cuda.flash_sdp_enabled()

    def forward(self, q: Any, k: Any, v: Any, how: Scoring) -> tuple[Tensor, Tensor]:
        found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, how.causal, scale=how.scale)
        return found[0], found[1]

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, how: Scoring) -> Grads:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        return ATEN._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, how.causal, seed, seed[:1],
            scale=how.scale,
        )  # fmt: skip


class Cudnn(Aten):
    name = "aten cudnn"
    takes_bias = True

    def enabled(self) -> bool:
        return torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()

    def forward(self, q: Any, k: Any, v: Any, how: Scoring) -> tuple[Tensor, Tensor]:
        bias = _whole(how.bias, q, k)
        found = ATEN._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, how.causal, scale=how.scale)
        return found[0], found[1].view(q.shape[:3])  # it has a last dim of 1

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, how: Scoring) -> Grads:
        seed, bias = torch.zeros((), dtype=torch.int64, device=q.device), _whole(how.bias, q, k)
        return ATEN._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, bias, None, None, q.shape[2], k.shape[2], 0.0,
            how.causal, scale=how.scale,
        )  # fmt: skip


class Efficient(Aten):
    """Repeats grouped keys and values, and stores the log-sum-exp in rows of a multiple of 32."""

    name = "aten efficient"
    dtypes = (*HALF, torch.float32)
    takes_bias = True

    def enabled(self) -> bool:
        return torch.backends.cuda.mem_efficient_sdp_enabled()

    def forward(self, q: Any, k: Any, v: Any, how: Scoring) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out, lse, _, _ = ATEN._scaled_dot_product_efficient_attention(
            q, k, v, _whole(how.bias, q, k), True, 0.0, how.causal, scale=how.scale
        )
        return out, lse[:, :, : q.shape[2]]

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, how: Scoring) -> Grads:
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        rows = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = ATEN._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _whole(how.bias, q, k), out, rows, seed, seed, 0.0, [True, True, True, False], how.causal,
            scale=how.scale,
        )  # fmt: skip
        return dq, dk.unflatten(1, (kv_heads, group)).sum(2), dv.unflatten(1, (kv_heads, group)).sum(2)


def _whole(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """`bias` expanded to all heads, its rows starting at multiples of 16 bytes as the CUDA kernels need."""
    if bias is None:
        return None
    columns = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, -columns % 8))[..., :columns]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


class FlashPackage:
    """flash-attn 2 or 3, if installed: [batch, rows, heads, dim] and a soft cap."""

    equal_dims = True
    multiple = 8

    def __init__(self, version: int) -> None:
        self.name, self.version = f"flash-attn {version}", version
        self.module = "flash_attn_interface" if version == 3 else "flash_attn.flash_attn_interface"

    def fits(self, q: Tensor, biased: bool, softcap: float | None) -> bool:
        suits = q.device.type == "cuda" and q.dtype in HALF and not biased and q.shape[-1] <= 256
        if not suits or not _installed(self.module):
            return False
        return self.version == 2 or torch.cuda.get_device_capability(q.device)[0] == 9

    def forward(self, q: Any, k: Any, v: Any, how: Scoring) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        keys: dict[str, Any] = dict(softmax_scale=how.scale, causal=how.causal, softcap=how.softcap or 0.0)
        if self.version == 3:
            found = _load(self.module)._flash_attn_forward(q, k, v, **keys)
        else:
            keys |= dict(window_size_left=-1, window_size_right=-1, alibi_slopes=None, return_softmax=False)
            found = _load(self.module)._flash_attn_forward(q, k, v, 0.0, **keys)
        return found[0].transpose(1, 2), found[1]

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, how: Scoring) -> Grads:
        grad, q, k, v, out = (x.transpose(1, 2).contiguous() for x in (grad, q, k, v, out))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        keys: dict[str, Any] = dict(softmax_scale=how.scale, softcap=how.softcap or 0.0, deterministic=False)
        keys |= {"is_causal" if self.version == 3 else "causal": how.causal}
        if self.version == 3:
            _load(self.module)._flash_attn_backward(grad, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv, **keys)
        else:
            keys |= dict(window_size_left=-1, window_size_right=-1, alibi_slopes=None)
            _load(self.module)._flash_attn_backward(
                grad, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv, dropout_p=0.0, **keys
            )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@cache
def _installed(module: str) -> bool:
    return find_spec(module.partition(".")[0]) is not None


def _load(module: str) -> Any:
    from importlib import import_module

    return import_module(module)


KERNELS: tuple[Kernel, ...] = (
    Blocked(), CpuFlash(), FlashPackage(3), FlashPackage(2), CudaFlash(), Cudnn(), Efficient(), PLAIN
)  # fmt: skip
"""In order of preference. torch's switches (`torch.nn.attention.sdpa_kernel`) take theirs out."""


def choose(q: Tensor, biased: bool, softcap: float | None, dropout: bool = False) -> Kernel:
    """The first kernel that fits; `plain` always does, and alone drops what it is told to."""
    if dropout:
        return PLAIN
    return next(kernel for kernel in KERNELS if kernel.fits(q, biased, softcap))


def forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one tile; see `Kernel`. Rows that see no key: output 0, log-sum-exp -inf."""
    kernel, dim = choose(q, how.bias is not None, how.softcap, how.keep is not None), v.shape[-1]
    q, k, v = _fill_up(kernel, q, k, v)
    out, lse = kernel.forward(q, k, v, how)
    out = out[..., :dim]
    if how.bias is not None:
        blind = (how.bias == float("-inf")).all(-1)  # what a kernel returns for such a row is its own affair
        lse = lse.masked_fill(blind, float("-inf"))
        out = out.masked_fill(blind.unsqueeze(-1), 0)
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: Scoring) -> Grads:
    """The share of one tile in the gradients of q, k and v.

    `out` and `lse` are merged over all tiles of the rows; where a row sees no key at all, `lse` is 0.
    """
    kernel = choose(q, how.bias is not None, how.softcap, how.keep is not None)
    dim, value_dim = q.shape[-1], v.shape[-1]
    q, k, v, out, grad = _fill_up(kernel, q, k, v, out, grad)
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, how)
    return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _fill_up(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros behind the last dim, as far as `kernel` needs them: q, k, v and what else has the value dim."""
    widths = [x.shape[-1] for x in tensors]
    if kernel.equal_dims:
        widths = [max(widths)] * len(widths)
    widths = [-(-width // kernel.multiple) * kernel.multiple for width in widths]
    return tuple(
        x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        for x, width in zip(tensors, widths, strict=True)
    )
