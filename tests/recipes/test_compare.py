from __future__ import annotations

from itertools import permutations

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.models import CifarResNet, Classifier
from lightning_dp.runs import compare
from lightning_dp.runs.compare import choose_metrics, common_accuracy, main, read_sweep, table
from lightning_dp.runs.hydra_versions import VERSION_BASE, instantiate
from lightning_dp.runs.metrics import CURVES
from lightning_dp.runs.traffic import bytes_per_step
from tests.recipes.in_process import composed

HEADER = "agbn/is_global,epoch,step,test/acc,time/images_per_s,time/train_s,val/acc\n"


def job(folder, overrides, rows):
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(overrides, folder / ".hydra" / "overrides.yaml")
    config = composed(folder, "trainer=cpu", *overrides)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    (folder / "metrics.csv").write_text(HEADER + "".join(rows))
    (folder / CURVES).touch()  # drawn at the end


def rows(accuracies, seconds, test):
    """Two lines per epoch of ten steps, as Lightning writes them: validation, then the rest."""
    lines = []
    for epoch, (accuracy, now) in enumerate(zip(accuracies, seconds, strict=True)):
        step = 10 * epoch + 9
        lines += [f",{epoch},{step},,,,{accuracy}\n", f"{1.0 - epoch % 2},{epoch},{step},,{100 + epoch},{now},\n"]
    return [*lines, f",{len(accuracies)},{10 * len(accuracies)},{test},,,\n"]


@pytest.fixture
def sweep(tmp_path):
    both = ["trainer.devices=2"]
    job(tmp_path / "0", [*both, "strategy=ddp", "seed=1"], rows([0.5, 0.8], [10, 20], 0.7))
    job(tmp_path / "1", [*both, "strategy=ddp", "seed=2"], rows([0.7, 0.9], [10, 30], 0.9))
    job(tmp_path / "2", [*both, "strategy=layered_sgd_single", "seed=1"], rows([0.6, 0.7], [5, 8], 0.6))
    return tmp_path


def test_jobs_that_differ_in_their_seed_are_one_row_with_its_spread(sweep):
    jobs = read_sweep(sweep, "val/acc")
    assert common_accuracy(jobs) == 0.7
    header, _, ddp, layered = table(jobs, "val/acc", 0.7).splitlines()
    assert "s of training to val/acc >= 0.7" in header
    cells = [cell.strip() for cell in ddp.strip("|").split("|")]
    assert cells[:4] == ["strategy=ddp", "2", "0.8000 (0.7000 to 0.9000)", "101"]
    assert cells[4] == "50", "half of the steps had global statistics"
    assert cells[6] == "15.0 (10.0 to 20.0)"
    assert [cell.strip() for cell in layered.strip("|").split("|")][:3] == [
        "strategy=layered_sgd_single",
        "1",
        "0.6000",
    ]


def test_jobs_may_be_in_folders_of_folders(tmp_path):
    """As with ``hydra.sweep.subdir='${data.batch_size}/${seed}'``."""
    for size, seed in ((64, 2), (8, 1), (64, 1)):
        job(tmp_path / str(size) / str(seed), [f"data.batch_size={size}", f"seed={seed}"], rows([0.5], [10], 0.7))
    with pytest.raises(FileNotFoundError, match="give the folder of a sweep"):
        read_sweep(tmp_path, "val/acc")
    (tmp_path / "multirun.yaml").touch()
    assert [each.label for each in read_sweep(tmp_path, "val/acc")] == [
        f"data.batch_size={size}" for size in (8, 64, 64)
    ]


def test_a_job_that_was_continued_is_in_the_row_of_the_others(tmp_path):
    job(tmp_path / "0", ["strategy=ddp", "seed=1"], rows([0.5], [10], 0.7))
    job(tmp_path / "1", ["strategy=ddp", "seed=2", "ckpt_path=last"], rows([0.5], [10], 0.7))
    assert [job.label for job in read_sweep(tmp_path, "val/acc")] == 2 * ["all jobs"]


