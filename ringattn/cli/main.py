"""ringattn <verb> [overrides]: the command line, on Hydra."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from ..config.folders import config_folders
from ..config.overrides import prepare, refused, swept
from ..config.schema import SCHEMAS, conf_dir
from ..config.verb_help import verb_help
from ..errors import InvalidInput, RingAttentionError, did_you_mean
from ..transport.launcher import TERMINATED, UNREAD, detect, drop_output, terminable

VERBS = {
    "run": "attention over a text, a file or random numbers, on local ranks, torchrun, mpirun or virtual ranks",
    "plan": "who computes what and who sends what to whom, counted, without torch",
    "simulate": "the time of a plan on a machine, by models: exposed time, memory, links, failures, energy, cost",
    "bench": "a suite of alternating measurements, written to outputs/bench/",
    "calibrate": "measures kernels, merging, links, overlap and noise here, and writes a machine file",
    "doctor": "what this machine and installation can run, and what to install for the rest",
}
#: What Hydra raises besides its own errors over overrides of Hydra's own keys, or of groups, that it cannot use.
UNTOLD = (ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError, RecursionError)
#: Verbs that every rank of a launched job has a part in.
EVERYWHERE = ("run", "calibrate")
#: Options of Hydra that install or answer shell completion.
COMPLETION = ("-sc", "--shell-completion")
#: Exit status of a wrong call.
USAGE_ERROR = 2
#: Characters of a line of an error that are shown, at most.
LINE = 1200
#: Exit status after Ctrl-C, as of a shell.
INTERRUPTED = 130


#: What a signal is told as, and the exit status after it.
SIGNALS = {signal.SIGINT: ("interrupted", INTERRUPTED), signal.SIGTERM: ("terminated", TERMINATED)}


def main() -> None:
    """Entry point of `ringattn` and `python -m ringattn`."""
    try:
        with _ending_at_once():
            _main(sys.argv[1:])
            sys.stdout.flush()
    except RingAttentionError as error:
        _fail(error)
    except BrokenPipeError:
        drop_output()
        raise SystemExit(UNREAD) from None


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """SIGINT and SIGTERM end the process with a line and a status of a shell, where nothing has to be tidied up.

    An exception in their place would be raised within imports, Hydra or OmegaConf, which take it for their own. What others handle, or
    have switched off, is left as it is.
    """
    free: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = [number for number, handler in free.items() if signal.getsignal(number) == handler] if _is_main() else []
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, free[number])


@contextmanager
def _ending_tidily(launched: bool) -> Iterator[None]:
    """The same for a block that has to be left in order: a signal raises in it, and is told when the block has been left.

    `launched`: SIGTERM ends a rank of a launched job at once, as it may wait in a collective, where Python hears no signal.
    """
    ours = [number for number in SIGNALS if signal.getsignal(number) == _end] if _is_main() else []
    try:
        for number in ours:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with nullcontext() if launched else terminable():
            yield
    except KeyboardInterrupt:
        _tell(signal.SIGINT)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if end.code == TERMINATED:
            _tell(signal.SIGTERM)
        raise
    finally:
        for number in ours:
            signal.signal(number, _end)


def _end(number: int, frame: Any = None) -> None:
    _tell(number)
    os._exit(SIGNALS[signal.Signals(number)][1])


def _tell(number: int) -> None:
    told, _ = SIGNALS[signal.Signals(number)]
    os.write(2, f"ringattn: {told}\n".encode())  # sys.stderr may be in the middle of a line


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _main(arguments: list[str]) -> None:
    completion = _completion(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())  # noqa: T201
        if not arguments:
            raise SystemExit(USAGE_ERROR)
    elif completion:
        _complete(arguments, completion)
    elif arguments[0] == "--version":
        print(import_module("ringattn").__version__)  # noqa: T201
    else:
        _run(arguments[0], arguments[1:])


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
            "ringattn <verb> --cfg job --resolve        what would run",
            "ringattn <verb> -m ranks=2,4               one job per value; simulate: one study",
            'eval "$(ringattn -sc install=bash)"         completion in this shell (also zsh, fish)',
            "",
            'example: ringattn plan pattern="Causal() & Window(4096)" ranks=8 tokens=1M',
        ]
    )


def _completion(arguments: list[str]) -> str | None:
    """What is asked of shell completion, such as install=bash; None where nothing is."""
    given = [argument for argument in arguments if argument not in VERBS]
    return given[1] if len(given) == 2 and given[0] in COMPLETION else None


def _complete(arguments: list[str], asked: str) -> None:
    """Install completion in a shell, or answer the installed one, which asks by COMP_LINE what the words may become."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    if asked.startswith("query=") and (len(words) < 2 or (len(words) == 2 and not line.endswith(" "))):
        print("\n".join(VERBS))  # noqa: T201
        return
    verb = words[1] if asked.startswith("query=") else next((one for one in arguments if one in VERBS), "run")
    if verb not in VERBS:
        return
    os.environ["COMP_LINE"] = " ".join(["ringattn", *words[2:]]) + " " * line.endswith(" ")
    _hand_to_hydra(verb, ["-sc", asked], program="ringattn")  # the command that the shell completes


