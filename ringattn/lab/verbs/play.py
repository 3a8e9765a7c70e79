"""ringattn play: plans and advice in a page of this machine's browser; without torch, nothing is run."""

from __future__ import annotations

from ...simulator.reporting.console import print_plain
from ..play.server import PlayServer
from .settings import PlayConfig


def main(config: PlayConfig) -> None:
    """Print the address of the page, and serve it until interrupted."""
    with PlayServer(config.port) as server:
        print_plain(f"{server.url}  a page for this machine's browser; Ctrl-C ends it")
        server.serve_forever()