def test_an_override_that_names_another_value_is_shown_as_it_was_written(tmp_path):
    overrides = ['+callbacks.own.path="${run_dir}/a"', 'optim.lr="${oc.env:NOT_SET_HERE}"']
    for number, override in enumerate(overrides):
        job(tmp_path / str(number), ["seed=1"], rows([0.5], [10], 0.7))
        OmegaConf.save([override], tmp_path / str(number) / ".hydra" / "overrides.yaml")
    assert [job.label for job in read_sweep(tmp_path, "val/acc")] == overrides


def test_a_job_that_was_repeated_by_a_command_of_its_own_is_in_the_row_of_the_others(tmp_path):
    """Hydra spells the overrides of a sweep's jobs itself: false is False there, and 1e-2 is 0.01."""
    sweep = ["trainer.enable_progress_bar=False", "optim.lr=0.01", "trainer.devices=[0,1]"]
    single = ["trainer.enable_progress_bar=false", "optim.lr=1e-2", "trainer.devices=[0, 1]", "ckpt_path=last"]
    for number, overrides in enumerate((sweep, single)):
        job(tmp_path / str(number), [*overrides, f"seed={number}"], rows([0.5], [10], 0.7))
    assert [job.label for job in read_sweep(tmp_path, "val/acc")] == 2 * ["all jobs"]


def test_jobs_from_other_checkpoints_are_rows_of_their_own(tmp_path):
    for name in ("a", "b"):
        job(tmp_path / name, [f"ckpt_path={name}/last.ckpt", "seed=1"], rows([0.5], [10], 0.7))
    assert [job.label for job in read_sweep(tmp_path, "val/acc")] == ["ckpt_path=a/last.ckpt", "ckpt_path=b/last.ckpt"]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_job_that_has_diverged_has_no_result_whatever_its_place(tmp_path, order):
    losses = [[2.0, 0.5], [0.9, 0.7], [3.0, "nan"]]
    for name, place in enumerate(order):
        job(tmp_path / str(name), [f"seed={name}"], rows(losses[place], [10, 20], losses[place][-1]))
        file = tmp_path / str(name) / "metrics.csv"
        file.write_text(file.read_text().replace("val/acc", "val/loss"))
    jobs = read_sweep(tmp_path, "val/loss")
    assert common_accuracy(jobs) == 3.0
    assert (
        table(jobs, "val/loss", None)
        .splitlines()[-1]
        .startswith("| all jobs | 3 | 0.6000 (0.5000 to 0.7000), 1 without |")
    )


@pytest.mark.parametrize(
    ("metric", "mode", "best"),
    [
        ("val/error", None, 5.0),
        ("val_err", None, 5.0),
        ("val/f1", None, 7.0),
        ("val/f1", "min", 5.0),
        ("terrain", None, 7.0),
    ],
)
def test_which_values_are_better_is_told_by_the_name_or_the_user(tmp_path, metric, mode, best):
    for name, values in (("0", [9, 5]), ("1", [7, 3])):
        job(tmp_path / name, [f"seed={name}"], rows(values, [10, 20], values[-1]))
        file = tmp_path / name / "metrics.csv"
        file.write_text(file.read_text().replace("val/acc", metric))
    jobs = read_sweep(tmp_path, metric, mode=mode)
    assert common_accuracy(jobs) == best
    assert f"to {metric} {'<=' if best == 5.0 else '>='} {best:g} " in table(jobs, metric, best)


def test_an_accuracy_that_a_job_has_not_reached_is_named_as_such(sweep):
    *_, ddp, layered = table(read_sweep(sweep, "val/acc"), "val/acc", 0.85).splitlines()
    assert ddp.rstrip(" |").endswith("30.0, 1 without")
    assert layered.rstrip(" |").endswith("| -")


