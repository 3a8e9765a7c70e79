"""ringattn <verb> [overrides]: the command line, on Hydra."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from ..errors import InvalidInput, RingAttentionError
from ..text import did_you_mean
from ..transport.launcher import UNREAD, detect, drop_output
from .config.folders import CONFIG_DIR_OPTIONS, config_folders
from .config.overrides import explain_refusal, is_offered, is_sweep, prepare
from .config.schema import SCHEMAS, conf_dir, key_names
from .config.verb_help import verb_help
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
#: Options of Hydra that install or answer shell completion.
COMPLETION_OPTIONS = ("-sc", "--shell-completion")
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
    name, equals, _ = arguments[0].partition("=") if arguments else ("", "", "")
    if name in CONFIG_DIR_OPTIONS:  # before the verb
        end = 1 if equals else 2
        arguments = [*arguments[end : end + 1], *arguments[:end], *arguments[end + 1 :]]
    completion = _completion_request(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())  # noqa: T201
        if not arguments:
            raise SystemExit(USAGE_ERROR)
    elif completion is not None:
        _complete(arguments, completion)
    elif arguments[0] == "--version":
        print(import_module("ringattn").__version__)  # noqa: T201
    else:
        _run_verb(arguments[0], arguments[1:])


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


def _completion_request(arguments: list[str]) -> str | None:
    """The value of the completion option, such as install=bash or query=bash; None without the option."""
    rest = [argument for argument in arguments if argument not in VERBS]
    return rest[1] if len(rest) == 2 and rest[0] in COMPLETION_OPTIONS else None


def _complete(arguments: list[str], request: str) -> None:
    """Install completion in a shell, or print what the last word of the shell's COMP_LINE may become."""
    if not request.startswith("query="):
        verb = next((argument for argument in arguments if argument in VERBS), "run")
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
        # Hydra offers all config groups and every file in them, also for verbs that do not take them.
        folders = config_folders(())
        offered = [word for word in answer.getvalue().split() if is_offered(words[1], word, folders)]
        print(("\n" if request == "query=fish" else " ").join(offered))  # noqa: T201


def _run_verb(verb: str, arguments: list[str]) -> None:
    """Print the help of a verb, or run the verb as this process's rank of the job."""
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS)
        raise InvalidInput(f"unknown verb {verb!r}; {hint}expected one of {', '.join(VERBS)}")
    if {"-h", "--help"} & set(arguments):
        measures = verb in ("bench", "report")
        suites = {"suites": import_module("..bench", __package__).SUITES} if measures else {}
        print(verb_help(verb, config_folders(arguments), suites))  # noqa: T201
        return
    if verb == "report":
        verb, arguments = _expand_report(arguments)
    launch = detect()
    jobs: list[str] = []
    if verb == "simulate":
        sweep = import_module(".config.sweep", __package__)
        arguments, jobs = sweep.split_jobs(arguments)
        if is_sweep(arguments):  # its points are one study, in one folder
            arguments = sweep.as_study(arguments)
    prepared = prepare(verb, arguments, launch if verb in RANK_VERBS else None)
    if verb not in RANK_VERBS and (launch.local_rank if verb == "doctor" else launch.rank):
        return  # rank 0 speaks for all ranks; for doctor, which describes a machine, one rank of every node
    if launch.rank > 0:  # one run directory, one log and one .hydra per job
        prepared += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    with ExitStack() as stack:
        if launch.rank > 0 and launch.kind in ("mpich", "openmpi"):
            # mpirun sets no name of the job, and the clocks of nodes differ, so these ranks cannot name the folder of
            # the job. Hydra writes into the folder of a sweep.
            scratch = stack.enter_context(TemporaryDirectory(prefix="ringattn-")) if is_sweep(arguments) else "."
            prepared += ["hydra.run.dir=.", f"hydra.sweep.dir={scratch}"]
        if jobs:
            _run_hydra(verb, [*jobs, *prepared])
        _run_hydra(verb, prepared)


def _expand_report(arguments: list[str]) -> tuple[str, list[str]]:
    """(verb, arguments) of a report whose suite may be named first, and whose results `--compare OLD NEW` may name.

    Raises InvalidInput for a second name, and for --compare without two results.
    """
    if "--compare" in arguments:
        at = arguments.index("--compare")
        files = [argument for argument in arguments[at + 1 : at + 3] if not argument.startswith("-")]
        if len(files) < 2:
            raise InvalidInput("--compare: expected two results, such as ringattn report --compare old.jsonl new.jsonl")
        quote = import_module(".config.sweep", __package__).quote
        arguments = [*arguments[:at], f"compare=[{','.join(map(quote, files))}]", *arguments[at + 3 :]]
    if not arguments or not re.fullmatch(r"\w+", arguments[0]):
        return "report", arguments
    name, *others = arguments
    for before, other in zip(arguments, others, strict=False):
        if re.fullmatch(r"\w+", other) and not before.startswith("-"):
            raise InvalidInput(
                f"report {name} {other}: {other} is neither key=value nor the report's name, which is {name}; give "
                f"each report a command of its own, or name cases: ringattn report {name} 'cases=[...]'"
            )
    if name == "billion":  # a study of the timing model
        measured = {*key_names(SCHEMAS["report"])} - {*key_names(SCHEMAS["simulate"])}
        for key in (other.lstrip("+~").partition("=")[0] for other in others):
            if key in measured:
                raise InvalidInput(
                    f"report billion: {key} is a setting of measured reports, and billion is a study of the timing "
                    "model; it takes the settings of `ringattn simulate`, such as study.execute.budget=5"
                )
        return "simulate", ["experiment=billion_tokens", *others]
    return "report", [f"suite={name}", *others]


def _run_hydra(verb: str, prepared: list[str], program: str | None = None) -> None:
    """Compose the configuration of a verb with Hydra, and run the verb. Raises InvalidInput for wrong overrides."""
    hydra = import_module("hydra")
    omegaconf = import_module("omegaconf")
    store = import_module("hydra.core.config_store").ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=schema)
    omegaconf.OmegaConf.register_new_resolver("run_id", _run_id, replace=True, use_cache=True)
    sys.argv = [program or f"ringattn {verb}", *prepared]
    import_module(".config.source", __package__).check_sources()
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
        raise explain_refusal(verb, error) from error
    except OSError as error:
        if task.running:
            raise
        kind = "sweep" if is_sweep(prepared) else "run"
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
        from omegaconf import OmegaConf
        from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

        try:
            return OmegaConf.to_object(composed)
        except MissingMandatoryValue as error:
            raise InvalidInput(f"a value is missing: {str(error).splitlines()[0]}") from None
        except OmegaConfBaseException as error:
            raise explain_refusal(self.verb, error) from error


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
