"""ringattn <verb> [overrides]: the command line, on Hydra."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from ..errors import InvalidInput, RingAttentionError
from ..files import STDOUT
from ..text import did_you_mean
from ..transport.launcher import UNREAD, detect, drop_output
from .config.folders import user_folders
from .config.overrides import JSON_KEYS, check_parameters, explain, parse_arguments, prepare, quote, store_schemas
from .config.schema import SCHEMAS, conf_dir
from .signals import ending_at_once, ending_tidily

VERBS = {
    "run": "attention over a text, a file or random numbers, on local ranks, torchrun, mpirun or virtual ranks",
    "plan": "who computes what and who sends what to whom, counted, without torch",
    "simulate": "the time of a plan on a machine, by models: exposed time, memory, links, failures, energy, cost",
    "advise": "the best ways to train a model on a cluster: parallelism, plan, memory, time, cost, what changes them",
    "bench": "a suite of alternating measurements, written to outputs/bench/",
    "report": "a suite by name as a page: report standard; or two results compared: report 'compare=[OLD,NEW]'",
    "calibrate": "measures kernels, merging, links, overlap and noise here, and writes a machine file",
    "doctor": "what this machine and installation can run, and what to install for the rest",
}
#: What Hydra raises, besides its own errors, for overrides of its own keys or of groups that it cannot use.
HYDRA_ERRORS = (ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError, RuntimeError)
#: Verbs that every rank of a launched job runs.
RANK_VERBS = ("run", "calibrate")
#: Exit status of a wrong call.
USAGE_ERROR = 2
#: The most characters of an error's line that are printed, and how many of them are from the line's end.
MAX_LINE, LINE_END = 1200, 200


def main() -> None:
    """Run the command line of `ringattn` and `python -m ringattn`."""
    try:
        with ending_at_once():
            _dispatch(sys.argv[1:])
            sys.stdout.flush()
    except RingAttentionError as error:
        _fail(error)
    except BrokenPipeError:
        drop_output()
        raise SystemExit(UNREAD) from None


def _dispatch(arguments: list[str]) -> None:
    """Print help or the version, answer completion, or run a verb."""
    given = parse_arguments(arguments)
    if given.shell_completion is not None:
        _complete(given.words, given.shell_completion)
    elif given.version:
        print(import_module("ringattn").__version__)  # noqa: T201
    elif given.words:
        _run_verb(given.words[0], given)
    else:
        print(_usage())  # noqa: T201
        if not given.help:
            raise SystemExit(USAGE_ERROR)


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    return "\n".join(
        [
            "ringattn <verb> [key=value ...]",
            "",
            *lines,
            "",
            "ringattn <verb> --help                     groups and keys of a verb",
            "ringattn <verb> --cfg job --resolve        the configuration that would run",
            "ringattn <verb> -m ranks=2,4               one job per value; simulate: one study",
            'eval "$(ringattn -sc install=bash)"         completion in this shell (also zsh, fish)',
            "",
            'example: ringattn plan pattern="Causal() & Window(4096)" ranks=8 tokens=1M',
        ]
    )


def _complete(words: list[str], request: str) -> None:
    """Install completion in a shell, or print what the last word of the shell's COMP_LINE may become."""
    if not request.startswith("query="):
        verb = next((word for word in words if word in VERBS), "run")
        _run_hydra(verb, ["-sc", request], program="ringattn")  # the command that the shell completes
        return
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        print("\n".join(VERBS))  # noqa: T201
    elif words[1] in VERBS:
        os.environ["COMP_LINE"] = " ".join(["ringattn", *words[2:]]) + " " * line.endswith(" ")
        with redirect_stdout(io.StringIO()) as answer:
            _run_hydra(words[1], ["-sc", request], program="ringattn")
        # Hydra offers all config groups, also those that the verb does not have.
        keys = {"hydra", *(field.name for field in fields(SCHEMAS[words[1]]))}
        offered = [word for word in answer.getvalue().split() if re.split(r"[.=/]", word)[0] in keys]
        print(("\n" if request == "query=fish" else " ").join(offered))  # noqa: T201


def _run_verb(verb: str, given: Namespace) -> None:
    """Print the help of a verb, or run the verb as this process's rank of the job."""
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS)
        raise InvalidInput(f"unknown verb {verb!r}; {hint}expected one of {', '.join(VERBS)}")
    jobs: list[str] = []
    options, folders = given.options, user_folders(given.options, given.words[1:])
    if given.help:
        measures = verb in ("bench", "report")
        suites = {"suites": import_module("..bench", __package__).SUITES} if measures else {}
        print(import_module(".config.verb_help", __package__).verb_help(verb, folders, suites))  # noqa: T201
        return
    verb, overrides = _own_overrides(verb, given)
    if verb == "simulate":
        sweep = import_module(".config.sweep", __package__)
        overrides, jobs = sweep.split_jobs(overrides)
        other_mode = any(each.startswith("mode=") and each != "mode=timing" for each in overrides)
        if given.multirun and not other_mode:
            overrides, given.multirun = sweep.as_study(overrides), False  # its points are one study, in one folder
    launch = detect()
    if verb not in RANK_VERBS and (launch.local_rank if verb == "doctor" else launch.rank):
        return  # rank 0 speaks for all ranks; for doctor, which describes a machine, one rank of every node
    arguments = [*options, *(["--multirun"] if given.multirun else []), *prepare(verb, overrides)]
    if launch.rank > 0:  # one run directory, one log and one .hydra per job
        arguments += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    with ExitStack() as stack:
        if launch.rank > 0 and launch.kind in ("mpich", "openmpi"):
            # mpirun sets no name of the job, and the clocks of nodes differ, so these ranks cannot name the folder of
            # the job. Hydra writes into the folder of a sweep.
            scratch = stack.enter_context(TemporaryDirectory(prefix="ringattn-")) if given.multirun else "."
            arguments += ["hydra.run.dir=.", f"hydra.sweep.dir={scratch}"]
        if jobs:
            _run_hydra(verb, [*jobs, *arguments])
        _run_hydra(verb, arguments)


