"""Packed batches and the log of a run, each continued where it was left."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringattn import InvalidInput
from ringattn.train import Log, pack, shard, start

DOCUMENTS = ["first", [7, 8, 9], "", torch.arange(20), "x"]
LENGTHS = (5, 3, 20, 1)


def rows(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    return [batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids")]


def test_documents_follow_each_other_and_borders_have_no_label() -> None:
    ids = [*b"first", 7, 8, 9, *range(20), *b"x"]
    found = list(pack(DOCUMENTS, 7))
    assert len(found) == len(ids) // 7 and all(x.dtype == torch.int64 for x in found[0].values())
    begins = {sum(LENGTHS[:i]) for i in range(4)} | {*range(0, len(ids), 7)}  # a cut document is another one
    for step, batch in enumerate(found):
        places = range(7 * step, 7 * step + 7)
        expected = [place - max(x for x in begins if x <= place) for place in places]
        assert rows(batch)[0] == [ids[place] for place in places]
        assert rows(batch)[2] == expected
        assert rows(batch)[1] == [-100 if place in begins else ids[place] for place in places]


def test_a_path_is_the_text_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    assert rows(next(pack([tmp_path / "a.txt", [7]], 6))) == rows(next(pack(["first", [7]], 6)))


def test_a_process_without_torchrun_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of mpirun are refused; where there are GPUs, ranks take theirs in turn."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start() == torch.device("cpu")
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        for name, value in (("RANK", 11), ("WORLD_SIZE", 16), ("LOCAL_RANK", 11), ("LOCAL_WORLD_SIZE", 16)):
            monkeypatch.setenv(name, str(value))
        assert [start()] == chosen == [torch.device("cuda", 3)]
    finally:
        dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match="use torchrun"):
        start()


def test_what_has_no_layers_is_not_sharded() -> None:
    with pytest.raises(InvalidInput, match="Linear names no layers"):
        shard(torch.nn.Linear(2, 2))


def test_a_stream_goes_on_from_its_state_without_encoding_again() -> None:
    encoded: list[Any] = []

    def encode(document: Any) -> Any:
        encoded.append(document)
        return document

    stream = pack(cycle(DOCUMENTS), 6, encode)
    for _ in range(11):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [rows(next(stream)) for _ in range(9)]
    assert len(encoded) == stream.done + bool(stream.taken)
    encoded.clear()
    other = pack(cycle(DOCUMENTS), 6, encode)
    other.load_state_dict(state)
    assert not encoded
    assert [rows(next(other)) for _ in range(9)] == expected
    with pytest.raises(InvalidInput, match="load the state before the first batch"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("documents", "tokens", "words"),
    [
        ("one text", 4, r"an iterable of documents .* got 'one text', 4; try pack\(\[text\], 8192\)"),
        (["text"], "1M", "an integer >= 1, got .* '1M'"),
        ([{"input_ids": [1]}], 4, "document 0 must be a text or a list of token ids, got {'input_ids'"),
        ([[1, 2], [0.5]], 4, "document 1 must be a text or a list of token ids"),
        ([[[1, 2]]], 4, "document 0 must be"),
    ],
)
def test_other_documents_are_refused(documents: Any, tokens: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as error:
        next(pack(documents, tokens))
    assert "\n" not in str(error.value)


def test_a_log_goes_on_and_drops_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(first: int, last: int) -> Log:
        log = Log(tmp_path / "run", 1000, held_out=lambda: torch.tensor(9.0), every=2)
        log.load_state_dict({"step": first})
        for step in range(first, last):
            assert log(torch.tensor(float(step)))["step"] == step + 1 == log.state_dict()["step"]
        return log

    run(0, 5)
    with (tmp_path / "run/log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    run(3, 7)
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["loss"] for line in lines] == list(range(7))
    assert [line.get("held_out") for line in lines] == [None, 9.0, None, 9.0, None, 9.0, None]
    assert all(line["tokens_per_second"] > 0 and line["peak_bytes"] > 1 << 20 for line in lines)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 9 and shown[1].startswith("step     2 ") and shown[1].endswith("loss 1.0000  held out 9.0000")
    assert all(word in shown[0] for word in (" tokens/s ", "iB ", "loss 0.0000"))
    assert (tmp_path / "run/log.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "run/log.png").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringattn.train.log.find_spec", lambda name: None)  # without matplotlib
        run(0, 2)
    assert not (tmp_path / "run/log.png").exists()
    run(0, 1)
    assert len((tmp_path / "run/log.jsonl").read_text().splitlines()) == 1
