"""Bad input: one clear error, status 1, and nothing left on disk. In this process, for speed."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_dp.planner.report import PLAN_VERSION
from lightning_dp.runs import command_line, train
from lightning_dp.runs.command_line import arguments_of_rank, config_error, explain, job_error, write_configuration
from lightning_dp.runs.validation import with_keys
from tests.ranks import environment_of_rank, run_processes
from tests.recipes.in_process import composed

AGBN = "callbacks.adaptive_global_batch_norm"


@pytest.fixture
def fail(monkeypatch, tmp_path, capsys):
    """``fail("data=nope")``: the error that train.py ends with. No process may have been started."""

    def launched(*args: object, **options: object) -> None:
        pytest.fail("processes were started")

    def fail(*arguments: str) -> str:
        monkeypatch.setattr(train, "launch", launched)
        monkeypatch.setattr(sys, "argv", ["train.py", "name=bad", *arguments])
        handlers, level = list(logging.root.handlers), logging.root.level
        with pytest.raises(SystemExit) as caught:
            command_line.run(train.job, "train")
        for handler in set(logging.root.handlers) - set(handlers):
            handler.close()
        logging.root.handlers[:], logging.root.level = handlers, level
        assert list(tmp_path.iterdir()) == [], "something was left on disk"
        assert "Traceback" not in capsys.readouterr().err
        assert isinstance(caught.value.code, str), "status 1, and the message on standard error"
        return caught.value.code

    return fail


OWN_EXPERIMENT = """# @package _global_
defaults:
  - override /data: synthetic
  - override /optim: sgd_multistep
  - override /trainer: cpu
optim:
  lr: 0.05
  {option}
"""


OWN_MODEL = """
_target_: lightning_dp.models.Classifier
model: {_target_: lightning_dp.models.resnet20, num_classes: 10}
num_classes: 10
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
"""


@pytest.mark.ci
def test_an_option_that_only_unread_options_of_optim_read_is_refused(fail, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "model").mkdir()
    (folder / "model" / "mine.yaml").write_text(OWN_MODEL)
    plain = ["data=synthetic", "trainer=cpu"]
    arguments = [f"hydra.searchpath=['file://{folder}']", "model=mine", *plain]
    # `optim.optimizer` and `optim.scheduler` read the rate, but the model reads neither.
    assert fail(*arguments, "optim.lr=0.3").startswith("error: nothing reads optim.lr; leave it out, or ")
    assert fail(*arguments, "optim.optimizer.lr=0.3").startswith("error: nothing reads optim.optimizer; leave it out")
    assert fail(*arguments, "optim=lars").startswith("error: nothing reads optim; leave it out, or ")
    # Nothing is wrong with these but that no epoch is left to train.
    reads = "+model.label_smoothing=${optim.lr}"
    assert "trainer.max_epochs=0" in fail(*arguments, "trainer.max_epochs=0", "optim.lr=0.3", reads)
    assert "trainer.max_epochs=0" in fail(*arguments, "trainer.max_epochs=0", "optim=null")
    groups = ["optim=goyal", "model.parameter_groups=null", "optim.weight_decay=0.5"]
    assert fail(*plain, *groups).startswith("error: nothing reads optim.weight_decay; if it is an argument of ")
    # Without a schedule, it has an effect.
    constant = ["model.scheduler=null", "optim.optimizer.lr=0.5"]
    assert "trainer.max_epochs=0" in fail(*plain, *constant, "trainer.max_epochs=0")


@pytest.mark.ci
def test_an_option_of_optim_in_an_experiment_that_nothing_reads_is_refused(fail, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "experiment").mkdir()
    experiment = folder / "experiment" / "mine.yaml"
    arguments = [f"hydra.searchpath=['file://{folder}']", "experiment=mine"]
    experiment.write_text(OWN_EXPERIMENT.format(option="weight_decay: 0"))
    assert fail(*arguments).startswith("error: nothing reads optim.weight_decay; ")
    # `optim.lr` of the file is not read now, which is nobody's mistake.
    experiment.write_text(OWN_EXPERIMENT.format(option="optimizer: {lr: 0.5}"))
    assert "trainer.max_epochs=0" in fail(*arguments, "trainer.max_epochs=0")
    experiment.write_text(OWN_EXPERIMENT.format(option="decay: 0\n  optimizer:\n    weight_decay: ${optim.decay}"))
    assert "trainer.max_epochs=0" in fail(*arguments, "trainer.max_epochs=0")


@pytest.mark.parametrize("option", ["--config-dir", "hydra.searchpath"])
def test_an_experiment_may_take_a_file_of_optim_from_the_same_folder(fail, tmp_path_factory, option):
    folder = tmp_path_factory.mktemp("own")
    (folder / "optim").mkdir()
    (folder / "optim" / "mine.yaml").write_text("defaults: [sgd_multistep]\n")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(OWN_EXPERIMENT.format(option="").replace("sgd_multistep", "mine"))
    given = [f"{option}=['file://{folder}']"] if "." in option else [option, str(folder)]
    assert "trainer.max_epochs=0" in fail("experiment=mine", *given, "trainer.max_epochs=0")


@pytest.mark.ci
def test_a_run_that_sigterm_ends_has_not_ended_well(monkeypatch, capsys):
    """Lightning raises a SystemExit without a status."""

    def launched(*args: object, **options: object) -> None:
        raise SIGTERMException

    monkeypatch.setattr(train, "launch", launched)
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer=cpu"])
    handlers, level = list(logging.root.handlers), logging.root.level
    with pytest.raises(SystemExit) as caught:
        command_line.run(train.job, "train")
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert caught.value.code == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in capsys.readouterr().err


@pytest.mark.ci
def test_a_key_that_names_the_run_folder_is_read(fail):
    folder = "hydra.run.dir=runs/${name}/${tag}"
    assert "trainer.max_epochs=0" in fail("+tag=mine", folder, "trainer.max_epochs=0")
    assert "nothing reads the key tags" in fail("+tag=mine", "+tags=mine", folder)


def write_as_another_rank(rank, folder, name):
    """Run a job that writes a file to its run folder, as rank 1 of a launcher; return its folder and what it says."""
    tempfile.tempdir = folder
    os.environ.update(environment_of_rank(1, 2, 1, 0))
    sys.argv = ["train.py", "trainer=cpu"]
    found = []

    def job(cfg):
        found.append(cfg.run_dir)
        if name:
            Path(cfg.run_dir, name).write_text("mine")

    with contextlib.redirect_stderr(io.StringIO()) as said:
        command_line.run(job, "train")
    return Path(found[0]), said.getvalue()


@pytest.mark.ci
def test_what_a_user_writes_on_another_rank_of_a_launcher_is_not_removed(tmp_path):
    ((folder, said),) = run_processes(1, write_as_another_rank, str(tmp_path), "")
    assert not folder.exists()
    assert said == ""
    ((folder, said),) = run_processes(1, write_as_another_rank, str(tmp_path), "predictions.txt")
    assert (folder / "predictions.txt").read_text() == "mine"
    assert f"rank 1 has written files to {folder}, because" in said
    assert "hydra.run.dir=FOLDER" in said


@pytest.fixture
def mirror(tmp_path_factory):
    """Address of a server on this machine, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("mirror")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


