"""ringattn audit: whether a context-parallel attention computes what its mask says, feature by feature."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ... import __version__
from ...cli.ranks import check_mpi_size
from ...errors import InvalidInput
from ...files import STDOUT, check_json, write_json
from ...simulator.reporting.console import get_console, print_paragraph
from ...text import plural
from ...transport.launcher import Launch, detect, init_process_group
from ...transport.mpi import Mpi
from ...transport.records import exchange_values
from ..audit.kit import Case
from ..audit.named import check, read_known
from ..audit.run import Finding, audit, choose_cases, work
from .settings import AuditConfig

#: The version of the JSON record. 2: the case that was tried beside the smallest, and stacks.
FORMAT = 2


def main(config: AuditConfig) -> None:
    """Run an audit and print a verdict for each feature; exit with status 1 if one is wrong or hangs.

    Also writes the verdicts as JSON, and scripts of the failures, if these outputs are set.
    """
    config.check()
    check_json(config.output.path)
    launch = detect()
    chosen = (4 if len(os.sched_getaffinity(0)) > 3 else 3) if config.ranks is None else config.ranks
    ranks = chosen if launch.kind == "none" else launch.world
    if ranks < 2:
        raise InvalidInput(f"ranks={ranks}: one rank sends nothing; try 2 ranks")
    model = config.model
    cases, known, news = choose_cases(ranks, config.features, model), read_known(config.known), set[str]()
    findings: list[Finding] = []

    def report(found: list[Finding], begun: str | None = None) -> None:
        if begun is None:
            _report(config, model, ranks, found)
            news.update(_tell(config.known, known, cases, found))

    if launch.kind == "none":
        try:
            findings.extend(audit(config.target, ranks, cases, config.patience, model))
        finally:  # perhaps interrupted
            if findings:
                report(findings)
    else:
        cases = check(config.target, ranks, cases, model)
        _join(launch, 60 * config.patience)
        work(launch.rank, config.target, cases, config.patience, model, report)
    if news:
        sys.exit(1)


def _report(config: AuditConfig, model: str | None, ranks: int, findings: list[Finding]) -> None:
    """Print the findings, and write them to files."""
    given = (config.target, model, dist.get_backend() if dist.is_initialized() else "gloo")
    if config.output.path is not None:
        versions = {"torch": torch.__version__, "ringattn": __version__}
        record = {"format": FORMAT, "target": config.target, "model": model, "ranks": ranks, "versions": versions}
        write_json(config.output.path, {**record, "features": [_record(one, *given) for one in findings]})
    if config.output.path != STDOUT:
        audited = config.target if model is None else f"{model} by {config.target}"
        print_paragraph(f"audit of {audited} on {plural(ranks, 'rank')}")
        for one in findings:
            verdict, _, why = one.verdict.told.partition(": ")
            where = f"rank {one.rank}: " if verdict == "wrong" else ""
            lines = [f"{one.case.feature:<32} {verdict:<11} {where}{why}".rstrip()]
            for line in lines + [f"  smallest: {one.smallest}"] * one.failed:
                get_console().print(line, markup=False, highlight=False, soft_wrap=True)
        sys.stdout.flush()
    for one in findings:
        if one.failed and config.output.scripts is not None:
            one.save_script(config.output.scripts, *given)


def _record(one: Finding, *given: Any) -> dict[str, Any]:
    found = {name: asdict(getattr(one, name)) for name in ("case", "smallest", "verdict")}
    script = one.write_script(*given) if one.failed else ""
    return {"feature": one.case.feature, **found, "rank": one.rank, "stacks": one.stacks, "script": script}


def _tell(path: str | None, known: set[str], cases: list[Case], found: list[Finding]) -> set[str]:
    """Show on standard error where ranks hang, what is mended, and what was not tried.

    Returns the features that fail, other than the known ones, and the known ones that are right.
    """
    for one in found:
        for stack in one.stacks:
            sys.stderr.write(f"{one.case.feature}: {stack}\n")
    mended = known & {one.case.feature for one in found if one.verdict.verdict in ("exact", "rounded")}
    for name in sorted(mended):
        sys.stderr.write(f"ringattn: {name} is a known failure in {path}, but is right now; take it out\n")
    if left := [case.feature for case in cases[len(found) :]]:
        why = {"hang": ": the target does not answer", "too slow": ": try a machine that is less busy"}
        said = why.get(found[-1].verdict.verdict, "") if found else ""
        sys.stderr.write(f"ringattn: the audit ended early{said}; not tried: {', '.join(left)}\n")
    return mended | ({one.case.feature for one in found if one.failed} - known)


def _join(launch: Launch, timeout: float) -> None:
    """Join the process group of a job; over MPI the ranks tell each other the address of a store."""
    store = None
    if launch.kind != "torchrun":
        world = Mpi()
        check_mpi_size(launch, world.size)
        alone = launch.local_world == launch.world
        with socket.create_server(("127.0.0.1" if alone else "", 0)) as server:
            own = ["127.0.0.1" if alone else socket.gethostname(), server.getsockname()[1]]
            host, port = exchange_values(world, "address", own)[0]
            listening = server.detach() if alone and not world.rank else None  # else all interfaces, as hosts meet
        store = TCPStore(host, port, None, not world.rank, wait_for_workers=False, master_listen_fd=listening)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    init_process_group(replace(launch, kind="torchrun"), backend=backend, timeout=timeout, store=store)
