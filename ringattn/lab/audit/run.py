"""An audit: ranks try one feature after another; a hang or a crash ends only the feature in which it happens."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, LaunchFailure
from ...text import did_you_mean
from ...transport.launcher import run_local, show_note, terminable
from . import models
from .cases import Case, accepts, find_named, list_cases, shrink
from .judge import VERDICTS, Verdict, check_target, compare, judge
from .script import write_script

#: Targets by name: the modules beside this one.
ADAPTERS = tuple(sorted(path.stem for path in (Path(__file__).parent / "adapters").glob("[a-z]*.py")))
#: Verdicts that make the audit fail.
FAILURES = ("wrong", "hang", "crash")
#: The exit status of a rank that waited in vain, and seconds in which rank 0 tells what the ranks found.
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
        what = f"{module} has no function {function}" if named else f"{name} has no adapter for models; try ringattn"
        raise InvalidInput(f"target={name}: {what}")
    if "group" not in accepts(target):
        raise InvalidInput(f"target={name}: the function has no argument group; see docs/audit.md for its arguments")
    return target


def choose_cases(ranks: int, features: Sequence[str] | None, model: str | None = None) -> list[Case]:
    """The cases of an audit: of these features or, if they have a minus, of all but these. Raises InvalidInput."""
    cases = {case.feature: case for case in (list_cases if model is None else models.list_cases)(ranks)}
    names = {name.removeprefix("-") for name in features or ()}
    for name in names - {*cases}:
        raise InvalidInput(f"features: {name}: {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    wanted = {name for name in features or () if name[0] != "-"} or cases.keys() - names
    return [case for name, case in cases.items() if name in wanted]


def check(target: str, ranks: int, cases: Sequence[Case], model: str | None = None) -> None:
    """Raise InvalidInput for a target or a model that no rank can try on these cases."""
    check_target(target, load_target(target, model), cases, ranks)
    if model is not None:
        models.check_model(model, cases[0])


def audit(
    target: str, ranks: int, cases: Sequence[Case], patience: float, model: str | None = None
) -> Iterator[Finding]:
    """The findings of a target on new Gloo ranks of this machine, in the order of the cases.

    A rank that is not done after `patience` seconds hangs; the remaining cases then run on new ranks. If interrupted,
    yields what was found, and then raises.
    """
    check(target, ranks, cases, model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "findings")
        while cases:
            path.touch()
            limit, failure = len(cases) * 4 * patience + 600.0, None
            try:
                with _following(path):
                    run_local(work, ranks, target, cases, patience, model, None, path, timeout=limit, threads=1)
            except (LaunchFailure, KeyboardInterrupt, SystemExit) as error:
                failure = error
            told = path.read_text(encoding="utf-8").splitlines()
            path.unlink()
            yield from list_findings(told, cases, target, ranks, model)
            found, begun = _read(told)
            last = next((i for i, case in enumerate(cases) if case.feature == begun), None)
            if failure is not None and (last is None or not isinstance(failure, LaunchFailure)):
                raise failure
            assert last is not None, "ranks that end without an error have begun a case"
            if isinstance(failure, LaunchFailure) and begun not in found:
                first, *more = str(failure).splitlines()
                words = first.partition("; its last output")[0]
                if more and (failure.status or 0) > 0:
                    words += f": {more[-1].strip()}"
                yield Finding(cases[last], Verdict("crash", words))
            cases = cases[last + 1 :]


@contextmanager
def _following(path: Path) -> Iterator[None]:
    """Within the block, show on a terminal which case the ranks have begun, as the file at `path` tells."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(0.5):
            _, begun = _read(path.read_text(encoding="utf-8").splitlines())
            show_note(begun)

    threading.Thread(target=follow, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@dataclass(frozen=True)
class _Rank:
    """What a rank needs to try a case, and to tell the others its verdict. Rank 0 keeps all verdicts, as JSON lines."""

    solve: Callable[[Case], Any] | None
    judge: Callable[[Case, Any], Verdict]
    rank: int
    ranks: int
    store: Any
    patience: float
    path: Path | None
    report: Callable[[list[str]], None] | None
    told: list[str] = field(default_factory=list)

    def write(self, record: dict[str, Any]) -> None:
        if self.rank == 0:
            self.told.append(json.dumps(record))
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self.told[-1] + "\n")

    def tell(self, feature: str, verdicts: Sequence[Verdict], smaller: Case | None = None) -> None:
        self.write({"feature": feature, "verdicts": [*map(asdict, verdicts)], "case": smaller and asdict(smaller)})

    def agree(self, case: Case, number: str) -> list[Verdict]:
        """The verdicts of all ranks on a case, exchanged through the store under the key `number`."""
        solved = self.solve and self.solve(case)
        self.store.set(f"{number}/ready/{self.rank}", "")
        self._wait(f"{number}/ready", inf)
        timer = threading.Timer(self.patience, self.give_up, (case, number))
        timer.start()
        with redirect_stdout(sys.stderr):  # a launcher's standard output is for the report
            mine = self.judge(case, solved)
        timer.cancel()
        self.store.set(f"{number}/verdict/{self.rank}", json.dumps(asdict(mine)))
        verdicts = self._collect(number, 2 * self.patience)
        if any(one.verdict == "hang" for one in verdicts):
            self.give_up(case, number, mine)
        return verdicts

    def give_up(self, case: Case, number: str, mine: Verdict | None = None) -> None:
        """End this process, as a rank hangs in this case: this one without a verdict `mine`, otherwise another one."""
        if mine is None:
            stuck = Verdict("hang", f"no result after {self.patience:g} s")
            self.store.set(f"{number}/verdict/{self.rank}", json.dumps(asdict(stuck)))
        if self.rank == 0 and "." not in number:  # a smaller case that hangs is no case that is wrong
            self.tell(case.feature, self._collect(number, LINGER / 2))
        if self.rank == 0 and self.report is not None:
            sys.stdout = sys.__stdout__
            self.report(self.told)
        if self.rank or self.report is not None:
            sleep(LINGER)  # a launcher ends all ranks with the first
        os._exit(STUCK)

    def _wait(self, key: str, seconds: float) -> None:
        """Wait until all ranks have set the key, or for `seconds`. Unlike store.wait, this lets signals through."""
        end, keys = monotonic() + seconds, [f"{key}/{rank}" for rank in range(self.ranks)]
        while not self.store.check(keys) and monotonic() < end:
            sleep(0.005)

    def _collect(self, number: str, seconds: float) -> list[Verdict]:
        self._wait(f"{number}/verdict", seconds)
        keys = [f"{number}/verdict/{rank}" for rank in range(self.ranks)]
        missing = Verdict("hang", "no result")
        return [Verdict(**json.loads(self.store.get(key))) if self.store.check([key]) else missing for key in keys]


