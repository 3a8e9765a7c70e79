"""Refusals of parallelized models that leave everything usable, and models that the first comparison must refuse."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import model_cases
import torch
import torch.distributed as dist
import transformers as hf
from peft import LoraConfig, get_peft_model
from rank_pool import told_by
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import masking_utils

import ringattn as ra
from ringattn.integrations.transformers import parallelize, shard_batch

IDS = torch.randint(1, 61, (2, 25), generator=torch.Generator().manual_seed(0))
AHEAD = torch.cat([torch.arange(10), torch.arange(50, 65)])[None]
MASK = torch.ones_like(IDS)
cut = functools.partial(shard_batch, layout="zigzag")


class Fault(torch.nn.Module):
    """A feed-forward part of a model that mixes rows under some condition."""

    def __init__(self, inner: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.calls = inner, how, 0
        self.norm, self.gate = torch.nn.BatchNorm1d(32), torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) + getattr(self, self.how)(x)

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]]

    def trained(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(x) if self.training else x

    def batch_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)

    def capacity(self, x: torch.Tensor) -> torch.Tensor:
        expert = F.one_hot(x[..., :4].argmax(-1).flatten(), 4)
        full = (expert.cumsum(0) * expert).amax(-1).view(x.shape[:2]) > len(expert) // 8 + 1
        return x.masked_fill((full & torch.tensor(self.training))[..., None], 0)

    def long(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(x) if x.shape[1] > 36 else x

    def longer(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(x) if x.shape[1] > 97 else x

    def later(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(x) if self.calls > 4 else x

    def backward_only(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.shift(x)
        return x.detach() + mixed - mixed.detach()

    def behind_zero(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate * self.shift(x)


class Head(hf.LlamaForCausalLM):  # type: ignore[misc]
    """A head that mixes rows through its labels or its mask."""

    how = ""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        **more: Any,
    ) -> Any:
        result = super().forward(input_ids, attention_mask, position_ids, labels=labels, **more)
        if self.how == "rolled ids" and labels is not None:
            result["loss"] = result["loss"] + F.cross_entropy(result["logits"].mT, input_ids.roll(-2, 1))
        if self.how == "own balance loss" and labels is not None:
            share = F.one_hot(result["logits"].argmax(-1)).float().mean((0, 1))
            result["loss"] = result["loss"] + share.square().sum()
        if self.how == "mean by the mask" and attention_mask is not None:
            real = attention_mask[..., None].float()
            result["logits"] = result["logits"] + (result["logits"] * real).sum(1, keepdim=True) / real.sum(1)[:, None]
        return result


#: Faults by the words of docs/models.md, and where they are in a model.
FAULTS: dict[str, str] = {
    "a shift of tokens in training mode": "trained",
    "BatchNorm over tokens": "batch_norm",
    "experts whose capacity drops tokens in training mode": "capacity",
    "a shift in sequences longer than 36 tokens": "long",
    "a head that predicts rolled ids of its batch": "rolled ids",
    "a loss that balances something over all tokens": "own balance loss",
    "a mean over the tokens of the padding mask": "mean by the mask",
    "a shift in sequences longer than 97 tokens": "longer",
    "a shift that begins after some calls": "later",
    "a shift of gradients alone": "backward_only",
    "a shift behind a weight that is 0": "behind_zero",
}


def faults(rank: int) -> dict[str, str]:
    """What `parallelize` says to each fault; it leaves modes, buffers, attributes and random numbers unchanged."""
    found = {}
    for name, how in FAULTS.items():
        model = model_cases.make("Llama", num_hidden_layers=1)
        if hasattr(Fault, how):
            model.model.layers[0].mlp = Fault(model.model.layers[0].mlp, how)
        else:
            model.__class__, Head.how = Head, how
        model.eval().model.norm.train()
        before = [(module, module.training, getattr(module, "calls", 0)) for module in model.modules()]
        buffers, numbers = [x.clone() for x in model.buffers()], torch.get_rng_state()
        said = told_by(lambda: parallelize(model, layout="zigzag"))
        found[name] = "found" if "mixes rows outside" in said else said
        assert [(module, module.training, getattr(module, "calls", 0)) for module in model.modules()] == before
        assert all(map(torch.equal, model.buffers(), buffers)) and torch.equal(torch.get_rng_state(), numbers)
    return found


def replaced(model: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Send a function through the model's forward, as TRL does; after an error the forward stays replaced, as there."""
    forward = model.forward

    def other(*args: Any) -> Any:
        model.forward = forward
        return function(*args)

    model.forward = other
    return model(*args)


