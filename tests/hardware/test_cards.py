"""The table of cards: rates that follow from the silicon, names that match whole."""

import re

import pytest

from llmq.hardware import cards as gpus

# Dense bf16 products summed in f32: FLOP per clock and SM, and the clock in MHz that the paper's rate is stated at (the
# boost clock of the whitepapers). From the architecture papers, not from the table under test.
SILICON = """
    A100 40GB: 2048 x 1410, A100 80GB: 2048 x 1410, A800 40GB: 2048 x 1410, A800 80GB: 2048 x 1410,
    A30: 2048 x 1440, A2: 1024 x 1770, A10: 1024 x 1695, A10G: 512 x 1710, A16: 1024 x 1755, H20: 1024 x 1853,
    H20 141GB: 1024 x 1853, H800: 4096 x 1830, B100: 8192 x 1443, GB200: 8192 x 2008, GB300: 8192 x 2008,
    H100 SXM: 4096 x 1830, H100 PCIe: 4096 x 1620, H100 NVL: 4096 x 1545, H200: 4096 x 1830, H200 NVL: 4096 x 1545,
    GH200 96GB: 4096 x 1830, GH200 144GB: 4096 x 1830, B200: 8192 x 1856, B300: 8192 x 1856, L20: 512 x 2520,
    L4: 1024 x 2040, L40: 512 x 2490, L40S: 1024 x 2520, A40: 1024 x 1740, RTX 6000 Ada: 1024 x 2505,
    RTX PRO 6000: 1024 x 2617, RTX PRO 6000 Max-Q: 1024 x 2280, RTX PRO 6000 Server: 1024 x 2600, GB10: 1024 x 2520
"""


@pytest.mark.parametrize("card", gpus.CARDS, ids=lambda card: card.name)
def test_rates_are_dense_and_summed_in_f32(card):
    """A figure with sparsity or with f16 accumulation is off by two; L40S's sheet rounds by 1.2%.

    fp32 is 2 FLOP per core: 64 cores an SM on GA100, 128 elsewhere, between 1.1 and 2.7 GHz.
    """
    if card in gpus.PAPERS:
        flops, megahertz = map(int, re.search(rf" {re.escape(card.name)}: (\d+) x (\d+)", SILICON).groups())
        assert card.bf16 == pytest.approx(card.num_sms * flops * megahertz * 1e6 / 1e12, rel=0.013)
    else:
        assert 0.9 < card.memory_mib / 1024 / round(card.memory_mib / 1000) < 1.05  # a whole number of GB, nearly
    assert card.e4m3 is None or card.e4m3 == pytest.approx(2 * card.bf16, rel=0.013 if card in gpus.PAPERS else 0.005)
    cores = 64 if card.capability == (8, 0) else 128
    assert 1.1 < card.fp32 * 1e12 / (card.num_sms * cores * 2) / 1e9 < 2.7
    assert ("e4m3" in card.peaks) == (card.capability >= (8, 9))
    assert card.peaks["bf16"] == card.bf16 * 1e12 and card.peaks["fp32"] == card.fp32 * 1e12


def test_every_name_means_one_card():
    names = [gpus._plain(name) for card in gpus.CARDS for name in card.reported]
    assert len(names) == len(set(names))
    assert len(gpus.CARDS) == len({card.name for card in gpus.CARDS})
    for card in gpus.CARDS:
        assert gpus.named(card.name) is card
        for name in card.reported:
            assert gpus.find(name) is gpus.find(f"NVIDIA {name}") is gpus.named(name) is card


def test_the_drivers_names_are_known():
    names = """NVIDIA H200 is H200, NVIDIA H100 80GB HBM3 is H100 SXM, NVIDIA A100-SXM4-80GB is A100 80GB,
        A100-SXM4-40GB is A100 40GB, NVIDIA GH200 480GB is GH200 96GB, NVIDIA B300 SXM6 AC is B300,
        NVIDIA GeForce RTX 4080 SUPER is RTX 4080 SUPER, NVIDIA GeForce RTX 4080 Laptop GPU is RTX 4080 Laptop GPU,
        NVIDIA RTX 5000 Ada Generation is RTX 5000 Ada, NVIDIA RTX PRO 4500 Blackwell is RTX PRO 4500"""
    for reported, name in (pair.split(" is ") for pair in " ".join(names.split()).split(", ")):
        assert gpus.find(reported).name == name


