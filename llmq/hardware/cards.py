"""NVIDIA cards: the dense peak rates of their tensor cores, memory and size, each from NVIDIA's own papers.

Data sheets print rates twice as high, for matrices with two zeros in every four numbers: all rates here are dense.
Training accumulates in f32, at which GeForce cards run at half their rate (the sheet's larger number is the one with
f16 accumulation). `fp32` is the rate of the ordinary cores. Clocks under load, and with them the real limit, are lower:
these are the figures that shares of the speed of light are stated against.

A name must match whole: an "RTX 4080 SUPER" or "RTX 4090 Laptop GPU" is another card than the one it is called after,
and a part of a card (MIG) has its own name.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmq.disk import MIB

TERA = 1e12
# What the driver keeps of the memory that NVML counts, and a CUDA context with its libraries.
CONTEXT_BYTES = 1280 * MIB

HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
RTX_PRO = "NVIDIA RTX PRO Blackwell GPU Architecture whitepaper"


@dataclass(frozen=True)
class Card:
    """A model of GPU. Rates in TFLOP/s; those of bf16 and e4m3 are matrix products summed in f32, None without fp8."""

    name: str
    reported: tuple[str, ...]  # what NVML and CUDA call it, without "NVIDIA"
    capability: tuple[int, int]
    num_sms: int
    memory_mib: int  # all of it, as NVML counts
    bf16: float
    e4m3: float | None
    fp32: float
    source: str  # of the rates

    @property
    def peaks(self) -> dict[str, float]:
        """FLOP/s by dtype; no `e4m3` where the card has none."""
        rates = {"bf16": self.bf16, "fp32": self.fp32, "e4m3": self.e4m3}
        return {dtype: TERA * rate for dtype, rate in rates.items() if rate is not None}

    @property
    def total_bytes(self) -> int:
        """Bytes of memory."""
        return self.memory_mib * MIB

    @property
    def free_bytes(self) -> int:
        """About what a run can take of an idle card: 139.2 GiB of an H200, where CUDA gave 139.3 beside its context."""
        return self.total_bytes - CONTEXT_BYTES


CARDS = (
    Card("A100 40GB", ("A100-SXM4-40GB", "A100-PCIE-40GB"), (8, 0), 108, 40960,
         312, None, 19.5, "NVIDIA A100 Tensor Core GPU datasheet"),
    Card("A100 80GB", ("A100-SXM4-80GB", "A100 80GB PCIe"), (8, 0), 108, 81920,
         312, None, 19.5, "NVIDIA A100 Tensor Core GPU datasheet"),
    Card("H100 SXM", ("H100 80GB HBM3",), (9, 0), 132, 81559, 989.4, 1978.9, 66.9, HOPPER),
    Card("H100 PCIe", ("H100 PCIe",), (9, 0), 114, 81559, 756, 1513, 51.2, HOPPER),
    Card("H100 NVL", ("H100 NVL",), (9, 0), 132, 95830, 835.5, 1670.5, 60,
         "NVIDIA H100 Tensor Core GPU datasheet (1671 and 3341 with sparsity)"),
    Card("H200", ("H200",), (9, 0), 132, 143771, 989.4, 1978.9, 66.9,
         "NVIDIA H200 Tensor Core GPU datasheet (1979 and 3958 with sparsity; digits of the H100 SXM)"),
    Card("H200 NVL", ("H200 NVL",), (9, 0), 132, 143771, 835.5, 1670.5, 60,
         "NVIDIA H200 Tensor Core GPU datasheet (1671 and 3341 with sparsity)"),
    Card("GH200 96GB", ("GH200 480GB", "GH200 120GB"), (9, 0), 132, 97871, 989.4, 1978.9, 66.9,
         "NVIDIA GH200 Grace Hopper Superchip datasheet (1979 and 3958 with sparsity; digits of the H100 SXM)"),
    Card("GH200 144GB", ("GH200 144G HBM3e",), (9, 0), 132, 145920, 989.4, 1978.9, 66.9,
         "NVIDIA GH200 Grace Hopper Superchip datasheet (1979 and 3958 with sparsity; digits of the H100 SXM)"),
    Card("B200", ("B200",), (10, 0), 148, 183359, 2250, 4500, 75,
         "NVIDIA Blackwell datasheet, HGX B200, one GPU (4.5 and 9 PFLOP/s with sparsity)"),
    Card("B300", ("B300 SXM6 AC",), (10, 3), 148, 275040, 2250, 4500, 75,
         "NVIDIA HGX B300 specifications, an eighth (36 and 72 PFLOP/s with sparsity, 600 TFLOP/s fp32)"),
    Card("L4", ("L4",), (8, 9), 58, 23034, 121, 242.5, 30.3, "NVIDIA L4 datasheet (242 and 485 with sparsity)"),
    Card("L40", ("L40",), (8, 9), 142, 46068, 181.05, 362, 90.5, "NVIDIA L40 datasheet"),
    Card("L40S", ("L40S",), (8, 9), 142, 46068, 362.05, 733, 91.6, "NVIDIA L40S datasheet"),
    Card("A40", ("A40",), (8, 6), 84, 46068, 149.7, None, 37.4, "NVIDIA A40 datasheet"),
    Card("RTX 3090", ("GeForce RTX 3090",), (8, 6), 82, 24576, 71, None, 35.6,
         "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"),
    Card("RTX 4080", ("GeForce RTX 4080",), (8, 9), 76, 16376, 97.5, 194.9, 48.7, ADA),
    Card("RTX 4090", ("GeForce RTX 4090",), (8, 9), 128, 24564, 165.2, 330.3, 82.6, ADA),
    Card("RTX 5070", ("GeForce RTX 5070",), (12, 0), 48, 12227, 61.7, 123.5, 30.9, RTX_BLACKWELL),
    Card("RTX 5080", ("GeForce RTX 5080",), (12, 0), 84, 16303, 112.6, 225.1, 56.3, RTX_BLACKWELL),
    Card("RTX 5090", ("GeForce RTX 5090",), (12, 0), 170, 32607, 209.5, 419, 104.8, RTX_BLACKWELL),
    Card("RTX 6000 Ada", ("RTX 6000 Ada Generation",), (8, 9), 142, 49140, 364.2, 728.5, 91.1,
         "NVIDIA RTX 6000 Ada Generation datasheet (1457 fp8 with sparsity)"),
    Card("RTX PRO 6000", ("RTX PRO 6000 Blackwell Workstation Edition",), (12, 0), 188, 97887,
         503.8, 1007.6, 126, RTX_PRO),
    Card("RTX PRO 6000 Max-Q", ("RTX PRO 6000 Blackwell Max-Q Workstation Edition",), (12, 0), 188, 97887,
         438.9, 877.8, 109.7, RTX_PRO),
    Card("RTX PRO 6000 Server", ("RTX PRO 6000 Blackwell Server Edition",), (12, 0), 188, 97887, 500, 1000, 120,
         "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet (1 and 2 PFLOP/s with sparsity)"),
    # No dense bf16 rate is published. Its 1 PFLOP/s of sparse fp4 is 8 times the dense bf16 rate on every other card of
    # capability 12.x that sums in f32 at full rate, and cudnn-frontend's benchmarks count 1024 FLOP per clock and SM.
    Card("GB10", ("GB10",), (12, 1), 48, 124546, 125, 250, 31,
         "NVIDIA DGX Spark datasheet (1 PFLOP/s of fp4 with sparsity; bf16 an eighth, fp8 a quarter of it); "
         "fp32: NVIDIA at Hot Chips 2025"),
)  # fmt: skip


def find(reported: str) -> Card | None:
    """The card that NVML or CUDA calls `reported`; None if the table does not have it."""
    return _by_reported().get(_plain(reported))


def named(text: str) -> Card | None:
    """The card named `text`: our name or the driver's, in any case."""
    return _by_name().get(_plain(text)) or find(text)


def names() -> list[str]:
    """Our names of all cards."""
    return [card.name for card in CARDS]


def _by_reported() -> dict[str, Card]:
    return {_plain(name): card for card in CARDS for name in card.reported}


def _by_name() -> dict[str, Card]:
    short = {"A100": "A100 80GB", "H100": "H100 SXM", "GH200": "GH200 96GB", "H200 SXM": "H200", "DGX Spark": "GB10"}
    cards = {card.name: card for card in CARDS}
    return {_plain(name): card for name, card in (*cards.items(), *((s, cards[full]) for s, full in short.items()))}


def _plain(name: str) -> str:
    return " ".join(name.upper().split()).removeprefix("NVIDIA ")
