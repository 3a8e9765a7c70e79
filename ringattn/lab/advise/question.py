"""The question that the settings of `ringattn advise` ask."""

from __future__ import annotations

from dataclasses import replace

from ...cli.config.groups import default_of
from ...cli.config.schema import parse_size
from ...errors import InvalidInput
from ...machine.presets import MACHINES, get_machine
from ...text import did_you_mean
from ..models.config import load_model
from ..verbs.settings import AdviseConfig, read_documents, read_software
from .advice import torch_library
from .search import Offer, Question


def make_question(config: AdviseConfig) -> Question:
    """What to compare. Raises InvalidInput."""
    return Question(
        model=load_model(config.model),
        offers=tuple(make_offers(config)),
        tokens=parse_size(config.tokens, "tokens"),
        gpus=config.gpus,
        batch=config.batch,
        software=read_software(config),
        documents=read_documents(config),
        phase=config.phase,
        within=config.within,
    )


def make_offers(config: AdviseConfig) -> list[Offer]:
    """Machines with a price per GPU-hour: those listed in `prices`, or else `machine` with its own price.

    Raises InvalidInput.
    """
    if config.prices is None:
        machine = config.machine.made(ranks=config.gpus)
        offer = Offer(config.machine.path or config.machine.spec, machine, machine.price)
        return [offer if config.machine.library or config.phase != "training" else _of_software(offer)]
    if not isinstance(config.prices, dict) or not config.prices:
        raise InvalidInput(
            f"prices={config.prices}: expected prices per hour by machine, such as 'prices={{h100: 2.5, a100: 1.2}}'"
        )
    if config.machine != default_of(config, "machine"):
        raise InvalidInput("machine= has no meaning beside prices=, which names the machines; leave one of them out")
    offers = [_make_offer(str(name), price) for name, price in config.prices.items()]
    return [_of_software(one) if config.phase == "training" and "/" not in one.name else one for one in offers]


def _make_offer(name: str, price: object) -> Offer:
    """The preset `name`, or the first preset whose name begins with `name` and `_`, at this price."""
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
        raise InvalidInput(f"prices: {name}: {price!r} is not a price; give a number >= 0, such as {name}: 2.5")
    found = next((preset for preset in MACHINES if preset == name or preset.startswith(f"{name}_")), None)
    if found is None and "/" not in name:
        raise InvalidInput(
            f"prices: unknown machine {name!r}; {did_you_mean(name, MACHINES)}expected {', '.join(MACHINES)}, or the "
            "part of a name before an underscore"
        )
    return Offer(found or name, get_machine(found or name), float(price))


def _of_software(offer: Offer) -> Offer:
    """The offer with the attention kernels of `torch_library`, if the machine is a preset."""
    library = torch_library(offer)
    if library is None or offer.machine.kernel_rates is None:
        return offer
    rates = get_machine(f"{offer.machine.preset}/{library}").kernel_rates
    return replace(offer, machine=replace(offer.machine, kernel_rates=rates))
