"""A study's report as Markdown and as one HTML page, from the template beside this module."""

from __future__ import annotations

from ...simulator.reporting.pages import render_page
from .report import StudyReport


def render_markdown(report: StudyReport) -> str:
    """The report as Markdown; plots are links to the files beside the report."""
    return render_page(__package__ or "", "report.j2", "markdown", {"report": report})


def render_html(report: StudyReport) -> str:
    """The report as one HTML page, with its plots inside the page."""
    return render_page(__package__ or "", "report.j2", "html", {"report": report})