@pytest.mark.ci
def test_a_validation_within_an_epoch_has_its_own_time(tmp_path):
    """Two epochs of ten steps and 20 s each, then one that has not ended; three validations between their ends."""
    within = [",0,4,,,,0.5\n", ",0,9,,100,20,\n", ",1,11,,,,0.8\n", ",1,19,,100,40,\n", ",2,24,,,,0.9\n"]
    job(tmp_path / "0", ["seed=1"], within)
    (found,) = read_sweep(tmp_path, "val/acc", count_bytes=False)
    assert found.curve == [(pytest.approx(10), 0.5), (pytest.approx(24), 0.8)]


@pytest.mark.ci
def test_a_validation_has_its_own_time_whatever_the_module_logs_as_its_step(tmp_path):
    """Such as the epoch. Lightning names no epoch in that row."""
    own = [",,0,,,,0.5\n", ",0,9,,100,20,\n", ",,1,,,,0.8\n", ",1,19,,100,40,\n", ",2,20,0.8,,,\n"]
    job(tmp_path / "0", ["seed=1"], own)
    (found,) = read_sweep(tmp_path, "val/acc", count_bytes=False)
    assert found.curve == [(pytest.approx(20), 0.5), (pytest.approx(40), 0.8)]


@pytest.mark.ci
def test_the_command_writes_a_table_and_a_plot(sweep, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep)])
    compare.main()
    assert (sweep / "compare.md").read_text().strip() in capsys.readouterr().out
    assert (sweep / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_without_its_hidden_folder_is_not_left_out(sweep, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep)])
    for name in ("1", "0", "2"):
        (sweep / name / ".hydra").rename(sweep / f"hidden_{name}")
        with pytest.raises(SystemExit, match=r"error: .*/[01] has a metrics\.csv and no \.hydra/overrides\.yaml"):
            compare.main()


@pytest.mark.parametrize("line", ["|  |", "written to"])
def test_a_pipe_that_is_closed_is_an_error_in_one_line(sweep, monkeypatch, line):
    """As of ``compare.py SWEEP_DIR | head``."""

    def closed(*texts, **options):
        if texts[0].strip().startswith(line):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep)])
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(SystemExit, match=r"^error: \[Errno 32\] Broken pipe$"):
        compare.main()


def test_the_table_of_a_folder_that_cannot_be_written_to_is_printed(sweep, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep)])
    (sweep / "compare.md").mkdir()  # as an error of writing: root may write to any folder
    with pytest.raises(SystemExit, match=r"error: .*compare\.md"):
        compare.main()
    assert "| test/acc |" in capsys.readouterr().out


@pytest.mark.ci
def test_jobs_without_validation_are_compared_by_their_training(tmp_path, monkeypatch, capsys):
    for name, overrides, accuracy in (("0", [], 0.5), ("1", ["strategy=layered_sgd_single"], 0.6)):
        job(tmp_path / name, overrides, [])
        (tmp_path / name / "metrics.csv").write_text(
            f"epoch,step,test/acc,time/train_s,train/acc,val/acc\n0,9,,3.0,{accuracy},\n1,20,0.7,,,\n"
        )
    monkeypatch.setattr("sys.argv", ["compare.py", str(tmp_path)])
    main()
    header, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert "s of training to train/acc >= 0.5" in header
    assert first.startswith("| defaults | 1 | 0.7000 |")
    assert second.startswith("| strategy=layered_sgd_single | 1 | 0.7000 |")


@pytest.mark.ci
def test_unfinished_jobs_are_marked_and_have_no_result(sweep, capsys, monkeypatch):
    """One that was killed after its first epoch, with a row cut by a full disk, and one before it logged anything."""
    job(sweep / "3", ["trainer.devices=2", "strategy=ddp", "seed=3"], [",0,9,,,,0.99\n", "1.0,0,9,,100,5,\n", ",0,1"])
    (sweep / "3" / CURVES).unlink()
    job(sweep / "4", ["trainer.devices=2", "strategy=layered_sgd_single", "seed=2"], [])
    (sweep / "4" / "metrics.csv").unlink()
    (sweep / "4" / CURVES).unlink()
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep)])
    main()
    header, _, ddp, layered, *_ = capsys.readouterr().out.splitlines()
    assert header.startswith("|  | jobs | test/acc | images/s |")
    assert "val/acc >= 0.7" in header, "what every finished job has reached"
    assert ddp.startswith("| strategy=ddp | 3 (1 unfinished) | 0.8000 (0.7000 to 0.9000), 1 without |")
    assert layered.startswith("| strategy=layered_sgd_single | 2 (1 unfinished) | 0.6000, 1 without |")


