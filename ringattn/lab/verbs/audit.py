"""ringattn audit: whether a context-parallel attention computes what its mask says, feature by feature."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from ... import __version__
from ...cli.ranks import check_mpi_size
from ...errors import InvalidInput
from ...files import STDOUT, check_json, write_json, write_text
from ...simulator.reporting.console import get_console, print_paragraph
from ...text import plural
from ...transport.launcher import Launch, detect, init_process_group
from ...transport.mpi import Mpi
from ...transport.records import exchange_values
from ..audit.kit import FAILURES, Case
from ..audit.named import read_known
from ..audit.run import Finding, audit, check, choose_cases, work
from .settings import AuditConfig

#: The version of the JSON record. 2: the case that was tried beside the smallest, and stacks.
FORMAT = 2


def main(config: AuditConfig) -> None:
    """Run an audit and print a verdict for each feature; exit with status 1 if one is wrong or hangs.

    Also writes the verdicts as JSON, and as a page, if these outputs are set.
    """
    config.check()
    check_json(config.output.path)
    launch = detect()
    chosen = config.ranks or (4 if len(os.sched_getaffinity(0)) > 3 else 3)
    ranks = chosen if launch.kind == "none" else launch.world
    if ranks < 2:
        raise InvalidInput(f"ranks={ranks}: one rank sends nothing; try 2 ranks")
    model = config.model.spec or config.model.path
    cases = choose_cases(ranks, config.features, model)

    known = read_known(config.known)
    findings: list[Finding] = []

    def report(found: list[Finding]) -> None:
        findings[:] = found
        _report(config, model, ranks, found)
        _tell(config.known, known, cases, found)
        sys.stdout.flush()

    if launch.kind == "none":
        try:
            findings.extend(audit(config.target, ranks, cases, config.patience, model))
        finally:  # perhaps interrupted
            if findings:
                report(findings)
    else:
        check(config.target, ranks, cases, model)
        _join(launch, 60 * config.patience)
        work(launch.rank, config.target, cases, config.patience, model, report)
    failed = {one.case.feature for one in findings if one.verdict.verdict in FAILURES}
    if failed - known or find_mended(findings, known):
        sys.exit(1)


def _tell(path: str | None, known: set[str], cases: list[Case], found: list[Finding]) -> None:
    """Show on standard error where ranks hang, what is mended, and what was not tried."""
    for one in found:
        for stack in one.stacks:
            sys.stderr.write(f"{one.case.feature}: {stack}\n")
    for name in find_mended(found, known):
        sys.stderr.write(f"ringattn: {name} is a known failure in {path}, but is right now; take it out\n")
    if left := [case.feature for case in cases[len(found) :]]:
        why = {"hang": ": the target does not answer", "too slow": ": try a machine that is less busy"}
        said = why.get(found[-1].verdict.verdict, "") if found else ""
        sys.stderr.write(f"ringattn: the audit ended early{said}; not tried: {', '.join(left)}\n")


def find_mended(findings: list[Finding], known: set[str]) -> list[str]:
    """The known failures that are right now."""
    return [one.case.feature for one in findings if one.case.feature in known and one.verdict.verdict == "exact"]


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


def _report(config: AuditConfig, model: str | None, ranks: int, findings: list[Finding]) -> None:
    audited = config.target if model is None else f"{model} by {config.target}"
    if config.output.path is not None:
        record = {
            "format": FORMAT,
            "target": config.target,
            "model": model,
            "ranks": ranks,
            "versions": {"torch": torch.__version__, "ringattn": __version__},
            "features": [{**asdict(one), "feature": one.case.feature} for one in findings],
        }
        write_json(config.output.path, record)
    if config.output.page is not None:
        write_text(Path(config.output.page), _page(audited, ranks, findings))
    first = next((one for one in findings if one.script), None)
    if config.output.script is not None and first is not None:
        write_text(Path(config.output.script), first.script)
    if config.output.path == STDOUT:
        return
    print_paragraph(f"audit of {audited} on {plural(ranks, 'rank')}")
    for one in findings:
        line = f"{one.case.feature:<24} {one.verdict.verdict:<11} {_explain(one)}".rstrip()
        get_console().print(line, markup=False, highlight=False, soft_wrap=True)
    if first is not None:
        print_paragraph(f"the smallest failing case of {first.case.feature!r}; output.script= writes a script:")
        get_console().print(str(first.smallest), markup=False, highlight=False, soft_wrap=True)


def _explain(one: Finding) -> str:
    verdict = one.verdict
    if verdict.verdict == "exact":
        return f"within {verdict.error:.0e} (allowed {verdict.tolerance:.0e})"
    if verdict.verdict == "wrong":
        by = "" if not verdict.error else f", by {verdict.error:.0e} of the largest entry"
        return f"rank {one.rank}: {verdict.why}{', not finite' if verdict.error == inf else by}"
    return verdict.why


def _page(target: str, ranks: int, findings: list[Finding]) -> str:
    """The findings as Markdown."""
    lines = [
        f"# Audit of {target} on {plural(ranks, 'rank')}\n",
        f"Written by `ringattn audit` {__version__} with torch {torch.__version__}.\n",
        "| feature | verdict | why |",
        "|---|---|---|",
        *(f"| {one.case.feature} | {one.verdict.verdict} | {_explain(one).replace('|', '/')} |" for one in findings),
    ]
    for one in findings:
        if one.script:
            lines += [f"\n## {one.case.feature}\n", "```python", str(one.smallest), "```"]
            lines += ["\n```", *one.stacks, "```"] if one.stacks else []
    return "\n".join(lines) + "\n"