def _run(verb: str, overrides: list[str]) -> None:
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS)
        raise InvalidInput(f"unknown verb {verb!r}; {hint}expected one of {', '.join(VERBS)}")
    if {"-h", "--help"} & set(overrides):
        suites = {"suites": import_module("..experiments.bench", __package__).SUITES} if verb == "bench" else {}
        print(verb_help(verb, config_folders(overrides), suites))  # noqa: T201
        return
    launch = detect()
    if verb == "simulate" and swept(overrides):  # its points are one study, in one folder
        overrides = import_module("..experiments.study.sweep", __package__).as_study(overrides)
    prepared = prepare(verb, overrides, launch if verb in EVERYWHERE else None)
    if verb not in EVERYWHERE and (launch.local_rank if verb == "doctor" else launch.rank):
        return  # one rank says it for all; doctor, which tells of a machine, on every node once
    if launch.rank > 0:  # one run directory, one log, one .hydra, whatever the launcher
        prepared += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    with ExitStack() as ended:
        if launch.rank > 0 and launch.kind in ("mpich", "openmpi"):
            # No name of the job is in their environment, and steps differ. Hydra writes into the folder of a sweep.
            scratch = ended.enter_context(TemporaryDirectory(prefix="ringattn-")) if swept(overrides) else "."
            prepared += ["hydra.run.dir=.", f"hydra.sweep.dir={scratch}"]
        _hand_to_hydra(verb, prepared)


def _hand_to_hydra(verb: str, prepared: list[str], program: str | None = None) -> None:
    hydra = import_module("hydra")
    omegaconf = import_module("omegaconf")
    store = import_module("hydra.core.config_store").ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=schema)
    omegaconf.OmegaConf.register_new_resolver("run_id", _run_id, replace=True, use_cache=True)
    sys.argv = [program or f"ringattn {verb}", *prepared]
    begun: list[str] = []
    task = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(_task(verb, begun))
    # Hydra raises what is wrong with its input, in place of printing it and ending with a status of its own.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        task()
    except (
        import_module("hydra.errors").HydraException,
        import_module("omegaconf.errors").OmegaConfBaseException,
        import_module("yaml").YAMLError,
        *UNTOLD,
    ) as error:
        if begun:
            raise
        raise refused(verb, error) from error
    except OSError as error:
        if begun:
            raise
        kind = "sweep" if swept(prepared) else "run"
        raise InvalidInput(
            f"{error.filename or 'the folder of this job'}: Hydra's record of the job cannot be written ({error.strerror}); "
            f"try another folder, such as hydra.{kind}.dir=/tmp/ringattn"
        ) from error


def _task(verb: str, begun: list[str]) -> Callable[[Any], None]:
    """The task of a verb; `begun` has an entry while it runs."""

    def task(cfg: Any) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

        try:
            try:
                config = OmegaConf.to_object(cfg)
            except MissingMandatoryValue as error:
                raise InvalidInput(f"a value is missing: {str(error).splitlines()[0]}") from None
            except OmegaConfBaseException as error:
                raise refused(verb, error) from error
            begun.append(verb)
            command = import_module(f".{verb}", __package__)
            with _ending_tidily(launched=verb in EVERYWHERE and detect().kind != "none"):
                command.main(config)
            sys.stdout.flush()
            begun.clear()
        except RingAttentionError as error:
            _fail(error)
        except BrokenPipeError:  # here, since Hydra would show its traceback
            drop_output()
            raise SystemExit(UNREAD) from None
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:  # files are told of where they are written
                raise
            drop_output()
            _fail(InvalidInput(f"standard output: could not be written ({error.strerror}); make room where it goes"))

    return task


def _fail(error: RingAttentionError) -> NoReturn:
    if os.environ.get("RINGATTN_TRACEBACK") == "1":
        raise error
    lines = [
        line if len(line) <= LINE else f"{line[: LINE - 200]} ... {line[-200:]}" for line in str(error).splitlines()
    ]
    sys.stderr.write("ringattn: " + "\n".join(lines) + "\n")  # a value that is repeated may be of any length
    sys.stderr.flush()
    raise SystemExit(USAGE_ERROR)


def _run_id() -> str:
    """The name of the run directory, equal on all ranks of a job."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic == "none":  # torchrun without a rendezvous id: its ranks share a parent
        elastic = f"torchrun-{os.getppid()}"
    known = os.environ.get("RINGATTN_RUN_ID") or elastic or os.environ.get("SLURM_JOB_ID")
    return known or time.strftime("%Y-%m-%d/%H-%M-%S")
