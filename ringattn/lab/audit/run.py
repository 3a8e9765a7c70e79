"""An audit: ranks try one feature after another; a hang or a crash ends only the feature in which it happens."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from time import sleep
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ...errors import InvalidInput, LaunchFailure
from ...text import did_you_mean
from ...transport.launcher import run_local
from ...transport.mpi import HEARD
from . import models
from .cases import Case, accepts, find_named, list_cases, shrink
from .judge import VERDICTS, Verdict, compare, judge
from .script import write_script

#: Targets by name: the modules beside this one.
ADAPTERS = tuple(sorted(path.stem for path in (Path(__file__).parent / "adapters").glob("[a-z]*.py")))
#: Verdicts that make the audit fail.
FAILURES = ("wrong", "hang", "crash")
#: The exit status of a rank that waited in vain, and seconds in which the others write what they found.
STUCK, LINGER = 3, 2.0


@dataclass(frozen=True)
class Finding:
    """What became of a feature: the worst verdict of all ranks, on which rank, and the smallest failing script."""

    case: Case
    verdict: Verdict
    rank: int = 0
    script: str = ""


def load_target(name: str, model: str | None = None) -> Callable[..., Any]:
    """The function "module:function", or that of an adapter by name, of shards or of a model. Raises InvalidInput."""
    module, named, function = name.partition(":")
    if not named:
        if name not in ADAPTERS:
            hint = did_you_mean(name, ADAPTERS)
            raise InvalidInput(f"target={name}: {hint}expected module:function, or one of {', '.join(ADAPTERS)}")
        module, function = f"ringattn.lab.audit.adapters.{name}", "attend" if model is None else "run_model"
    target = find_named(f"target={name}", module, function)
    if not callable(target):
        raise InvalidInput(f"target={name}: {module} has no function {function}")
    return target


def choose_cases(ranks: int, features: Sequence[str] | None, model: str | None = None) -> list[Case]:
    """The cases of an audit, or those of these features. Raises InvalidInput for an unknown one."""
    cases = {case.feature: case for case in (list_cases if model is None else models.list_cases)(ranks)}
    for name in features or ():
        if name not in cases:
            raise InvalidInput(f"features: {name}: {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    return [case for name, case in cases.items() if not features or name in features]


def audit(
    target: str, ranks: int, cases: Sequence[Case], patience: float, model: str | None = None
) -> Iterator[Finding]:
    """The findings of a target on new Gloo ranks of this machine, in the order of the cases.

    A rank that is not done after `patience` seconds hangs; the remaining cases then run on new ranks.
    """
    load_target(target, model)
    if model is not None:
        models.load_model(model)
    with tempfile.TemporaryDirectory() as folder:
        done = 0
        while done < len(cases):
            limit = (len(cases) - done) * 4 * patience + 60.0
            try:
                run_local(work, ranks, target, cases[done:], folder, patience, model, timeout=limit, threads=1)
                end = len(cases)
            except LaunchFailure as error:
                found, last = _read(Path(folder), ranks)
                end = next((i for i, case in enumerate(cases) if case.feature == last), done) + 1
                if cases[end - 1].feature not in found:
                    yield from finish(Path(folder), ranks, cases[done : end - 1], target, model)
                    words = (str(error).strip().splitlines() or ["no message"])[-1]
                    yield Finding(cases[end - 1], Verdict("crash", f"a rank ended: {words}"))
                    done = end
                    continue
            yield from finish(Path(folder), ranks, cases[done:end], target, model)
            done = end


@dataclass(frozen=True)
class _Rank:
    """What a rank needs to try a case, and to tell the others, and a file of its own, what it found."""

    judge: Callable[[Case], Verdict]
    rank: int
    ranks: int
    file: TextIO
    store: Any
    patience: float
    stop: Callable[[str], None]

    def tell(self, feature: str, verdict: Verdict, smaller: Case | None = None) -> None:
        self.write({"feature": feature, **asdict(verdict), "case": smaller and asdict(smaller)})

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def give_up(self, case: Case, number: str, verdict: Verdict | None = None) -> None:
        if "." not in number:  # a smaller case that hangs is no case that is wrong
            self.tell(case.feature, verdict or Verdict("hang", f"no result after {self.patience:g} s"))
        self.stop(number)
        os._exit(STUCK)

    def agree(self, case: Case, number: str) -> list[Verdict]:
        """The verdicts of all ranks on a case, exchanged through the store under the key `number`."""
        timer = Timer(self.patience, self.give_up, (case, number))
        timer.start()
        mine = self.judge(case)
        timer.cancel()
        self.store.set(f"{number}/{self.rank}", json.dumps(asdict(mine)))
        others = [f"{number}/{other}" for other in range(self.ranks)]
        try:
            self.store.wait(others, timedelta(seconds=2 * self.patience))
        except RuntimeError:  # DistStoreError: another rank is stuck
            self.give_up(case, number, mine)
        return [Verdict(**json.loads(self.store.get(key))) for key in others]


def work(
    rank: int, name: str, cases: Sequence[Case], folder: str, patience: float, model: str | None = None,
    report: Callable[[Sequence[Case]], None] | None = None,
) -> None:  # fmt: skip
    """Try the cases on this rank of a group; what it finds is appended to this rank's file in `folder`. Collective.

    After a hang, calls `report` with the cases that were tried, and ends the process.
    """
    target, ranks = load_target(name, model), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if dist.get_backend() == "nccl" else "cpu"
    make_store: Any = vars(dist)["TCPStore"]  # has no type stubs
    store = make_store("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [store and store.port]
    dist.broadcast_object_list(port, 0)
    store = store or make_store(os.environ.get("MASTER_ADDR", "127.0.0.1"), *port, None, False)
    comparison = compare if model is None else partial(models.compare, models.load_model(model))

    def stop(number: str) -> None:
        if report is not None:
            sleep(LINGER * (1 if rank == 0 else 2))  # a launcher ends all ranks with the first
            if rank == 0:
                report(cases[: int(number.split(".")[0]) + 1])
                sleep(HEARD)

    with Path(folder, f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        run = partial(judge, comparison, target, device=torch.device(device))
        one = _Rank(run, rank, ranks, file, store, patience, stop)
        for number, case in enumerate(cases):
            if case.dtype == "float32":
                case = replace(case, dtype=getattr(target, "dtype", case.dtype))
            one.write({"begun": case.feature})
            lacks = set() if model else case.needs - accepts(target)
            if lacks:
                one.tell(case.feature, Verdict("not offered", f"no argument {', '.join(sorted(lacks))}"))
                continue
            verdicts = one.agree(case, str(number))
            one.tell(case.feature, verdicts[rank])
            if any(each.verdict == "wrong" for each in verdicts):
                case, verdicts = _shrink(case, verdicts, one, number)
                one.tell(case.feature, verdicts[rank], case)
        store.set(f"end/{rank}", "")
        if rank == 0:  # whose store the others read
            store.wait([f"end/{other}" for other in range(ranks)], timedelta(seconds=2 * patience))


def _shrink(case: Case, verdicts: list[Verdict], one: _Rank, number: int) -> tuple[Case, list[Verdict]]:
    """A smaller case that is still wrong, and the verdicts on it. Collective."""
    turn, going = 0, True
    while going:
        going = False
        for smaller in shrink(case, one.ranks):
            turn += 1
            found = one.agree(smaller, f"{number}.{turn}")
            if any(each.verdict == "wrong" for each in found):
                case, verdicts, going = smaller, found, True
                break
    return case, verdicts


def _read(folder: Path, ranks: int) -> tuple[dict[str, list[tuple[Verdict, Case | None]]], str]:
    """(by feature the last verdict of each rank, with the smallest failing case; the feature that was begun last)."""
    found: dict[str, dict[int, tuple[Verdict, Case | None]]] = {}
    last = ""
    for rank in range(ranks):
        path = folder / f"{rank}.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            record = json.loads(line)
            if "begun" in record:
                last = record["begun"]
                continue
            feature, smaller = record.pop("feature"), record.pop("case")
            if smaller is not None:
                smaller = Case(**{**smaller, "ways": tuple(smaller["ways"])})
            found.setdefault(feature, {})[rank] = Verdict(**record), smaller
    missing = Verdict("hang", "no result"), None
    return {name: [of_rank.get(rank, missing) for rank in range(ranks)] for name, of_rank in found.items()}, last


def finish(folder: Path, ranks: int, cases: Sequence[Case], target: str, model: str | None = None) -> Iterator[Finding]:
    """The findings of the cases that all ranks have tried."""
    found, _ = _read(folder, ranks)
    for case in cases:
        of_ranks = found[case.feature]
        verdicts = [one for one, _ in of_ranks]
        # A wrong output tells more about a fault than the gradients that it makes wrong on other ranks.
        order = [(VERDICTS.index(one.verdict), one.tensor == "out", one.error) for one in verdicts]
        rank = max(range(ranks), key=order.__getitem__)
        worst = verdicts[rank]
        said = [f"rank {i}: {one.why}" for i, one in enumerate(verdicts) if one.verdict in ("refused", "crash")]
        if worst.verdict == "hang" and said:
            worst = replace(worst, why=f"{worst.why}, after {said[0]}")
        elif worst.verdict == "refused" and len(said) < ranks:
            worst = replace(worst, why=f"{worst.why} (on {len(said)} of {ranks} ranks only)")
        smaller = next((one for _, one in of_ranks if one is not None), case)
        script = ""
        if worst.verdict == "wrong":
            script = write_script(load_target(target, model), target, smaller, ranks, model)
        yield Finding(smaller if script else case, worst, rank, script)