@pytest.mark.ci
def test_without_a_test_the_column_is_that_of_the_metric(tmp_path, capsys, monkeypatch):
    for name, seed in (("0", 1), ("1", 2)):
        job(tmp_path / name, [f"seed={seed}", "test=false"], rows([0.5, 0.8], [10, 20], "")[:-1])
    (tmp_path / "1" / CURVES).unlink()
    monkeypatch.setattr("sys.argv", ["compare.py", str(tmp_path)])
    main()
    header, _, only, *_ = capsys.readouterr().out.splitlines()
    assert header.startswith("|  | jobs | val/acc |")
    assert only.startswith("| all jobs | 2 (1 unfinished) | 0.8000, 1 without |")


@pytest.mark.ci
def test_every_group_is_in_the_legend_once(sweep, monkeypatch):
    """Also one whose first job has no curve."""
    (sweep / "0" / "metrics.csv").write_text(HEADER)
    drawn = []
    monkeypatch.setattr(compare.Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    compare.draw(read_sweep(sweep, "val/acc"), "val/acc", sweep / "plot.png")
    curves, _ = drawn[0].axes
    assert [text.get_text() for text in curves.get_legend().get_texts()] == [
        "strategy=ddp",
        "strategy=layered_sgd_single",
    ]


def test_of_a_loss_the_lower_value_is_the_better_one(tmp_path):
    for name, losses in (("0", [2.0, 0.5]), ("1", [0.9, 0.7])):
        job(tmp_path / name, ["trainer.devices=1"], rows(losses, [10, 20], 0.5))
        file = tmp_path / name / "metrics.csv"
        file.write_text(file.read_text().replace("val/acc", "val/loss"))
    first, second = read_sweep(tmp_path, "val/loss")
    assert common_accuracy([first, second]) == 0.7
    assert [first.time_to(0.7), second.time_to(0.7)] == [20, 20]


def test_a_later_test_of_other_weights_is_not_the_result_of_a_job(sweep):
    """With ``train=false ckpt_path=best`` in the folder of one job. Lightning logs it with step 0."""
    before = [each.accuracy for each in read_sweep(sweep, "val/acc")]
    with open(sweep / "0" / "metrics.csv", "a") as file:
        file.write(",0,0,0.99,,,\n")
    assert [each.accuracy for each in read_sweep(sweep, "val/acc")] == before


def test_a_later_test_of_one_job_leaves_the_metric_of_jobs_that_do_not_test(tmp_path):
    for name, accuracies in (("0", [0.5, 0.8]), ("1", [0.4, 0.6])):
        job(tmp_path / name, [f"optim.lr=0.{name}", "test=false"], rows(accuracies, [10, 20], 0.0)[:-1])
    with open(tmp_path / "0" / "metrics.csv", "a") as file:
        file.write(",0,0,0.99,,,\n")
    metric, result = choose_metrics(tmp_path, None)
    assert result == "val/acc"
    assert [each.accuracy for each in read_sweep(tmp_path, metric, result)] == [0.8, 0.6]


def test_a_later_test_has_no_time_whatever_its_metrics_are_called(sweep):
    """Else the jobs would have reached it after 0 seconds."""
    for file in sweep.glob("*/metrics.csv"):
        file.write_text(file.read_text().replace("test/acc", "test_acc") + ",0,0,0.99,,,\n")
    jobs = read_sweep(sweep, "test_acc", "test_acc")
    assert [each.accuracy for each in jobs] == [0.7, 0.9, 0.6]
    assert [each.curve for each in jobs] == [[], [], []]


def test_an_epoch_counts_by_its_steps_in_the_share_of_global_statistics(tmp_path):
    """As where ``max_steps`` ends a run within an epoch: here after two of its ten steps."""
    *lines, end, test = rows([0.5, 0.6, 0.7], [10, 20, 22], 0.7)
    job(tmp_path / "0", ["seed=1"], [*lines, end.replace(",29,", ",21,"), test.replace(",30,", ",22,")])
    assert read_sweep(tmp_path, "val/acc")[0].global_share == pytest.approx((10 + 2) / 22)


def test_epochs_before_a_continuation_may_have_been_without_global_statistics(tmp_path):
    validation, end, *others = rows([0.5, 0.6, 0.7], [10, 20, 30], 0.7)
    job(tmp_path / "0", ["seed=1"], [validation, end.removeprefix("1.0"), *others])
    assert read_sweep(tmp_path, "val/acc")[0].global_share == pytest.approx(10 / 30)


@pytest.mark.parametrize(("metric", "is_warned"), [("test/acc", True), ("val/acc", False)])
def test_a_metric_that_is_logged_after_training_has_no_time(sweep, monkeypatch, caplog, metric, is_warned):
    """All jobs test with more than 0.5: a column of jobs that had not reached it would be wrong."""
    options = ["--metrics-only", f"--metric={metric}", "--accuracy=0.5"]
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep), *options])
    monkeypatch.setattr(compare, "draw", lambda *_: None)
    main()
    assert (f"--metric {metric}: the plot has no curve of it" in caplog.text) is is_warned


