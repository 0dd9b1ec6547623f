"""Is a configuration right? Mistakes are found before any process is started."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from hydra.errors import InstantiationException
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ModelSummary, ProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger
from pytorch_lightning.strategies import ModelParallelStrategy, Strategy
from torch import nn

from lightning_dp.data.module import ImageDataModule
from lightning_dp.launch import check_ranks, external_rank
from lightning_dp.runs.hydra_versions import instantiate
from lightning_dp.strategies.krizhevsky_hybrid.checks import find_head

log = logging.getLogger("validation")

Config = dict[str, Any]

# Values of the top level, which every run needs, and their types.
TOP_LEVEL_TYPES: dict[str, Any] = {
    **{"name": str, "seed": int, "run_dir": str, "ckpt_path": str | None, "train": bool, "print_config": bool},
    **{"test": str | bool, "optimized_metric": str | None, "optimized_mode": str, "matmul_precision": str},
}
READ_GROUPS = {"data", "model", "optim", "strategy", "trainer", "callbacks", "logger"}
OVERRIDING = {"experiment", "debug", "hparams_search"}  # groups whose files override values of the others
READ_BY_RECIPES = READ_GROUPS | {*TOP_LEVEL_TYPES, "num_classes"}

# Option of the Trainer -> the base class of what it switches off.
SWITCHES: dict[str, type[Callback]] = {
    "enable_checkpointing": Checkpoint,
    "enable_progress_bar": ProgressBar,
    "enable_model_summary": ModelSummary,
}
MAX_RANKS_PER_CORE = 8
OF_FSDP = ("32-true", "32", "bf16-mixed", "bf16", "bf16-true", "16-true", "None")  # precisions


def resolved(cfg: DictConfig, *also_read: str) -> Config:
    """Return a configuration in plain dicts and lists, or raise ValueError for a key that nothing reads or that lacks.

    Args:
        cfg: as Hydra composed it.
        also_read: keys that this recipe reads, and not all do.
    """
    check_top_level(cfg, *also_read)
    for group in ("data", "model", "strategy", "trainer"):
        if cfg.get(group) is None:
            raise ValueError(f"{group}=null: every run needs one; choose it with {group}=NAME (--help names them)")
        if "_target_" not in cfg[group]:
            raise ValueError(
                f"{group} has no _target_; choose a file that has it with {group}=NAME (--help names them)"
            )
    for group in ("callbacks", "logger"):
        if OmegaConf.is_list(cfg.get(group)):
            raise ValueError(f"{group} is a list; give each of its objects a name: {group}.NAME._target_=CLASS")
    if missing := [key for key in TOP_LEVEL_TYPES if key not in cfg]:
        raise ValueError(f"{missing[0]} was taken away, and every run needs it; leave out ~{missing[0]}")
    config: Config = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if config["name"] in (None, "") or isinstance(config["name"], list | dict):
        raise ValueError(f"name={config['name']} must be a text: the run folder is runs/NAME/DATE")
    config |= {group: config.get(group) or {} for group in ("callbacks", "logger")} | {"name": str(config["name"])}
    config["trainer"] = trainer = {"accelerator": "auto", "devices": "auto", "num_nodes": 1} | config["trainer"]
    if trainer["devices"] in (-1, "-1"):
        trainer["devices"] = "auto"  # means the same, and Lightning takes it on CPU as well
    return config


def resolved_part(cfg: DictConfig, keys: Sequence[str]) -> Config:
    """Return the values that a configuration has of these keys of the top level, in plain dicts and lists.

    Others may name what only Hydra knows while a run is on, as ``${now:%Y}``, or only the machine of the run.
    """
    found = {key: cfg[key] for key in keys if key in cfg}
    return {
        key: OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        for key, node in found.items()
    }


def validate(config: Config) -> int:
    """Check arguments, devices and data, download the data if requested, and return the number of processes per node.

    Raises:
        ValueError, OSError, ImportError: the message has the given value, the rule and the remedy.
    """
    with naming_optim(config):
        check_top_level_types(config)
        for path, node in targets(config):
            check_arguments(path, node)
        for group in ("callbacks", "logger"):
            check_have_targets(group, config[group])
        check_together(config)
        trainer = config["trainer"]
        num_processes = count_processes(
            trainer["accelerator"],
            trainer["devices"],
            num_gpus=torch.cuda.device_count(),
            num_cores=os.cpu_count() or 1,
        )
        check_ranks(num_processes, trainer["num_nodes"])
        with naming_keys("strategy", config):
            strategy = instantiate(config["strategy"])
            _check_strategy(strategy, config["strategy"], trainer.get("precision"))
            if hasattr(strategy, "topology_of"):
                strategy.topology_of(trainer["num_nodes"], num_processes)
        # Each rank builds these again. Here they are built for the errors of their constructors.
        with naming_keys("trainer", config), ExitStack() as stack:
            # Records below warnings would go into train.log, which may be that of another run.
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.INFO)
            # In a SLURM job with one task, whose processes we start, Lightning would ask for as many tasks as devices.
            alone = {"devices": 1, "num_nodes": 1, "strategy": "auto"} if external_rank() is None else {}
            made = instantiate(trainer | alone, logger=False, _convert_="all")
            _require_kind(type(made), Trainer, "trainer", trainer)
        _check_callbacks_and_loggers(config)
        _check_optimizer(config)
        _check_model(config)
        with naming_keys("data", config):
            _check_data(instantiate(config["data"]), config, num_processes * trainer["num_nodes"], made)
        return num_processes


def _check_strategy(made: Strategy, node: Config, precision: Any) -> None:
    """Raise ValueError for what would be found in the ranks, where Lightning's Trainer gets the strategy."""
    _require_kind(type(made), Strategy, "strategy", node)
    if isinstance(made, ModelParallelStrategy) and str(precision) not in OF_FSDP:
        raise ValueError(
            f"trainer.precision={precision} is none that FSDP2 takes; use 32-true, bf16-mixed, bf16-true or 16-true"
        )
    if (method := node.get("start_method", "popen")) != "popen":
        raise ValueError(f"strategy.start_method={method}: the recipes start the ranks; leave it out")


