"""Run a Hydra application: one run folder for all ranks, and errors of a few lines instead of tracebacks."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.distributed.elastic.multiprocessing import SignalException
from yaml import YAMLError  # type: ignore[import-untyped]  # of OmegaConf

from lightning_dp.launch import LaunchError, environment_restored, external_rank
from lightning_dp.planner.report import read_plan
from lightning_dp.runs.checkpoints import OF_A_RUN
from lightning_dp.runs.hydra_versions import MAIN_OPTIONS
from lightning_dp.runs.validation import Config, check_given_optim, interpolated_keys, resolved, with_keys

log = logging.getLogger("train")

FULL_ERROR = "HYDRA_FULL_ERROR"
LOG_FILE = "train.log"
UNREADABLE = "backslashreplace"  # names of files need not be UTF-8, as those of an archive made on Windows
GROUPS = ("debug", "experiment", "hparams_search", "plan")  # keys of a command line that choose files, and `plan=FILE`
PLAN = "plan="
OF_A_SWEEP = ("hydra.sweep.", "hydra.launcher.", "hydra/launcher", "hydra.sweeper.", "hydra/sweeper")
# Options of Hydra that take a value; the second ones may have none.
WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
MAY_HAVE_VALUE = ("--info", "-i")
RUN_DIR = "{} has no effect on Hydra's files; name the run folder with hydra.run.dir=FOLDER"
NO_SWEEP = "--multirun starts the processes of each job itself; use python, not torchrun or srun"
OF_SIGNALS = (KeyboardInterrupt, SignalException)  # for which Lightning and `launch` end the process
# Launchers and sweepers of Hydra -> the extra that brings their plugin.
PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "optuna": "hydra-optuna-sweeper",
}


def argument_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help names the command as it was typed: installed, or a script of ``recipes/``."""
    script = sys.argv[0]
    typed = command if Path(script).name == command else f"python {script}"
    text = (description or "").replace(command, typed)
    return argparse.ArgumentParser(typed, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def conf_folder() -> Path:
    """Return the folder of the configuration: in a wheel within the package, in a clone beside it."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


class SweepFolder(Callback):
    """A Hydra callback that remembers the folder of a sweep.

    A sweep that fails before its first job leaves an empty folder, which `run` then removes.
    """

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Remember the folder. Called by Hydra."""
        SweepFolder.path = Path(config.hydra.sweep.dir)


class JobError(Exception):
    """A job failed. The message is complete, so no traceback is shown."""


def run(job: Callable[[DictConfig], Any], config_name: str) -> None:
    """Compose the configuration of the command line and call ``job`` with it; in a sweep, for each job.

    An error ends the program with a message and status 1. With ``HYDRA_FULL_ERROR=1`` in the environment, tracebacks
    are shown in full. Under torchrun or SLURM, only rank 0 has a run folder.
    """
    before = os.environ.get(FULL_ERROR)
    with folder_of_rank() as folder, environment_restored():
        # With this variable, Hydra raises errors instead of printing them.
        os.environ[FULL_ERROR] = "1"
        try:
            try:
                sys.argv[1:] = arguments_of_rank(sys.argv[1:], external_rank(), folder)
            except (ValueError, FileNotFoundError) as error:
                raise JobError(str(error)) from error
            # Hydra would write .hydra before the configuration is checked: see `write_configuration`.
            sys.argv.insert(1, "hydra.output_subdir=null")
            hydra.main(**MAIN_OPTIONS, config_path=str(conf_folder()), config_name=config_name)(job)()
        except (JobError, HydraException, OmegaConfBaseException, YAMLError) as error:
            if SweepFolder.path is not None:
                _discard(SweepFolder.path, {"multirun.yaml"})
            if before == "1":
                raise
            sys.exit(f"error: {explain(error)}")
        except (OSError, ValueError) as error:  # of Hydra, before the job: errors within it are JobErrors
            # The log is the first file that is written. Its error is the cause of logging's own.
            cause = error.__cause__ if isinstance(error, ValueError) else error
            if before == "1" or not isinstance(cause, OSError) or cause.filename is None:
                raise
            sys.exit(f"error: the run folder cannot be made: {cause}; name another one with hydra.run.dir=FOLDER")
        except SIGTERMException:  # of Lightning, which leaves the status of a run that has ended well
            print("ended by SIGTERM", file=sys.stderr)
            sys.exit(128 + signal.SIGTERM)
        except (KeyboardInterrupt, SystemExit) as error:
            # Lightning ends with another status.
            if isinstance(error, SystemExit) and not isinstance(error.__context__, KeyboardInterrupt):
                raise
            print("interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)


@contextmanager
def folder_of_rank() -> Iterator[str]:
    """Make a folder for a rank that has no run folder, and remove it afterwards, unless somebody has put files there.

    Nothing of ours does. A callback of the user's may write a file on each rank to ``${run_dir}``.
    """
    folder = Path(tempfile.mkdtemp(prefix="rank_"))
    try:
        yield str(folder)
    finally:
        if any(not path.is_dir() for path in folder.rglob("*")):
            print(
                f"rank {external_rank()} has written files to {folder}, because the command names no run folder for "
                "all ranks; name it with hydra.run.dir=FOLDER",
                file=sys.stderr,
            )
        else:
            shutil.rmtree(folder, ignore_errors=True)


def arguments_of_rank(arguments: list[str], rank: int | None, folder: str) -> list[str]:
    """Return the command line for Hydra on this rank.

    Of the ranks that torchrun or SLURM started, all but rank 0 have Hydra write to ``folder``, which is temporary.

    Raises:
        ValueError, FileNotFoundError: the command is a sweep, whose jobs start processes of their own, but runs under
            such a launcher; or an option has no effect; or its plan cannot be applied.
    """
    arguments, options = overrides_and_options(arguments)
    if rank is not None and not {"-m", "--multirun"}.isdisjoint(options):
        raise ValueError(NO_SWEEP)
    # Hydra has another way to write this.
    nulls = [f"{path.name}=null" for path in conf_folder().iterdir()]
    arguments = [f"~{text.removesuffix('=null')}" if text in nulls else text for text in arguments]
    if given := [text for text in arguments if key_of(text) == "run_dir"]:
        raise ValueError(RUN_DIR.format(given[0]))
    if empty := [text for text in arguments if text in ("hydra.run.dir=", "hydra.sweep.dir=")]:
        raise ValueError(f"{empty[0]} names no folder; write {empty[0]}FOLDER, or leave it out")
    if subdir := [text for text in arguments if key_of(text) == "hydra.output_subdir" and not text.endswith("=null")]:
        raise ValueError(
            f"{subdir[0]} has no effect: the configuration is written to .hydra in the run folder; leave it out"
        )
    arguments, applied = with_plan(arguments)
    run_dir = None if rank is None else named_run_dir(arguments)
    if applied is not None and not rank:
        print(applied, flush=True)
    if not rank:
        return [*arguments, *options]
    # Where rank 0 keeps its checkpoints, so that this rank finds the same one.
    same = [] if run_dir is None else [f"run_dir={QuotedString(run_dir, Quote.single).with_quotes()}"]
    return [*arguments, f"hydra.run.dir={folder}", "hydra/job_logging=none", *same, *options]


def overrides_and_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of a command line, and the options of Hydra, each with its value.

    Hydra's parser takes no override behind an option that is behind another override.
    """
    overrides: list[str] = []
    options: list[str] = []
    for before, argument in pairwise(["", *arguments]):
        is_value = before in WITH_VALUE or (before in MAY_HAVE_VALUE and "=" not in argument)
        (options if is_value or argument.startswith("-") else overrides).append(argument)
    return overrides, options


def named_run_dir(arguments: Sequence[str]) -> str | None:
    """Return the absolute run folder that a command line names, or None if it names none that can be read here."""
    values = [text for text in arguments if "=" in text and not text.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(values)
    folder = {override.key_or_group: override.value() for override in overrides}.get("hydra.run.dir")
    return None if folder is None or "$" in str(folder) else str(Path(str(folder)).absolute())


def require_named_run_dir(requested: str | None) -> None:
    """Raise ValueError where torchrun or SLURM continues a run, and the command line does not name its folder.

    Launchers restart a job with the same command, whose ranks must find the same checkpoint.
    """
    rank = external_rank()
    if rank is None or requested not in OF_A_RUN:
        return
    # Rank 0 has the folder as typed, with its interpolations; the others where `arguments_of_rank` has put it.
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.hydra, resolve=False)
    if named_run_dir(typed) is None if rank == 0 else "run_dir" not in given_keys():
        raise ValueError(
            f"ckpt_path={requested} under torchrun or SLURM needs a run folder that is the same after a restart; name "
            "it with hydra.run.dir=FOLDER"
        )


def with_plan(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the command line with the overrides of a plan in its place, and a line that says so, if there is one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no plan, two are given, or the command line also sets what the plan sets.
    """
    given_files = [argument.partition("=")[2] for argument in arguments if _is_plan(argument)]
    # As in other values, a second pair of quotes is not part of the name.
    files = [re.sub(r"""^(["'])(.*)\1$""", r"\2", text) for text in given_files]
    if not files:
        return list(arguments), None
    if len(files) > 1:
        raise ValueError(f"plan={files[0]} and plan={files[1]}: give one plan")
    path = Path(files[0])
    if not path.is_file():
        raise FileNotFoundError(f"plan={files[0]}: there is no such file; lightning-dp-plan writes one, plan.yaml")
    plan = read_plan(path)
    overrides, world_size = plan["overrides"], plan.get("world_size")
    others = [argument for argument in arguments if not _is_plan(argument)]
    given = {key_of(argument) for argument in others if "=" in argument}
    if twice := [override for override in overrides if _sets_again(key_of(override), given)]:
        raise ValueError(f"plan={path} sets {twice[0]}, and so does the command line; leave out one of the two")
    made_for = "" if world_size is None else f", made for {world_size} rank{'s' * (world_size != 1)}"
    if images := plan.get("images_per_rank"):
        made_for += f" of {images} images"
    return [*others, *overrides], f"plan={path}{made_for}: {' '.join(overrides)}"


def _is_plan(argument: str) -> bool:
    return argument.lstrip("+").startswith(PLAN)


def _sets_again(key: str, given: set[str]) -> bool:
    """Return whether one of the keys ``given`` is ``key``, or lies below it. Options below a group go with any file."""
    return key in given or ("." in key and any(other.startswith(f"{key}.") for other in given))


def key_of(override: str) -> str:
    """Return the key of an override of the command line."""
    return override.partition("=")[0].lstrip("+~")


def message_of(error: Exception) -> str:
    """Return the message of an error, with its type if that does not go without saying."""
    is_complete = isinstance(error, ValueError | OSError | ImportError | OmegaConfBaseException | HydraException)
    return explain(error) if is_complete else f"{type(error).__name__}: {error}"


def explain(error: Exception) -> str:
    """Return the message of an error. For an unknown key, it names the keys that exist."""
    cause: BaseException = error
    # An error of this package is complete, also one that a key which an object of the user's has missed has led to.
    while cause.__cause__ is not None and isinstance(error, HydraException | OmegaConfBaseException):
        cause = cause.__cause__
    # An interpolation names the key that has it, and not the one that does not exist.
    if isinstance(cause, OmegaConfBaseException) and not isinstance(cause, InterpolationResolutionError):
        parent = cause.parent_node
        if parent is not None and OmegaConf.is_dict(parent) and cause.key is not None and cause.key not in parent:
            return _unknown_key(cause.key, cause.full_key or str(cause.key), [str(name) for name in parent])
    missing = re.search(r"Could not find '(hydra/\w+)/(\w+)'", str(error))
    if missing is not None and missing[2] in PLUGINS:
        group, name = missing.groups()
        return f"{group}={name} needs a plugin of Hydra: pip install {PLUGINS[name]}"
    text = str(error)
    if isinstance(error, YAMLError):  # names the file and the line
        return " ".join(text.split())
    if isinstance(error, OverrideParseException):
        key, sign, value = error.override.partition("=")
        if not sign:
            return f"{key} is no override; write KEY=VALUE"
        hint = "; the keys of a dict have no quotes" if value.startswith("{") else ""
        return f"{error.override} cannot be read; for a text write {_quoted(key, value)}, with all its quotes{hint}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        text = _in_one_line(text if str(cause) in text else f"{text}\n{cause}")
        if "Could not load" in text:
            text = f"{text} --help names what there is"
        where = getattr(cause, "full_key", None)
        if where and where not in text:
            text = f"{where}: {text}"
    return text


def _quoted(key: str, text: str) -> str:
    """Return the override that sets a key to this text, as a shell and Hydra read it."""
    text = re.sub(r'\\+(?="|$)', r"\g<0>\g<0>", text).replace('"', r"\"")  # before a quote, \ is one of Hydra's
    return shlex.quote(f'{key}="{text}"')


def _in_one_line(text: str) -> str:
    """Return a message of Hydra or OmegaConf without the fields at its end. Hydra lists what there is, a line each."""
    text = re.split(r"\n(?:Config search path|See https|\s*(?:full_key|reference_type|object_type)[:=])", text)[0]
    return re.sub(r"\s*\n\s*", "; ", re.sub(r"\s*\n\t", ", ", text.strip()).replace(":,", ":"))


def _unknown_key(key: Any, full_key: str, existing: list[str]) -> str:
    if "." not in full_key:
        existing = sorted({*existing, *GROUPS})
    similar = difflib.get_close_matches(str(key), existing, n=1)
    suggestion = f"; did you mean {similar[0]}?" if similar else "."
    where = full_key.rpartition(".")[0]
    what = f"are: {', '.join(sorted(existing))}" if existing else "is nothing"
    there_are = f"In {where or 'the configuration'} there {what}."
    # An object accepts more arguments than its file in conf/ lists. The group optim is none, but has one.
    argument = f"++optim.optimizer.{key}" if where == "optim" else f"+{full_key}"
    hint = f" To add an argument that is not in the file of its group, write {argument}=..." if where else ""
    return f"{full_key} is unknown{suggestion} {there_are}{hint}"


def config_error(error: Exception) -> JobError:
    """Return the error of a job that could not start, and remove its run folder if nothing else is in it."""
    _discard(Path(HydraConfig.get().runtime.output_dir), {LOG_FILE})
    return _make_job_error(message_of(error))


def job_error(run_dir: str, error: Exception, config: dict[str, Any]) -> JobError:
    """Return the error of a job that failed while it ran, and write its traceback to train.log."""
    if isinstance(error, LaunchError):
        message, text = str(error), error.traceback
    else:
        message, text = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    message = with_keys(message, config)
    if external_rank():
        # Only rank 0 has a log file that stays.
        return _make_job_error(f"rank {external_rank()}: {text}")
    log_file = Path(run_dir, LOG_FILE)
    try:
        with open(log_file, "a", errors=UNREADABLE) as file:
            file.write(text)
    except OSError as failed:  # a full disk, or the folder is gone
        return _make_job_error(f"{message}\nThe traceback cannot be written to {log_file}: {failed.strerror}")
    return _make_job_error(f"{message}\nThe traceback is in {log_file}")


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """In a sweep, let a job whose code calls sys.exit() fail as by an error: Hydra would start none of the others.

    Raises:
        RuntimeError: it was called, with any status.
    """
    try:
        yield
    except SystemExit as error:
        of_signal = isinstance(error, SIGTERMException) or isinstance(error.__context__, OF_SIGNALS)
        # submitit has queued the job again, at its time limit or for another job, and ends its process.
        *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
        is_queued = raised_in.f_globals.get("__name__", "").startswith("submitit.")
        if of_signal or is_queued or not is_in_sweep():
            raise
        raise RuntimeError(f"sys.exit({'' if error.code is None else repr(error.code)}) was called") from error


def write_configuration(cfg: DictConfig) -> None:
    """Write the folder .hydra of a run, as Hydra does by default.

    Hydra would do so before the configuration is checked. A run that is refused because it would replace the results in
    its folder would have replaced their configuration by then.
    """
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir, ".hydra")
    folder.mkdir(exist_ok=True)
    nodes = {"config": cfg, "hydra": {"hydra": hydra_cfg}, "overrides": hydra_cfg.overrides.task}
    for name, node in nodes.items():
        part = folder / f"{name}.part"
        part.write_text(OmegaConf.to_yaml(node))
        # At once: a full disk must not cut the file, which tells how the run has begun.
        part.replace(folder / f"{name}.yaml")


@contextmanager
def hydra_of(run_dir: Path) -> Iterator[None]:
    """Let ``${hydra:...}`` mean within the context what it meant in a run, as in ``${hydra:runtime.cwd}/data``.

    Does nothing where the run has left no ``.hydra/hydra.yaml``.

    Raises:
        ValueError: that file is damaged.
    """
    path = run_dir / ".hydra" / "hydra.yaml"
    if not path.is_file():
        yield
        return
    try:
        hydra_cfg = OmegaConf.load(path).hydra
    except Exception as error:  # of YAML or OmegaConf
        raise ValueError(
            f"{path} is damaged ({error}); remove it if the configuration has no ${{hydra:...}}"
        ) from error
    # Left in place, it would answer for a program that Hydra has started, and for the next run without this file.
    is_hydras = OmegaConf.has_resolver("hydra")
    OmegaConf.register_new_resolver("hydra", lambda key: OmegaConf.select(hydra_cfg, key), replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("hydra")
        if is_hydras:
            setup_globals()


def is_in_sweep() -> bool:
    """Return whether this job is one of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def names_folder() -> bool:
    """Return whether the command line names the folder of the run or of the sweep."""
    return not {"hydra.run.dir", "hydra.sweep.dir"}.isdisjoint(map(key_of, HydraConfig.get().overrides.hydra))


def given_keys() -> list[str]:
    """Return the keys of the overrides on the command line."""
    return list(map(key_of, HydraConfig.get().overrides.task))


def resolved_command(cfg: DictConfig, *also_read: str) -> Config:
    """Return a command's configuration as `resolved` does. Raise ValueError also for an option that has no effect."""
    check_mode()
    check_run_folder(cfg)
    check_config_folders()
    # The name of the run folder may have keys of the user's. Of other ranks of a launcher, it is replaced.
    of_hydra = map(str, cfg) if external_rank() else interpolated_keys(HydraConfig.get())
    config = resolved(cfg, *also_read, *of_hydra)
    check_given_optim(cfg, [*given_keys(), *added_to_optim(cfg)])
    return config


def added_to_optim(cfg: DictConfig) -> list[str]:
    """Return the keys of ``optim`` that its file does not have, such as those that an experiment's file gives."""
    choice, optim = HydraConfig.get().runtime.choices.get("optim"), cfg.get("optim")
    if choice is None or optim is None:
        return []
    of_file = composed_again([f"optim={choice}"]).optim
    return [f"optim.{key}" for key in optim if key not in of_file]


def composed_again(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of other overrides. Files are looked for in the folders of the command line."""
    hydra_cfg = HydraConfig.get()
    folders = [text for text in hydra_cfg.overrides.hydra if key_of(text) == "hydra.searchpath"]
    return compose(hydra_cfg.job.config_name, [*folders, *overrides])


def check_mode() -> None:
    """Raise ValueError for options of Hydra that are for a sweep, in a single run, or the other way round."""
    if is_in_sweep() and external_rank() is not None:  # by hydra.mode=MULTIRUN, or an option that sets it
        raise ValueError(NO_SWEEP)
    options = ("hydra.run.",) if is_in_sweep() else OF_A_SWEEP
    remedy = "name the folder of a sweep with hydra.sweep.dir=FOLDER" if is_in_sweep() else "add --multirun"
    for text in HydraConfig.get().overrides.hydra:
        if key_of(text).startswith(options):
            raise ValueError(f"{text} has no effect {'in a sweep' if is_in_sweep() else 'on a single run'}; {remedy}")


def check_run_folder(cfg: DictConfig) -> None:
    """Raise ValueError where a file of the user's names no folder, or one that Hydra does not write to."""
    hydra_cfg = HydraConfig.get()
    if not hydra_cfg.run.dir:
        raise ValueError("hydra.run.dir is empty in a configuration file; write dir: FOLDER, or leave it out")
    # On other ranks of a launcher, `arguments_of_rank` has given both.
    folder = hydra_cfg.runtime.output_dir
    if not external_rank() and os.path.abspath(cfg.get("run_dir", folder)) != folder:
        raise ValueError(RUN_DIR.format(f"run_dir={cfg.run_dir}"))


def check_config_folders() -> None:
    """Raise ValueError for files in a user's folder, as of --config-dir, that Hydra does not read."""
    sources = HydraConfig.get().runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file"]
    ours = conf_folder()
    for folder in folders[folders.index(ours) + 1 :] if ours in folders else ():
        require_new_names(folder)


def require_new_names(folder: Path) -> None:
    """Raise ValueError for a file that has the name of one of ours and other content: Hydra takes the first one."""
    ours = conf_folder()
    for path in sorted(ours.rglob("*.yaml")):
        own = folder / path.relative_to(ours)
        if own.is_file() and own.read_bytes() != path.read_bytes():
            raise ValueError(f"{own} is not read, because the recipes have a file of that name; give it another name")


def is_search() -> bool:
    """Return whether this job is one of a sweep whose next jobs depend on what the first ones reach."""
    return is_in_sweep() and not HydraConfig.get().sweeper["_target_"].endswith(".BasicSweeper")


def _discard(folder: Path, files_of_hydra: set[str]) -> None:
    """Remove a folder that contains only Hydra's files, and the two folders above it, runs/NAME, if they are empty."""
    if not folder.is_dir() or not {path.name for path in folder.iterdir()} <= files_of_hydra:
        return
    for handler in [h for h in logging.root.handlers if isinstance(h, logging.FileHandler)]:
        logging.root.removeHandler(handler)
        handler.close()
    with suppress(OSError):  # a folder is not empty, or must not be removed
        for name in files_of_hydra:
            (folder / name).unlink(missing_ok=True)
        for empty in (folder.resolve(), *folder.resolve().parents[:2]):
            if empty == Path.cwd():
                return
            empty.rmdir()


def _make_job_error(message: str) -> JobError:
    """Return a JobError. In a sweep, also log it: Hydra reports only the first failed job, and only at the end."""
    if is_in_sweep():
        number = HydraConfig.get().job.num
        log.error("job %d failed: %s", number, message)
        message = f"job {number}: {message}"
    return JobError(message)


def job_logging() -> dict[str, Any] | None:
    """Return Hydra's logging configuration, for the processes that this job starts, or None under a launcher."""
    if external_rank() is not None:
        return None
    return OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True)  # type: ignore[return-value]
