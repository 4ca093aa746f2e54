"""The measure itself: what counts, what does not, and when it ends."""

import torch
import torch.nn.functional as F
from live_bytes import LiveBytes

KB = 1024  # bytes of 256 fp32 numbers


def test_a_tensor_counts_while_it_lives() -> None:
    with LiveBytes() as live:
        a = torch.zeros(256)
        assert (live.now, live.peak) == (KB, KB)
        b = a + 1
        assert live.now == 2 * KB
        del a
        assert (live.now, live.peak) == (KB, 2 * KB)
        del b
    assert (live.now, live.peak) == (0, 2 * KB)


def test_what_was_there_before_counts_nothing() -> None:
    old = torch.zeros(256)
    with LiveBytes() as live:
        old.add_(1)
        view = old.view(16, 16).mT[2:]
        assert (live.now, live.peak) == (0, 0)
        kept = torch.cat([view, view])
    assert live.now == kept.nbytes


def test_a_view_counts_nothing_and_keeps_its_storage() -> None:
    with LiveBytes() as live:
        whole = torch.zeros(16, 16)
        part = whole[3:5, ::2].mT
        assert live.now == KB
        del whole
        assert live.now == KB
        del part
        assert live.now == 0


def test_a_name_that_is_given_away_frees_what_it_held() -> None:
    with LiveBytes() as live:
        x = torch.zeros(256)
        for _ in range(5):
            x = x * 2
        assert (live.now, live.peak) == (KB, 2 * KB)


def test_a_composite_operation_is_counted_in_its_parts() -> None:
    """softmax in fp32 of bf16 makes an fp32 copy, under inference mode as without."""
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, LiveBytes() as live:
            x.softmax(-1, dtype=torch.float32)
        assert live.peak == 2 * KB


def test_fused_attention_makes_its_output_and_row_sums() -> None:
    q, kv = torch.zeros(1, 4, 16, 8), torch.zeros(1, 2, 32, 8)
    with torch.inference_mode(), LiveBytes() as live:
        out = F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
    assert live.peak == out.nbytes + 4 * 16 * 4


def test_new_data_from_python_counts() -> None:
    with LiveBytes() as live:
        x = torch.tensor([0.0] * 256)
        assert live.now == x.nbytes


def test_a_peak_can_start_again() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(256)
        torch.zeros(4 * 256)
        assert live.peak == 5 * KB and live.at_peak == "aten.zeros.default"
        live.restart()
        assert live.peak == kept.nbytes