def test_a_time_to_no_number_is_an_error(sweep, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep), "--accuracy=nan"])
    with pytest.raises(SystemExit, match="--accuracy nan must be finite"):
        main()


def test_a_sweep_without_the_usual_metrics_names_those_that_it_has(tmp_path):
    """Nobody has given --metric, so the error must not say that it is wrong."""
    job(tmp_path / "0", [], rows([0.5], [10], 0.0)[:-1])
    file = tmp_path / "0" / "metrics.csv"
    file.write_text(file.read_text().replace("/acc", "/f1"))
    with pytest.raises(
        ValueError, match=r"^no job of .* has logged val/acc or train/acc; give --metric one of .*val/f1"
    ):
        choose_metrics(tmp_path, None)


@pytest.mark.ci
def test_a_model_that_cannot_be_built_here_costs_the_bytes_only(sweep, caplog, monkeypatch, capsys):
    for path in sweep.glob("*/.hydra/config.yaml"):
        path.write_text(path.read_text().replace("lightning_dp.models.Classifier", "not_here.Net"))
    assert [each.num_bytes for each in read_sweep(sweep, "val/acc")] == [None] * 3
    assert "bytes are not counted: the model of" in caplog.text
    caplog.clear()
    monkeypatch.setattr("sys.argv", ["compare.py", str(sweep), "--metrics-only"])
    main()
    assert "| strategy=ddp | 2 | 0.8000 (0.7000 to 0.9000) |" in capsys.readouterr().out
    assert not caplog.records, "nothing was built"


def test_bytes_are_counted_if_the_data_is_where_the_job_was_started(sweep, caplog):
    for place in sweep.glob("*/.hydra"):
        config = OmegaConf.load(place / "config.yaml")
        config.where = "${hydra:runtime.cwd}/data"
        config.name = "${oc.env:NOT_SET_HERE}"  # nothing here reads it
        OmegaConf.save(config, place / "config.yaml")
        OmegaConf.save({"hydra": {"runtime": {"cwd": "/home"}}}, place / "hydra.yaml")
    read_sweep(sweep, "val/acc")
    assert not caplog.records


def num_bytes(tmp_path, *overrides, share=0.0):
    return bytes_per_step(composed(tmp_path, "trainer=cpu", *overrides), share)


