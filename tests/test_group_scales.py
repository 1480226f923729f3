"""Scales of 4-bit groups: the least error of a few, numbers a kernel takes, the same in any rows and threads."""

import pytest
import torch

from exportable_cache.backends.executorch.options import ExecutorchOptions
from exportable_cache.cache.spec import CacheSpec
from exportable_cache.common.fs.tensor_files import Scratch
from exportable_cache.models.quantization import calibration
from exportable_cache.models.quantization.calibration import round_groups
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.pipeline.spec import ExportSpec

from .support.models import tiny_model

pytest.importorskip("torchao", reason="the executorch extra is not installed")

GROUP = 32


def weights(rows: int = 40, columns: int = 192) -> torch.Tensor:
    """Some like a normal distribution, some with outliers of either sign, some with few numbers."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=generator)
    heavy = normal * torch.rand(rows, columns, generator=generator).pow(-0.7)
    return torch.cat([normal, heavy, torch.sign(normal), torch.rand(rows, columns, generator=generator) * 1e-3])


def errors(weight: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Squared error of each group, in double precision."""
    grouped = weight.double().view(len(weight), -1, GROUP)
    return (integers.view(grouped.shape) * scales.double()[..., None] - grouped).square().sum(-1)


def largest_over(steps: float, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Errors with scales of the largest magnitude over `steps`."""
    grouped = weight.view(len(weight), -1, GROUP)
    scales = (grouped.abs().amax(-1) / steps).to(dtype)
    integers = (grouped / scales.float()[..., None]).round().clamp(-8, 7)
    return errors(weight, integers.to(torch.int8), scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_group_is_worse_than_with_its_largest_magnitude_over_7_5(dtype: torch.dtype) -> None:
    weight = weights()
    found, usual = errors(weight, *round_groups(weight, GROUP, dtype)), largest_over(7.5, weight, dtype)
    assert (found <= usual * (1 + 1e-5)).all()
    assert found.sum() < 0.87 * usual.sum()
    # Scales that divide by one number fall short of one chosen for each group.
    for steps in (7.0, 8.0, 8.5, 9.0):
        assert found.sum() < 0.97 * largest_over(steps, weight, dtype).sum()


def test_signed_scales_are_better_still() -> None:
    weight = weights()
    plain, signed = (errors(weight, *round_groups(weight, GROUP, torch.bfloat16, signed)) for signed in (False, True))
    assert signed.sum() < 0.95 * plain.sum()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitude_of_either_sign_is_8_steps_under_a_signed_scale(sign: int) -> None:
    weight = sign * torch.tensor([8.0, *([-7.0, 1.0, 3.0, -5.0] * 7), 0.0, 2.0, -4.0])[None]
    integers, scales = round_groups(weight, GROUP, torch.bfloat16, signed=True)
    assert scales.item() == -sign and torch.equal(integers * scales.float(), weight)
    # Without a sign 8 is no number of 4 bits, and -8 is.
    integers, scales = round_groups(weight, GROUP, torch.bfloat16)
    assert scales.item() > 0 and torch.equal(integers * scales.float(), weight) == (sign < 0)


def test_a_scale_is_fitted_to_the_integers_that_the_best_of_the_others_gives() -> None:
    # Of four steps each way: none of what is tried first is a quarter of the largest.
    weight = torch.tensor([*([1.0, -1.0, 2.0, -2.0] * 7), 7.7, -7.7, 3.0, -3.0])[None]
    integers, scales = round_groups(weight, GROUP, torch.float32)
    products = (integers * weight).sum() / integers.square().sum()
    torch.testing.assert_close(scales.item(), products.item(), rtol=1e-6, atol=0)
    assert all(abs(scales.item() - 7.7 / steps) > 1e-3 for steps in (7.5, 7.0, 8.0, 8.5, 9.0))


def test_groups_of_zeros_and_of_the_smallest_numbers_have_scales_that_kernels_take() -> None:
    weight = torch.zeros(3, GROUP)
    weight[1], weight[2, 0] = 1e-40, -(2.0**60)
    integers, scales = round_groups(weight, GROUP, torch.bfloat16)
    assert (integers[:2] == 0).all() and integers[2, 0] == -8 and (integers[2, 1:] == 0).all()
    assert (scales >= torch.finfo(torch.float32).smallest_normal).all() and scales.isfinite().all()


@pytest.mark.parametrize("signed", [False, True])
def test_weights_that_are_of_4_bits_already_keep_their_values(signed: bool) -> None:
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        integers, scales = round_groups(weight, GROUP, torch.bfloat16, signed)
        return integers * scales.float().repeat_interleave(GROUP, 1)

    once = rounded(weights())
    assert torch.equal(rounded(once), once)


def test_rows_and_threads_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    weight = weights().to(torch.bfloat16)
    whole = round_groups(weight, GROUP, torch.bfloat16)
    monkeypatch.setattr(calibration, "_ELEMENTS_AT_ONCE", 5 * weight.shape[1])
    parts = round_groups(weight, GROUP, torch.bfloat16, scratch=Scratch(tmp_path))
    assert torch.equal(parts.integers, whole.integers) and torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize(
    ("scheme", "least", "dtype"),
    [
        (Quantization("8da4w", GROUP), 1, torch.bfloat16),
        (Quantization("8da4w", GROUP, scales="signed_mse"), -1, torch.bfloat16),
        (Quantization("8da4w", GROUP, scales="absmax"), 1, torch.bfloat16),
    ],
    ids=["mse", "signed_mse", "absmax"],
)
def test_linear_layers_have_the_scales_asked_for(scheme: Quantization, least: int, dtype: torch.dtype) -> None:
    model = tiny_model("llama", hidden_size=64, head_dim=16, tie_word_embeddings=False)
    layer = model.model.layers[0].mlp.down_proj
    found = quantize(model, scheme).model.model.layers[0].mlp.down_proj.weight
    assert found.scale.dtype == dtype and found.scale.sign().min() == least and not found.zero_point.any()
    if scheme.scales == "absmax":
        grouped = layer.weight.view(len(layer.weight), -1, GROUP)
        torch.testing.assert_close(found.scale, (grouped.abs().amax(-1) / 7.5).to(dtype), rtol=0, atol=0)
    else:
        expected = round_groups(layer.weight, GROUP, dtype, scheme.scales == "signed_mse")
        assert torch.equal(found.qdata, expected.integers) and torch.equal(found.scale, expected.scales)


def test_tables_of_4_bits_have_signed_scales() -> None:
    model = tiny_model("llama", hidden_size=64, head_dim=16, tie_word_embeddings=False)
    table = model.model.embed_tokens.weight
    found = quantize(model, Quantization("8da8w", embeddings="4w")).model.model.embed_tokens.weight
    expected = round_groups(table, GROUP, torch.float32, signed=True)
    assert torch.equal(found.qdata, expected.integers) and torch.equal(found.scale, expected.scales)
    assert found.activation_quantization is None


def test_negative_scales_are_for_kernels_that_take_them(tmp_path) -> None:
    def chosen(**options: str) -> str | None:
        spec = ExportSpec(
            "model",
            "executorch",
            tmp_path / "x",
            cache=CacheSpec(64),
            options=ExecutorchOptions(**options),
            quantization=Quantization("8da4w"),
        )
        return spec.quantization.scales

    assert chosen() == chosen(kernels="native", linears="delegate") == "mse"
    # Kernels of ours for attention bring those for linear layers.
    assert chosen(linears="native") == chosen(kernels="native") == "signed_mse"
