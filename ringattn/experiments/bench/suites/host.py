"""Suite "host": the host's time of one rank's warm call, without kernels and messages, and what the call counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....functional import ring_attention
from ....kernels import AUTO
from ....kernels.base import Kernel
from ....kernels.aten_cpu import AtenCpu
from ....pattern import parse_pattern
from ....plan.plan import Plan
from ....plan.work import Work
from ....planner import make_plan
from ....runtime.executor import Forward, Job, backward, forward
from ....transport.base import Counters, Post, Program, drive, number_tags
from ....transport.records import Agreed
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Run

RANKS, RANK, HEADS, HEAD_DIM, TOKENS = 8, 3, 8, 64, 512


class Silent:
    """A transport of one rank whose messages neither leave nor arrive: whatever is received is zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.counters, self.calls, self.agreed = Counters(), count(), Agreed()

    def check(self, device: torch.device) -> None:
        """Every device will do."""

    def post(self, post: Post) -> None:
        for message in post.recvs:
            message.data.zero_()

    def wait(self, ticket: None) -> None:
        """Nothing is under way."""

    def gather(self, record: bytes) -> list[bytes]:
        return [record] * self.size


class NoKernel(AtenCpu):
    """Splits work as the kernel of CPUs does, and computes nothing."""

    name = "none"

    def forward(self, q, k, v, work, scale):
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3])

    def backward(self, grad, q, k, v, out, lse, work, scale):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
