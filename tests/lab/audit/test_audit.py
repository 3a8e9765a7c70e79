"""The audit finds planted faults, hangs and crashes, and has nothing to say about what is right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import ringattn
from faulty_rings import FAULTS
from torch.nn.functional import scaled_dot_product_attention

from ringattn import InvalidInput
from ringattn.lab.audit.cases import list_cases
from ringattn.lab.audit.kit import Case, make_inputs, prepare, see, solve
from ringattn.lab.audit.named import check, load_model, load_target
from ringattn.lab.audit.run import Finding, audit, choose_cases, read, save, work
from ringattn.lab.verbs.audit import main
from ringattn.lab.verbs.settings import AuditConfig
from ringattn.transport.launcher import run_local

HELPERS = Path(__file__).parents[2] / "helpers"
RANKS = 3


def make_store() -> Any:
    """A store on a free port, as torchrun has one for its ranks."""
    return vars(dist)["TCPStore"]("127.0.0.1", 0, None, True, wait_for_workers=False)


def place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables with which torchrun tells a rank its place, and where its store is."""
    found = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def try_all(rank: int, features: dict[str, list[str] | None], folder: Path, model: str | None) -> None:
    """Audit one target after the other on the same ranks."""
    for name, chosen in features.items():
        work(rank, name, choose_cases(dist.get_world_size(), chosen, model), 20.0, model, partial(save, folder / name))


def find_all(
    features: dict[str, list[str] | None], ranks: int, folder: Path, model: str | None = None
) -> dict[str, list[Finding]]:
    """What rank 0 wrote of each target about its features, all of them."""
    run_local(try_all, ranks, features, folder, model, timeout=170, threads=1)
    found = {}
    for name, chosen in features.items():
        made, _ = read(folder / name)
        assert [one.case.feature for one in made] == [case.feature for case in choose_cases(ranks, chosen, model)]
        found[name] = made
    return found


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script of a failure, where the target can be imported, and this library is not found."""
    (path := folder / "small.py").write_text(script)
    return ringattn(cwd=HELPERS, script=str(path), status=None)


@pytest.mark.multi
def test_what_is_right_is_said_to_be(tmp_path: Path) -> None:
    features: dict[str, list[str] | None] = {"faulty_rings:attend": ["-torch.compile"], "ringattn": None}
    found = find_all(features, RANKS, tmp_path)
    for name, refusals, rounded in (
        ("faulty_rings:attend", {"cross-attention", "uneven length", "ranks without tokens", "ranks that differ"}, 1),
        ("ringattn", {"ranks that differ"}, 0),
    ):
        others = [one for one in found[name] if one.verdict.verdict not in ("exact", "not offered", "refused")]
        told = [(one.case.feature, one.verdict.verdict) for one in others]
        assert told == [("same bits", "rounded")] * rounded, others
        assert {one.case.feature for one in found[name] if one.verdict.verdict == "refused"} == refusals


@pytest.mark.multi
def test_recurrent_layers_are_targets(tmp_path: Path) -> None:
    """`decay` without a default: no softmax in any case, and no case without a causal mask."""
    features = ["dense", "causal", "grouped heads", "bfloat16"]
    for name, told in (("recur", ["exact"] * 3), ("forget", ["wrong"] * 3)):
        cases = check(f"faulty_rings:{name}", RANKS, choose_cases(RANKS, features))
        run_local(work, RANKS, f"faulty_rings:{name}", cases, 20.0, None, partial(save, tmp_path / name), threads=1)
        found = [one.verdict for one in read(tmp_path / name)[0]]
        assert [one.verdict for one in found] == ["not offered", *told], found


@pytest.mark.multi
def test_planted_faults_are_found(tmp_path: Path) -> None:
    """Each in its feature, with the rank and rows, and a smaller case whose script shows it without this library."""
    found = find_all(
        {f"faulty_rings:fault_{i}": [feature] for i, feature in enumerate(FAULTS.values())}, RANKS, tmp_path
    )
    by_fault = {fault: found[f"faulty_rings:fault_{i}"][0] for i, fault in enumerate(FAULTS)}
    for fault, one in by_fault.items():
        assert one.verdict.verdict == "wrong", (fault, one)
    lost, small, late = (by_fault[fault] for fault in ("lost border", "dropped mask", "stale buffer"))
    assert lost.rank == RANKS - 1 and "of rows " in lost.verdict.why
    assert small.smallest.heads == small.smallest.kv_heads == 1 and small.smallest.tokens < small.case.tokens
    assert "in call 2 of 2" in late.verdict.why and late.smallest.calls == 2
    assert by_fault["in-place change"].verdict.tensor == "q" and by_fault["kept tensors"].verdict.tensor == "memory"
    for fault in ("dropped mask", "stale buffer", "padding attended"):
        script = by_fault[fault].write_script(f"faulty_rings:fault_{[*FAULTS].index(fault)}", None)
        done = run_script(script, tmp_path)
        assert done.returncode == 1 and "wrong: out of rows" in done.stdout, done
        assert "import ringattn" not in script
    done = run_script(small.write_script("faulty_rings:attend", None), tmp_path)
    assert done.returncode == 0 and done.stdout.count("exact: by ") == RANKS, done
    assert run_script(small.write_script("faulty_rings:nowhere", None), tmp_path).returncode == 125


def try_ruler(rank: int) -> list[list[str]]:
    """Verdicts about a kernel's own results, scaled, for two dtypes."""
    device, told = torch.device("cpu"), []
    tried: Any = (("bfloat16", torch.bfloat16, (1.0, 1.01, 1.02)), ("float64", torch.float32, (1, 2)))
    for dtype, rounded, factors in tried:
        case = Case("ruler", 72, dtype=dtype, calls=1, mask={"causal": True})
        right = solve(case, make_inputs(case), rounded)["out"].to(getattr(torch, dtype))
        for factor in factors:

            def attend(q: Any, k: Any, v: Any, by: float = factor, kept: Any = right, **_: Any) -> Any:
                exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True).to(kept.dtype)
                return exact + (kept * by - exact).detach()

            told.append(prepare(attend, case, device)().verdict)
    return [told]