@pytest.mark.ci
def test_a_wrong_checksum_ends_a_run_before_it_starts(fail, mirror, tmp_path_factory):
    (address, served), root = mirror, tmp_path_factory.mktemp("root")
    (served / "archive").write_bytes(b"not the archive")
    message = fail("data=cifar10", f"data.root={root}", "data.download=true", f"+data.url={address}/archive")
    assert "expected sha256" in message
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("launcher=joblib", "hydra-joblib-launcher"),
        ("launcher=submitit_slurm", "hydra-submitit-launcher"),
        ("sweeper=optuna", "hydra-optuna-sweeper"),
    ],
)
def test_a_plugin_that_is_not_installed_is_named_with_its_package(name, package):
    group, _, option = name.partition("=")
    error = MissingConfigException(
        f"Could not find 'hydra/{group}/{option}'\n\nAvailable options in 'hydra/{group}':\n\tbasic"
    )
    assert explain(error) == f"hydra/{name} needs a plugin of Hydra: pip install {package}"


@pytest.mark.parametrize("text", ["a=b", "it's=2.ckpt", 'say "hi"', '{"a":1}', "end=\\", r'a\\"b\"=', "[a b", "a{$b"])
def test_the_remedy_for_a_text_that_cannot_be_read_can_be_pasted_into_a_shell(text):
    parser = OverridesParser.create()
    with pytest.raises(OverrideParseException) as caught:
        parser.parse_overrides([f"+data.extra={text}"])
    remedy = re.search(r"for a text write (.*), with all its quotes", explain(caught.value))[1]
    (pasted,) = shlex.split(remedy)
    assert parser.parse_override(pasted).value() == text
    assert ("keys of a dict have no quotes" in explain(caught.value)) == text.startswith("{")