class Rule:
    """A mask function that is an object."""

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q


def masked(function: Callable[..., Any]) -> Any:
    """A parallelized model that lays a mask function over the causal one."""
    model = parallelize(model_cases.make("Llama", num_hidden_layers=1), layout="zigzag")

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = masking_utils.create_causal_mask(
            config=model.config, inputs_embeds=torch.zeros(*kwargs["input_ids"].shape, 32),
            attention_mask=None, past_key_values=None, position_ids=kwargs["position_ids"], and_mask_function=function,
        )  # fmt: skip
        return args, {**kwargs, "attention_mask": mask}

    model.model.register_forward_pre_hook(add, with_kwargs=True)
    return model


def sharded(kind: str) -> Any:
    """A model that fully_shard has cut, parallelized afterwards."""
    model = model_cases.make(kind)
    fully_shard(model)
    return parallelize(model, layout="zigzag", whole=True)


def seeing() -> Any:
    """The language model of a tiny Qwen3-VL."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = hf.Qwen3VLTextConfig(**{**model_cases.BASE, "rope_parameters": rope})
    return parallelize(hf.Qwen3VLTextModel(text), layout="zigzag")


def in_context(*rows: int, mask: Any = None) -> None:
    """scaled_dot_product_attention of queries and keys of so many rows, in a context of 16 tokens."""
    q, k = (torch.zeros(1, 4, n, 8) for n in rows)
    with ra.context_parallel(dist.group.WORLD, buffers=[torch.zeros(1, 16)], buffer_seq_dims=[1]):
        F.scaled_dot_product_attention(q, k, k, mask)


class Calls:
    """Refused calls, each of a model that is made once and stays usable."""

    def __init__(self) -> None:
        self.alone = model_cases.make("Llama").eval()
        self.part, self.whole = (parallelize(model_cases.make("Llama"), layout="zigzag", whole=x) for x in (0, 1))
        self.dropping = parallelize(model_cases.make("Llama", attention_dropout=0.3), layout="zigzag").train()
        self.bart, self.vision = parallelize(model_cases.make("BART"), layout="zigzag"), seeing()
        self.masks = {rule: masked(rule) for rule in (Rule(), functools.partial(Rule()))}
        embeds, images = {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 25, 32)}, torch.zeros(2, 25).bool()
        few, rest = {"attention_mask": torch.tensor([[0], [1]])}, {"labels": IDS}
        deep = {"visual_pos_masks": images, "deepstack_visual_embeds": [torch.zeros(0, 32)]}
        self.refused: list[tuple[str, Callable[[], Any]]] = [
            ("LlamaModel is a part", lambda: replaced(self.whole, lambda ids: self.whole.model(input_ids=ids), IDS)),
            ("LlamaModel is a part", lambda: replaced(self.part, lambda ids: self.part.model(input_ids=ids), IDS)),
            ("FSDPLlamaForQuestionAnswering is sharded already", lambda: sharded("Llama, answers")),
            ("BertPooler is sharded already", lambda: sharded("BERT, classes")),
            (
                "generate: LlamaAttention has dropout of attention",
                lambda: self.dropping.generate(IDS, max_new_tokens=2),
            ),
            ("generate: a padded prompt of length 1", lambda: self.part.generate(IDS[:, :1], max_new_tokens=2, **few)),
            *(
                ("this model lays a mask of its own", functools.partial(lambda m: m(**cut({"input_ids": IDS})), m))
                for m in self.masks.values()
            ),
            ("position_ids jump ahead", lambda: self.whole(input_ids=IDS, position_ids=AHEAD)),
            ("decoder_position_ids is missing", lambda: self.bart(**cut({"input_ids": IDS, **rest}))),
            ("the tensors of a batch must", lambda: cut({"input_ids": IDS, "labels": IDS[:, :9]})),
            ("deepstack_visual_embeds= does not have", lambda: self.vision(**cut(embeds), **deep)),
            ("need q_layout= or first= of ring_attention", lambda: in_context(8, 6)),
            ("attn_mask torch.bool (3, 1, 1, 8)", lambda: in_context(8, 8, mask=torch.ones(3, 1, 1, 8).bool())),
        ]

    def good(self, which: int) -> float:
        """How far a call that is fine is from one process."""
        batch = {"input_ids": IDS, "labels": IDS}
        right = self.alone(**batch).loss
        if which == 0:
            return float((self.whole(**batch).loss - right).abs())
        if which == 1:
            return float((ra.train.mean_over_ranks(self.part(**cut(batch)).loss) - right).abs())
        ours, one = (m.generate(IDS, max_new_tokens=3, do_sample=False) for m in (self.part.eval(), self.alone))
        return float((ours != one).sum())


def refusals(rank: int, count: int) -> dict[str, int]:
    """Make `count` refused calls, in random order, each followed by a call that must be right; how many were which."""
    numbers, calls, found = random.Random(7), Calls(), dict[str, int]()
    rounds = count // len(calls.refused) + 1
    order = [x for _ in range(rounds) for x in numbers.sample(calls.refused, len(calls.refused))]
    for words, call in order[:count]:
        said = told_by(call)
        assert words in said and "\n" not in said, said
        assert (far := calls.good(numbers.randrange(3))) < 1e-5, (words, far)
        found[words] = found.get(words, 0) + 1
    return found


def served(rank: int) -> dict[str, float]:
    """How far from one process calls are that were refused before, or that ranks disagreed about."""
    alone, whole = model_cases.make("Llama").eval(), parallelize(model_cases.make("Llama"), layout="zigzag", whole=True)
    found, batch = {}, {"input_ids": IDS, "attention_mask": MASK}
    for name, positions in (("ahead", AHEAD), ("moved", torch.arange(7, 32)[None])):
        ours, right = (m(**batch, labels=IDS, position_ids=positions).loss for m in (whole, alone))
        logits = [m(**batch, position_ids=positions.expand_as(IDS)).logits for m in (whole, alone)]
        found[name] = model_cases.largest([ours - right, logits[0] - logits[1]])
    roberta = "RoBERTa, positions from 2"
    pair = parallelize(model_cases.make(roberta), layout="zigzag", whole=True).eval(), model_cases.make(roberta).eval()
    ours, right = (m(input_ids=IDS, position_ids=torch.arange(2, 27)[None]).logits for m in pair)
    found["positions from 2"] = model_cases.largest([ours - right])
    loss = replaced(whole, lambda ids: whole(input_ids=ids, labels=ids).loss, IDS)
    found["replaced forward"] = float((loss - alone(IDS, labels=IDS).loss).abs())
    causal = masked(functools.partial(masking_utils.causal_mask_function))
    found["a partial of the causal mask"] = float(told_by(lambda: causal(**cut({"input_ids": IDS}))) != "fine")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.3)
    tuned = parallelize(get_peft_model(model_cases.make("Llama"), lora), layout="zigzag").train()
    for sample in (True, False):
        tokens = tuned.generate(input_ids=IDS, max_new_tokens=20, do_sample=sample)
        every: list[Any] = [None, None]
        dist.all_gather_object(every, tokens.tolist())
        found[f"LoRA dropout, sample={sample}"] = float(every[0] != every[1])
    return found
