"""An audit: ranks try one feature after another; a hang or a crash ends only the feature in which it happens."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, process_time, sleep, thread_time
from typing import Any

import torch
import torch.distributed as dist
from msgspec import msgpack
from torch._C._distributed_c10d import PrefixStore

from ...errors import InvalidInput, LaunchFailure, RingAttentionError
from ...files import make_folder, replacing, write_text
from ...text import did_you_mean
from ...transport.launcher import progress_stream, run_local, terminable
from . import kit, models
from .cases import list_cases, list_model_cases, shrink
from .kit import FAILURES, VERDICTS, Case, Verdict, accepts, judge, prepare
from .models import Tested
from .named import check, load_model, load_target, spell_target

#: The exit status of a rank that waited in vain, and seconds in which rank 0 tells what the ranks found.
STUCK, LINGER = 3, 2.0
#: Seconds between two looks at a rank; it computes if it has used this part of them; and the most times the patience
#: that a case takes by the clock.
TICK, LEAST, SLOW = 0.25, 0.02, 10
TOO_SLOW = Verdict("too slow", f"no result after {SLOW} times the patience: a rank is stopped, or the machine too busy")
#: Modules on the stack of a rank that imports or compiles.
BUILDERS = ("importlib.", "torch._dynamo.convert_frame", "torch.utils.cpp_extension", "triton.compiler")


#: A failing case as a script without this library.
SCRIPT = """# {feature}, as ringattn audit found it. `python this.py` needs torch and the target alone. Its status
# is 0 if the case is right, 1 if it is wrong, and 125 if the target cannot be imported or refuses it, so that
# `git bisect run python this.py` finds the commit. The case itself is in the last line.
{source}

def load_and_prepare(case, device):
    from {module} import {function} as target
    {prepare}


if __name__ == "__main__":
    run_script(load_and_prepare, {case!r}, {ranks}, {backend!r})
"""


@dataclass(frozen=True)
class Finding:
    """What an audit found about one feature: the verdicts of all ranks on the smallest case that fails as `case` does.

    If no rank fails, `smallest` is `case`.
    """

    case: Case
    smallest: Case
    verdicts: Sequence[Verdict]

    @property
    def rank(self) -> int:
        """The rank whose verdict is the worst."""
        # A wrong output tells more about a fault than the gradients that it makes wrong on other ranks.
        order = [(VERDICTS.index(one.verdict), one.tensor in ("out", "logits"), one.error) for one in self.verdicts]
        return order.index(max(order))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict, which tells what other ranks raised."""
        worst = self.verdicts[self.rank]
        said = [f"rank {i}: {one.why}" for i, one in enumerate(self.verdicts) if one.verdict in ("refused", "crash")]
        if worst.verdict == "hang" and said:
            return replace(worst, why=f"{worst.why}, after {said[0]}")
        if worst.verdict == "refused" and len(said) < len(self.verdicts):
            return replace(worst, why=f"{worst.why} (on {len(said)} of {len(self.verdicts)} ranks only)")
        return worst

    @property
    def failed(self) -> bool:
        """Whether the audit fails."""
        return self.verdict.verdict in FAILURES

    @property
    def mended(self) -> bool:
        """Whether a feature that is known to fail is right now; one that is not offered is not."""
        return self.verdict.verdict in ("exact", "rounded")

    @property
    def stacks(self) -> list[str]:
        """What each rank does in a hang."""
        hangs = self.verdict.verdict == "hang"
        return [f"rank {i}: {one.stack or one.verdict}" for i, one in enumerate(self.verdicts) if hangs]

    def write_script(self, name: str, model: str | None, backend: str = "gloo") -> str:
        """A script that tries the smallest case as the audit did: inputs, exact results, tolerances, and calls."""
        module, function = spell_target(name, model)
        source, prepared = inspect.getsource(kit), "return prepare(target, case, device)"
        if model is not None:
            source += re.sub(r"(?m)^from (__future__|\.kit) import .*\n", "", inspect.getsource(models))
            _, imported, made = load_model(model)
            prepared = f"{imported}\n    return Tested(lambda: {made}).prepare(target, case, device)"
        return SCRIPT.format(
            feature=self.case.feature, source=source, module=module, function=function, prepare=prepared,
            case=self.smallest, ranks=len(self.verdicts), backend=backend,
        )  # fmt: skip

    def save_script(self, folder: str, *given: Any) -> None:
        """Write the script to the folder, which is made, by the name of the feature. Raises InvalidInput."""
        make_folder(Path(folder))
        write_text(Path(folder, re.sub(r"\W+", "_", self.case.feature) + ".py"), self.write_script(*given))