def test_a_file_of_the_users_that_is_no_yaml_is_named(fail, tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("seed: 7\n  name: mine\n")
    assert f'not allowed here in "{file}", line 2' in fail("experiment=mine", "--config-dir", str(file.parents[1]))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            "run_dir: /elsewhere",
            "run_dir=/elsewhere has no effect on Hydra's files; name the run folder with hydra.run",
        ),
        ("hydra: {run: {dir: ''}}", "hydra.run.dir is empty in a configuration file; write dir: FOLDER, or leave it"),
    ],
)
def test_a_file_of_the_users_names_a_run_folder_that_is_used(fail, tmp_path_factory, monkeypatch, option, says):
    folder = tmp_path_factory.mktemp("own")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{option}\n")
    monkeypatch.chdir(folder)
    assert says in fail("experiment=mine", "--config-dir", str(folder), "trainer=cpu")


@pytest.mark.parametrize("option", ["--config-dir", "-cd", "hydra.searchpath"])
def test_a_file_of_the_users_that_ours_would_hide_is_named(fail, tmp_path_factory, option):
    folder = tmp_path_factory.mktemp("own")
    file = folder / "experiment" / "digits_resnet20.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nseed: 7\n")
    given = [f"{option}=[file://{folder}]"] if "." in option else [option, str(folder)]
    assert f"{file} is not read, because the recipes have a file" in fail("experiment=digits_resnet20", *given)


def test_an_error_of_a_rank_without_a_log_file_has_its_traceback(monkeypatch, tmp_path):
    """Under torchrun, the run folder of other ranks is temporary."""
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": {"mode": "RUN"}})
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert str(job_error(str(tmp_path), ValueError("no data"), {})) == "rank 1: ValueError: no data\n"
    assert list(tmp_path.iterdir()) == []


def test_an_error_whose_traceback_cannot_be_written_is_named(tmp_path):
    """The disk is full, or the folder is gone."""
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": {"mode": "RUN"}})
    message = str(job_error(str(tmp_path / "gone"), ValueError("no data"), {}))
    assert message.startswith("ValueError: no data\nThe traceback cannot be written to ")


def test_a_name_that_is_no_utf8_can_be_logged(tmp_path):
    """As of a broken image in an archive that was packed on Windows."""
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": {"mode": "RUN"}})
    name = os.fsdecode(b"\xff.png")
    message = str(job_error(str(tmp_path), ValueError(f"{name} cannot be decoded"), {}))
    assert message.startswith(f"ValueError: {name} cannot be decoded\nThe traceback is in ")
    assert "ValueError: \\udcff.png cannot be decoded" in (tmp_path / "train.log").read_text()
    handlers, level = list(logging.root.handlers), logging.root.level
    file = {"class": "logging.FileHandler", "filename": str(tmp_path / "warnings.log")}
    config = {"version": 1, "handlers": {"file": file}, "root": {"handlers": ["file"]}}
    train.configure_logging(config | {"disable_existing_loggers": False})
    logging.getLogger("lightning_dp").warning("%s is skipped", name)
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert (tmp_path / "warnings.log").read_text() == "\\udcff.png is skipped\n"


def test_a_full_disk_leaves_the_configuration_of_a_run_as_it_was(tmp_path, monkeypatch):
    found = OmegaConf.create({"runtime": {"output_dir": str(tmp_path)}, "overrides": {"task": []}})
    monkeypatch.setattr(command_line.HydraConfig, "get", lambda: found)
    write_configuration(OmegaConf.create({"seed": 1}))

    def cut(path, text):
        path.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", cut)
        with pytest.raises(OSError, match="No space left"):
            write_configuration(OmegaConf.create({"seed": 2}))
    assert OmegaConf.load(tmp_path / ".hydra" / "config.yaml") == {"seed": 1}


