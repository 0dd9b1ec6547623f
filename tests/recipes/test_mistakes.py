"""Bad input: one clear error, status 1, and nothing left on disk. In this process, for speed."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from lightning_dp.runs import command_line, train
from lightning_dp.runs.command_line import arguments_of_rank, config_error, explain, job_error

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
        logging.root.handlers[:], logging.root.level = handlers, level
        assert list(tmp_path.iterdir()) == [], "something was left on disk"
        assert "Traceback" not in capsys.readouterr().err
        assert isinstance(caught.value.code, str), "status 1, and the message on standard error"
        return caught.value.code

    return fail


def test_a_run_of_no_epochs_ends_well_without_a_metric_of_training(monkeypatch, capsys):
    monkeypatch.setattr(train, "launch", lambda *args, **options: {"test/acc": 0.125})
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer=cpu", "trainer.max_epochs=0", "optimized_metric=val/acc"])
    handlers, level = list(logging.root.handlers), logging.root.level
    command_line.run(train.job, "train")
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert "test/acc=0.1250" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["strategy=nope"], ["Could not find 'strategy/nope'", "ddp", "layered_sgd"]),
        (["strateggy=ddp"], ["strateggy is unknown; did you mean strategy?", "callbacks, ckpt_path, data"]),
        (["data.bach_size=3"], ["data.bach_size is unknown; did you mean batch_size?", "num_workers, seed"]),
        (["+data.augment=true"], ["data.augment is not an argument of lightning_dp.data.Digits; there are batch_size"]),
        (["model.model._target_=lightning_dp.models.vgg"], ["model.model._target_=", "cannot be imported"]),
        (["trainer=cpu", "trainer.devices=100000"], ["trainer.devices=100000", "CPU cores; use at most"]),
        (["trainer=cpu", "trainer.devices=0"], ["trainer.devices=0 must be 1 or more"]),
        (["trainer.num_nodes=2"], ["num_nodes=2", "torchrun --nnodes=2"]),
        (["trainer=cpu", "trainer.devices=2", "data.batch_size=1"], ["batch_size=1", "number of ranks (2)"]),
        (
            ["trainer=cpu", "trainer.devices=2", "strategy=layered_sgd", "strategy.group_size=3"],
            ["world_size=2 is not a multiple of strategy.group_size=3; use 1 or 2"],
        ),
        (
            ["strategy=layered_sgd", "strategy.overlap=all"],
            ["strategy.overlap='all' is not known; use one of"],
        ),
        (["data=cifar10", "data.root=no/where"], ["no/where/cifar-10-batches-py", "download=true"]),
        (["strategy=ddp,layered_sgd"], ["--multirun"]),
        (["+ckpt_pth=a.ckpt"], ["nothing reads the key ckpt_pth; did you mean ckpt_path?"]),
        (["ckpt_path=no-such-file"], ["ckpt_path=no-such-file: there is no such checkpoint", "checkpoints/last.ckpt"]),
        (["experiments=digits_resnet20"], ["experiments is unknown; did you mean experiment?"]),
        (["hydra.run.dir=/dev/null/run"], ["the run folder cannot be made", "name another one with hydra.run.dir"]),
        (["+callbacks.other.patience=2"], ["callbacks.other={'patience': 2} has no _target_", "callbacks.other=null"]),
        (["+callbacks.other=2"], ["callbacks.other=2 has no _target_"]),
        (["logger=csv", "+logger.wandb.project=a"], ["logger.wandb={'project': 'a'} has no _target_", "logger=NAME"]),
        (["ckpt_path=last"], ["has no checkpoints/last.ckpt, nor has another run named bad", "hydra.run.dir=FOLDER"]),
        (["--multirun", "ckpt_path=last", "seed=1,2"], ["no job of", "hydra.sweep.dir=FOLDER"]),
        (["train=false"], ["train=false needs weights to test"]),
        (["trainer.profiler=simple"], ["trainer.profiler is unknown", "write +trainer.profiler=..."]),
        (["callbacks.progress_bar._target_=lightning_dp.runs.progress.RichBar"], ["rich"]),
        (["trainer=cpu", "data.batch_size=abc"], ["data.batch_size=abc must be a whole number"]),
        (["trainer=cpu", "data.batch_size=null"], ["data.batch_size=None must be a whole number"]),
        (["trainer=cpu", "data.batch_size=[1,2]"], ["data.batch_size=[1, 2] must be a whole number"]),
        (["trainer=cpu", "data.batch_size=1.5"], ["data.batch_size=1.5 must be a whole number"]),
        (["data=cifar10", "data.download=maybe"], ["data.download=maybe must be true or false"]),
        (["model.label_smoothing=none"], ["model.label_smoothing=none must be a number"]),
        (["model.model.num_classes=ten"], ["model.model.num_classes=ten must be a whole number"]),
        (["optim.lr=fast"], ["=fast must be a number"]),
        (["optim.optimizer.momentum=true"], ["optim.optimizer.momentum=True must be a number"]),
        (["optim.scheduler.pct_start=early"], ["optim.scheduler.pct_start=early must be a number"]),
        (["trainer.max_epochs=many"], ["trainer.max_epochs=many must be a whole number or null"]),
        (["trainer.num_nodes=two"], ["trainer.num_nodes=two must be a whole number"]),
        (["trainer.log_every_n_steps=abc"], ["trainer.log_every_n_steps=abc must be a whole number or null"]),
        (["trainer.enable_checkpointing=5"], ["trainer.enable_checkpointing=5 must be true or false"]),
        (["trainer=cpu", "trainer.devices=few"], ["trainer.devices=few must be 1 or more"]),
        (
            ["strategy=layered_sgd", "strategy.group_size=two"],
            ["strategy.group_size=two must be a whole number"],
        ),
        (
            ["callbacks=agbn", "callbacks.adaptive_global_batch_norm.convergence.patience=long"],
            ["patience=long must be"],
        ),
        (["callbacks=agbn", "callbacks.adaptive_global_batch_norm.group_size=0"], ["norm.group_size=0"]),
        (["seed=abc"], ["seed=abc must be a whole number"]),
        (["seed=-1"], ["seed=-1 must be 0 to 4294967295"]),
        (["seed=null"], ["seed=None must be a whole number"]),
        (["train=maybe"], ["train=maybe must be true or false"]),
        (["test=3"], ["test=3 must be"]),
        (["optimized_metric=3"], ["optimized_metric=3 must be a text or null"]),
        (["ckpt_path=7"], ["ckpt_path=7 must be a text or null"]),
        (["matmul_precision=2"], ["matmul_precision=2 must be a text"]),
        (["model=null"], ["model=null: every run needs one; choose it with model=NAME"]),
        (["data=null"], ["data=null: every run needs one"]),
        (["strategy=null"], ["strategy=null: every run needs one"]),
        (["trainer=null"], ["trainer=null: every run needs one"]),
        (["optim=null"], ["optim.optimizer"]),
        (["trainer=cpu", "trainer.max_epochs=-1"], ["trainer.max_epochs=-1", "OneCycleLR", "trainer.max_steps"]),
        (["trainer=cpu", "trainer.limit_test_batches=0"], ["trainer.limit_test_batches=0", "use test=false"]),
        (["test=best", "trainer.limit_val_batches=0.0"], ["test=best", "trainer.limit_val_batches=0"]),
        (["test=best", "trainer.check_val_every_n_epoch=20"], ["trainer.check_val_every_n_epoch=20", "max_epochs=10"]),
        (["data._target_=lightning_dp.models.resnet20"], ["data.batch_size is not an argument of"]),
        (["data._target_=5"], ["data._target_=5 cannot be imported"]),
        (["data._target_=os.getcwd", "~data.batch_size", "~data.seed", "~data.num_workers"], ["make a LightningData"]),
        (["data=imagenet_shards", "data.root=none"], ["set data.root to the folder", "set data.train_shards"]),
        (
            ["data=imagenet", "data.on_broken=skip", "data.decoder=dali"],
            ["data.on_broken='skip' needs data.decoder='auto'"],
        ),
        (["data=imagenet", "data.crop=round"], ["data.crop='round' must be one of"]),
        (["--multirun", "hydra/launcher=nope", "seed=1,2"], ["hydra/launcher/nope"]),
        (["ckpt_path=best"], ["has no checkpoints/best.ckpt", "test=best keeps the best weights"]),
        (["--multirun", "strategy=ddp,nope"], ["Could not find 'strategy/nope'", "layered_sgd"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_is_named_with_the_remedy(fail, arguments, expected):
    message = fail(*arguments)
    for part in expected:
        assert part in message
    lines = [
        line for line in message.splitlines() if not line.startswith("\t")
    ]  # Hydra lists what there is, a line each
    assert len(lines) <= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(fail):
    assert "there is no GPU that torch can use; use trainer=cpu" in fail("trainer=gpu")


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


def test_a_wrong_checksum_ends_a_run_before_it_starts(fail, mirror, tmp_path_factory):
    (address, served), root = mirror, tmp_path_factory.mktemp("root")
    (served / "archive").write_bytes(b"not the archive")
    message = fail("data=cifar10", f"data.root={root}", "data.download=true", f"+data.url={address}/archive")
    assert "expected sha256" in message
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "extra"),
    [("launcher=joblib", "sweeps"), ("launcher=submitit_slurm", "sweeps"), ("sweeper=optuna", "search")],
)
def test_a_plugin_that_is_not_installed_is_named_with_its_extra(name, extra):
    group, _, option = name.partition("=")
    error = MissingConfigException(
        f"Could not find 'hydra/{group}/{option}'\n\nAvailable options in 'hydra/{group}':\n\tbasic"
    )
    assert explain(error) == f"hydra/{name} needs a plugin of Hydra: pip install 'lightning-dp[{extra}]'"


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="optuna is installed")
def test_a_search_without_optuna_is_refused(fail):
    assert fail("--multirun", "hparams_search=optuna").endswith("pip install 'lightning-dp[search]'")


def test_the_results_of_a_run_and_their_configuration_are_left_alone(monkeypatch, tmp_path):
    run = tmp_path / "runs" / "old"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("name: old\n")
    (run / "metrics.csv").write_text("epoch,step\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer=cpu", f"hydra.run.dir={run}"])
    handlers, level = list(logging.root.handlers), logging.root.level
    with pytest.raises(
        SystemExit, match="holds the results of a run, which this one would replace; continue that with"
    ):
        command_line.run(train.job, "train")
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert (run / ".hydra" / "config.yaml").read_text() == "name: old\n"
    assert (run / "metrics.csv").read_text() == "epoch,step\n"


def test_an_error_of_a_rank_without_a_log_file_has_its_traceback(monkeypatch, tmp_path):
    """Under torchrun, the run folder of other ranks is temporary."""
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": {"mode": "RUN"}})
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert str(job_error(str(tmp_path), ValueError("no data"))) == "rank 1: ValueError: no data\n"
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_under_torchrun_is_refused(fail, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "not torchrun" in fail("--multirun", "seed=1,2")
    assert "2 processes were started, for 1 devices" in fail("trainer=cpu")


def test_only_the_first_rank_of_a_launcher_has_a_run_folder():
    assert arguments_of_rank(["seed=1"], 0, "/elsewhere") == ["seed=1"]
    assert arguments_of_rank(["seed=1"], 1, "/elsewhere")[1] == "hydra.run.dir=/elsewhere"


def test_multirun_is_accepted_between_overrides():
    assert arguments_of_rank(["a=1", "-m", "b=1,2"], None, "/elsewhere") == ["-m", "a=1", "b=1,2"]


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
