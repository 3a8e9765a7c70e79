"""The pytest plugin: `pytest --ringattn-audit my_ring:attend` has a test for each feature of an attention over ranks.

Every pytest of an environment with this library loads this module, so that it imports nothing of weight before use.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        from .run import audit, choose_cases

        def find() -> Iterator[Any]:  # audits the features that were chosen, from the first that is asked for
            chosen = [one.name for one in session.items if isinstance(one, Feature)]
            yield from audit(target, ranks, choose_cases(ranks, chosen), 20.0)

        ranks, found, kept = config.getoption("--ringattn-audit-ranks"), find(), dict[str, Any]()
        for case in choose_cases(ranks, None):
            place = f"{target}::{case.feature}"
            items.append(Feature.from_parent(session, name=case.feature, nodeid=place, found=found, kept=kept))


class Feature(pytest.Item):
    """One feature: passes if exact, and is skipped if the target refuses it or does not offer it."""

    def __init__(self, found: Iterator[Any], kept: dict[str, Any], **given: Any) -> None:
        super().__init__(**given)
        self.found, self.kept = found, kept

    def runtest(self) -> None:
        """Take the finding of this feature; those before it are kept for their tests, whatever their order is."""
        from .named import read_known

        while self.name not in self.kept and (one := next(self.found, None)) is not None:
            self.kept[one.case.feature] = one
        one = self.kept.get(self.name)
        if one is None:
            pytest.skip("not tried: the audit ended early, as ranks do not answer")
        known = self.name in read_known(self.config.getoption("--ringattn-audit-known"))
        told = f"{one.verdict.told}, on rank {one.rank}"
        self.add_report_section("call", "ringattn audit", f"{told}\n{one.smallest}")
        if one.verdict.verdict in ("refused", "not offered"):
            pytest.skip(told)
        if one.failed:
            if folder := self.config.getoption("--ringattn-audit-scripts"):
                one.save_script(folder, self.config.getoption("--ringattn-audit"), None)
            words = "\n".join([told, str(one.smallest), *one.stacks])
            pytest.xfail(words) if known else pytest.fail(words, pytrace=False)
        if known and one.mended:
            pytest.fail("a known failure that is right now: take it out of the file", pytrace=False)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Where the test is, and its name."""
        return f"ringattn audit of {self.config.getoption('--ringattn-audit')}", None, self.name
