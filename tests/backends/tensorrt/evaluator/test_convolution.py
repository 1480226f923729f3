import pytest
import torch
from torch.nn import functional as F

from exportable_cache.errors import VerificationError

from .networks import DTYPES, assert_caught, assert_same, evaluate, random, trt


def weights(tensor: torch.Tensor | None):
    return trt.Weights() if tensor is None else trt.Weights(DTYPES[tensor.dtype], tensor.data_ptr(), tensor.numel())


def convolve(
    kernel: torch.Tensor, bias: torch.Tensor | None = None, *, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1
):
    """A convolution that points at `kernel` and `bias`, which the caller keeps."""

    def build(net, x):
        layer = net.add_convolution_nd(x, kernel.shape[0], tuple(kernel.shape[2:]), weights(kernel), weights(bias))
        layer.stride_nd, layer.padding_nd, layer.dilation_nd, layer.num_groups = stride, padding, dilation, groups
        layer.name = "convolution"
        net.constants.update(
            {f"convolution {name}": t for name, t in (("KERNEL", kernel), ("BIAS", bias)) if t is not None}
        )
        return layer

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_convolution(dtype: torch.dtype):
    x, kernel, bias = (
        random(2, 4, 9, 5, dtype=dtype),
        random(6, 2, 3, 2, dtype=dtype, seed=1),
        random(6, dtype=dtype, seed=2),
    )
    settings = {"stride": (2, 1), "padding": (2, 1), "dilation": (2, 1), "groups": 2}
    expected = F.conv2d(x.float(), kernel.float(), bias.float(), **settings).to(dtype)
    assert_same(evaluate(convolve(kernel, bias, **settings), x), expected)
    for name, other in (("stride", (1, 1)), ("padding", (1, 1)), ("dilation", (1, 1))):
        assert_caught(evaluate(convolve(kernel, bias, **{**settings, name: other}), x), expected)
    assert_caught(evaluate(convolve(kernel, None, **settings), x), expected)
    assert_caught(evaluate(convolve(kernel.flip(2).contiguous(), bias, **settings), x), expected)


def pool(kind: str, window=(3, 2), *, stride=(2, 1), padding=(1, 1), excludes=False):
    def build(net, x):
        layer = net.add_pooling_nd(x, getattr(trt.PoolingType, kind), window)
        layer.stride_nd, layer.padding_nd, layer.average_count_excludes_padding = stride, padding, excludes
        return layer

    return build


@pytest.mark.parametrize("excludes", [True, False])
def test_pooling(excludes: bool):
    x = random(2, 4, 9, 5)
    settings = {"stride": (2, 1), "padding": (1, 1)}
    expected = F.avg_pool2d(x, (3, 2), **settings, count_include_pad=not excludes)
    assert_same(evaluate(pool("AVERAGE", excludes=excludes), x), expected)
    assert_same(evaluate(pool("MAX"), x), F.max_pool2d(x, (3, 2), **settings))
    for other in ({"excludes": not excludes}, {"stride": (1, 1)}, {"padding": (0, 1)}, {"window": (2, 3)}):
        assert_caught(evaluate(pool("AVERAGE", **{"excludes": excludes, **other}), x), expected)
    assert_caught(evaluate(pool("MAX"), x), expected)
    with pytest.raises(VerificationError, match="has type MAX_AVERAGE_BLEND"):
        evaluate(pool("MAX_AVERAGE_BLEND"), x)


def test_each_channel_for_itself():
    x, kernel = random(1, 4, 7, 1), random(4, 1, 3, 1, seed=1)
    assert_same(evaluate(convolve(kernel, groups=4, padding=(2, 0)), x), F.conv2d(x, kernel, groups=4, padding=(2, 0)))


def test_unequal_padding_is_refused():
    kernel = random(4, 4, 3, 1)

    def build(net, x):
        layer = convolve(kernel)(net, x)
        layer.pre_padding = (2, 0)
        return layer

    with pytest.raises(VerificationError, match=r"is padded by \(2, 0\) before and \(0, 0\) after"):
        evaluate(build, random(1, 4, 7, 1))


def test_a_kernel_that_nobody_can_show_is_asked_for():
    kernel = random(4, 4, 3, 1, dtype=torch.bfloat16)

    def build(net, x):
        layer = convolve(kernel)(net, x)
        net.constants.clear()
        return layer

    with pytest.raises(VerificationError, match="pass it in `constants` as 'convolution KERNEL'"):
        evaluate(build, random(1, 4, 7, 1, dtype=torch.bfloat16))
