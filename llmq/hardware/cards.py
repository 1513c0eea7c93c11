"""NVIDIA cards since Ampere: the dense peak rates of their tensor cores, memory and size, from NVIDIA's own papers.

Cards of data centres have rates of their own papers. Those of the other families follow from the silicon, as the
whitepapers derive them: SMs x FLOP per clock and SM x boost clock (of a laptop's range, the highest).

Data sheets print rates twice as high, for matrices with two zeros in every four numbers: all rates here are dense.
Training accumulates in f32, at which GeForce cards run at half their rate (the sheet's larger number is the one with
f16 accumulation). `fp32` is the rate of the ordinary cores. Clocks under load, and with them the real limit, are lower:
these are the figures that shares of the speed of light are stated against.

A driver's name must match whole: an "RTX 4080 SUPER" or "RTX 4090 Laptop GPU" is another card than the one it is called
after, and a part of a card (MIG) has its own name. A name that is typed may leave out what is the same of all.
"""

import difflib
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmq.disk import GIB, MIB

TERA, GIGA = 1e12, 1e9
# What the driver keeps of the memory that NVML counts, and a CUDA context with its libraries.
CONTEXT_BYTES = 1280 * MIB

HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
RTX_PRO = "NVIDIA RTX PRO Blackwell GPU Architecture whitepaper"


@dataclass(frozen=True)
class Card:
    """A model of GPU. Rates in TFLOP/s; those of bf16 and e4m3 are matrix products summed in f32, None without fp8.

    In GB/s, from the same data sheets: of its `memory`, None where it is not in the table, and of `nvlink` to the other
    cards of a machine in one direction, half of what the sheets print; None where not all are linked.
    """

    name: str
    reported: tuple[str, ...]  # what NVML and CUDA call it, without "NVIDIA"
    capability: tuple[int, int]
    num_sms: int  # this and the rates are 0 where only a size is given
    memory_mib: int  # all of it, as NVML counts
    bf16: float
    e4m3: float | None
    fp32: float
    paper: str = ""  # of the rates, where it is not the card's datasheet
    memory: float | None = None
    nvlink: float | None = None

    @property
    def source(self) -> str:
        """Where the rates are from."""
        return self.paper or f"NVIDIA {self.name} datasheet"

    @property
    def peaks(self) -> dict[str, float]:
        """FLOP/s by dtype; no `e4m3` where the card has none."""
        rates = {"bf16": self.bf16, "fp32": self.fp32, "e4m3": self.e4m3}
        return {dtype: TERA * rate for dtype, rate in rates.items() if rate}

    @property
    def memory_rate(self) -> float | None:
        """Bytes/s of its memory; None where that is not in the table."""
        return self.memory and GIGA * self.memory

    @property
    def link_rate(self) -> float:
        """Bytes/s that copies to or from a host reach over 16 lanes of the PCI Express of its generation."""
        return GIGA * (55 if self.capability >= (9, 0) else 25)

    @property
    def peer_rate(self) -> float | None:
        """Bytes/s of its links to other cards of a machine, in one direction; None without NVLink."""
        return self.nvlink and GIGA * self.nvlink

    @property
    def total_bytes(self) -> int:
        """Bytes of memory."""
        return self.memory_mib * MIB

    @property
    def free_bytes(self) -> int:
        """About what a run can take of an idle card: 139.2 GiB of an H200, where CUDA gave 139.3 beside its context."""
        return self.total_bytes - CONTEXT_BYTES