def work(
    rank: int, name: str, cases: Sequence[Case], patience: float, model: str | None = None,
    report: Callable[[list[str]], None] | None = None, path: Path | None = None,
) -> list[str]:  # fmt: skip
    """Try the cases on this rank of a group; returns what was found, as lines for `list_findings`, on rank 0.

    Collective. Rank 0 also appends the lines to the file at `path`. If ranks hang or end early, rank 0 calls `report`
    with the lines so far.
    """
    target, ranks = load_target(name, model), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if dist.get_backend() == "nccl" else "cpu"
    make_store: Any = vars(dist)["TCPStore"]  # has no type stubs
    store = make_store("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [store and store.port]
    dist.broadcast_object_list(port, 0)
    store = store or make_store(os.environ.get("MASTER_ADDR", "127.0.0.1"), *port, None, False)
    tested = None if model is None else models.Tested(model)
    one = _Rank(
        tested.solve if tested else None,
        partial(judge, tested.compare if tested else compare, target, device=torch.device(device)),
        rank,
        ranks,
        store,
        patience,
        path,
        report,
    )
    ended = False
    try:
        with nullcontext() if report is None else terminable():
            for number, case in enumerate(cases):
                _try(case, number, one, target, set() if model else case.needs - accepts(target))
        store.set(f"end/{rank}", "")
        if rank == 0:  # whose store the others read
            one._wait("end", 2 * patience)
        ended = True
    finally:
        if rank == 0 and report is not None and not ended:
            report(one.told)
    return one.told


def _try(case: Case, number: int, one: _Rank, target: Callable[..., Any], lacks: set[str]) -> None:
    """Try a case, and smaller ones if it is wrong. Collective."""
    if case.dtype == "float32":
        case = replace(case, dtype=getattr(target, "dtype", case.dtype))
    one.write({"begun": case.feature})
    if lacks:
        return one.tell(case.feature, [Verdict("not offered", f"no argument {', '.join(sorted(lacks))}")] * one.ranks)
    verdicts, smaller, turn = one.agree(case, str(number)), None, 0
    one.tell(case.feature, verdicts)
    tried = shrink(case, one.ranks) if _is_wrong(verdicts) else iter(())
    while (candidate := next(tried, None)) is not None:
        turn += 1
        found = one.agree(candidate, f"{number}.{turn}")
        if _is_wrong(found):
            verdicts, smaller, tried = found, candidate, shrink(candidate, one.ranks)
    if smaller is not None:
        one.tell(case.feature, verdicts, smaller)


def _is_wrong(verdicts: Sequence[Verdict]) -> bool:
    return any(one.verdict == "wrong" for one in verdicts)


def _read(told: Sequence[str]) -> tuple[dict[str, tuple[list[Verdict], Case | None]], str]:
    """(by feature the verdicts of all ranks, with the smallest failing case; the feature that was begun last)."""
    found: dict[str, tuple[list[Verdict], Case | None]] = {}
    begun = ""
    for record in map(json.loads, told):
        begun = record.get("begun", begun)
        if "feature" in record:
            smaller = record["case"] and Case(**{**record["case"], "ways": tuple(record["case"]["ways"])})
            found[record["feature"]] = [Verdict(**one) for one in record["verdicts"]], smaller
    return found, begun


def list_findings(
    told: Sequence[str], cases: Sequence[Case], target: str, ranks: int, model: str | None = None
) -> Iterator[Finding]:
    """The findings of those cases that the ranks have told about in these lines, see `work`."""
    found, _ = _read(told)
    for case in (case for case in cases if case.feature in found):
        verdicts, smaller = found[case.feature]
        # A wrong output tells more about a fault than the gradients that it makes wrong on other ranks.
        order = [(VERDICTS.index(one.verdict), one.tensor in ("out", "logits"), one.error) for one in verdicts]
        rank = max(range(ranks), key=order.__getitem__)
        worst = verdicts[rank]
        said = [f"rank {i}: {one.why}" for i, one in enumerate(verdicts) if one.verdict in ("refused", "crash")]
        if worst.verdict == "hang" and said:
            worst = replace(worst, why=f"{worst.why}, after {said[0]}")
        elif worst.verdict == "refused" and len(said) < ranks:
            worst = replace(worst, why=f"{worst.why} (on {len(said)} of {ranks} ranks only)")
        script = ""
        if worst.verdict == "wrong":
            script = write_script(load_target(target, model), target, smaller or case, ranks, model)
        yield Finding((smaller if script else None) or case, worst, rank, script)
