"""ringattn audit: whether a context-parallel attention computes what its mask says, feature by feature."""

from __future__ import annotations

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
from ...files import STDOUT, check_json, check_writable, write_json, write_text
from ...simulator.reporting.console import get_console, print_paragraph
from ...text import plural
from ...transport.launcher import Launch, detect, init_process_group
from ...transport.mpi import Mpi
from ...transport.records import exchange_values
from ..audit.run import FAILURES, Finding, audit, check, choose_cases, work
from .settings import AuditConfig


def main(config: AuditConfig) -> None:
    """Run an audit and print a verdict for each feature; exit with status 1 if one is wrong or hangs.

    Also writes the verdicts as JSON, and as a page, if these outputs are set.
    """
    check_json(config.output.path)
    if config.output.page is not None:
        check_writable(Path(config.output.page))
    launch = detect()
    ranks = config.ranks if launch.kind == "none" else launch.world
    if ranks < 2:
        raise InvalidInput(f"ranks={ranks}: one rank sends nothing; try 2 ranks")
    if not 0 < config.patience < inf:
        raise InvalidInput(f"patience={config.patience}: must be a number of seconds > 0")
    if config.model.spec is not None and config.model.path is not None:
        raise InvalidInput(
            f"model.path={config.model.path} has no meaning with model={config.model.spec}; leave out one"
        )
    model = config.model.spec or config.model.path
    cases = choose_cases(ranks, config.features, model)

    findings: list[Finding] = []

    def report(found: list[Finding]) -> None:
        findings[:] = found
        _report(config, model, ranks, found)
        if left := [case.feature for case in cases[len(found) :]]:
            why = {"hang": ": the target does not answer", "too slow": ": try a machine that is less busy"}
            said = why.get(found[-1].verdict.verdict, "") if found else ""
            sys.stderr.write(f"ringattn: the audit ended early{said}; not tried: {', '.join(left)}\n")
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
    if any(one.verdict.verdict in FAILURES for one in findings):
        sys.exit(1)


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
            "target": config.target,
            "model": model,
            "ranks": ranks,
            "versions": {"torch": torch.__version__, "ringattn": __version__},
            "features": [{**asdict(one), "feature": one.case.feature} for one in findings],
        }
        write_json(config.output.path, record)
    if config.output.page is not None:
        write_text(Path(config.output.page), _page(audited, ranks, findings))
    if config.output.path == STDOUT:
        return
    print_paragraph(f"audit of {audited} on {plural(ranks, 'rank')}")
    for one in findings:
        line = f"{one.case.feature:<22} {one.verdict.verdict:<11} {_explain(one)}".rstrip()
        get_console().print(line, markup=False, highlight=False, soft_wrap=True)
    first = next((one for one in findings if one.script), None)
    if first is not None:
        print_paragraph(f"the smallest failing case of {first.case.feature!r}:")
        get_console().print(first.script, markup=False, highlight=False, soft_wrap=True)


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
            lines += [f"\n## {one.case.feature}\n", "```python", one.script.rstrip(), "```"]
    return "\n".join(lines) + "\n"