PAPERS = (
    Card("A100 40GB", ("A100-SXM4-40GB", "A100-PCIE-40GB"), (8, 0), 108, 40960, 312, None, 19.5, memory=1555),
    Card("A100 80GB", ("A100-SXM4-80GB", "A100 80GB PCIe"), (8, 0), 108, 81920, 312, None, 19.5, memory=2039),
    Card("A800 40GB", ("A800-SXM4-40GB", "A800 40GB Active"), (8, 0), 108, 40960, 312, None, 19.5),
    Card("A800 80GB", ("A800-SXM4-80GB", "A800 80GB PCIe"), (8, 0), 108, 81920, 312, None, 19.5),
    Card("A30", ("A30",), (8, 0), 56, 24576, 165, None, 10.3, memory=933),
    Card("H20", ("H20",), (9, 0), 78, 97871, 148, 296, 44, memory=4000, nvlink=450),
    Card("H20 141GB", ("H20-3e",), (9, 0), 78, 143771, 148, 296, 44, nvlink=450),
    # The sheets of the next cards round: digits of the H100 SXM where they have its chip.
    Card("H800", ("H800",), (9, 0), 132, 81559, 989.4, 1978.9, 66.9, memory=3350, nvlink=200),
    Card("H100 SXM", ("H100 80GB HBM3",), (9, 0), 132, 81559, 989.4, 1978.9, 66.9, HOPPER, memory=3350, nvlink=450),
    Card("H100 PCIe", ("H100 PCIe",), (9, 0), 114, 81559, 756, 1513, 51.2, HOPPER, memory=2000),
    Card("H100 NVL", ("H100 NVL",), (9, 0), 132, 95830, 835.5, 1670.5, 60, memory=3900),
    Card("H200", ("H200",), (9, 0), 132, 143771, 989.4, 1978.9, 66.9, memory=4800, nvlink=450),
    Card("H200 NVL", ("H200 NVL",), (9, 0), 132, 143771, 835.5, 1670.5, 60, memory=4800),
    Card("GH200 96GB", ("GH200 480GB", "GH200 120GB"), (9, 0), 132, 97871, 989.4, 1978.9, 66.9),
    Card("GH200 144GB", ("GH200 144G HBM3e",), (9, 0), 132, 145920, 989.4, 1978.9, 66.9),
    Card("B100", ("B100",), (10, 0), 148, 183359, 1750, 3500, 60, "NVIDIA Blackwell datasheet, HGX B100, one GPU"),
    Card("B200", ("B200",), (10, 0), 148, 183359, 2250, 4500, 75, "NVIDIA Blackwell datasheet, HGX B200, one GPU",
         memory=8000, nvlink=900),
    Card("GB200", ("GB200",), (10, 0), 152, 189471, 2500, 5000, 80, "NVIDIA GB200 NVL72 datasheet, one GPU",
         memory=8000, nvlink=900),
    Card("B300", ("B300 SXM6 AC",), (10, 3), 148, 275040, 2250, 4500, 75,
         "NVIDIA HGX B300 specifications, an eighth of it", memory=8000, nvlink=900),
    Card("GB300", ("GB300",), (10, 3), 152, 284208, 2500, 5000, 80, "NVIDIA GB300 NVL72 specifications, one GPU",
         memory=8000, nvlink=900),
    Card("L20", ("L20",), (8, 9), 92, 46068, 119.5, 239, 59.8),
    Card("L4", ("L4",), (8, 9), 58, 23034, 121, 242.5, 30.3, memory=300),
    Card("L40", ("L40",), (8, 9), 142, 46068, 181.05, 362, 90.5, memory=864),
    Card("L40S", ("L40S",), (8, 9), 142, 46068, 362.05, 733, 91.6, memory=864),
    Card("A2", ("A2",), (8, 6), 10, 15356, 18, None, 4.5),
    Card("A10", ("A10",), (8, 6), 72, 23028, 125, None, 31.2, memory=600),
    Card("A10G", ("A10G",), (8, 6), 80, 23028, 70, None, 35),
    Card("A16", ("A16",), (8, 6), 10, 15356, 17.9, None, 4.5, "NVIDIA A16 datasheet, one of four GPUs"),
    Card("A40", ("A40",), (8, 6), 84, 46068, 149.7, None, 37.4, memory=696),
    Card("RTX 6000 Ada", ("RTX 6000 Ada Generation",), (8, 9), 142, 49140, 364.2, 728.5, 91.1, memory=960),
    Card("RTX PRO 6000", ("RTX PRO 6000 Blackwell Workstation Edition",), (12, 0), 188, 97887, 503.8, 1007.6, 126,
         RTX_PRO, memory=1792),
    Card("RTX PRO 6000 Max-Q", ("RTX PRO 6000 Blackwell Max-Q Workstation Edition",), (12, 0), 188, 97887, 438.9,
         877.8, 109.7, RTX_PRO),
    Card("RTX PRO 6000 Server", ("RTX PRO 6000 Blackwell Server Edition",), (12, 0), 188, 97887, 500, 1000, 120),
    # No dense bf16 rate is published. Its 1 PFLOP/s of sparse fp4 is 8 times the dense bf16 rate on every other card of
    # capability 12.x that sums in f32 at full rate, and cudnn-frontend's benchmarks count 1024 FLOP per clock and SM.
    Card("GB10", ("GB10",), (12, 1), 48, 124546, 125, 250, 31,
         "NVIDIA DGX Spark datasheet, of sparse fp4; fp32: NVIDIA at Hot Chips 2025", memory=273),
)  # fmt: skip