def _check_callbacks_and_loggers(config: Config) -> None:
    """Raise ValueError for what is none, and for a logger that would write the metrics.csv of the run."""
    for group, kind in (("callbacks", Callback), ("logger", Logger)):
        for name, node in config[group].items():
            if node is None:
                continue
            with naming_keys(f"{group}.{name}", config):
                made = instantiate(node)
                _require_kind(type(made), kind, f"{group}.{name}", node)
            if isinstance(made, CSVLogger) and Path(made.log_dir).resolve() == Path(config["run_dir"]).resolve():
                raise ValueError(
                    f"logger.{name} would write {config['run_dir']}/metrics.csv, which every run has anyway; leave it "
                    f"out, or name a folder in that one with logger.{name}.name=FOLDER"
                )


def _require_kind(made: type, kind: type, path: str, node: Config) -> None:
    if not issubclass(made, kind):
        is_of_other = any(base.__module__.startswith("lightning.pytorch.") for base in made.__mro__)
        other = " of pytorch_lightning, which the recipes import, not of lightning.pytorch" if is_of_other else ""
        raise ValueError(f"{path}._target_={node['_target_']} must make a {kind.__name__}{other}")


def _check_optimizer(config: Config) -> None:
    """Raise ValueError for options that the optimizer or the schedule does not take. Both are made for one number.

    Not if the module, or the function that makes the groups of parameters, is the user's: the optimizer may be given
    something else there.
    """
    optimizer, groups = (config["model"].get(name) for name in ("optimizer", "parameter_groups"))
    if not config["model"]["_target_"].startswith("lightning_dp."):
        return
    if groups is not None and not groups["_target_"].startswith("lightning_dp."):
        return
    if isinstance(optimizer, dict) and groups is not None:
        for key in sorted({"lr", "weight_decay"} & optimizer.keys() & groups.keys()):
            if optimizer[key] != groups[key]:
                raise ValueError(
                    f"model.optimizer.{key}={optimizer[key]} has no effect, because model.parameter_groups sets {key} "
                    f"of all parameters; write optim.{key}={optimizer[key]}"
                )
    if not _is_partial(optimizer):
        return
    with naming_keys("model.optimizer", config):
        made = instantiate(optimizer)([torch.nn.Parameter(torch.zeros(1, 1))])  # a matrix: Muon takes no others
        lr = made.param_groups[0].get("lr", 0.0)
        if not math.isfinite(lr):
            raise ValueError(f"lr={lr} must be a finite number")
    scheduler = config["model"].get("scheduler")
    if _is_partial(scheduler):
        with naming_keys("model.scheduler", config):
            has_end = "total_steps" in _parameters(scheduler["_target_"])
            end = {"total_steps": scheduler.get("total_steps") or 100} if has_end else {}
            instantiate(scheduler)(made, **end)


