"""An audit: ranks try one feature after another; a hang or a crash ends only the feature in which it happens."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, process_time, sleep, thread_time
from typing import Any, Self

import torch
import torch.distributed as dist
from msgspec import msgpack
from torch._C._distributed_c10d import PrefixStore

from ...errors import CommFailure, InvalidInput, LaunchFailure, RingAttentionError
from ...files import replacing
from ...text import did_you_mean
from ...transport.launcher import progress_stream, run_local, terminable
from ...transport.records import describe_error
from .cases import list_cases, list_model_cases, shrink
from .kit import FAILURES, VERDICTS, Case, Verdict, accepts, judge, prepare
from .models import Tested
from .named import check_model, check_target, load_model, load_target
from .script import write_script

#: The exit status of a rank that waited in vain, and seconds in which rank 0 tells what the ranks found.
STUCK, LINGER = 3, 2.0
#: Seconds between two looks at a rank; it computes if it has used this part of them; and the most times the patience
#: that a case takes by the clock.
TICK, LEAST, SLOW = 0.25, 0.02, 10
#: The innermost frames of a rank that a hang shows.
DEPTH = 6
TOO_SLOW = Verdict("too slow", f"no result after {SLOW} times the patience: a rank is stopped, or the machine too busy")
#: Modules on the stack of a rank that imports or compiles.
BUILDERS = ("importlib.", "torch._dynamo.convert_frame", "torch.utils.cpp_extension", "triton.compiler")


@dataclass(frozen=True)
class Finding:
    """The result of an audit for one feature: the worst verdict, its rank, and a script that shows a failure.

    `case` was tried; `smallest` is the smallest that fails in the same way. `stacks` has what each rank does in a hang.
    """

    case: Case
    verdict: Verdict
    smallest: Case
    rank: int = 0
    script: str = ""
    stacks: tuple[str, ...] = ()


def choose_cases(ranks: int, features: Sequence[str] | None, model: str | None = None) -> list[Case]:
    """The test cases of these features; if features begin with a minus, all cases but theirs. Raises InvalidInput."""
    cases = {case.feature: case for case in (list_cases if model is None else list_model_cases)(ranks)}
    names = {name.removeprefix("-") for name in features or ()}
    for name in names - {*cases}:
        raise InvalidInput(f"features: {name}: {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    wanted = {name for name in features or () if name[0] != "-"} or cases.keys() - names
    return [case for name, case in cases.items() if name in wanted]


def check(target: str, ranks: int, cases: Sequence[Case], model: str | None = None) -> None:
    """Raise InvalidInput for a function or a model that cannot be audited with these cases on any rank."""
    check_target(target, load_target(target, model), cases, ranks)
    if model is not None:
        check_model(model, cases[0])


def audit(
    target: str, ranks: int, cases: Sequence[Case], patience: float, model: str | None = None
) -> Iterator[Finding]:
    """Audit a function on new Gloo ranks of this machine; yields a Finding for each case, in order.

    A case hangs if each rank without a result has had `patience` seconds: of the CPU while it computes, by the clock
    while it waits, none while it imports or compiles. The remaining cases then run on new ranks, unless two in a row
    hang, or one is too slow to tell. If interrupted, yields the findings so far, and then raises the interruption.
    """
    check(target, ranks, cases, model)
    with tempfile.TemporaryDirectory() as folder:
        path, told = Path(folder, "findings"), list[str]()
        while cases and told[-2:] != ["hang"] * 2 and told[-1:] != ["too slow"]:
            path.write_bytes(msgpack.encode(({}, "")))
            limit, failure = len(cases) * SLOW * patience + 600.0, None
            compiles = any("compile" in case.ways for case in cases)
            warm = [__name__, "torch._dynamo" if compiles else "torch.fx.experimental.symbolic_shapes"]
            try:
                run_local(work, ranks, target, cases, patience, model, None, path, timeout=limit, threads=1, warm=warm)
            except (LaunchFailure, KeyboardInterrupt, SystemExit) as error:
                failure = error
            found, begun = read(path)
            yield from found.values()
            if failure is None:
                return
            if not begun or not isinstance(failure, LaunchFailure) or failure.status is None:
                raise failure
            last = [case.feature for case in cases].index(begun)
            if begun not in found:
                first, *more = str(failure).splitlines()
                words = first.partition("; its last output")[0]
                if more and (failure.status or 0) > 0:
                    words += f": {more[-1].strip()}"
                case = _in_dtype(cases[last], load_target(target, model))
                source = load_model(model)[1:] if model else None
                script = write_script(load_target(target, model), target, case, ranks, "gloo", source)
                found[begun] = Finding(case, Verdict("crash", words), case, script=script)
                yield found[begun]
            told += [one.verdict.verdict for one in found.values() if one.verdict.verdict != "not offered"]
            cases = cases[last + 1 :]


def read(path: Path) -> tuple[dict[str, Finding], str]:
    """Read the file that rank 0 writes: (findings by feature, the feature that was begun last)."""
    return msgpack.decode(path.read_bytes(), type=tuple[dict[str, Finding], str])


class _Rank:
    """A rank that tries cases, and agrees with the others on each; rank 0 keeps the findings, by feature.

    The ranks leave this context together: rank 0 has the store, and tells the others if it fails.
    """

    def __init__(
        self, rank: int, name: str, patience: float, model: str | None,
        report: Callable[[list[Finding]], None] | None, path: Path | None,
    ) -> None:  # fmt: skip
        self.rank, self.ranks, self.patience = rank, dist.get_world_size(), patience
        self.name, self.target, self.report, self.path = name, load_target(name, model), report, path
        self.findings: dict[str, Finding] = {}
        on_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
        store: Any = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]  # the target waits on its own
        turn = store.add(f"ringattn/audit/{rank}", 1)  # the store keeps what earlier audits wrote
        self.store: Any = PrefixStore(f"ringattn/audit/{turn}", store)
        self.source, self.prepare = None, partial(prepare, self.target, device=self.device)
        if model is not None:
            make, *source = load_model(model)
            self.source = source[0], source[1]
            self.prepare = partial(Tested(make).prepare, self.target, device=self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.rank == 0 and (error is None or isinstance(error, Exception)):  # not if interrupted
            self.store.set(*(("end/0", "") if error is None else ("failure", describe_error(error))))
            self.wait([f"end/{rank}" for rank in range(1, self.ranks)], 2 * self.patience)
        elif error is None:
            self.wait(["end/0"], inf)
            self.store.set(f"end/{self.rank}", "")

    def write(self, begun: str) -> None:
        """Write the findings, and the feature that was begun last, to the file at `path`."""
        if self.rank == 0 and self.path is not None:
            with replacing(self.path) as path:
                path.write_bytes(msgpack.encode((self.findings, begun)))

    def tell(self, case: Case, verdicts: Sequence[Verdict], smaller: Case | None = None) -> None:
        """On rank 0, turn the verdicts of all ranks on a case into its Finding.

        `smaller` is the smallest case that is also wrong.
        """
        if self.rank:
            return
        # A wrong output tells more about a fault than the gradients that it makes wrong on other ranks.
        order = [(VERDICTS.index(one.verdict), one.tensor in ("out", "logits"), one.error) for one in verdicts]
        rank = max(range(self.ranks), key=order.__getitem__)
        worst, smallest, script, stacks = verdicts[rank], smaller or case, "", tuple[str, ...]()
        said = [f"rank {i}: {one.why}" for i, one in enumerate(verdicts) if one.verdict in ("refused", "crash")]
        if worst.verdict == "hang":
            stacks = tuple(f"rank {i}: {one.stack or one.verdict}" for i, one in enumerate(verdicts))
            worst = replace(worst, why=f"{worst.why}, after {said[0]}" if said else worst.why, stack="")
        elif worst.verdict == "refused" and len(said) < self.ranks:
            worst = replace(worst, why=f"{worst.why} (on {len(said)} of {self.ranks} ranks only)")
        if worst.verdict in FAILURES:
            script = write_script(self.target, self.name, smallest, self.ranks, dist.get_backend(), self.source)
        self.findings[case.feature] = Finding(case, worst, smallest, rank, script, stacks)
        self.write(case.feature)

    def agree(self, case: Case, number: str) -> list[Verdict]:
        """Run a case on this rank; returns the verdicts of all ranks on it.

        Ranks exchange verdicts through the store, under the key `number`.
        """
        call = self.prepare(case)
        self.store.set(f"{number}/spent/{self.rank}", "0")
        self.wait([f"{number}/spent/{rank}" for rank in range(self.ranks)], inf)
        done = threading.Event()
        watcher = threading.Thread(target=self.watch, args=(case, number, done, threading.get_ident()), daemon=True)
        watcher.start()
        try:
            with redirect_stdout(sys.stderr):  # a launcher's standard output is for the report
                mine = judge(call)
        finally:
            done.set()
            watcher.join()
            self.store.set(f"{number}/spent/{self.rank}", "inf")
        self.store.set(f"{number}/verdict/{self.rank}", msgpack.encode(mine))
        verdicts = self._collect(number, SLOW * self.patience, TOO_SLOW)
        for one in verdicts:
            if one.verdict in ("hang", "too slow"):
                self.give_up(case, number, one, known=True)
        return verdicts

    def watch(self, case: Case, number: str, done: threading.Event, caller: int) -> None:
        """Tell all ranks the seconds that this one has had, see `audit`, until it is done; infinity means a result."""
        spent, begun, now, used = 0.0, monotonic(), monotonic(), process_time()
        while not done.wait(TICK):
            before, now, earlier, used = now, monotonic(), used, process_time() - thread_time()
            stack = traceback.walk_stack(sys._current_frames()[caller])
            if not any(frame.f_globals.get("__name__", "").startswith(BUILDERS) for frame, _ in stack):
                # A thread that wakes up late has no free core: that its rank computes nothing does not show a wait.
                waits = used - earlier < LEAST * TICK and now - before < 2 * TICK
                spent += TICK if waits else used - earlier
            self.store.set(f"{number}/spent/{self.rank}", str(spent))
            if min(float(self.store.get(f"{number}/spent/{rank}")) for rank in range(self.ranks)) >= self.patience:
                why = f"no result after {self.patience:g} s in which ranks waited or computed"
                frames = traceback.format_stack(sys._current_frames()[caller], DEPTH)
                self.give_up(case, number, Verdict("hang", why, stack="".join(frames)))
            if now - begun > SLOW * self.patience:
                self.give_up(case, number, TOO_SLOW)

    def give_up(self, case: Case, number: str, stuck: Verdict, *, known: bool = False) -> None:
        """End this process, as ranks have no result: `stuck` is their verdict, and this one's unless it is known."""
        if not known:
            self.store.set(f"{number}/verdict/{self.rank}", msgpack.encode(stuck))
        if self.rank:
            self.store.set(f"end/{self.rank}", "")  # rank 0 may wait for it, if an error ends it
        try:
            if self.rank == 0 and "." not in number:  # a smaller case that hangs is no case that is wrong
                self.tell(case, self._collect(number, LINGER / 2, stuck))
            if self.rank == 0 and self.report is not None:
                sys.stdout = sys.__stdout__
                self.report([*self.findings.values()])
            if self.rank or self.report is not None:
                sleep(LINGER)  # a launcher ends all ranks with the first
        except RingAttentionError as error:
            sys.stderr.write(f"ringattn: {error}\n")
        finally:
            if failure := sys.exc_info()[1]:
                traceback.print_exception(failure)
            sys.stderr.flush()
            os._exit(STUCK)

    def wait(self, keys: list[str], seconds: float) -> None:
        """Wait up to `seconds` until the store has all `keys`. Unlike store.wait, this lets signals interrupt.

        Raises CommFailure if rank 0 has failed.
        """
        end = monotonic() + seconds
        while not self.store.check(keys) and monotonic() < end:
            if self.rank and self.store.check(["failure"]):
                self.store.set(f"end/{self.rank}", "")
                raise CommFailure(f"rank 0 ended the audit: {self.store.get('failure').decode()}")
            sleep(0.005)

    def _collect(self, number: str, seconds: float, missing: Verdict) -> list[Verdict]:
        keys = [f"{number}/verdict/{rank}" for rank in range(self.ranks)]
        self.wait(keys, seconds)
        raw = [self.store.get(key) if self.store.check([key]) else msgpack.encode(missing) for key in keys]
        return [msgpack.decode(one, type=Verdict) for one in raw]

    def try_case(self, case: Case, number: int) -> None:
        """Try a case, and smaller ones if it is wrong. Collective."""
        case = _in_dtype(case, self.target)
        self.write(case.feature)
        if self.rank == 0:
            progress_stream().write(f"audit: {case.feature}\n")
        lacks = set() if self.source else case.needs - accepts(self.target)
        if lacks:
            return self.tell(case, [Verdict("not offered", f"no argument {', '.join(sorted(lacks))}")] * self.ranks)
        verdicts, smaller, turn = self.agree(case, str(number)), None, 0
        self.tell(case, verdicts)
        wrong = _find_wrong(verdicts)
        tried = shrink(case, self.ranks) if wrong else iter(())
        while (candidate := next(tried, None)) is not None:
            turn += 1
            found = self.agree(candidate, f"{number}.{turn}")
            if _find_wrong(found) == wrong:  # else it fails in another way
                verdicts, smaller, tried = found, candidate, shrink(candidate, self.ranks)
        if smaller is not None:
            self.tell(case, verdicts, smaller)


