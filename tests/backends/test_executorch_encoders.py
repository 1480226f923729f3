"""Encoders of images and sound on the ExecuTorch runtime, and the rewrites without which it could not run them."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.runtime import Runtime

from exportable_cache import ExportableCache, export, load
from exportable_cache.backends import backend_for
from exportable_cache.backends.executorch.lowering.lower import lower_programs
from exportable_cache.backends.executorch.lowering.rewrites import fold_constants, patches_to_linear, state_of
from exportable_cache.backends.executorch.pte.rewrite import write_pte
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import among
from ..support.multimodal import FAMILIES, tiny_multimodal
from ..test_multimodal import largest_difference, options_of

TOLERANCE = 1e-4


# Patches by a 3-D convolution with positions in a grid; with --full also sound, by 1-D ones.
@pytest.mark.parametrize("family", among(FAMILIES, fast=("qwen3_vl",)))
def test_encoders_equal_the_model(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(family)
    kind, _, options = FAMILIES[family]
    name = f"encode_{kind}"
    modalities = modalities_of(model, [kind], options.get("image_size"))
    backend = backend_for("executorch")
    program = Program(
        model,
        ExportableCache.from_model(model, 32),
        backend.program_spec(ProgramSpec(20, modalities=modalities), backend.options()),
    )
    write_pte(lower_programs({name: program.export(name)}), tmp_path / "program.pte")
    method = Runtime.get().load_program(tmp_path / "program.pte").load_method(name)
    item = torch.randn(modalities[0].inputs[0].shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (expected,) = program.modules[name](item)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(method.execute([item])[0], expected, atol=TOLERANCE, rtol=0)


# One takes 1 to 3 minutes.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bundles_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(family)
    model.save_pretrained(tmp_path / family)
    bundle = export(tmp_path / family, "executorch", 96, tmp_path / "bundle", **options_of(family))
    assert largest_difference(load(bundle.path), model, family) <= TOLERANCE


class Patches(nn.Module):
    """Values [patches, 3 * 2 * height * width] by a kernel of 2 x 4 x 4."""

    def __init__(self, height: int, bias: bool = True) -> None:
        super().__init__()
        self.shape = (-1, 3, 2, height, 4)
        self.embed = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), bias=bias)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.embed(values.view(self.shape)).flatten(1)


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_over_one_patch_become_linear(bias: bool) -> None:
    module, values = Patches(4, bias), torch.randn(5, 96)
    program = patches_to_linear(torch.export.export(module, (values,)))
    targets = {node.target for node in program.graph.nodes}
    assert torch.ops.aten.linear.default in targets and torch.ops.aten.conv3d.default not in targets
    torch.testing.assert_close(program.module()(values), module(values))


def test_convolutions_over_more_are_refused() -> None:
    program = torch.export.export(Patches(8), (torch.randn(5, 192),))
    with pytest.raises(
        UnsupportedModelError, match=r"no kernel for a 3-D convolution of \[5, 3, 2, 8, 4\] by \[8, 3, 2, 4, 4\]"
    ):
        patches_to_linear(program)


class Orders(nn.Module):
    """One order of a constant, and one of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.tensor([2, 0, 1]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        places = torch.bucketize(torch.arange(3) * 0.25, torch.arange(0.25, 1, 0.25), right=True)
        return values[torch.argsort(self.keys)] + torch.argsort(values) + places


def test_orders_of_constants_are_constants() -> None:
    module, values = Orders(), torch.tensor([0.3, 0.1, 0.2])
    program = fold_constants(torch.export.export(module, (values,)))
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.argsort.default) == 1 and torch.ops.aten.bucketize.Tensor not in targets
    assert torch.equal(program.module()(values), module(values))


class Sparse(nn.Module):
    """What lies above a quantile of the normal distribution, as Gemma 3n's feed-forward layers keep it."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        quantile = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.95))
        return torch.relu(values - quantile)


def test_quantiles_of_constants_are_constants() -> None:
    module, values = Sparse(), torch.tensor([0.3, 1.9, 2.2])
    program = fold_constants(torch.export.export(module, (values,)))
    assert torch.ops.aten.erfinv.default not in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(values), module(values))


class Written(nn.Module):
    """A mask that is filled in parts, as encoders do for windows, and one of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("allowed", torch.tensor([1.0, 0.0, 1.0, 0.0]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4)
        before = mask + 1
        mask[1:3] = 5.0
        return values * mask * before + self.allowed.flip(0)


def test_what_is_written_to_is_no_constant() -> None:
    module, values = Written(), torch.randn(4)
    program = fold_constants(torch.export.export(module, (values,)))
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.aten.flip.default not in targets
    assert any(getattr(target, "_schema", None) is not None and target._schema.is_mutable for target in targets)
    for _ in range(2):
        assert torch.equal(program.module()(values), module(values))


class Kept(nn.Module):
    """Two methods over one buffer, as the steps of a decoder over the keys of its encoder: one writes, one reads."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(3), persistent=False)
        self.writes = writes

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.keys.copy_(values)
        return values + torch.exp(self.keys * 2 + torch.arange(3))


def test_what_another_method_writes_is_no_constant(tmp_path: Path) -> None:
    values = torch.tensor([0.1, 0.2, 0.3])
    write, read = (torch.export.export(Kept(writes), (values,)) for writes in (True, False))
    assert state_of((write, read)) == {"keys"} and not state_of((read,))
    write_pte(lower_programs({"write": write, "read": read}), tmp_path / "program.pte")
    program = Runtime.get().load_program(tmp_path / "program.pte")
    module, read = Kept(writes=True), program.load_method("read")
    program.load_method("write").execute([values])
    module(values)
    module.writes = False
    assert torch.allclose(read.execute([values * 2])[0], module(values * 2))