def _is_partial(node: Any) -> bool:
    return isinstance(node, dict) and bool(node.get("_partial_"))


def _check_model(config: Config) -> None:
    """Raise ValueError for options that a model of this package does not take. It is made without memory."""
    made = pkgutil.resolve_name(config["model"]["_target_"])
    if isinstance(made, type):  # a function could make anything
        _require_kind(made, LightningModule, "model", config["model"])
        if config["test"] and getattr(made, "test_step", None) is LightningModule.test_step:
            raise ValueError(f"{made.__name__} has no test_step; use test=false")
    made_of = [node["_target_"] for path, node in targets(config["model"]) if path.partition(".")[0] in ("", "model")]
    # A model of the user's may load weights, or need another device.
    if not all(str(name).startswith("lightning_dp.") for name in made_of):
        return
    with naming_keys("model", config), torch.device("meta"):
        module = instantiate(config["model"])
    if getattr(module, "parameter_groups", None) is not None:
        with naming_keys("model.parameter_groups", config):
            list(module.parameter_groups(module.model))
    if config["strategy"]["_target_"] == "lightning_dp.KrizhevskyHybridStrategy":
        with naming_keys("strategy", config):
            find_head(module, config["strategy"].get("head", "head"))


def _check_data(data: Any, config: Config, world_size: int, trainer: Any) -> None:
    """Raise an error if the data cannot be used. Download it if requested. ``trainer`` is one for this process."""
    _require_kind(type(data), LightningDataModule, "data", config["data"])
    # Of the object: `LightningDataModule.from_datasets` gives its loaders to that, and not to a class.
    if config["test"] and getattr(data.test_dataloader, "__func__", None) is LightningDataModule.test_dataloader:
        raise ValueError(f"{type(data).__name__} has no test_dataloader; use test=false")
    if isinstance(data, ImageDataModule):
        num_classes = config["model"].get("num_classes", data.num_classes)
        if num_classes < data.num_classes:
            key = "num_classes" if config.get("num_classes") == num_classes else "model.num_classes"
            raise ValueError(
                f"model.num_classes={num_classes} is less than the {data.num_classes} classes of the data; use "
                f"{key}={data.num_classes}"
            )
        data.check(world_size)
    if external_rank() is None:
        # Before any rank starts: no rank waits for a download, and a download that fails starts no rank.
        data.trainer = trainer  # which a data module may ask, for example for its folder
        data.prepare_data()


@contextmanager
def naming_optim(config: Config) -> Iterator[None]:
    """Let errors name the keys that the command line takes: the model refers to those of ``optim``."""
    try:
        yield
    except ValueError as error:
        optim, model = config.get("optim") or {}, config["model"]
        same = "|".join(re.escape(key) for key in optim if key in model and model[key] == optim[key])
        raise ValueError(re.sub(rf"\bmodel\.({same})\b", r"optim.\1", str(error)) if same else str(error)) from error