def work(
    rank: int, name: str, cases: Sequence[Case], patience: float, model: str | None = None,
    report: Callable[[list[Finding]], None] | None = None, path: Path | None = None,
) -> None:  # fmt: skip
    """Run the cases of an audit on this rank. Collective.

    Rank 0 writes the findings to the file at `path`, see `read`, or calls `report` with them at the end, even if ranks
    hang or end early. Raises CommFailure on the other ranks if rank 0 fails, for example because its report does.
    """
    with _Rank(rank, name, patience, model, report, path) as one:
        try:
            with nullcontext() if report is None else terminable():
                for number, case in enumerate(cases):
                    one.try_case(case, number)
        finally:
            if rank == 0 and report is not None:
                report([*one.findings.values()])


def _find_wrong(verdicts: Sequence[Verdict]) -> str:
    """The first tensor that is wrong on a rank: out, or the first gradient; "" if none is."""
    names = {one.tensor for one in verdicts if one.verdict == "wrong"}
    return next((name for name in ("out", "logits", "dq", "dk", "dv", *sorted(names)) if name in names), "")


def _in_dtype(case: Case, target: Callable[..., Any]) -> Case:
    """The case in the dtype that the audited function takes, unless it is about another."""
    return replace(case, dtype=getattr(target, "dtype", case.dtype)) if case.dtype == "float32" else case
