"""A kernel in your own package: attention by the varlen functions of flash_attn 2. For kernel="varlen", register it:

[project.entry-points."ringattn.kernels"]
varlen = "my_package.own_kernel:Varlen"
"""

import torch
from flash_attn import flash_attn_interface as api

from ringattn import Unsupported
from ringattn.kernels.base import Kernel, cut
from ringattn.kernels.cuda_device import flash_reads, flash_window
from ringattn.kernels.packing import cumulative, pack
from ringattn.kernels.pad import align, crop_to, pad_to


class Varlen(Kernel):
    name, max_head_dim = "varlen", 256

    def check(self, q, k, v):
        if q.dtype not in (torch.float16, torch.bfloat16) or max(q.shape[-1], v.shape[-1]) > 256:
            raise Unsupported(f"kernel varlen takes 16-bit dtypes, head dims up to 256, got {q.dtype} {tuple(v.shape)}")

    def split(self, work):  # into calls whose band flash can express as a window
        return cut(work, flash_reads)

    def pack(self, calls):  # short works, such as documents, become sequences of one call
        return pack(calls)

    def forward(self, q, k, v, work, scale):
        inputs, lengths = tokens(q, k, v), cumulative(work, len(q), q.device)
        out, lse, *_ = api._wrapped_flash_attn_varlen_forward(*inputs, *lengths, 0.0, scale, False, *flash_window(work))
        return crop_to(heads(out, len(q)), v.shape[-1]), lse.unflatten(1, (len(q), -1)).transpose(0, 1)

    def backward(self, grad, q, k, v, out, lse, work, scale):
        inputs, lengths = tokens(grad, q, k, v, out), cumulative(work, len(q), q.device)
        lse, grads = lse.transpose(0, 1).flatten(1).contiguous(), [torch.empty_like(x) for x in inputs[1:4]]
        api._wrapped_flash_attn_varlen_backward(
            *inputs, lse, *grads, *lengths, 0.0, scale, False, *flash_window(work), 0.0, None, False
        )
        return [crop_to(heads(x, len(q)), y.shape[-1]) for x, y in zip(grads, (q, k, v), strict=True)]


def tokens(*tensors):  # [B, H, n, D] to [B * n, H, D or more], padded to a multiple of 8 columns
    width = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [align(pad_to(x, width).transpose(1, 2).flatten(0, 1)) for x in tensors]


def heads(x, batch):  # the reverse
    return x.unflatten(0, (batch, -1)).transpose(1, 2)