@contextmanager
def naming_keys(path: str, config: Config) -> Iterator[None]:
    """Let the errors of an object name its arguments as the command line does: ``data.batch_size``, not ``batch_size``.

    Every error is raised again as ValueError.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error if isinstance(error, InstantiationException) else error
        is_complete = isinstance(cause, ValueError | OSError | ImportError | MisconfigurationException)
        text = str(cause)
        if isinstance(cause, ConfigAttributeError):  # its other lines name the key once more
            text = f"{text.splitlines()[0]}; add it, or write _convert_: all beside the _target_ for a dict of Python's"
        message = " ".join((text if is_complete else f"{type(cause).__name__}: {text}").split())
        # The last line is Hydra's. An error of OmegaConf within it has another full_key, that of the dict it is about.
        inner = re.search(r"\nfull_key: (\S+)$", str(error)) if isinstance(error, InstantiationException) else None
        if inner is not None and inner[1] != path and "[" not in inner[1]:
            path = f"{path}.{inner[1]}"  # of an object within the object
        node: Any = config
        for key in path.split("."):
            node = node[key]
        for name in _parameters(node["_target_"]):
            if name not in config:  # a key of the top level, such as num_classes, is passed on to several objects
                after = r"(?=\W|$)" if "_" in name else "(?==)"  # else it may be a word of the sentence
                message = re.sub(rf"(?<![\w./'\"-]){name}{after}(?!/|\.\w)", f"{path}.{name}", message)
        raise ValueError(message if f"{path}." in message else f"{path}: {message}") from error


def with_keys(message: str, config: Config) -> str:
    """Return the message of an error of a run with the keys of arguments that only one object has with that value."""
    found: dict[str, list[str]] = {}
    for path, node in targets(config):
        for name in node.keys() - config.keys():  # a key of the top level is what the user gave
            found.setdefault(f"{name}={node[name]!r}", []).append(path)
    for text, paths in found.items():
        if len(paths) == 1:
            message = re.sub(rf"(?<![\w./])(?={re.escape(text)}(?!\w))", f"{paths[0]}.", message)
    return message


def targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and content of each node that has a ``_target_``."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))


def check_have_targets(group: str, nodes: dict[str, Any]) -> None:
    """Raise ValueError for options of an object that the chosen file of a group does not have, but another one has."""
    for name, node in nodes.items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            raise ValueError(
                f"{group}.{name}={node} has no _target_: the chosen {group} have no {name}; choose a file that has it "
                f"({group}=NAME), or write {group}.{name}=null"
            )


def check_arguments(path: str, node: dict[str, Any]) -> None:
    """Raise ValueError if the target of a node does not exist or does not accept one of the arguments."""
    name = node["_target_"]
    try:
        parameters = _parameters(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}._target_={name} cannot be imported: {error}") from error
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    types = _types_of_arguments(name)
    for key, value in node.items():
        if key.startswith("_"):
            continue
        if key not in parameters and not takes_any:
            raise ValueError(f"{path}.{key} is not an argument of {name}; there are {', '.join(parameters)}")
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{path}.{key}={value} must be a finite number")
        is_default = key in parameters and value == parameters[key].default
        if key in types and not is_default and not fits(value, types[key]):
            raise ValueError(f"{path}.{key}={shown(value)} must be {spelled(types[key])}")
        if key in types and not is_default and needs_target(value, types[key]):
            raise ValueError(f"{path}.{key}={value} must be an object, with a _target_; choose a file of its group")
        is_whole = isinstance(value, float) and value.is_integer()
        if is_whole and key in types and float not in _plain_types(types[key]) >= {int}:
            node[key] = int(value)  # 1e5


def _parameters(target: str) -> Mapping[str, inspect.Parameter]:
    found = pkgutil.resolve_name(target)
    try:
        return inspect.signature(found).parameters
    except ValueError:  # of a class in C, such as datetime.timedelta
        return inspect.signature(lambda **arguments: None).parameters


def _types_of_arguments(target: str) -> dict[str, Any]:
    """Return the annotations of a class's constructor, or of a function. Empty where they cannot be evaluated."""
    found = pkgutil.resolve_name(target)
    try:
        return get_type_hints(found.__init__ if isinstance(found, type) else found)  # type: ignore[misc]
    except Exception:  # an annotation may name anything, also what is not there at run time
        return {}


