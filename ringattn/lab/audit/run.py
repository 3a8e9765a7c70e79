"""An audit: ranks try one feature after another; a hang or a crash ends only the feature in which it happens."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, LaunchFailure
from ...text import did_you_mean
from ...transport.launcher import run_local
from .cases import Case, accepts, list_cases, shrink
from .judge import VERDICTS, Verdict, judge
from .script import write_script

#: Targets by name: the modules beside this one.
ADAPTERS = tuple(sorted(path.stem for path in (Path(__file__).parent / "adapters").glob("[a-z]*.py")))
#: Verdicts that make the audit fail.
FAILURES = ("wrong", "hang", "crash")
#: The exit status of a rank that waited in vain.
STUCK = 3


@dataclass(frozen=True)
class Finding:
    """What became of a feature: the worst verdict of all ranks, on which rank, and the smallest failing script."""

    case: Case
    verdict: Verdict
    rank: int = 0
    script: str = ""


def load_target(name: str) -> Callable[..., Any]:
    """The function "module:function", or that of an adapter by name. Raises InvalidInput."""
    module, named, function = name.partition(":")
    if not named:
        if name not in ADAPTERS:
            hint = did_you_mean(name, ADAPTERS)
            raise InvalidInput(f"target={name}: {hint}expected module:function, or one of {', '.join(ADAPTERS)}")
        module, function = f"ringattn.lab.audit.adapters.{name}", "attend"
    try:
        target = getattr(import_module(module), function, None)
    except ImportError as error:
        raise InvalidInput(f"target={name}: {error}; install it, or run where it can be imported") from None
    if not callable(target):
        raise InvalidInput(f"target={name}: {module} has no function {function}")
    return target


def choose_cases(ranks: int, features: Sequence[str] | None) -> list[Case]:
    """The cases of an audit, or those of these features. Raises InvalidInput for an unknown one."""
    cases = {case.feature: case for case in list_cases(ranks)}
    for name in features or ():
        if name not in cases:
            raise InvalidInput(f"features: {name}: {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    return [case for name, case in cases.items() if not features or name in features]


def audit(target: str, ranks: int, cases: Sequence[Case], patience: float) -> Iterator[Finding]:
    """The findings of a target on new Gloo ranks of this machine, in the order of the cases.

    A rank that is not done after `patience` seconds hangs; the remaining cases then run on new ranks.
    """
    load_target(target)
    with tempfile.TemporaryDirectory() as folder:
        done = 0
        while done < len(cases):
            limit = (len(cases) - done) * 4 * patience + 60.0
            try:
                run_local(work, ranks, target, cases[done:], folder, patience, timeout=limit, threads=1)
                end = len(cases)
            except LaunchFailure as error:
                found, last = _read(Path(folder), ranks)
                end = next((i for i, case in enumerate(cases) if case.feature == last), done) + 1
                if cases[end - 1].feature not in found:
                    yield from finish(Path(folder), ranks, cases[done : end - 1], target)
                    words = (str(error).strip().splitlines() or ["no message"])[-1]
                    yield Finding(cases[end - 1], Verdict("crash", f"a rank ended: {words}"))
                    done = end
                    continue
            yield from finish(Path(folder), ranks, cases[done:end], target)
            done = end


def work(rank: int, name: str, cases: Sequence[Case], folder: str, patience: float) -> None:
    """Try the cases on this rank of a group; what it finds is appended to a file of its own in `folder`. Collective."""
    target, ranks = load_target(name), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if dist.get_backend() == "nccl" else "cpu"
    make_store: Any = vars(dist)["TCPStore"]  # has no type stubs
    port: list[Any] = [None]
    store = make_store("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port[0] = None if store is None else store.port
    dist.broadcast_object_list(port, 0)
    store = store or make_store(host, port[0], None, False)
    with Path(folder, f"{rank}.jsonl").open("a", encoding="utf-8") as file:

        def tell(feature: str, verdict: Verdict, smaller: Case | None = None) -> None:
            file.write(json.dumps({"feature": feature, **asdict(verdict), "case": smaller and asdict(smaller)}) + "\n")
            file.flush()

        def give_up(case: Case, number: str) -> None:
            if "." not in number:  # a smaller case that hangs is no case that is wrong
                tell(case.feature, Verdict("hang", f"no result after {patience:g} s"))
            os._exit(STUCK)

        def agree(case: Case, number: str) -> list[Verdict]:
            """The verdicts of all ranks on a case."""
            timer = Timer(patience, give_up, (case, number))
            timer.start()
            mine = judge(target, case, torch.device(device))
            timer.cancel()
            store.set(f"{number}/{rank}", json.dumps(asdict(mine)))
            others = [f"{number}/{other}" for other in range(ranks)]
            try:
                store.wait(others, timedelta(seconds=2 * patience))
            except RuntimeError:  # DistStoreError: another rank is stuck
                if "." not in number:
                    tell(case.feature, mine)
                os._exit(STUCK)
            return [Verdict(**json.loads(store.get(key))) for key in others]

        for number, case in enumerate(cases):
            if case.dtype == "float32":
                case = replace(case, dtype=getattr(target, "dtype", case.dtype))
            file.write(json.dumps({"begun": case.feature}) + "\n")
            file.flush()
            lacks = (case.needs | ({"return_lse"} if "lse" in case.ways else set())) - accepts(target)
            if lacks:
                tell(case.feature, Verdict("not offered", f"no argument {', '.join(sorted(lacks))}"))
                continue
            verdicts = agree(case, str(number))
            tell(case.feature, verdicts[rank])
            if any(one.verdict == "wrong" for one in verdicts):
                smaller, verdicts = _shrink(case, verdicts, partial(_agree_on, agree, number), ranks)
                tell(case.feature, verdicts[rank], smaller)
        store.set(f"end/{rank}", "")
        if rank == 0:  # whose store the others read
            store.wait([f"end/{other}" for other in range(ranks)], timedelta(seconds=2 * patience))


def _agree_on(agree: Callable[[Case, str], list[Verdict]], number: int, case: Case, turn: int) -> list[Verdict]:
    return agree(case, f"{number}.{turn}")


def _shrink(
    case: Case, verdicts: list[Verdict], agree: Callable[[Case, int], list[Verdict]], ranks: int
) -> tuple[Case, list[Verdict]]:
    """A smaller case that is still wrong, and the verdicts on it. Collective."""
    turn, going = 0, True
    while going:
        going = False
        for smaller in shrink(case, ranks):
            turn += 1
            found = agree(smaller, turn)
            if any(one.verdict == "wrong" for one in found):
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


def finish(folder: Path, ranks: int, cases: Sequence[Case], target: str) -> Iterator[Finding]:
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
        script = write_script(load_target(target), target, smaller, ranks) if worst.verdict == "wrong" else ""
        yield Finding(smaller if script else case, worst, rank, script)
