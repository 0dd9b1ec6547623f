"""Published throughputs of CNNs in data-parallel training, and what of them the simulation is given.

The list was frozen before it was simulated: nothing is fitted on it, and nothing was left out for its error. Horovod's
rows came later than the others, also before they were simulated, because the others hardly depend on the network.

A table is in it if it is for image classification with synchronous data parallelism by all-reduces, and has a row for
one GPU at the same batch per GPU. Mixed precision is in it where the program was seen to show the type of gradients.
Left out:

- parameter servers (TensorFlow's other rows, MXNet's examples): the simulation has no such method;
- Horovod's rows whose sums MPI makes on processors;
- mixed precision by TensorFlow and in DLPerf;
- "widese" EfficientNets, for want of a source for their parameters;
- EfficientNet-B4, mixed precision, 64 GPUs: 64 times the batch of its configuration is more than the global batch;
- PyTorch's tables for V100 with 32 GB: some of their EfficientNets run 17 times as fast on 8 GPUs as on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dp.planner import Block, Head, Link, Network, Workload, simulate

GIGA = 1e9
# Seconds for a message, from NCCL's model of rings of large messages: hwLat in src/graph/tuning.cc, NCCL 2.7.3 to 2.10.
NVLINK_S, PCI_S, NETWORK_S = 3.4e-6, 5.7e-6, 9.6e-6

SOURCES = {
    "TensorFlow": "TensorFlow guide, Performance, Benchmarks (May 2017), DGX-1 (P100), training synthetic data",
    "PyTorch": "NVIDIA DeepLearningExamples 729963d, PyTorch/Classification/ConvNets/*/README.md, training performance",
    "MXNet": "NVIDIA DeepLearningExamples 729963d, MxNet/Classification/RN50v1.5/README.md, training performance",
    "TF 1": "NVIDIA DeepLearningExamples 729963d, TensorFlow/Classification/ConvNets/*/README.md, training performance",
    "DLPerf": "DLPerf c89430b, reports/dlperf_benchmark_test_report_v1.md, ResNet50 V1.5, FP32, batch size 128",
    "Horovod": "Horovod fcfed73 (September 2017), README.md, the rows whose sums are made by NCCL",
    "Krizhevsky": "arXiv 1404.5997, Table 1, scheme b, equal batches",
}


@dataclass(frozen=True)
class Machine:
    """A kind of host.

    Attributes:
        name: of the machine.
        links: GB/s that leave a GPU for the others of a host, in each direction, by the number of GPUs that take part.
        latency_s: of a message between its GPUs.
        network_gbit: Gbit/s of all NICs of a host, 0 if there is one host.
        gpus: of a host.
        all_reduce: `Network.all_reduce`. NCCL has trees since version 2.4.
    """

    name: str
    links: Mapping[int, float]
    latency_s: float = NVLINK_S
    network_gbit: float = 0
    gpus: int = 8
    all_reduce: str = "auto"

    def network(self, num_gpus: int) -> Network:
        """Return the links of a job of ``num_gpus``."""
        intra = Link(self.latency_s, self.links[min(num_gpus, self.gpus)] * GIGA)
        inter = Link(NETWORK_S, self.network_gbit / 8 * GIGA) if self.network_gbit else intra
        return Network(inter, intra, ranks_per_node=self.gpus, all_reduce=self.all_reduce)


# NVLink: 20 GB/s a link and direction on P100, 25 on V100 and A100; 4, 6 and 12 links. In a DGX-1 GPUs 0 and 1 share
# one link, and a GPU has 3 (P100) or 4 (V100) links to the others of its half. NVSwitch gives a GPU all its links.
P100 = Machine("DGX-1 (P100)", {2: 20, 4: 60, 8: 80}, all_reduce="ring")
V100 = Machine("DGX-1 (V100)", {2: 25, 4: 100, 8: 150})
DGX2 = Machine("DGX-2 (V100)", {2: 150, 4: 150, 8: 150, 16: 150}, gpus=16)
# PyTorch's table does not name the network between hosts: it is taken to be all 8 NICs for compute of the data sheet.
A100 = Machine("DGX A100", {4: 300, 8: 300}, network_gbit=8 * 200)
# The report's own list of links is that of a DGX-1; its network is one InfiniBand EDR.
DLPERF = Machine("4 x 8 V100, 100 Gbit/s", {8: 150}, network_gbit=100)
# "4 Pascal GPUs each"; between them PCI Express 3.0 x16, which is faster than the network and so plays no part.
PASCAL_25 = Machine("4 x 4 Pascal, 25 Gbit/s", {4: 15.75}, PCI_S, network_gbit=25, gpus=4, all_reduce="ring")
PASCAL_40 = Machine("16 x 4 Pascal, 40 Gbit/s", {4: 15.75}, PCI_S, network_gbit=40, gpus=4, all_reduce="ring")
# "6GB/s PCI-Express links" (section 5). Four GPUs share a switch, and the way to the other four.
K20 = Machine("K20", {2: 6, 4: 6}, latency_s=PCI_S, gpus=4, all_reduce="ring")


# --- networks: parameters, for networks whose layers hold both in shares, or all layers where they do not ---

PARAMETERS = {
    "ResNet-50": 25_557_032,
    "ResNet-101": 44_549_160,
    "Inception V3": 23_834_568,
    "ResNeXt-101": 44_177_704,
    "SE-ResNeXt-101": 48_955_416,
    "EfficientNet-B0": 5_288_548,
    "EfficientNet-B4": 19_341_616,
}


@dataclass(frozen=True)
class Layer:
    """A convolution or fully-connected layer: weights and biases, and multiplications for an image."""

    parameters: int
    multiplications: int


def convolution(side: int, kernel: int, channels: int, filters: int) -> Layer:
    """Return a convolution with ``side`` x ``side`` outputs."""
    weights = kernel**2 * channels * filters
    return Layer(weights + filters, weights * side**2)


def linear(inputs: int, outputs: int) -> Layer:
    """Return a fully-connected layer."""
    return Layer((inputs + 1) * outputs, inputs * outputs)


# Side of the outputs, channels and filters.
VGG_CONVOLUTIONS = (
    (224, 3, 64),
    (224, 64, 64),
    (112, 64, 128),
    (112, 128, 128),
    (56, 128, 256),
    (56, 256, 256),
    (56, 256, 256),
    (28, 256, 512),
    (28, 512, 512),
    (28, 512, 512),
    (14, 512, 512),
    (14, 512, 512),
    (14, 512, 512),
)
NUM_HEAD_LAYERS = 3
LAYERS = {
    # One tower, as in arXiv 1404.5997, section 5, and in tf_cnn_benchmarks.
    "AlexNet": (
        convolution(55, 11, 3, 64),
        convolution(27, 5, 64, 192),
        convolution(13, 3, 192, 384),
        convolution(13, 3, 384, 384),
        convolution(13, 3, 384, 256),
        linear(9216, 4096),
        linear(4096, 4096),
        linear(4096, 1000),
    ),
    "VGG-16": (
        *(convolution(side, 3, channels, filters) for side, channels, filters in VGG_CONVOLUTIONS),
        linear(512 * 49, 4096),
        linear(4096, 4096),
        linear(4096, 1000),
    ),
}


@dataclass(frozen=True)
class Series:
    """The rows of a published table for one network, machine and precision.

    Attributes:
        source: key of `SOURCES`.
        what: version of the software or precision, as the table names it.
        model: network.
        machine: host.
        batch_size: images per GPU.
        one_gpu: images/s on one GPU.
        published: images/s, by number of GPUs.
        gradient_bytes: of each parameter.
        method: `METHODS` of the planner.
    """

    source: str
    what: str
    model: str
    machine: Machine
    batch_size: int
    one_gpu: float
    published: Mapping[int, float]
    gradient_bytes: int = 4
    method: str = "ddp"

    @property
    def step_s(self) -> float:
        """Time of a step on one GPU, from the same table."""
        return self.batch_size / self.one_gpu

    @property
    def megabytes(self) -> float:
        """Of all gradients."""
        layers = LAYERS.get(self.model)
        parameters = sum(layer.parameters for layer in layers) if layers else PARAMETERS[self.model]
        return parameters * self.gradient_bytes / 1e6

    def workload(self) -> Workload:
        """Return what the simulation is given: bytes, and the time of one GPU, a third of it for the forward.

        Layers have their part of the time by multiplications, where `LAYERS` has them, and are equal elsewhere.
        """
        layers = LAYERS.get(self.model)
        if layers is None:
            third_s = self.step_s / 3
            return Workload.uniform(self.megabytes * 1e6, third_s, 2 * third_s, batch_size=self.batch_size)
        total = sum(layer.multiplications for layer in layers)
        blocks = []
        for layer in layers:
            third_s = self.step_s / 3 * layer.multiplications / total
            blocks.append(Block(float(layer.parameters * self.gradient_bytes), third_s, 2 * third_s))
        if self.method == "ddp":
            return Workload(tuple(blocks), batch_size=self.batch_size)
        fully_connected = blocks[-NUM_HEAD_LAYERS:]
        # 9216 features and 2 x 4096 hidden activations of 4 bytes for each image.
        head = Head(
            sum(block.num_bytes for block in fully_connected),
            sum(block.forward_s for block in fully_connected),
            sum(block.backward_s for block in fully_connected),
            feature_bytes=4.0 * self.batch_size * 9216,
            hidden_bytes=4.0 * self.batch_size * 2 * 4096,
        )
        return Workload(tuple(blocks[:-NUM_HEAD_LAYERS]), batch_size=self.batch_size, head=head)

    def predicted(self, num_gpus: int) -> float:
        """Return the simulated images/s."""
        return simulate(self.workload(), self.machine.network(num_gpus), num_gpus, self.method).images_per_s

    def without_waiting(self, num_gpus: int) -> float:
        """Return the images/s of GPUs that never wait for each other."""
        return num_gpus * self.one_gpu

    def without_overlap(self, num_gpus: int) -> float:
        """Return the images/s of data parallelism whose all-reduces begin when the backward has ended."""
        all_reduce_s = self.machine.network(num_gpus).all_reduce_s(1e6 * self.megabytes, num_gpus)
        return num_gpus * self.batch_size / (self.step_s + all_reduce_s)


def _images_per_s(hours: float) -> float:
    """Return the images/s of 90 epochs of ILSVRC 2012 (arXiv 1404.5997, section 5)."""
    return 90 * 1281167 / (3600 * hours)


SERIES = (
    Series("TensorFlow", "FP32", "AlexNet", P100, 512, 2987, {2: 5658, 4: 10509, 8: 17822}),
    Series("TensorFlow", "FP32", "VGG-16", P100, 64, 154, {2: 295, 4: 584, 8: 1081}),
    Series("TensorFlow", "FP32", "VGG-16", P100, 32, 144, {2: 281, 4: 549, 8: 820}),
    # Automatic mixed precision of torch.cuda.amp: parameters and gradients have 4 bytes. Batches: configs.yml.
    Series("PyTorch", "TF32", "ResNet-50", A100, 256, 938, {8: 7248}),
    Series("PyTorch", "AMP", "ResNet-50", A100, 256, 2470, {8: 16621}),
    Series("PyTorch", "FP32", "ResNet-50", V100, 112, 367, {8: 2855}),
    Series("PyTorch", "AMP", "ResNet-50", V100, 256, 1200, {8: 8322}),
    Series("PyTorch", "TF32", "ResNeXt-101", A100, 128, 456, {8: 3471}),
    Series("PyTorch", "AMP", "ResNeXt-101", A100, 128, 1211, {8: 7925}),
    Series("PyTorch", "FP32", "ResNeXt-101", V100, 64, 147, {8: 1133}),
    Series("PyTorch", "AMP", "ResNeXt-101", V100, 128, 587, {8: 4065}),
    Series("PyTorch", "TF32", "SE-ResNeXt-101", A100, 128, 395, {8: 2991}),
    Series("PyTorch", "AMP", "SE-ResNeXt-101", A100, 128, 855, {8: 5779}),
    Series("PyTorch", "FP32", "SE-ResNeXt-101", V100, 64, 132, {8: 1004}),
    Series("PyTorch", "AMP", "SE-ResNeXt-101", V100, 112, 443, {8: 2971}),
    Series("PyTorch", "TF32", "EfficientNet-B0", A100, 256, 1078, {8: 8193, 16: 16137}),
    Series("PyTorch", "AMP", "EfficientNet-B0", A100, 256, 2489, {8: 16652, 16: 29332}),
    Series("PyTorch", "FP32", "EfficientNet-B0", V100, 64, 655, {8: 4672}),
    Series("PyTorch", "AMP", "EfficientNet-B0", V100, 128, 1301, {8: 7789}),
    Series("PyTorch", "TF32", "EfficientNet-B4", A100, 64, 157, {8: 1223, 16: 2417, 32: 4813, 64: 9146}),
    Series("PyTorch", "AMP", "EfficientNet-B4", A100, 128, 331, {8: 2570, 16: 4813, 32: 9425}),
    Series("PyTorch", "FP32", "EfficientNet-B4", V100, 16, 83, {8: 616}),
    Series("PyTorch", "AMP", "EfficientNet-B4", V100, 32, 204, {8: 1366}),
    # Mixed precision casts the network to float16 (models.py), gradients among it.
    Series("MXNet", "TF32", "ResNet-50", A100, 512, 1055.78, {4: 4182.30, 8: 8247.44}),
    Series("MXNet", "FP16", "ResNet-50", A100, 512, 3410.52, {4: 13442.66, 8: 26673.72}, gradient_bytes=2),
    Series("MXNet", "FP32", "ResNet-50", V100, 96, 384, {2: 763, 4: 1513, 8: 3005}),
    Series("MXNet", "FP16", "ResNet-50", V100, 192, 1376, {2: 2768, 4: 5357, 8: 10723}, gradient_bytes=2),
    Series("MXNet", "FP32", "ResNet-50", DGX2, 128, 417, {2: 821, 4: 1623, 8: 3223, 16: 6338}),
    Series("MXNet", "FP16", "ResNet-50", DGX2, 256, 1492, {2: 2935, 4: 5726, 8: 11368, 16: 21484}, gradient_bytes=2),
    Series("TF 1", "TF32", "ResNet-50", A100, 256, 909, {8: 7000}),
    Series("TF 1", "FP32", "ResNet-50", V100, 128, 412, {8: 3170}),
    Series("TF 1", "FP32", "ResNet-50", DGX2, 128, 432, {16: 6500}),
    Series("TF 1", "TF32", "ResNeXt-101", A100, 128, 371, {8: 2854}),
    Series("TF 1", "FP32", "ResNeXt-101", V100, 64, 166, {8: 1210}),
    Series("TF 1", "FP32", "ResNeXt-101", DGX2, 64, 170, {16: 2500}),
    Series("TF 1", "TF32", "SE-ResNeXt-101", A100, 128, 342, {8: 2610}),
    Series("TF 1", "FP32", "SE-ResNeXt-101", V100, 64, 152, {8: 1120}),
    Series("TF 1", "FP32", "SE-ResNeXt-101", DGX2, 64, 158, {16: 2270}),
    Series("DLPerf", "OneFlow", "ResNet-50", DLPERF, 128, 397.64, {8: 3130.34, 16: 6260.30, 32: 12411.97}),
    Series("DLPerf", "NGC MXNet", "ResNet-50", DLPERF, 128, 392.24, {8: 3006.98, 16: 5758.49, 32: 11331.93}),
    Series("DLPerf", "NGC TF 1", "ResNet-50", DLPERF, 128, 362.44, {8: 2721.98, 16: 5099.42, 32: 9514.64}),
    Series("DLPerf", "NGC PyTorch", "ResNet-50", DLPERF, 128, 367.29, {8: 2887.65, 16: 5716.79, 32: 10917.09}),
    Series("DLPerf", "MXNet", "ResNet-50", DLPERF, 128, 384.19, {8: 2556.03, 16: 4855.34, 32: 9579.74}),
    Series("DLPerf", "TF 2", "ResNet-50", DLPERF, 128, 321.80, {8: 2458.74, 16: 4849.68, 32: 9418.44}),
    Series("DLPerf", "PyTorch", "ResNet-50", DLPERF, 128, 348.62, {8: 2632.93, 16: 5115.40, 32: 10021.29}),
    Series("DLPerf", "Paddle", "ResNet-50", DLPERF, 128, 352.72, {8: 2625.38, 16: 4895.27, 32: 9348.17}),
    Series("Horovod", "RDMA", "Inception V3", PASCAL_25, 64, 134.4, {16: 2022.6}),
    Series("Horovod", "RDMA", "ResNet-101", PASCAL_25, 64, 119.4, {16: 1746.2}),
    Series("Horovod", "RDMA", "VGG-16", PASCAL_25, 64, 130.9, {16: 1787.4}),
    Series("Horovod", "TCP", "Inception V3", PASCAL_25, 64, 134.4, {16: 1990.7}),
    Series("Horovod", "TCP", "ResNet-101", PASCAL_25, 64, 119.4, {16: 1685.1}),
    Series("Horovod", "TCP", "VGG-16", PASCAL_25, 64, 130.9, {16: 1308.7}),
    Series("Horovod", "TCP", "Inception V3", PASCAL_40, 64, 148.8, {64: 7932.1}),
    Series("Horovod", "TCP", "ResNet-101", PASCAL_40, 64, 136.0, {64: 7741.6}),
    Series("Horovod", "TCP", "VGG-16", PASCAL_40, 64, 149.6, {64: 6084.2}),
    Series(
        "Krizhevsky",
        "FP32",
        "AlexNet",
        K20,
        128,
        _images_per_s(98.05),
        {2: _images_per_s(50.24), 4: _images_per_s(26.20), 8: _images_per_s(15.68)},
        method="hybrid_b",
    ),
)