# Plain type -> what to call it in an error.
PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _plain_types(annotation: Any) -> set[Any]:
    """Return the types of an annotation. Tensors are left out: a configuration has none. A path is a text there."""
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_plain_types, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return {str if annotation is Path else annotation} - {torch.Tensor}


def fits(value: Any, annotation: Any) -> bool:
    """Return False for a value of the wrong type. Annotations of anything but plain types accept all values."""
    types = _plain_types(annotation)
    if not types <= PLAIN.keys() or (isinstance(value, dict) and "_target_" in value):
        return True
    if isinstance(value, float):
        return float in types or (int in types and value.is_integer())
    if type(value) is int:
        return not types.isdisjoint({int, float}) or (bool in types and value in (0, 1))
    return type(value) in types


def needs_target(value: Any, annotation: Any) -> bool:
    """Return whether only an object that a ``_target_`` makes fits, such as a model or an optimizer, and it is none."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    is_made = isinstance(value, dict) and "_target_" in value
    if is_made or (value is None and type(None) in kinds):
        return False
    are_made = [
        get_origin(kind) is Callable or (isinstance(kind, type) and issubclass(kind, nn.Module))
        for kind in kinds
        if kind is not type(None)
    ]
    return bool(are_made) and all(are_made)


def spelled(annotation: Any) -> str:
    """Return the types of an annotation in words."""
    return " or ".join(text for each, text in PLAIN.items() if each in _plain_types(annotation))


def shown(value: Any) -> str:
    """Return a value as errors show it: a text that looks like a number, as of ``${oc.env:...}``, as a text."""
    looks_right = isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false|null", value, re.I)
    return f"'{value}', a text," if looks_right else str(value)


def count_processes(accelerator: str, devices: Any, *, num_gpus: int, num_cores: int) -> int:
    """Return the number of processes per node: one per device.

    Args:
        accelerator: argument of the Trainer: ``"cpu"``, ``"gpu"``, ``"auto"``, ...
        devices: argument of the Trainer: a number, ``"auto"`` or -1 for all (on CPU: one), or the indices of GPUs.
        num_gpus: number of GPUs of this node.
        num_cores: number of CPU cores of this node.

    Raises:
        ValueError: the devices do not exist, or there would be far more ranks than cores.
    """
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and num_gpus > 0)
    if on_gpu and num_gpus == 0:
        raise ValueError(f"trainer.accelerator={accelerator}, but there is no GPU that torch can use; use trainer=cpu")
    if devices in ("auto", "-1", -1):
        return num_gpus if on_gpu else 1
    if isinstance(devices, list) and on_gpu and devices:
        count, needed = len(devices), max(devices) + 1
    elif str(devices).isdigit() and int(devices) > 0:
        count = needed = int(devices)
    else:
        raise ValueError(f"trainer.devices={devices} must be 1 or more, 'auto', or a list of GPUs with trainer=gpu")
    if on_gpu and needed > num_gpus:
        raise ValueError(f"trainer.devices={devices}, but there are {num_gpus} GPUs; use at most {num_gpus}")
    if not on_gpu and count > MAX_RANKS_PER_CORE * num_cores:
        limit = MAX_RANKS_PER_CORE * num_cores
        raise ValueError(f"trainer.devices={devices}, but there are {num_cores} CPU cores; use at most {limit} ranks")
    if not on_gpu and count > num_cores:
        log.warning("%d ranks share %d CPU cores: the result is right, but training is slow", count, num_cores)
    return count


# --- the top-level keys: which ones exist, and which go together ---


MAX_SEED = 2**32 - 1  # NumPy's


def check_top_level_types(config: Config) -> None:
    """Raise ValueError for a value of the wrong type, or one that NumPy or torch does not take."""
    for key, annotation in TOP_LEVEL_TYPES.items():
        if key in config and not fits(config[key], annotation):
            raise ValueError(f"{key}={shown(config[key])} must be {spelled(annotation)}")
    config["seed"] = int(config["seed"])  # 1e3, which would seed other images than 1000
    if not 0 <= config["seed"] <= MAX_SEED:
        raise ValueError(f"seed={config['seed']} must be 0 to {MAX_SEED}")
    # Configurations of old runs do not have it.
    if config.get("matmul_precision", "highest") not in ("highest", "high", "medium"):
        raise ValueError(f"matmul_precision={config['matmul_precision']} must be highest, high or medium")


def check_top_level(config: DictConfig, *also_read: str) -> None:
    """Raise ValueError for a key that neither the recipes nor an interpolation in the configuration reads.

    Args:
        config: the whole configuration.
        also_read: keys that this recipe reads, and not all do.
    """
    read = READ_BY_RECIPES | {*also_read} | interpolated_keys(config)
    for key in map(str, config):
        if key in OVERRIDING:  # where Hydra puts the values of a file without this line
            raise ValueError(f"the file of {key}=NAME lacks its first line, # @package _global_; write it there")
        if key not in read:
            similar = difflib.get_close_matches(key, sorted(READ_BY_RECIPES), n=1)
            remedy = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(sorted(READ_BY_RECIPES))}"
            raise ValueError(f"nothing reads the key {key!s}; {remedy}")


def interpolated_keys(config: Any) -> set[str]:
    """Return the keys of the top level that interpolations in a configuration read, and other words in these."""
    texts = _strings(OmegaConf.to_container(config, resolve=False))
    return {name for text in texts for name in re.findall(r"[{:]\s*(\w+)", text)}


def check_given_optim(config: DictConfig, given: Sequence[str]) -> None:
    """Raise ValueError for an option of ``optim`` that somebody has given and no interpolation reads, or no schedule.

    The group is no object that could refuse it.

    Args:
        config: the whole configuration.
        given: the keys of the command line, and those that an experiment adds to the group.
    """
    optim, read = config.get("optim") or {}, _read_of_optim(config)
    schedule = OmegaConf.select(config, "optim.scheduler.max_lr") if "scheduler" in read else None
    if "optim.optimizer.lr" in given and schedule is not None:
        raise ValueError(
            "optim.optimizer.lr has no effect, because the schedule takes the rate from max_lr; write optim.lr "
            "or optim.scheduler.max_lr"
        )
    for group, _, option in (key.partition(".") for key in given):
        name = option.partition(".")[0]
        unread = name in optim and name not in read if name else optim and not read
        if group != "optim" or not unread:
            continue
        if "optimizer" in read:
            remedy = f"if it is an argument of the optimizer, write ++optim.optimizer.{name}=..."
        else:  # a model with an optimizer of its own
            remedy = "leave it out, or let a value of the model name it, such as model.lr='${optim.lr}'"
        raise ValueError(f"nothing reads {f'optim.{name}' if name else 'optim'}; {remedy}")


def _read_of_optim(config: DictConfig) -> set[str]:
    """Return the options of ``optim`` that an interpolation outside the group reads, and those that these read."""
    texts: Any = OmegaConf.to_container(config, resolve=False)
    optim = texts.pop("optim", None)
    outside = list(_strings(texts))
    names_all = any(re.search(r"[{:]\s*optim\s*[,}]", text) for text in outside)
    if names_all or not isinstance(optim, dict):  # such as `optim: ${mine}`
        return set(map(str, config.get("optim") or {}))
    read: set[str] = set()
    new = {name for text in outside for name in re.findall(r"\boptim[.\[](\w+)", text)}
    while new := new - read:
        read |= new
        # `optim.optimizer.lr: ${optim.lr}` reads nothing if no one reads `optim.optimizer`.
        within = [text for name in new for text in _strings(optim.get(name))]
        new = {name for text in within for name in re.findall(r"[.\[](\w+)", text)}
    return read


def _strings(node: Any) -> Iterator[str]:
    """Yield the strings of a configuration that contain an interpolation."""
    if isinstance(node, str) and "${" in node:
        yield node
    elif isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _strings(value)


def check_together(config: Config) -> None:
    """Raise ValueError for options that contradict each other."""
    trainer, metric = config["trainer"], config["optimized_metric"]
    if "logger" in trainer:
        raise ValueError("trainer.logger cannot be given; choose loggers with logger=csv, tensorboard, wandb or mlflow")
    if "callbacks" in trainer:
        raise ValueError("trainer.callbacks cannot be given; add one with +callbacks.NAME._target_=CLASS")
    if trainer.get("strategy") != config["strategy"]:
        raise ValueError(f"trainer.strategy={trainer.get('strategy')} cannot be given; choose it with strategy=NAME")
    if config["test"] not in ("last", "best", False):
        raise ValueError(f"test={config['test']} must be last, best or false")
    _check_mode(metric, config["optimized_mode"])
    _check_numbers(trainer)
    if config["test"] and trainer.get("limit_test_batches") == 0:
        raise ValueError("trainer.limit_test_batches=0 leaves nothing to test; use test=false")
    if config["test"] and config["data"].get("num_test") == 0:
        raise ValueError("data.num_test=0 leaves nothing to test; use test=false")
    if not config["train"]:
        if not config["test"]:
            raise ValueError("train=false and test=false leave nothing to do; use test=last to test ckpt_path")
        if config["ckpt_path"] is None:
            raise ValueError("train=false needs weights to test; give ckpt_path=PATH or ckpt_path=last")
        if config["test"] == "best" and config["ckpt_path"] == "last":
            raise ValueError(
                "train=false tests the weights of ckpt_path=last, so test=best has no effect; use test=last, or "
                "ckpt_path=best"
            )
        return
    for key in ("limit_train_batches", "max_steps", "max_epochs"):
        if trainer.get(key) == 0:
            raise ValueError(
                f"trainer.{key}=0 leaves nothing to train; use train=false to test the weights of ckpt_path"
            )
    strategy = config["strategy"]
    if config["test"] and "Hybrid" in strategy["_target_"] and strategy.get("state_dict_type") == "sharded":
        raise ValueError(
            f"test={config['test']} needs whole weights, and with strategy.state_dict_type=sharded a rank keeps its "
            "local shard of the head after training; use test=false, and test the run with train=false ckpt_path=last"
        )
    if config["test"] == "best":
        _check_best(trainer, metric, config["data"])
    _check_schedule(trainer, config["model"], config["data"])
    if not config["test"] and metric is not None and metric.startswith("test/"):
        raise ValueError(f"optimized_metric={metric} is not measured with test=false; use val/acc, or null")


def _check_mode(metric: str | None, mode: str) -> None:
    if mode not in ("max", "min"):
        raise ValueError(f"optimized_mode={mode} must be max or min")
    if metric is not None and "loss" in metric and mode == "max":
        raise ValueError(f"optimized_metric={metric} is best where it is highest; write optimized_mode=min")


def _check_numbers(trainer: Config) -> None:
    """Raise ValueError for values that the Trainer would take, and then fail or do something else."""
    remedy = {"check_val_every_n_epoch": ", or null; for no validation, use trainer.limit_val_batches=0"}
    for key in ("num_nodes", "accumulate_grad_batches", "check_val_every_n_epoch"):
        if (value := trainer.get(key)) is not None and value < 1:
            raise ValueError(f"trainer.{key}={value} must be 1 or more{remedy.get(key, '')}")
    if (trainer.get("gradient_clip_val") or 0) < 0:
        raise ValueError(
            f"trainer.gradient_clip_val={trainer['gradient_clip_val']} must be more than 0, or null for no clipping"
        )
    if isinstance(trainer.get("max_time"), int | float):  # in YAML 1:00:00:00 without quotes is a number
        raise ValueError(
            f"trainer.max_time={trainer['max_time']} must be days, hours, minutes and seconds, such as 00:12:00:00, "
            "which needs quotes in a file"
        )
    if trainer.get("deterministic") not in (True, False, None, "warn"):  # any other text would count as true
        raise ValueError(f"trainer.deterministic={trainer['deterministic']} must be true, false or warn")


def is_of_validation(metric: str) -> bool:
    """Return whether a metric is measured in validation, by its name: val/acc, or a user's val_acc or valid_loss."""
    return re.match(r"val(id|idation)?(?![a-z])", metric) is not None


