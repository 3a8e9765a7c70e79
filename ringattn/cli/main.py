"""ringattn <verb> [overrides]: the command line, built on Hydra."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NoReturn

from ..errors import InvalidInput, RingAttentionError
from ..files import STDOUT, write_json
from ..registry import Registry
from ..text import did_you_mean
from ..transport.launcher import UNREAD, detect, drop_output, refuse_windows, show_note
from .config.defaults import conf_dir, read_defaults
from .config.folders import OPTIONS, fit, heading, user_folders, verb_help
from .config.overrides import (
    JSON_KEYS,
    as_study,
    check_jobs,
    check_parameters,
    explain,
    parse_arguments,
    prepare,
    quote,
    store_schemas,
)
from .config.schema import SCHEMAS
from .signals import ending_at_once, ending_tidily

#: The function that runs each verb, called with its configuration. ringattn.lab and other packages add verbs through
#: entry points.
VERBS: Registry[Callable[[Any], dict[str, Any] | None]] = Registry(
    "verbs", {verb: f"cli.{verb}:main" for verb in ("run", "plan", "simulate", "verify", "doctor")}
)
#: Errors, besides Hydra's own, that Hydra raises for unusable overrides of its own keys or of groups.
HYDRA_ERRORS = (ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError, RuntimeError)
#: Verbs that every rank of a launched job runs.
RANK_VERBS = ("run", "calibrate", "audit")
#: Verbs whose jobs with -m are the points of one study, in one folder.
STUDIED = ("simulate", "estimate")
#: Exit status after an error.
USAGE_ERROR = 2
#: Longer error lines are cut to MAX_LINE characters, the last LINE_END of them from the end of the line.
MAX_LINE, LINE_END = 1200, 200


def main() -> None:
    """Run the command line of `ringattn` and `python -m ringattn`."""
    if sys.platform == "win32" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a pipe's encoding there lacks the symbols of pictures
    with _telling_errors(), ending_at_once():
        _dispatch(sys.argv[1:])


@contextmanager
def _telling_errors() -> Iterator[None]:
    """Print an error of the block as one line and exit; exit silently if nobody reads standard output."""
    try:
        yield
        sys.stdout.flush()
    except RingAttentionError as error:
        _fail(error)
    except BrokenPipeError:
        drop_output()
        raise SystemExit(UNREAD) from None
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:  # code that writes files raises its own errors
            raise
        drop_output()
        _fail(InvalidInput(f"cannot write to standard output ({error.strerror}); free some space there"))


def _dispatch(arguments: list[str]) -> None:
    """Print help or the version, answer completion, or run a verb."""
    given = parse_arguments(arguments)
    if given.words[:1] == ["help"]:
        given.words, given.help = given.words[1:], True
    if given.shell_completion is not None:
        _complete(given.words, given.shell_completion)
    elif given.version:
        print(import_module("ringattn").__version__)  # noqa: T201
    elif given.words:
        _run_verb(given.words[0], given)
    else:
        print(fit(_usage()))  # noqa: T201
        if not given.help:
            raise SystemExit(USAGE_ERROR)


def _usage() -> str:
    width = max(map(len, SCHEMAS))
    heads = {verb: heading((conf_dir() / f"{verb}.yaml").read_text(encoding="utf-8"))[0] for verb in SCHEMAS}
    lines = [f"  {verb:<{width}}  {head.partition(': ')[2]}" for verb, head in heads.items()]
    return "\n".join(
        [
            "ringattn <verb> [key=value ...]",
            "",
            *lines,
            "",
            *(f"  {name:<12}  {text}" for name, text in OPTIONS.items()),
            "",
            'eval "$(ringattn -sc install=bash)": completion in this shell (also zsh, fish)',
            "",
            'example: ringattn plan pattern="Causal() & Window(4096)" ranks=8 tokens=1M',
        ]
    )


def _complete(words: list[str], request: str) -> None:
    """Install completion in a shell, or print the completions of the last word of the shell's COMP_LINE."""
    if not request.startswith("query="):
        verb = next((word for word in words if word in SCHEMAS), "run")
        _run_hydra(verb, ["-sc", request], program="ringattn")  # the name of the command to complete
        return
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        print("\n".join(SCHEMAS))  # noqa: T201
    elif words[1] in SCHEMAS:
        verb = words[1]
        os.environ["COMP_LINE"] = " ".join(["ringattn", *words[2:]]) + " " * line.endswith(" ")
        with redirect_stdout(io.StringIO()) as answer:
            _run_hydra(verb, ["-sc", request], program="ringattn")
        # Hydra offers all config groups, including those that the verb does not have.
        keys = {"hydra", *read_defaults(verb)}
        offered = [word for word in answer.getvalue().split() if re.split(r"[.=/]", word)[0] in keys]
        print(("\n" if request == "query=fish" else " ").join(offered))  # noqa: T201