def choose_cases(ranks: int, features: Sequence[str] | None, model: str | None = None) -> list[Case]:
    """The test cases of these features; if features begin with a minus, all cases but theirs. Raises InvalidInput."""
    cases = {case.feature: case for case in (list_cases if model is None else list_model_cases)(ranks)}
    names = {name.removeprefix("-") for name in features or ()}
    for name in names - {*cases}:
        raise InvalidInput(f"features: {name}: {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    wanted = {name for name in features or () if name[0] != "-"} or cases.keys() - names
    return [case for name, case in cases.items() if name in wanted]


def audit(
    target: str, ranks: int, cases: Sequence[Case], patience: float, model: str | None = None
) -> Iterator[Finding]:
    """Audit a function on new Gloo ranks of this machine; yields a Finding for each case, in order.

    A case hangs if each rank without a result has had `patience` seconds: of the CPU while it computes, by the clock
    while it waits, none while it imports or compiles. After a hang or a crash, whose messages may still arrive, the
    remaining cases run on new ranks, unless two in a row hang, or one is too slow to tell. If interrupted, yields the
    findings so far, and then raises the interruption.
    """
    cases = check(target, ranks, cases, model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _, number, part in (one for case in cases if model is None for one in case.split(ranks)):
        for call in range(part.different):
            part.pose(call, number)  # once, for all ranks
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path, told = Path(folder, "findings"), list[str]()
        while cases and told[-2:] != ["hang"] * 2 and told[-1:] != ["too slow"]:
            save(path, [], "")
            limit, failure = len(cases) * SLOW * patience + 600.0, None
            needed = [__name__, "torch.fx.experimental.symbolic_shapes"]
            if any("compile" in case.ways for case in cases):
                needed += ["torch._dynamo.backends.debugging", "torch._inductor.pattern_matcher"]
            given = (target, cases, patience, model, partial(save, path))
            try:
                run_local(work, ranks, *given, True, timeout=limit, threads=1, warm=needed)
            except (LaunchFailure, KeyboardInterrupt, SystemExit) as error:
                failure = error
            found, begun = read(path)
            yield from found
            if failure is None:
                return
            if not begun or not isinstance(failure, LaunchFailure) or failure.status is None:
                raise failure
            last = [case.feature for case in cases].index(begun)
            if begun not in [one.case.feature for one in found]:
                first, *more = str(failure).splitlines()
                words = first.partition("; its last output")[0]
                if more and (failure.status or 0) > 0:
                    words += f": {more[-1].strip()}"
                found.append(Finding(cases[last], cases[last], [Verdict("crash", words)] * ranks))
                yield found[-1]
            told += [one.verdict.verdict for one in found if one.verdict.verdict != "not offered"]
            cases = cases[last + 1 :]


def save(path: Path, findings: list[Finding], begun: str | None) -> None:
    """Write the findings, and the feature that was begun last, to a file; nothing at the end."""
    if begun is not None:
        with replacing(path) as new:
            new.write_bytes(msgpack.encode((findings, begun)))


def read(path: Path) -> tuple[list[Finding], str]:
    """Read the file that `save` writes. Its lists in masks were tuples, as which a script gives them to the target."""
    found, begun = msgpack.decode(path.read_bytes(), type=tuple[list[Finding], str])
    for mask in (case.mask for one in found for case in (one.case, one.smallest)):
        mask.update({name: tuple(value) for name, value in mask.items() if isinstance(value, list)})
    return found, begun


class _Rank:
    """A rank that tries cases, and agrees with the others on each; rank 0 keeps the findings, by feature."""

    def __init__(self, rank: int, name: str, patience: float, model: str | None, report: Callable[..., None]) -> None:
        self.rank, self.ranks, self.patience = rank, dist.get_world_size(), patience
        self.target, self.on_report = load_target(name, model), report
        self.findings: dict[str, Finding] = {}
        #: The number of the case that runs, how many ranks have no result of it, and since when it is so many.
        self.seen: tuple[tuple[str, int], float] = ("", 0), 0.0
        on_gpu = dist.get_backend() == "nccl"
        device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
        store: Any = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]  # the target waits on its own
        turn = store.add(f"ringattn/audit/{rank}", 1)  # the store keeps what earlier audits wrote
        self.store: Any = PrefixStore(f"ringattn/audit/{turn}", store)
        tested = prepare if model is None else Tested(load_model(model)[0]).prepare
        self.prepare, self.is_model = partial(tested, self.target, device=device), model is not None

    def report(self, begun: str | None, found: Finding | None = None) -> None:
        """On rank 0, report the findings, and the feature that was begun last, or None at the end."""
        if found is not None:
            self.findings[found.case.feature] = found
        if self.rank == 0:
            self.on_report([*self.findings.values()], begun)

    def agree(self, case: Case, number: str) -> list[Verdict]:
        """Run a case on this rank; returns the verdicts of all ranks on it.

        Each rank tells them through the store, under the key `number`: as long as it has no result, that it hangs, and
        the seconds that it has had.
        """
        call = self.prepare(case)
        self.meet(number, msgpack.encode(Verdict("hang")))
        done, look = threading.Event(), partial(self.look, case, number, monotonic() + SLOW * self.patience)
        watcher = threading.Thread(target=self.watch, args=(number, look, done, threading.get_ident()), daemon=True)
        watcher.start()
        try:
            with redirect_stdout(sys.stderr):  # a launcher's standard output is for the report
                mine = judge(call)
        finally:
            done.set()
            watcher.join()
        self.store.set(f"{number}/{self.rank}", msgpack.encode(mine))  # the launcher tells of a rank that has ended
        while (verdicts := look()) is None:
            sleep(0.005)
        return verdicts

    def watch(self, number: str, look: Callable[[], Any], done: threading.Event, caller: int) -> None:
        """Tell all ranks the seconds that this one has had, see `audit`, until it is done."""
        spent, now, used = 0.0, monotonic(), process_time()
        while not done.wait(TICK):
            before, now, earlier, used = now, monotonic(), used, process_time() - thread_time()
            frame = sys._current_frames()[caller]
            names = [one.f_globals.get("__name__", "") for one, _ in traceback.walk_stack(frame)]
            if not any(name.startswith(BUILDERS) for name in names):
                # A thread that wakes up late has no free core: that its rank computes nothing does not show a wait.
                waits = used - earlier < LEAST * TICK and now - before < 2 * TICK
                spent += TICK if waits else used - earlier
            why = f"no result after {self.patience:g} s in which ranks waited or computed"
            stack = "".join(traceback.format_stack(frame, 6)) if spent >= self.patience else ""
            self.store.set(f"{number}/{self.rank}", msgpack.encode(Verdict("hang", why, seconds=spent, stack=stack)))
            look()

    def look(self, case: Case, number: str, end: float) -> list[Verdict] | None:
        """The verdicts of all ranks; None if some have no result yet. If these will have none, ends this process."""
        verdicts = [msgpack.decode(self.store.get(f"{number}/{i}"), type=Verdict) for i in range(self.ranks)]
        waiting = [one.seconds for one in verdicts if one.verdict == "hang"]
        if not waiting:
            return verdicts
        if self.seen[0] != (number, len(waiting)):  # a rank that waited for another goes on where that one has a result
            self.seen = (number, len(waiting)), monotonic()
        if min(waiting) >= self.patience <= monotonic() - self.seen[1]:
            self.give_up(case, number, verdicts)
        if monotonic() > end:
            self.give_up(case, number, [TOO_SLOW if one.verdict == "hang" else one for one in verdicts])
        return None

    def give_up(self, case: Case, number: str, verdicts: Sequence[Verdict]) -> None:
        """End this process, as ranks will have no result."""
        try:
            sys.stdout = sys.__stdout__
            if "." not in number:  # a smaller case that hangs is no case that is wrong
                self.report(case.feature, Finding(case, case, verdicts))
            self.report(None)
        except RingAttentionError as error:
            sys.stderr.write(f"ringattn: {error}\n")
        finally:
            if failure := sys.exc_info()[1]:
                traceback.print_exception(failure)
            sys.stderr.flush()
            sleep(LINGER)  # a launcher ends all ranks with the first
            os._exit(STUCK)

    def meet(self, name: str, value: bytes | str, seconds: float = inf) -> None:
        """Store a value, and wait for those of all ranks. Unlike store.wait, this lets signals interrupt."""
        self.store.set(f"{name}/{self.rank}", value)
        keys, end = [f"{name}/{rank}" for rank in range(self.ranks)], monotonic() + seconds
        while not self.store.check(keys) and monotonic() < end:
            sleep(0.005)

    def try_case(self, case: Case, number: int) -> None:
        """Try a case, and smaller ones if it is wrong. Collective."""
        self.report(case.feature)
        if self.rank == 0:
            progress_stream().write(f"audit: {case.feature}\n")
        takes, given = accepts(self.target), case.keywords(torch.arange(0, device="cpu"))
        lacks = [] if self.is_model else [f"no argument {name}" for name in given.keys() - takes.keys()]
        lacks += [f"always {name}" for name in ("causal", "decay", "taps") if takes.get(name) and name not in given]
        if lacks:
            missing = Verdict("not offered", ", ".join(sorted(lacks)))
            return self.report(case.feature, Finding(case, case, [missing] * self.ranks))
        finding, turn = Finding(case, case, self.agree(case, str(number))), 0
        self.report(case.feature, finding)
        wrong = _find_wrong(finding.verdicts)
        tried = shrink(case, self.ranks) if wrong else iter(())
        while (smaller := next(tried, None)) is not None:
            turn += 1
            found = self.agree(smaller, f"{number}.{turn}")
            if _find_wrong(found) == wrong:  # else it fails in another way
                finding, tried = Finding(case, smaller, found), shrink(smaller, self.ranks)
        self.report(case.feature, finding)


def work(
    rank: int, name: str, cases: Sequence[Case], patience: float, model: str | None, report: Callable[..., None],
    renewed: bool = False,
) -> None:  # fmt: skip
    """Run the cases of an audit on this rank. Collective.

    Rank 0 calls `report` whenever it begins a feature or has a finding, and at the end, even if ranks hang or end
    early. With `renewed`, for ranks that are replaced, a crash before the last case ends this process.
    """
    one = _Rank(rank, name, patience, model, report)
    try:
        with terminable():
            for number, case in enumerate(cases):
                one.try_case(case, number)
                if renewed and one.findings[case.feature].verdict.verdict == "crash" and case is not cases[-1]:
                    sys.exit(STUCK)
    finally:
        one.report(None)
    one.meet("end", "", 2 * patience)  # ranks leave together, as one may have the store


def _find_wrong(verdicts: Sequence[Verdict]) -> str:
    """The first tensor that is wrong on a rank: out, or the first gradient; "" if none is."""
    names = {one.tensor for one in verdicts if one.verdict == "wrong"}
    return next((name for name in ("out", "logits", "dq", "dk", "dv", *sorted(names)) if name in names), "")