def _check_best(trainer: Config, metric: str | None, data: Config) -> None:
    """Raise ValueError unless there will be a checkpoint with the best ``metric``."""
    if metric is None or metric.startswith("test/"):
        raise ValueError(
            f"test=best needs a metric that is measured during training, not optimized_metric={metric}; use val/acc"
        )
    if is_of_validation(metric):
        _require_validation(f"test=best needs optimized_metric={metric}", trainer, data)
    every, epochs = trainer.get("check_val_every_n_epoch") or 1, trainer.get("max_epochs") or 0
    if is_of_validation(metric) and 0 < epochs < every:
        raise ValueError(
            f"test=best needs optimized_metric={metric}, but trainer.check_val_every_n_epoch={every} leaves it out of "
            f"trainer.max_epochs={epochs}; validate more often"
        )
    if trainer.get("enable_checkpointing") in (False, 0) or trainer.get("fast_dev_run"):
        raise ValueError("test=best needs checkpoints; leave enable_checkpointing and fast_dev_run as they are")


def _require_validation(use: str, trainer: Config, data: Config) -> None:
    """Raise ValueError if nothing is validated. ``use`` says what for."""
    if 0 in (data.get("val_size"), data.get("num_val")):
        raise ValueError(f"{use}, but no images are held out for validation")
    if trainer.get("limit_val_batches") == 0:
        raise ValueError(f"{use}; trainer.limit_val_batches=0 leaves it out")


