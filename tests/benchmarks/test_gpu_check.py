"""gpu_check: what it says without a GPU, its parts on the CPU, and how it reads profiles and reports."""

from __future__ import annotations

from pathlib import Path

import gpu_check
import gpu_step_time
import pytest
import torch
from support import gpu_parts, gpu_report, training_tests
from support.gpu_profile import hidden_share, is_communication, is_computation, merged, summarize

from tests.ranks import run_processes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gpu_check itself runs there")


def test_without_a_gpu_it_says_so_and_measures_nothing(capsys, tmp_path):
    gpu_check.main(["--output", str(tmp_path)])
    assert capsys.readouterr().out.strip() == gpu_check.NO_GPU
    assert list(tmp_path.iterdir()) == []


def test_every_part_of_the_table_and_the_plot_is_written(tmp_path):
    times = {gpu_parts.SYNC: [2e-4, 3e-4], gpu_parts.GLOBAL: [1e-4, 2e-4], gpu_parts.LOCAL: [1e-4, 1e-4]}
    overlap = {"hidden_share": 0.75, "communication_ms": 10.0, "computation_ms": 80.0, "num_copies": 12}
    figures = {
        "tests": {
            "nccl": {"passed": 68, "failed": 1, "skipped": 0},
            "nccl-legacy": {"passed": 30, "failed": 2, "skipped": 4},
        },
        "batch_norm": {"nccl, 1 rank, float32": {"32 x 64 x 112 x 112": times}},
        "resnet50": {"gloo, 2 ranks": {"DDP": [100.0, 200.0], "hybrid": [90.0, 180.0]}},
        "overlap": {"layered SGD, step": overlap},
        "resnet20": {"bfloat16": 20000.0},
        "cifar10": {"accuracy": 0.9125, "took_s": 600.0},
    }
    results = {part: {"figures": figures[part], "problem": None, "took_s": 1.0} for part in gpu_check.PARTS}
    results["resnet20"] = {"figures": None, "problem": "stopped after 7 s", "took_s": 7.0}
    table = gpu_report.table(results)
    for cell in (
        "| nccl | 68 | 1 | 0 |",
        "| nccl-legacy | 30 | 2 | 4 |",
        "1.75 (1.62-1.88)",
        "| 135.0 | 0.90 (0.90-0.90) |",
        "| 75% |",
        "stopped after 7 s",
        "| 0.9125 | 600 |",
    ):
        assert cell in table
    assert gpu_report.failed_tests(results) == 3
    assert gpu_report.failed_tests({}) == 0
    gpu_report.draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    gpu_report.draw({}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_part_that_runs_past_its_time_is_stopped_and_named(tmp_path, monkeypatch):
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    result = gpu_check.run_part("batch_norm", 1.0, tmp_path, [])
    assert (result["figures"], result["problem"]) == (None, "stopped after 1 s")
    script.write_text("import sys\nsys.exit(3)\n")
    assert gpu_check.run_part("batch_norm", 60.0, tmp_path, [])["problem"] == "exit status 3"


def test_both_engines_of_nccl_are_measured_where_torch_has_two():
    assert gpu_parts.nccl_engines("2.14.1+cu130") == {"nccl": {}}
    legacy = {"TORCH_DIST_USE_NCCL2": "0"}
    assert gpu_parts.nccl_engines("2.15.0") == {"nccl": {}, "nccl-legacy": legacy}
    creators = torch.distributed.distributed_c10d
    assert len(gpu_parts.nccl_engines(torch.__version__)) == 1 + hasattr(creators, "_create_nccl2_process_group")


def test_the_tests_of_an_engine_run_with_its_environment(monkeypatch):
    def write_report(command, env, **_):
        report = next(Path(word.removeprefix("--junitxml=")) for word in command if word.startswith("--junitxml="))
        chosen = command[command.index("-k") + 1] if "-k" in command else "all"
        passed = {("NCCL", "0"): 7, ("all", None): 9}[chosen, env.get("TORCH_DIST_USE_NCCL2")]
        report.write_text(f'<a><testsuite tests="{passed}" failures="0" errors="0" skipped="0"/></a>')

    monkeypatch.setattr(training_tests.subprocess, "run", write_report)
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    figures = gpu_check.measure("tests", gpu_check.parser().parse_args(["--smoke"]))
    assert {engine: counts["passed"] for engine, counts in figures.items()} == {"nccl": 9, "nccl-legacy": 7}


def batch_norm_on_the_cpu(rank):
    gpu_parts.SHAPES = [(4, 3)]
    return gpu_parts.batch_norm("gloo", torch.float32, 2, 1, 2)


def test_batch_norm_is_measured_on_the_cpu_without_sync_batch_norm():
    for results in run_processes(2, batch_norm_on_the_cpu):
        (times,) = results.values()
        assert times.keys() == {gpu_parts.LOCAL, gpu_parts.GLOBAL}
        assert all(len(values) == 2 and min(values) > 0 for values in times.values())
    rows = gpu_report.table({"batch_norm": {"figures": {"gloo": results}, "problem": None, "took_s": 1.0}})
    assert "needs a GPU" in rows


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_strategies_take_turns_on_the_cpu(ranks):
    names = list(gpu_parts.STRATEGIES) if ranks > 1 else ["DDP"]
    for rates in run_processes(ranks, train_on_the_cpu, names):
        assert list(rates) == names
        assert all(len(values) == 2 and min(values) > 0 for values in rates.values())


def train_on_the_cpu(rank, strategies):
    return gpu_parts.images_per_s("ResNet-20", strategies, "gloo", "32-true", (2, 8), 4, 2)


@pytest.mark.slow
def test_a_run_without_a_gpu_has_no_activities_of_one():
    for found in run_processes(2, profile_on_the_cpu):
        assert found == {"hidden_share": None, "communication_ms": 0, "computation_ms": 0, "num_copies": 0}


def profile_on_the_cpu(rank):
    return gpu_parts.overlap("layered SGD, step", "gloo", 2, 32)


def test_the_hidden_share_is_that_of_the_time_not_of_the_copies():
    assert merged([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert hidden_share([(0, 4), (2, 6)], [(1, 2), (1, 3), (5, 10)]) == 3 / 6
    assert hidden_share([(0, 1)], []) == 0.0
    assert hidden_share([], [(0, 1)]) is None


def test_copies_and_messages_are_told_from_kernels():
    names = ["Memcpy DtoH (Device -> Pinned)", "ncclDevKernel_AllReduce", "void cudnn::bn_fw_tr", "Memset (Device)"]
    assert [is_communication(name) for name in names] == [True, True, False, False]
    assert [is_computation(name) for name in names] == [False, False, True, False]
    found = summarize([("Memcpy HtoD (Pinned -> Device)", (0.0, 2000.0)), ("sgemm", (1000.0, 5000.0))])
    assert found == {"hidden_share": 0.5, "communication_ms": 2.0, "computation_ms": 4.0, "num_copies": 1}


def test_reports_of_pytest_and_of_recipes_are_read():
    suite = '<testsuites><testsuite tests="10" failures="1" errors="2" skipped="3"></testsuite></testsuites>'
    assert training_tests.counts_of(suite) == {"passed": 4, "failed": 3, "skipped": 3}
    assert training_tests.accuracy_of("epoch 1\ntest/acc=0.9125  run_dir=runs/x\n") == 0.9125
    names = {path.name for path in training_tests.files_with_gpu_tests()}
    assert names >= {"test_gpu.py", "test_global_batch_norm_cuda.py", "test_strategy.py", "test_ring.py"}
    with pytest.raises(ValueError, match="cifar10 needs the images; give --root DIR"):
        training_tests.run_cifar10(None, None, small=False)


def test_the_computed_step_times_are_those_of_the_page():
    times = gpu_step_time.step_times_s(gpu_step_time.resnet50(), 10, 12)
    milliseconds = {name: round(1e3 * seconds) for name, seconds in times.items()}
    expected = {"DDP, ring": 236, "DDP, tree": 208, "layered SGD, gloo": 291, "layered SGD, NCCL": 202, "bound": 200}
    assert milliseconds == expected
    row = "| 10 Gbit/s | " + " | ".join(map(str, expected.values()))
    assert row in (training_tests.ROOT / "docs" / "measurements" / "gpu.md").read_text()


def test_the_gpu_check_is_one_command():
    makefile = (training_tests.ROOT / "Makefile").read_text()
    assert 'gpu-check:\n\tPYTHONPATH="$(CURDIR)" $(PYTHON) benchmarks/gpu_check.py' in makefile