class OwnModule(Classifier):
    """May make layers in a hook, freeze some, or call backward twice in a step."""


class OwnStrategy(DDPStrategy):
    """May register a hook of its own."""


@pytest.mark.parametrize(
    "options",
    [
        [f"model._target_={__name__}.OwnModule"],
        [f"strategy._target_={__name__}.OwnStrategy"],
        [f"+callbacks.own._target_={__name__}.OwnCallback"],
        ["+callbacks.own._target_=pytorch_lightning.callbacks.BackboneFinetuning"],
        ["+callbacks.own={_target_:pytorch_lightning.callbacks.GradientAccumulationScheduler,scheduling:{2:4}}"],
        ["+trainer.plugins=[{_target_:pytorch_lightning.plugins.DoublePrecision}]"],
        ["+strategy.mixed_precision={_target_:builtins.dict}"],
        ["strategy=krizhevsky_hybrid", "model=cifar_alexnet", f"data._target_={__name__}.OwnData"],
    ],
)
def test_bytes_are_unknown_where_a_part_of_the_users_may_decide_what_is_sent(tmp_path, options):
    assert num_bytes(tmp_path, "trainer.devices=2", *options) is None


def test_a_network_of_the_users_has_bytes_unless_it_sends_more_than_gradients_of_32_bits(tmp_path):
    config = composed(tmp_path, "trainer=cpu", "trainer.devices=2")

    def of_network(**network):
        return bytes_per_step(config | {"model": config["model"] | {"model": network}})

    linear = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}
    assert of_network(**linear) == 32
    for dtype in ("float64", "bfloat16", "complex64"):
        found = of_network(**linear, dtype={"_target_": "hydra.utils.get_object", "path": f"torch.{dtype}"})
        assert found is None, dtype
    assert of_network(_target_="torch.nn.SyncBatchNorm", num_features=3) is None


@pytest.mark.ci
def test_bytes_are_those_of_the_strategys_formula(tmp_path):
    elements = 269_722
    assert num_bytes(tmp_path, "trainer.devices=1") == 0
    assert num_bytes(tmp_path, "trainer.devices=2") == 4 * elements
    four = ("trainer.devices=2", "trainer.num_nodes=2")
    assert num_bytes(tmp_path, *four) == 4 * elements * 1.5
    # A leader sends once around the ring of two and once to its member; the member sends once to the leader.
    assert num_bytes(tmp_path, *four, "strategy=layered_sgd") == 4 * elements * 1.5
    assert num_bytes(tmp_path, "trainer.devices=[0,3]") == 4 * elements
    assert num_bytes(tmp_path, "trainer.devices=auto") is None
    assert num_bytes(tmp_path, "trainer.devices=-1") is None
    single = num_bytes(tmp_path, *four, "strategy=layered_sgd_single")
    assert single == num_bytes(tmp_path, *four), "groups of one are a ring of all"
    assert num_bytes(tmp_path, *four, "strategy=layered_sgd", "strategy.compression=int8") is None
    # Half for each of reduce-scatter and two gathers inside the group, and half around the ring between groups.
    if torch.__version__ >= (2, 10):
        assert num_bytes(tmp_path, *four, "strategy=layered_fsdp") == 4 * elements * 2
        assert num_bytes(tmp_path, *four, "strategy=layered_fsdp", "strategy.reshard_after_forward=false") == single
    channels = [16] * 7 + [32] * 6 + [64] * 6
    statistics = sum(4 * count + 1 for count in channels) * 4
    assert num_bytes(tmp_path, "trainer.devices=2", "callbacks=agbn", share=0.5) == 4 * elements + statistics / 2
    assert num_bytes(tmp_path, "trainer.devices=2", share=0.5) is None, "who shares them is not known"


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ["trainer.precision=bf16-true"],
        ["+trainer.sync_batchnorm=true"],
        ["+strategy.ddp_comm_hook={_target_:builtins.dict}"],
        ["strategy._target_=pytorch_lightning.strategies.FSDPStrategy", "~strategy.gradient_as_bucket_view"],
    ],
)
def test_bytes_that_the_formulas_do_not_count_are_not_said(tmp_path, options):
    assert num_bytes(tmp_path, "trainer.devices=2", "trainer.precision=bf16-mixed") is not None
    assert num_bytes(tmp_path, "trainer.devices=2", *options) is None