@pytest.mark.multi
def test_the_ruler_measures(new_ranks: Callable[..., list[Any]]) -> None:
    """In bf16 up to 20 % were allowed, and in fp64 results in fp32 were as wrong as any."""
    ((told,),) = new_ranks(try_ruler, 1)
    assert told == ["exact", "wrong", "wrong", "rounded", "wrong"]


@pytest.mark.multi
def test_results_of_another_kind_are_wrong_and_not_refused(tmp_path: Path) -> None:
    kinds = {
        "faulty_rings:nothing": "out is of type NoneType, not a tensor",
        "faulty_rings:three": "the target returned 3 values, not out or (out, lse)",
        "faulty_rings:in_fp64": "out has dtype torch.float64, not torch.float32",
        "faulty_rings:of_one_row": "out has shape (1, ",
        "faulty_rings:with_a_mistake": "TypeError: object of type 'int' has no len()",
        "faulty_rings:promising": "dk has other bits on 2 ranks than on fewer",
    }
    features: dict[str, list[str] | None]
    features = {name: ["same bits" if "bits" in why else "dense"] for name, why in kinds.items()}
    found = find_all(features | {"faulty_rings:not_alone": ["same bits"]}, RANKS, tmp_path)
    (alone,) = found["faulty_rings:not_alone"]  # ranks of the larger groups do not wait for those of the smallest
    assert alone.verdict.verdict == "rounded" and "on 3 ranks than on fewer" in alone.verdict.why, alone
    for name, why in kinds.items():
        (one,) = found[name]
        assert one.verdict.verdict == ("crash" if "TypeError" in why else "wrong"), one
        assert one.verdict.why.startswith(why), one


MODEL = "LlamaForCausalLM"


@pytest.mark.multi
def test_faults_of_parallelized_models_are_found_and_nothing_else(tmp_path: Path) -> None:
    faults = {"without_documents": "documents", "with_padding": "padding on the left"}
    faults["with_half_a_gradient"] = "bfloat16"
    right = [*faults.values(), "uneven length"]
    features: dict[str, list[str] | None] = {"ringattn": right, "faulty_rings:run_model": right}
    features |= {f"faulty_rings:{name}": [feature, "uneven length"] for name, feature in faults.items()}
    for name, findings in find_all(features, 2, tmp_path, MODEL).items():
        found = {one.case.feature: one for one in findings}
        wrong = {feature for feature, one in found.items() if one.verdict.verdict != "exact"}
        fault = faults.get(name.removeprefix("faulty_rings:"))
        assert wrong == ({*found} if "half" in name else {fault} - {None}), (name, found)
        if fault is None:
            continue
        verdict = found[fault].verdict
        assert ("the gradient of model." in verdict.why) if "half" in name else (verdict.tensor == "logits")
    done = run_script(found[fault].write_script(name, MODEL), tmp_path)
    assert done.returncode == 1 and "the gradient of model." in done.stdout, done