def _run_verb(verb: str, given: Namespace) -> None:
    """Print the help of a verb, or run it, as one rank of the job if a launcher started this process."""
    asked, verb = verb, "study" if given.multirun and verb in STUDIED else verb
    if verb not in SCHEMAS:
        SCHEMAS.check_installed()
        hint = did_you_mean(verb, SCHEMAS)
        raise InvalidInput(f"unknown verb {verb!r}; {hint}expected one of {', '.join(SCHEMAS)}")
    folders = user_folders(given.config_dir, given.words[1:])
    if given.help:
        print(fit(verb_help(verb, given.words[1:], folders)))  # noqa: T201
        return
    if verb in (*RANK_VERBS, "report"):
        refuse_windows(f"ringattn {verb}")
    overrides = _own_overrides(asked, given)
    if verb == "study":
        overrides, given.multirun = as_study(asked, overrides), False
    launch = detect()
    if verb not in RANK_VERBS and (launch.local_rank if verb == "doctor" else launch.rank):
        return  # only rank 0 prints; for doctor, which describes a machine, one rank per node
    if launch.rank == 0:
        show_note("starting ...")
    arguments = [*given.options, *(["--multirun"] if given.multirun else []), *prepare(verb, overrides)]
    if launch.rank > 0:  # one run directory, one log and one .hydra per job
        arguments += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    with ExitStack() as stack:
        if launch.rank > 0 and launch.kind in ("mpich", "openmpi"):
            # mpirun gives jobs no name and clocks differ between nodes, so these ranks cannot know the job's folder.
            # Hydra always writes into the sweep folder: give it a temporary one.
            scratch = stack.enter_context(TemporaryDirectory(prefix="ringattn-")) if given.multirun else "."
            arguments += ["hydra.run.dir=.", f"hydra.sweep.dir={scratch}"]
        _run_hydra(verb, arguments)


def _own_overrides(verb: str, given: Namespace) -> list[str]:
    """The overrides, with --json, --compare, `report NAME` and `audit TARGET` among them. Raises InvalidInput."""
    overrides = given.words[1:]
    if given.json:
        if verb not in JSON_KEYS:
            raise InvalidInput(f"--json: ringattn {verb} prints no JSON; use it with {', '.join(JSON_KEYS)}")
        overrides.append(f"{JSON_KEYS[verb]}=-")
    if given.compare:
        if verb != "report":
            raise InvalidInput("--compare is an option of ringattn report")
        overrides.append(f"compare=[{','.join(map(quote, given.compare))}]")
    if verb == "audit" and overrides and re.fullmatch(r"[\w.]+(:\w+)?", overrides[0]):
        overrides[0] = f"target={overrides[0]}"
    if verb == "report" and overrides and re.fullmatch(r"\w+", overrides[0]):
        overrides[0] = f"suite={overrides[0]}"
    return overrides