def test_a_variant_is_another_card():
    variants = """GeForce RTX 4090 D v2, GeForce RTX 3080 12GB, H100 80GB HBM3 MIG 1g.10gb, A100-SXM-64GB, L40G,
        GeForce RTX"""
    for reported in ("", "NVIDIA", *(f"NVIDIA {name}" for name in " ".join(variants.split()).split(", "))):
        assert gpus.find(reported) is None, reported


def test_what_users_type_is_understood():
    assert gpus.named("h200") is gpus.named("NVIDIA H200") is gpus.find("NVIDIA H200")
    assert gpus.named("rtx  4090").name == "RTX 4090"
    assert gpus.named("H100").name == "H100 SXM"
    assert gpus.find("H100") is None  # no driver says so, and it would not say which
    assert gpus.named("RTX 4085") is None and gpus.nearest("RTX 4085")[0] in ("RTX 4080", "RTX 4090 D")
    assert gpus.nearest("Voodoo") == [card.name for card in gpus.CARDS]


def test_any_usual_spelling_is_understood():
    for name, typed in {
        "RTX 4090": "RTX4090, 4090, rtx-4090, GeForce RTX 4090, nvidia geforce rtx4090, RTX 4090 24GB",
        "RTX 4090 Laptop GPU": "4090 laptop, RTX 4090 Laptop",
        "RTX 4070 Ti SUPER": "4070 ti super, RTX4070Ti Super",
        "RTX 4060 Ti 16GB": "4060ti 16g, RTX 4060 Ti 16 GB",
        "A100 80GB": "a100-80g, A100, A100 80G, a100_80gb, A100-SXM4-80GB, Tesla A100, A100 SXM",
        "A100 40GB": "a100-40g, A100 40 GB, A100 SXM4 40GB",
        "H100 SXM": "h100 sxm, H100, H100-SXM5, h100sxm5, H100 SXM5 80GB, H100 80GB",
        "H100 PCIe": "h100-pcie, H100 PCIe 80GB, H100 80GB PCIe",
        "H200": "H200 SXM, h200-141gb",
        "L4": "L4 24GB, nvidia-l4",
        "RTX A6000": "A6000, rtxa6000",
        "RTX 6000 Ada": "6000 ada, RTX 6000 Ada Generation",
        "RTX PRO 6000": "pro 6000, RTX-PRO-6000",
    }.items():
        for text in typed.split(", "):
            assert (card := gpus.named(text)) is not None and card.name == name, text
    for text in ("4085", "A100 60GB", "40", "H100 SXM 40GB", "RTX", "4090 D v2", "SXM", "H100 80GB HBM3 MIG 1g.10gb"):
        assert gpus.named(text) is None, text


def test_a_card_of_unknown_rates_is_taken_for_one_of_its_size():
    for text, name in (("24GiB", "RTX 4090"), ("80GiB", "H100 SXM"), ("64GiB", "H100 SXM"), ("141GiB", "H200")):
        assert gpus.rated(gpus.named(text)).name == name
    assert gpus.rated(gpus.named("L4")) is gpus.named("L4")
    assert gpus.rated(gpus.named("L20")).name == "RTX 6000 Ada"


def test_a_size_is_a_card_of_which_nothing_else_is_known():
    for text in ("24GiB", "24 gib", "24GB", "24G", "24.0GiB"):
        card = gpus.named(text)
        assert (card.name, card.total_bytes, card.peaks, card.num_sms) == ("24 GiB", 24 * 2**30, {}, 0)
    assert gpus.named("0.5GiB") is None and gpus.named("24") is None and gpus.named("-3GiB") is None


def test_memory_that_a_run_can_take():
    """An idle H200 with a context: CUDA said that 139.29 GiB were free."""
    card = gpus.named("H200")
    assert card.total_bytes == 143771 * 2**20
    assert card.free_bytes == pytest.approx(139.29 * 2**30, rel=0.002)
