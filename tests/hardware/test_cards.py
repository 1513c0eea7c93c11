"""The table of cards: rates that follow from the silicon, names that match whole."""

import pytest

from llmq.hardware import cards as gpus

# Dense bf16 products summed in f32: FLOP per clock and SM, and the clock in MHz that the paper's rate is stated at (the
# boost clock of the whitepapers). From the architecture papers, not from the table under test.
SILICON = {
    "A100 40GB": (2048, 1410),
    "A100 80GB": (2048, 1410),
    "H100 SXM": (4096, 1830),
    "H100 PCIe": (4096, 1620),
    "H100 NVL": (4096, 1545),
    "H200": (4096, 1830),
    "H200 NVL": (4096, 1545),
    "GH200 96GB": (4096, 1830),
    "GH200 144GB": (4096, 1830),
    "B200": (8192, 1856),
    "B300": (8192, 1856),
    "L4": (1024, 2040),
    "L40": (512, 2490),
    "L40S": (1024, 2520),
    "A40": (1024, 1740),
    "RTX 3090": (512, 1695),
    "RTX 4080": (512, 2505),
    "RTX 4090": (512, 2520),
    "RTX 5070": (512, 2512),
    "RTX 5080": (512, 2617),
    "RTX 5090": (512, 2407),
    "RTX 6000 Ada": (1024, 2505),
    "RTX PRO 6000": (1024, 2617),
    "RTX PRO 6000 Max-Q": (1024, 2280),
    "RTX PRO 6000 Server": (1024, 2600),
    "GB10": (1024, 2520),
}


@pytest.mark.parametrize("card", gpus.CARDS, ids=lambda card: card.name)
def test_rates_are_dense_and_summed_in_f32(card):
    """A figure with sparsity or with f16 accumulation is off by two; L40S's sheet rounds by 1.2%."""
    flops, megahertz = SILICON[card.name]
    assert card.bf16 == pytest.approx(card.num_sms * flops * megahertz * 1e6 / 1e12, rel=0.013)
    if card.e4m3:
        assert card.e4m3 == pytest.approx(2 * card.bf16, rel=0.013)


@pytest.mark.parametrize("card", gpus.CARDS, ids=lambda card: card.name)
def test_ordinary_cores_run_at_a_boost_clock(card):
    """fp32 is 2 FLOP per core: 64 cores an SM on the A100, 128 elsewhere, between 1.3 and 2.7 GHz."""
    cores = 64 if card.capability == (8, 0) else 128
    assert 1.3 < card.fp32 * 1e12 / (card.num_sms * cores * 2) / 1e9 < 2.7


@pytest.mark.parametrize("card", gpus.CARDS, ids=lambda card: card.name)
def test_fp8_is_where_the_silicon_has_it(card):
    assert ("e4m3" in card.peaks) == (card.capability >= (8, 9))
    assert card.peaks["bf16"] == card.bf16 * 1e12 and card.peaks["fp32"] == card.fp32 * 1e12
    assert "sparsity" in card.source or "whitepaper" in card.source or "datasheet" in card.source


def test_every_name_means_one_card():
    names = [gpus._plain(name) for card in gpus.CARDS for name in card.reported]
    assert len(names) == len(set(names))
    assert len(gpus.names()) == len(set(gpus.names()))
    for card in gpus.CARDS:
        assert gpus.named(card.name) is card
        for name in card.reported:
            assert gpus.find(name) is gpus.find(f"NVIDIA {name}") is gpus.named(name) is card


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA GB10", "GB10"),
    ],
)
def test_the_drivers_names_are_known(reported, name):
    assert gpus.find(reported).name == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4080 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5070 Ti",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H20",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX",
        "NVIDIA",
        "",
    ],
)
def test_a_variant_is_another_card(reported):
    assert gpus.find(reported) is None


def test_what_somebody_types_is_understood():
    assert gpus.named("h200") is gpus.named("NVIDIA H200") is gpus.find("NVIDIA H200")
    assert gpus.named("rtx  4090").name == "RTX 4090"
    assert gpus.named("H100").name == "H100 SXM"
    assert gpus.find("H100") is None  # no driver says so, and it would not say which
    assert gpus.named("RTX 4080 SUPER") is None


def test_memory_that_a_run_can_take():
    """An idle H200 with a context: CUDA said that 139.29 GiB were free."""
    card = gpus.named("H200")
    assert card.total_bytes == 143771 * 2**20
    assert card.free_bytes == pytest.approx(139.29 * 2**30, rel=0.002)
