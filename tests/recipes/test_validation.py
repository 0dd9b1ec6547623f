from __future__ import annotations

import logging

import pytest

from lightning_dp.runs.validation import check_arguments, count_processes, targets


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_gpus", "expected"),
    [
        ("cpu", 2, 8, 2),
        ("cpu", "auto", 8, 1),
        ("cpu", "3", 0, 3),
        ("gpu", 4, 8, 4),
        ("gpu", "auto", 8, 8),
        ("gpu", -1, 8, 8),
        ("gpu", [1, 5], 8, 2),
        ("auto", 2, 8, 2),
        ("auto", "auto", 8, 8),
        ("auto", 2, 0, 2),
    ],
)
def test_processes_are_counted_as_the_trainer_counts_devices(accelerator, devices, num_gpus, expected):
    assert count_processes(accelerator, devices, num_gpus=num_gpus, num_cores=4) == expected


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_gpus", "message"),
    [
        ("gpu", 1, 0, "no GPU"),
        ("gpu", 9, 8, "trainer.devices=9, but there are 8 GPUs; use at most 8"),
        ("gpu", [0, 8], 8, "there are 8 GPUs"),
        ("auto", 9, 8, "there are 8 GPUs"),
        ("cpu", 33, 8, "4 CPU cores; use at most 32 ranks"),
        ("cpu", 0, 8, "must be 1 or more"),
        ("cpu", [0, 1], 8, "must be 1 or more"),
        ("cpu", 1.5, 8, "must be 1 or more"),
    ],
)
def test_devices_that_do_not_exist_are_refused(accelerator, devices, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        count_processes(accelerator, devices, num_gpus=num_gpus, num_cores=4)


def test_more_ranks_than_cores_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert count_processes("cpu", 5, num_gpus=0, num_cores=4) == 5
    assert "5 ranks share 4 CPU cores" in caplog.text


def test_every_object_of_every_configuration_exists_and_accepts_its_arguments():
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from tests.recipes.conftest import ROOT

    conf = ROOT / "conf"
    options = {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in conf.iterdir()}
    checked = set()
    with initialize_config_dir(str(conf), version_base="1.3"):
        for group, names in options.items():
            for name in names if group not in ("hydra", "hparams_search") else ():
                config = compose("train", [f"{group}={name}", "run_dir=here"])
                for path, node in targets(OmegaConf.to_container(config, resolve=True)):
                    check_arguments(path, node)
                    checked.add(node["_target_"])
    assert {
        "lightning_dp.LayeredSGDStrategy",
        "lightning_dp.AdaptiveGlobalBatchNorm",
        "lightning_dp.Plateau",
    } <= checked