@pytest.mark.ci
def test_statistics_travel_within_their_group_and_in_each_batch(tmp_path):
    agbn = ("trainer.devices=4", "callbacks=agbn")
    group = "callbacks.adaptive_global_batch_norm.group_size"
    gradients = num_bytes(tmp_path, *agbn)
    of_all = num_bytes(tmp_path, *agbn, share=1.0) - gradients
    assert num_bytes(tmp_path, *agbn, f"{group}=1", share=1.0) == gradients
    assert num_bytes(tmp_path, *agbn, f"{group}=2", share=1.0) == gradients + of_all / 3
    four = "trainer.accumulate_grad_batches=4"
    assert num_bytes(tmp_path, *agbn, four) == gradients, "once in a step"
    assert num_bytes(tmp_path, *agbn, four, share=1.0) == gradients + 4 * of_all


@pytest.mark.ci
def test_features_and_shards_travel_in_each_batch(tmp_path):
    four = "trainer.accumulate_grad_batches=4"
    alexnet = ("trainer.devices=2", "model=cifar_alexnet", "optim=krizhevsky", "strategy=krizhevsky_hybrid")
    one, accumulated = num_bytes(tmp_path, *alexnet), num_bytes(tmp_path, *alexnet, four)
    head = (accumulated - one) / 3
    module = instantiate(composed(tmp_path, *alexnet)["model"])
    trunk = sum(value.numel() for name, value in module.named_parameters() if not name.startswith("model.head."))
    assert one - head == 4 * trunk, "its gradients travel once in a step"
    if torch.__version__ >= (2, 10):
        nodes = ("trainer.devices=2", "trainer.num_nodes=2", "strategy=layered_fsdp")
        # Half for each of reduce-scatter and two gathers inside the group, and half around the ring between groups.
        assert num_bytes(tmp_path, *nodes, four) == 4 * 269_722 * (4 * 1.5 + 0.5)


class Frozen(CifarResNet):
    """Trains its first parameter only."""

    def __init__(self, **options):
        super().__init__(depth=20, **options)
        self.requires_grad_(False)
        next(self.parameters()).requires_grad_()


@pytest.mark.parametrize("strategy", ["ddp", "layered_sgd_single"])
def test_gradients_of_frozen_parameters_do_not_travel(tmp_path, strategy):
    own = f"model.model._target_={__name__}.Frozen"
    assert num_bytes(tmp_path, "trainer.devices=2", f"strategy={strategy}", own) == 4 * 16 * 3 * 9


def test_a_sharded_head_sends_less_than_its_gradients(tmp_path):
    alexnet = ("trainer.devices=2", "model=cifar_alexnet", "optim=krizhevsky")
    hybrid = num_bytes(tmp_path, *alexnet, "strategy=krizhevsky_hybrid", "data.batch_size=16")
    assert 0 < hybrid < num_bytes(tmp_path, *alexnet) / 2


def test_the_search_with_optuna_composes():
    pytest.importorskip("optuna", reason="pip install hydra-optuna-sweeper")
    from hydra import compose, initialize_config_dir

    from tests.recipes.conftest import ROOT

    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        overrides = ["hparams_search=optuna", "optimized_metric=val/loss", "optimized_mode=min"]
        config = compose("train", overrides, return_hydra_config=True)
    assert config.hydra.sweeper.direction == "minimize"
    assert OmegaConf.to_container(config.hydra.sweeper.params) == {"optim.lr": "tag(log, interval(0.01, 0.5))"}