def family(capability: tuple[int, int], flops: int, reported: str, source: str, *cards: tuple[Any, ...]) -> list[Card]:
    """Cards of one generation, with the rates that follow: `flops` are bf16 products summed in f32 per clock and SM,
    `reported` a driver's name, and each of `cards` has its name, SMs, boost clock in MHz, MiB, and GB/s if known."""
    found = []
    for name, num_sms, megahertz, memory_mib, *memory in cards:
        bf16, fp32, fp8 = (round(num_sms * each * megahertz / 1e6, 1) for each in (flops, 256, 2 * flops))
        # Two sizes of a GeForce card are one name to the driver: here it is the first's.
        names = () if name.endswith("GB") and reported.startswith("GeForce") else (reported.format(name),)
        e4m3 = fp8 if capability >= (8, 9) else None
        found.append(Card(name, names, capability, num_sms, memory_mib, bf16, e4m3, fp32, source, *memory))
    return found


FAMILIES = (
    *family((8, 6), 512, "GeForce {}", AMPERE,
        ("RTX 2050", 16, 1477, 4096),  # a laptop's, of Ampere
        ("RTX 3050", 20, 1777, 8192), ("RTX 3050 6GB", 18, 1470, 6144), ("RTX 3060", 28, 1777, 12288, 360),
        ("RTX 3060 8GB", 28, 1777, 8192), ("RTX 3060 Ti", 38, 1665, 8192),
        ("RTX 3070", 46, 1725, 8192, 448), ("RTX 3070 Ti", 48, 1770, 8192), ("RTX 3080", 68, 1710, 10240, 760),
        ("RTX 3080 12GB", 70, 1710, 12288), ("RTX 3080 Ti", 80, 1665, 12288), ("RTX 3090", 82, 1695, 24576, 936),
        ("RTX 3090 Ti", 84, 1860, 24564, 1008), ("RTX 3050 Laptop GPU", 16, 1740, 4096),
        ("RTX 3050 6GB Laptop GPU", 20, 1492, 6144),
        ("RTX 3050 Ti Laptop GPU", 20, 1695, 4096), ("RTX 3060 Laptop GPU", 30, 1703, 6144),
        ("RTX 3070 Laptop GPU", 40, 1620, 8192), ("RTX 3070 Ti Laptop GPU", 46, 1485, 8192),
        ("RTX 3080 Laptop GPU", 48, 1710, 8192), ("RTX 3080 Laptop GPU 16GB", 48, 1710, 16384),
        ("RTX 3080 Ti Laptop GPU", 58, 1590, 16384),
    ),
    *family((8, 9), 512, "GeForce {}", ADA,
        ("RTX 4060", 24, 2460, 8188), ("RTX 4060 Ti", 34, 2535, 8188), ("RTX 4060 Ti 16GB", 34, 2535, 16380, 288),
        ("RTX 4070", 46, 2475, 12282, 504), ("RTX 4070 SUPER", 56, 2475, 12282), ("RTX 4070 Ti", 60, 2610, 12282),
        ("RTX 4070 Ti SUPER", 66, 2610, 16376), ("RTX 4080", 76, 2505, 16376, 717),
        ("RTX 4080 SUPER", 80, 2550, 16376, 736),
        ("RTX 4090", 128, 2520, 24564, 1008), ("RTX 4090 D", 114, 2520, 24564), ("RTX 4050 Laptop GPU", 20, 2370, 6141),
        ("RTX 4060 Laptop GPU", 24, 2370, 8188), ("RTX 4070 Laptop GPU", 36, 2175, 8188),
        ("RTX 4080 Laptop GPU", 58, 2280, 12282), ("RTX 4090 Laptop GPU", 76, 2040, 16376),
    ),
    *family((12, 0), 512, "GeForce {}", RTX_BLACKWELL,
        ("RTX 5050", 20, 2572, 8151), ("RTX 5060", 30, 2497, 8151), ("RTX 5060 Ti", 36, 2572, 8151),
        ("RTX 5060 Ti 16GB", 36, 2572, 16311), ("RTX 5070", 48, 2512, 12227), ("RTX 5070 Ti", 70, 2452, 16303, 896),
        ("RTX 5080", 84, 2617, 16303, 960), ("RTX 5090", 170, 2407, 32607, 1792),
        ("RTX 5050 Laptop GPU", 20, 2662, 8151),
        ("RTX 5060 Laptop GPU", 26, 2497, 8151), ("RTX 5070 Laptop GPU", 36, 2347, 8151),
        ("RTX 5070 Ti Laptop GPU", 46, 2220, 12227), ("RTX 5080 Laptop GPU", 60, 2287, 16303),
        ("RTX 5090 Laptop GPU", 82, 2160, 24463),
    ),
    *family((8, 6), 1024, "{}", f"{AMPERE}; datasheets of the RTX A series",
        ("RTX A400", 6, 1762, 4094), ("RTX A1000", 18, 1462, 8188), ("RTX A2000", 26, 1200, 6138),
        ("RTX A2000 12GB", 26, 1200, 12282), ("RTX A4000", 48, 1560, 16376), ("RTX A4500", 56, 1650, 20470),
        ("RTX A5000", 64, 1695, 24564), ("RTX A5500", 80, 1665, 24564), ("RTX A6000", 84, 1800, 49140, 768),
    ),
    *family((8, 9), 1024, "{} Generation", f"{ADA}; datasheets of the Ada workstation cards",
        ("RTX 2000 Ada", 22, 2130, 16380), ("RTX 4000 SFF Ada", 48, 1560, 20475), ("RTX 4000 Ada", 48, 2175, 20475),
        ("RTX 4500 Ada", 60, 2580, 24570), ("RTX 5000 Ada", 100, 2550, 32760), ("RTX 5880 Ada", 110, 2460, 49140),
    ),
    # Clocks that give the AI TOPS of the datasheets, which are of sparse fp4: 8 times bf16.
    *family((12, 0), 1024, "{} Blackwell", f"{RTX_PRO}; datasheets of the other cards",
        ("RTX PRO 2000", 34, 1957, 16311), ("RTX PRO 4000", 70, 2054, 24467), ("RTX PRO 4500", 82, 2511, 32623),
        ("RTX PRO 5000", 110, 2290, 48935),
        ("RTX PRO 4000 SFF", 70, 1343, 24467),  # 770 TOPS
        ("RTX PRO 5000 72GB", 110, 2290, 73402),  # half as much again as the other's memory
    ),
)  # fmt: skip
# What is typed for a card whose name has more, or another order: of several sizes, the usual one.
SHORT = {
    "A100 80GB": "A100, A100 SXM, A100 PCIe",
    "A800 80GB": "A800",
    "H100 SXM": "H100, H100 80GB, H100 80GB SXM",
    "H100 PCIe": "H100 80GB PCIe",
    "H200": "H200 SXM, H200 141GB",
    "H20 141GB": "H20 3e",
    "H800": "H800 SXM",
    "B200": "B200 SXM",
    "GH200 96GB": "GH200",
    "GB10": "DGX Spark",
}
ABOUT = 1.15  # times the memory of another card: a step in how unlike cards are
CARDS = (*PAPERS, *FAMILIES)