def _run_hydra(verb: str, prepared: list[str], program: str | None = None) -> None:
    """Compose the configuration of a verb with Hydra, and run the verb. Raises InvalidInput for wrong overrides."""
    hydra = import_module("hydra")
    omegaconf = import_module("omegaconf")
    store_schemas(verb)
    omegaconf.OmegaConf.register_new_resolver("run_id", _run_id, replace=True, use_cache=True)
    together = "--multirun" in prepared and f"{JSON_KEYS.get(verb)}=-" in prepared  # one document, and nothing else
    quiet = ["hydra/hydra_logging=none", "hydra/job_logging=none"] if together else []
    sys.argv = [program or f"ringattn {verb}", *prepared, *quiet]
    task = _Task(verb, together)
    # Make Hydra raise its errors instead of printing them and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        if "--multirun" in prepared and not any(each.startswith("hydra/") for each in prepared):
            check_jobs(verb, prepared)
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(task)()
        if together:
            write_json(STDOUT, [json.loads(document) for document in task.documents])
        elif len(task.jobs) > 1:
            import_module(".comparison", __package__).print_jobs(task.jobs)
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
            f"{error.filename or 'the folder of this job'}: cannot write Hydra's record of the job "
            f"({error.strerror}); try another folder, such as hydra.{kind}.dir=/tmp/ringattn"
        ) from error


class _Task:
    """The function that Hydra calls with the configuration of each job; `running` is True while the verb runs."""

    def __init__(self, verb: str, together: bool) -> None:
        self.verb, self.together = verb, together
        self.running = False
        #: The JSON of each job, if they are printed together.
        self.documents: list[str] = []
        #: (overrides, headline numbers) of each job, except those that print JSON.
        self.jobs: list[tuple[dict[str, str], dict[str, str]]] = []

    def __call__(self, composed: Any) -> None:
        omegaconf = import_module("omegaconf")
        with _telling_errors():  # Hydra would print a traceback for an error that leaves this function
            check_parameters(composed)
            try:
                config = omegaconf.OmegaConf.to_object(composed)
            except omegaconf.errors.OmegaConfBaseException as error:
                raise explain(self.verb, error) from error
            self.running = True
            run = VERBS[self.verb]
            show_note()  # clear the note: the verb shows its own progress
            with ending_tidily(launched=self.verb in RANK_VERBS and detect().kind != "none"):
                record = self._collect(run, config) if self.together else run(config)
            # JSON on standard output must stay alone: no table after it.
            if record is not None and omegaconf.OmegaConf.select(composed, JSON_KEYS[self.verb]) != STDOUT:
                given = import_module("hydra.core.hydra_config").HydraConfig.get().overrides.task
                comparison = import_module(".comparison", __package__)
                self.jobs.append((comparison.read_overrides(given), comparison.headlines(record)))
        self.running = False

    def _collect(self, run: Callable[[Any], Any], config: Any) -> Any:
        """Run the verb, and keep what it and the ranks that it starts write to standard output."""
        with TemporaryFile("w+", encoding="utf-8") as file, redirect_stdout(file):
            terminal = os.dup(1)
            os.dup2(file.fileno(), 1)
            try:
                record = run(config)
            finally:
                os.dup2(terminal, 1)
                os.close(terminal)
            file.seek(0)
            self.documents.append(file.read())
        return record


def _fail(error: RingAttentionError) -> NoReturn:
    """Print an error with long lines cut (they may repeat a long value), and exit with `USAGE_ERROR`."""
    if os.environ.get("RINGATTN_TRACEBACK") == "1":
        raise error
    lines = [
        line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - LINE_END]} ... {line[-LINE_END:]}"
        for line in str(error).splitlines()
    ]
    show_note()
    sys.stderr.write("ringattn: " + "\n".join(lines) + "\n")
    sys.stderr.flush()
    raise SystemExit(USAGE_ERROR)


def _run_id() -> str:
    """The name of the run directory, the same on all ranks of a job."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic == "none":  # torchrun without a rendezvous id: use the ranks' common parent process
        elastic = f"torchrun-{os.getppid()}"
    job = os.environ.get("RINGATTN_RUN_ID") or elastic or os.environ.get("SLURM_JOB_ID")
    return job or time.strftime("%Y-%m-%d/%H-%M-%S")