def test_other_ranks_need_no_handler_of_the_log(monkeypatch):
    """``hydra/job_logging=none`` has none."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    handlers, level = list(logging.root.handlers), logging.root.level
    train.configure_logging({"version": 1, "root": None, "disable_existing_loggers": False})
    found, logging.root.handlers[:], logging.root.level = list(logging.root.handlers), handlers, level
    assert found == []


def test_a_sweep_under_torchrun_is_refused(fail, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for sweep in ("--multirun", "hydra.mode=MULTIRUN"):
        assert "not torchrun" in fail(sweep, "seed=1,2")
    assert "2 processes were started, for 1 devices" in fail("trainer=cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("requested", ["last", "best"])
def test_under_torchrun_a_run_that_is_continued_needs_a_named_folder(
    fail, tmp_path_factory, monkeypatch, requested, rank
):
    """Else each restart begins again in another folder. The ranks read the command line, and no folder of a file."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path_factory.mktemp("own")
    (folder / "experiment").mkdir()
    of_file = [f"hydra.searchpath=['file://{folder}']", "experiment=mine", "trainer=cpu"]
    for arguments in (of_file, [f"ckpt_path={requested}", "trainer=cpu"]):
        for line in ("", "hydra: {run: {dir: runs/fixed}}"):
            (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\nckpt_path: {requested}\n{line}\n")
            for unnamed in ([], ["hydra.run.dir=runs/${name}"]):
                message = fail(*arguments, *unnamed)
                assert message.startswith(f"error: ckpt_path={requested} under torchrun or SLURM needs a run folder")
        assert "2 processes were started, for 1 devices" in fail(*arguments, "hydra.run.dir=runs/bad/named")


def test_a_key_that_an_object_misses_in_its_options_is_named_with_the_object(fail):
    """Lightning's Timer takes a dict of Python, and asks one of OmegaConf for its seconds."""
    timer = ("+callbacks.timer._target_=pytorch_lightning.callbacks.Timer", "+callbacks.timer.duration.minutes=5")
    message = fail("trainer=cpu", *timer)
    assert "callbacks.timer: ConfigAttributeError: Missing key total_seconds; add it, or write _convert_:" in message


def test_a_shell_of_salloc_is_named_in_one_line(fail, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert "SLURM_NTASKS=4 is in the environment without SLURM_PROCID" in fail("trainer=cpu")


def test_an_error_of_a_run_has_the_key_of_the_value(tmp_path):
    config = composed(tmp_path, "callbacks=agbn", f"{AGBN}.convergence.monitor=nothing")
    message = with_keys(
        "ValueError: monitor='nothing' was not logged; my_monitor='nothing', seed=0, mode='min'", config
    )
    assert message.startswith(f"ValueError: {AGBN}.convergence.monitor='nothing' was not logged; my_monitor='nothing'")
    assert "; my_monitor='nothing', seed=0" in message


def test_only_the_first_rank_of_a_launcher_has_a_run_folder():
    assert arguments_of_rank(["seed=1"], 0, "/elsewhere") == ["seed=1"]
    assert arguments_of_rank(["seed=1"], 1, "/elsewhere")[1] == "hydra.run.dir=/elsewhere"


@pytest.mark.parametrize(
    "options",
    [("-m",), ("--cfg", "job"), ("--config-dir", "a=b", "--resolve"), ("--config-dir=a",), ("--info", "plugins")],
)
def test_options_of_hydra_may_stand_between_overrides(options):
    assert arguments_of_rank(["a=1", *options, "b=1,2", "~c"], None, "") == ["a=1", "b=1,2", "~c", *options]


def test_an_option_of_hydra_without_its_value_takes_no_override():
    assert arguments_of_rank(["--info", "a=1", "--multirun", "b=1"], None, "") == ["a=1", "b=1", "--info", "--multirun"]


def test_what_is_added_to_the_overrides_is_before_options(tmp_path):
    """Hydra's parser takes no override behind them."""
    assert arguments_of_rank(["a=1", "--config-dir", "b"], 1, "/elsewhere") == [
        "a=1",
        "hydra.run.dir=/elsewhere",
        "hydra/job_logging=none",
        "--config-dir",
        "b",
    ]
    plan = tmp_path / "plan.yaml"
    plan.write_text(json.dumps({"version": PLAN_VERSION, "overrides": ["strategy=ddp"]}))
    assert arguments_of_rank([f"plan={plan}", "--cfg", "job"], None, "") == ["strategy=ddp", "--cfg", "job"]


@pytest.mark.parametrize("subdir", [".hydra", "null"])
def test_a_run_that_is_refused_leaves_the_configuration_in_its_folder(fail, tmp_path_factory, subdir):
    """Also where the configuration has no `hydra: default`, as the one that a run has left."""
    folder = tmp_path_factory.mktemp("run")
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("name: old\n")
    (folder / "metrics.csv").write_text("epoch\n")
    fail("--config-path", str(folder / ".hydra"), "--config-name", "config", f"hydra.run.dir={folder}")
    assert (folder / ".hydra" / "config.yaml").read_text() == "name: old\n"
    fail(f"hydra.output_subdir={subdir}", f"hydra.run.dir={folder}", "trainer=cpu")
    assert (folder / ".hydra" / "config.yaml").read_text() == "name: old\n"
    assert [path.name for path in (folder / ".hydra").iterdir()] == ["config.yaml"]


def test_a_folder_with_results_is_never_removed(tmp_path):
    folder = tmp_path / "runs" / "old"
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": {"mode": "RUN", "runtime": {"output_dir": str(folder)}}})
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch\n")
    config_error(ValueError("no"))
    assert (folder / "metrics.csv").exists()
    (folder / "metrics.csv").unlink()
    (folder / "train.log").touch()
    config_error(ValueError("no"))
    assert list(tmp_path.iterdir()) == []
