"""Answers to: how many GPUs, which batch size, which strategy? Formulas, and measurements that they start from."""

from lightning_dp.planner.advice import Diagnosis, Prediction, make_diagnosis, read_overrides
from lightning_dp.planner.algorithms import AlgorithmsHandle, algorithms_for, apply_algorithms
from lightning_dp.planner.batch_size import BatchPlan, Candidate, Choice, choose_algorithms, choose_batch_size
from lightning_dp.planner.candidates import measure_candidates, measure_step
from lightning_dp.planner.convolution import ConvShape, convolution_memory_bytes
from lightning_dp.planner.diagnose import Diagnose
from lightning_dp.planner.find_batch_size import FindBatchSize
from lightning_dp.planner.layer_choices import convolution_choices
from lightning_dp.planner.measure import measure_memory, measure_peak_bytes
from lightning_dp.planner.measured_plans import plan_batch_size
from lightning_dp.planner.memory import MemoryModel
from lightning_dp.planner.methods import METHODS, Method
from lightning_dp.planner.network import Link, Network
from lightning_dp.planner.probe import probe_network
from lightning_dp.planner.profile import LayerProfile, StepProfile
from lightning_dp.planner.scaling import (
    amdahl_efficiency,
    amdahl_speedup,
    choose_num_gpus,
    choose_num_parameter_servers,
    max_overhead_ratio,
)
from lightning_dp.planner.simulation import StepTime, simulate
from lightning_dp.planner.trace import Layer, LayerKind, trace_layers
from lightning_dp.planner.trials import BatchSizeTrials, try_batch_sizes
from lightning_dp.planner.workload import Block, Head, Recomputation, Workload

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
    "probe_network",
    "read_overrides",
    "simulate",
    "trace_layers",
    "try_batch_sizes",
]