def _check_schedule(trainer: Config, model: Config, data: Config) -> None:
    """Raise ValueError for a schedule without what it must know: the end of training, or a metric."""
    scheduler = model.get("scheduler")
    if not isinstance(scheduler, dict) or not model["_target_"].startswith("lightning_dp."):
        return
    if scheduler.get("_target_") == "torch.optim.lr_scheduler.ReduceLROnPlateau":
        _require_validation("ReduceLROnPlateau needs val/loss or val/acc", trainer, data)
    endless = trainer.get("max_epochs") == -1 and trainer.get("max_steps", -1) == -1
    if endless and scheduler.get("total_steps") is None and "total_steps" in _parameters(scheduler["_target_"]):
        raise ValueError(
            f"trainer.max_epochs=-1 trains without end, but {scheduler['_target_']} must know the number of steps; "
            "give trainer.max_epochs or trainer.max_steps, or choose optim=sgd_multistep"
        )


def make_callbacks(config: Config) -> dict[str, Any]:
    """Make the callbacks, and leave out those of a kind that the Trainer's ``enable_...`` options switch off."""
    # Null is the Trainer's default, true.
    off = tuple(kind for option, kind in SWITCHES.items() if config["trainer"].get(option) in (False, 0))
    made = {name: instantiate(node) for name, node in config["callbacks"].items() if node is not None}
    return {name: each for name, each in made.items() if not isinstance(each, off)}