@pytest.mark.multi
def test_hangs_and_crashes_end_a_feature_and_not_the_audit() -> None:
    features = ["dense", "causal", "two-way documents"]
    for target, verdict, why in (
        ("faulty_rings:hanging", "hang", "after rank 0: NotImplementedError: no causal mask here"),
        ("faulty_rings:dying", "crash", "rank 1 of 2 exited with status 7"),
    ):
        found = [*audit(target, 2, choose_cases(2, features), 2.0)]
        assert [one.verdict.verdict for one in found] == ["exact", verdict, "not offered"], found
        assert why in found[1].verdict.why and found[1].failed
        shown = found[1].stacks
        assert verdict == "crash" or (shown[0] == "rank 0: refused" and "all_gather" in shown[1]), shown


@pytest.mark.multi
def test_a_crash_leaves_no_message_for_the_next_feature() -> None:
    features = ["dense", "window", "batch of 3"]
    found = [*audit("faulty_rings:leaving", 2, choose_cases(2, features), 5.0)]
    assert [one.verdict.verdict for one in found] == ["exact", "crash", "exact"], found


@pytest.mark.multi
def test_a_rank_that_is_stopped_or_imports_does_not_hang() -> None:
    """On a busy machine all of 14 features were said to hang. A rank that is never heard again is too slow to tell."""
    features = ["dense", "causal", "window", "batch of 3"]
    found = [*audit("faulty_rings:resting", 2, choose_cases(2, features), 0.5)]
    assert [one.verdict.verdict for one in found] == ["exact", "exact", "too slow"], found


@pytest.mark.multi
def test_a_target_that_never_answers_ends_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    features = ["dense", "causal", "batch of 3"]
    config = AuditConfig(target="faulty_rings:deaf", ranks=2, features=features, patience=0.5)
    with pytest.raises(SystemExit):
        main(config)
    told = capfd.readouterr()
    assert re.findall(r"^(?:dense|causal) +(\w+)", told.out, re.MULTILINE) == ["hang", "hang"]
    assert told.err.endswith("ringattn: the audit ended early: the target does not answer; not tried: batch of 3\n")


def launch(folder: Path, *words: str) -> list[subprocess.CompletedProcess[str]]:
    """`ringattn audit` on two ranks that find what torchrun tells them; what each has printed, and its status."""
    store = make_store()

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        return ringattn("audit", *words, cwd=folder, status=None, **place(rank, 2, store.port))

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(start, range(2))]


@pytest.mark.multi
def test_the_audit_runs_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    (told, other) = launch(tmp_path, "features=[causal,documents]", "output.path=-")
    record = json.loads(told.stdout)
    assert record["ranks"] == 2 and [one["feature"] for one in record["features"]] == ["causal", "documents"]
    assert {one["verdict"]["verdict"] for one in record["features"]} == {"exact"}
    assert told.returncode == other.returncode == 0 and not other.stdout
    assert told.stderr == "audit: causal\naudit: documents\n", "which feature runs, also without a terminal"


@pytest.mark.multi
def test_torchrun_tells_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    """The script of the failure is written on rank 0 alone."""
    words = (f"model={MODEL}", "features=[padding on the left,uneven length]", "output.path=found.json")
    assert launch(tmp_path, "faulty_rings:with_padding", *words)[0].returncode == 1
    record = json.loads((tmp_path / "found.json").read_text())
    assert [one["feature"] for one in record["features"]] == ["padding on the left", "uneven length"]
    assert [one["verdict"]["verdict"] for one in record["features"]] == ["wrong", "exact"]
    assert "model" in record["features"][0]["script"] and not record["features"][1]["script"]


@pytest.mark.multi
@pytest.mark.parametrize(("target", "status"), [("clearing", 2), ("clearing_and_hanging", 3)])
def test_a_report_that_cannot_be_written_fails_a_job_of_a_launcher(tmp_path: Path, target: str, status: int) -> None:
    (tmp_path / "out").mkdir()
    first, other = launch(
        tmp_path, f"faulty_rings:{target}", "features=[dense]", "output.path=out/found.json", "patience=1"
    )
    assert (first.returncode, other.returncode) == (status, 3 if status == 3 else 0)
    why = "output out/found.json: the folder out does not exist; make it first\n"
    assert first.stderr == f"audit: dense\nringattn: {why}"