@cache
def find(reported: str) -> Card | None:
    """The card that NVML or CUDA calls `reported`; None if the table does not have it."""
    return next((card for card in CARDS if _plain(reported) in map(_plain, card.reported)), None)


def named(text: str) -> Card | None:
    """The card named `text`, in any usual spelling, such as `RTX4090`, `4090`, `a100-80g` or `H100 SXM5 80GB`; or for
    `24GiB` any of that size."""
    return find(text) or _by_name().get(_spelled(text)) or _of_size(text)


def rated(card: Card) -> Card:
    """The card, or where the rate of its memory is not known, the one whose rates it is taken to have.

    That is the newest and fastest of those with fp8 and about its size.
    """
    if card.memory_rate is not None:
        return card

    def unlikeness(other: Card) -> tuple[float, ...]:
        ratio = max(other.memory_mib, card.memory_mib) / min(other.memory_mib, card.memory_mib)
        newness = (float(part) for part in other.capability)
        return (round(math.log(ratio, ABOUT)), *(-part for part in newness), -other.bf16, -(other.peer_rate or 0.0))

    return min((one for one in CARDS if one.memory_rate and one.e4m3), key=unlikeness)


def nearest(text: str) -> list[str]:
    """Names that `text` may mean; all, if it resembles none."""
    near = difflib.get_close_matches(_spelled(text), list(_by_name()), n=6)
    return list(dict.fromkeys(_by_name()[name].name for name in near))[:4] or [card.name for card in CARDS]