def _own_overrides(verb: str, given: Namespace) -> tuple[str, list[str]]:
    """(verb, overrides) with --json, --compare and `report NAME` written as overrides. Raises InvalidInput."""
    overrides = given.words[1:]
    if given.json:
        if verb not in JSON_KEYS:
            raise InvalidInput(f"--json: ringattn {verb} prints no JSON; it is for {', '.join(JSON_KEYS)}")
        overrides.append(f"{JSON_KEYS[verb]}=-")
    if given.compare:
        if verb != "report":
            raise InvalidInput("--compare is an option of ringattn report")
        overrides.append(f"compare=[{','.join(map(quote, given.compare))}]")
    if verb == "report" and overrides and re.fullmatch(r"\w+", overrides[0]):
        overrides[0] = f"suite={overrides[0]}"
        if overrides[0] == "suite=billion":  # a study of the timing model
            return "simulate", ["experiment=billion_tokens", *overrides[1:]]
    return verb, overrides


def _run_hydra(verb: str, prepared: list[str], program: str | None = None) -> None:
    """Compose the configuration of a verb with Hydra, and run the verb. Raises InvalidInput for wrong overrides."""
    hydra = import_module("hydra")
    omegaconf = import_module("omegaconf")
    store_schemas()
    omegaconf.OmegaConf.register_new_resolver("run_id", _run_id, replace=True, use_cache=True)
    sys.argv = [program or f"ringattn {verb}", *prepared]
    task = _Task(verb)
    # Hydra raises its errors, instead of printing them and ending the process.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(task)()
    except (
        import_module("hydra.errors").HydraException,
        import_module("omegaconf.errors").OmegaConfBaseException,
        import_module("yaml").YAMLError,
        *HYDRA_ERRORS,
    ) as error:
        if task.running:
            raise
        raise explain(verb, error) from error
    except OSError as error:
        if task.running:
            raise
        kind = "sweep" if "--multirun" in prepared else "run"
        raise InvalidInput(
            f"{error.filename or 'the folder of this job'}: Hydra's record of the job cannot be written "
            f"({error.strerror}); try another folder, such as hydra.{kind}.dir=/tmp/ringattn"
        ) from error


class _Task:
    """The function that Hydra calls with the configuration of a job; `running` while the verb itself runs."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.running = False

    def __call__(self, composed: Any) -> None:
        try:
            config = self._read(composed)
            self.running = True
            run: Callable[[Any], object] = import_module(f".{self.verb}", __package__).main
            with ending_tidily(launched=self.verb in RANK_VERBS and detect().kind != "none"):
                run(config)
            sys.stdout.flush()
            self.running = False
        except RingAttentionError as error:
            _fail(error)
        except BrokenPipeError:  # caught here, as Hydra would print its traceback
            drop_output()
            raise SystemExit(UNREAD) from None
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:  # writers of files raise errors of their own
                raise
            drop_output()
            _fail(InvalidInput(f"standard output: could not be written ({error.strerror}); make room where it goes"))

    def _read(self, composed: Any) -> object:
        """The configuration as an object of the verb's schema. Raises InvalidInput."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        check_parameters(composed)
        if HydraConfig.get().mode == RunMode.MULTIRUN and OmegaConf.select(composed, "study.share") is None:
            raw: Any = OmegaConf.to_container(composed)
            self._check_outputs(raw.get("output", {}))
        try:
            return OmegaConf.to_object(composed)
        except OmegaConfBaseException as error:
            raise explain(self.verb, error) from error

    def _check_outputs(self, outputs: dict[str, str | None]) -> None:
        """Refuse one output file for many jobs. A suite names the files of its records itself."""
        for key, path in outputs.items() if self.verb not in ("bench", "report") else ():
            if path not in (None, STDOUT) and "${hydra:" not in path:
                numbered = Path(path).with_name(f"{Path(path).stem}_${{hydra:job.num}}{Path(path).suffix}")
                raise InvalidInput(
                    f"output.{key}={path} with -m: every job would replace the output of the one before; let the path "
                    f"name the job, such as 'output.{key}={numbered}'"
                )


def _fail(error: RingAttentionError) -> NoReturn:
    """Print an error, its long lines shortened: they may repeat a value of any length. End with `USAGE_ERROR`."""
    if os.environ.get("RINGATTN_TRACEBACK") == "1":
        raise error
    lines = [
        line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - LINE_END]} ... {line[-LINE_END:]}"
        for line in str(error).splitlines()
    ]
    sys.stderr.write("ringattn: " + "\n".join(lines) + "\n")
    sys.stderr.flush()
    raise SystemExit(USAGE_ERROR)


def _run_id() -> str:
    """The name of the run directory, equal on all ranks of a job."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic == "none":  # torchrun without a rendezvous id: its ranks share a parent
        elastic = f"torchrun-{os.getppid()}"
    job = os.environ.get("RINGATTN_RUN_ID") or elastic or os.environ.get("SLURM_JOB_ID")
    return job or time.strftime("%Y-%m-%d/%H-%M-%S")