@pytest.mark.multi
def test_an_error_that_is_no_verdict_ends_the_audit_and_is_shown(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0, whose status tells the launcher to end the job."""
    first, _ = launch(tmp_path, "faulty_rings:stopping", "features=[dense]", "patience=1")
    assert "StopAsyncIteration: no more" in first.stderr and "not tried: dense" in first.stderr
    assert first.returncode == 1


def test_the_oracle_is_that_of_torch() -> None:
    """Masks by loops over pairs, and torch's own attention of them, with its gradients."""
    for case in {str((one.mask, one.tokens)): one for one in list_cases(2)}.values():
        if {"softcap", "sink_logits", "dropout"} & {*case.mask} or case.tokens > 200 or case.keys:
            continue
        mask, told = case.mask, see(case)[:, 0].tolist()
        starts = torch.tensor(mask.get("documents", (case.tokens,))).cumsum(0).tolist()
        for row, i, j in product(range(len(told)), range(case.tokens), range(case.tokens)):
            seen = not mask.get("causal") or j <= i
            if "window" in mask:
                seen = seen and (i - j <= mask["window"] or j < mask.get("sinks", 0))
            seen = seen and sum(i >= x for x in starts) == sum(j >= x for x in starts)
            seen = seen and mask.get("left", 0) * (row + 1) <= j < case.tokens - mask.get("padding", 0) * (row + 1)
            assert told[row][i][j] == seen, (case, row, i, j)
        q, k, v, grad, _ = make_inputs(case)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        spread = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in leaves[1:])
        seen = see(case) | ~see(case).any(-1, keepdim=True)  # torch's rows that see nothing are not finite
        out = scaled_dot_product_attention(q, *spread, attn_mask=seen, scale=mask.get("scale"))
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, grad), strict=True))
        found["out"] = out.masked_fill(~see(case).any(-1)[..., None], 0.0)
        exact = solve(case, make_inputs(case))
        assert all((exact[name] - x).abs().max() < 1e-11 for name, x in found.items()), case


@pytest.mark.mpi
def test_the_audit_runs_under_mpirun_and_tells_what_hung(tmp_path: Path) -> None:
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", "2", sys.executable, "-m", "ringattn", "audit"]
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    for words, status, shown in (
        (["features=[causal,documents]"], 0, r"causal +exact.*\ndocuments +exact"),
        (
            ["faulty_rings:hanging", "features=[dense,causal,padding on the left]", "patience=2"],
            3,
            r"dense +exact.*\ncausal +hang",
        ),
    ):
        done = subprocess.run(
            [*mpirun, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment, check=False
        )
        assert re.search(shown, done.stdout), done.stdout + done.stderr
        assert done.returncode == status and ("not tried: padding on the left" in done.stderr) == bool(status)


def test_wrong_targets_and_features_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"target=ringatn: did you mean 'ringattn'"):
        load_target("ringatn")
    with pytest.raises(InvalidInput, match=r"target=no_such_module:f: No module named"):
        load_target("no_such_module:f")
    (tmp_path / "needy_ring.py").write_text('raise ImportError("needs more\\nthan one line")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match=r"target=needy_ring:f: needs more; install it"):
        load_target("needy_ring:f")
    (tmp_path / "needier_ring.py").write_text("import no_such_kernel")
    with pytest.raises(InvalidInput, match=r"needier_ring can be found, but needs no_such_kernel, .*; install"):
        load_target("needier_ring:f")
    with pytest.raises(InvalidInput, match=r"target=math:nothing: math has no function nothing"):
        load_target("math:nothing")
    with pytest.raises(
        InvalidInput, match=r"model=Llama: .*expected module:function, or a class of models in transformers"
    ):
        load_model("Llama")
    with pytest.raises(InvalidInput, match="features: windows: did you mean 'window'"):
        choose_cases(2, ["windows"])
    with pytest.raises(InvalidInput, match=r"target=math:sqrt: the function has no argument group"):
        load_target("math:sqrt")
    with pytest.raises(InvalidInput, match="model=LlamaForCausalLN: did you mean 'LlamaForCausalLM'"):
        load_model("LlamaForCausalLN")
    with pytest.raises(InvalidInput, match="one process cannot run it: AttributeError: 'int' object has no attribute"):
        next(audit("ringattn", 2, choose_cases(2, None, "x"), 1.0, "faulty_rings:len_of_nothing"))
    for name, words in (("badly_named", "layout='zigzga': did you mean 'zigzag'"), ("badly_cut", "to one rank")):
        with pytest.raises(InvalidInput, match=words):
            next(audit(f"faulty_rings:{name}", 2, choose_cases(2, None), 1.0))
    assert isinstance(choose_cases(2, ["window"])[0], Case) and callable(main)
    assert len(choose_cases(2, ["-window", "-causal"])) == len(choose_cases(2, None)) - 2