def _of_size(text: str) -> Card | None:
    """A card of which only the memory is known; for what depends on the generation it is one of Hopper."""
    size = re.fullmatch(r"(\d{1,4}(?:\.\d{1,3})?) ?Gi?B?", text.strip(), re.IGNORECASE)
    memory_mib = int(float(size[1]) * GIB / MIB) if size else 0
    if memory_mib * MIB <= CONTEXT_BYTES:
        return None
    return Card(f"{float(size[1]):g} GiB" if size else "", (), (9, 0), 0, memory_mib, 0, None, 0)


@cache
def _by_name() -> dict[str, Card]:
    """Cards by each spelling that means one: our names and the driver's, then shorter ones in the order of SHORT."""
    cards = {card.name: card for card in CARDS}
    found = {_spelled(name): card for card in CARDS for name in (card.name, *card.reported)}
    for name, texts in SHORT.items():
        found.update(dict.fromkeys(map(_spelled, texts.split(", ")), cards[name]))
    for card in CARDS:
        found.setdefault(_spelled(card.name).removeprefix("RTX"), card)
        for unit in (GIB, GIGA):
            found.setdefault(_spelled(f"{card.name} {round(card.total_bytes / unit)}GB"), card)
    return found


def _spelled(name: str) -> str:
    """A name without what is left out or written in several ways: `A10080GB` of `nvidia a100-80g`."""
    words = re.sub(r"(\d)\s*G(IB|B)?\b", r"\1GB", _plain(name).replace("-", " ").replace("_", " "))
    words = re.sub(r"\b(NVIDIA|GEFORCE|QUADRO|TESLA|GENERATION|GPU)\b", "", words)
    return re.sub(r"\s+", "", re.sub(r"SXM\d", "SXM", words))


def _plain(name: str) -> str:
    return " ".join(name.upper().split()).removeprefix("NVIDIA ")
