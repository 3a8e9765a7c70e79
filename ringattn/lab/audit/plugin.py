"""The pytest plugin: `pytest --ringattn-audit my_ring:attend` has a test for each feature of an attention over ranks.

Every pytest of an environment with this library loads this module, so that it imports nothing of weight before use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the audit."""
    group = parser.getgroup("ringattn")
    group.addoption("--ringattn-audit", metavar="TARGET", help="audit an attention over ranks: module:function")
    group.addoption("--ringattn-audit-ranks", metavar="N", type=int, default=3, help="Gloo ranks to start (3)")
    group.addoption("--ringattn-audit-known", metavar="FILE", help="features that are known to fail, one a line")
    group.addoption("--ringattn-audit-scripts", metavar="FOLDER", help="where to write a script of each failure")


def pytest_collection(session: pytest.Session) -> None:
    """Ask for no test in files, if an audit is all that was asked for."""
    if session.config.getoption("--ringattn-audit") and not session.config.getoption("file_or_dir"):
        session.config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each feature, before -k takes some out."""
    if target := config.getoption("--ringattn-audit"):
        items += Audit.from_parent(session, name=f"ringattn audit of {target}", nodeid=target).collect()


class Audit(pytest.Collector):
    """The features of a target; the first test starts the ranks, which try those that were chosen, in order."""

    running: Iterator[Any] | None = None

    def collect(self) -> Iterator[Feature]:
        """A test for each feature."""
        from .run import choose_cases

        self.target = self.config.getoption("--ringattn-audit")
        self.ranks = self.config.getoption("--ringattn-audit-ranks")
        for case in choose_cases(self.ranks, None):
            yield Feature.from_parent(self, name=case.feature)

    def find(self, feature: str) -> Any:
        """The finding about a feature."""
        from .named import read_known
        from .run import audit, choose_cases

        if self.running is None:
            self.known = read_known(self.config.getoption("--ringattn-audit-known"))
            chosen = [one.name for one in self.session.items if isinstance(one, Feature)]
            self.running = audit(self.target, self.ranks, choose_cases(self.ranks, chosen), 20.0)
        return next((one for one in self.running if one.case.feature == feature), None)


class Feature(pytest.Item):
    """One feature: passes if exact, and is skipped if the target refuses it or does not offer it."""

    parent: Audit

    def runtest(self) -> None:
        """Take the next finding of the audit."""
        from .kit import FAILURES

        one = self.parent.find(self.name)
        if one is None:
            pytest.skip("not tried: the audit ended early, as ranks do not answer")
        verdict, known = one.verdict, self.name in self.parent.known
        by = f", by {verdict.error:.0e}, allowed {verdict.tolerance:.0e}" if verdict.error else ""
        told = f"{verdict.verdict}: {verdict.why}{by}"
        self.add_report_section("call", "ringattn audit", f"{told} on rank {one.rank}\n{one.smallest}")
        if verdict.verdict in ("refused", "not offered"):
            pytest.skip(told)
        if verdict.verdict not in FAILURES:
            if known:
                pytest.fail("a known failure that is right now: take it out of the file", pytrace=False)
            return
        if folder := self.config.getoption("--ringattn-audit-scripts"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{self.name.replace(' ', '_').replace(os.sep, '_')}.py").write_text(one.script)
        (pytest.xfail if known else pytest.fail)("\n".join([told, str(one.smallest), *one.stacks]))

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Where the test is, and its name."""
        return self.parent.name, None, self.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message of a failure, without a traceback through this file."""
        return str(excinfo.value) if isinstance(excinfo.value, pytest.fail.Exception) else super().repr_failure(excinfo)
