"""Answers to: how many GPUs, which batch size, which strategy? Formulas, and measurements that they start from."""

from lightning_dp.planner.convolutions.algorithms import AlgorithmsHandle, algorithms_for, apply_algorithms
from lightning_dp.planner.convolutions.measure import Layer, LayerKind, measure_memory, measure_peak_bytes, trace_layers
from lightning_dp.planner.convolutions.measured_plans import (
    convolution_choices,
    measure_candidates,
    measure_step,
    plan_batch_size,
)
from lightning_dp.planner.convolutions.memory import ConvShape, MemoryModel, convolution_memory_bytes
from lightning_dp.planner.convolutions.program import BatchPlan, Candidate, Choice, choose_algorithms, choose_batch_size
from lightning_dp.planner.diagnose import Diagnose
from lightning_dp.planner.find_batch_size import BatchSizeTrials, FindBatchSize, try_batch_sizes
from lightning_dp.planner.formulas import (
    amdahl_efficiency,
    amdahl_speedup,
    choose_num_gpus,
    choose_num_parameter_servers,
    max_overhead_ratio,
)
from lightning_dp.planner.network import Link, Network
from lightning_dp.planner.probe import probe_compressors, probe_network
from lightning_dp.planner.report import Diagnosis, Prediction, make_diagnosis, read_overrides
from lightning_dp.planner.simulation import METHODS, Method, StepTime, simulate
from lightning_dp.planner.workload import Block, Head, LayerProfile, Recomputation, StepProfile, Workload

__all__ = [
    "METHODS",
    "AlgorithmsHandle",
    "BatchPlan",
    "BatchSizeTrials",
    "Block",
    "Candidate",
    "Choice",
    "ConvShape",
    "Diagnose",
    "Diagnosis",
    "FindBatchSize",
    "Head",
    "Layer",
    "LayerKind",
    "LayerProfile",
    "Link",
    "MemoryModel",
    "Method",
    "Network",
    "Prediction",
    "Recomputation",
    "StepProfile",
    "StepTime",
    "Workload",
    "algorithms_for",
    "amdahl_efficiency",
    "amdahl_speedup",
    "apply_algorithms",
    "choose_algorithms",
    "choose_batch_size",
    "choose_num_gpus",
    "choose_num_parameter_servers",
    "convolution_choices",
    "convolution_memory_bytes",
    "make_diagnosis",
    "max_overhead_ratio",
    "measure_candidates",
    "measure_memory",
    "measure_peak_bytes",
    "measure_step",
    "plan_batch_size",
    "probe_compressors",
    "probe_network",
    "read_overrides",
    "simulate",
    "trace_layers",
    "try_batch_sizes",
]
