"""Options of a cache in one frozen value, which is checked when it is made.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.settings import REQUIRED, check_count, check_settings, setting
from ..errors import InputError

if TYPE_CHECKING:
    import torch

#: What `kv_dtype` may be, besides None for the dtype that the model writes.
KV_DTYPES = ("float16", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Sinks:
    """Sizes of attention sinks: `Sinks(4, 1020)` keeps the first 4 tokens and the last 1020.

    Raises:
        InputError: If a number is not a positive int.
    """

    tokens: int
    window: int

    def __post_init__(self) -> None:
        check_count("attention_sinks", self.tokens)
        check_count("attention_window", self.window)

    @classmethod
    def within(cls, max_cache_len: int, tokens: int | None, window: int | None) -> Sinks | None:
        """Return the sinks of the options `attention_sinks` and `attention_window`, None without them.

        Args:
            max_cache_len: Most slots of a layer; the window takes the rest of them by default.
            tokens: `attention_sinks`.
            window: `attention_window`.

        Raises:
            InputError: If there is a window without sinks, or both do not fit.
        """
        if tokens is None:
            if window is not None:
                raise InputError(
                    f"attention_window is {window}, but there are no attention_sinks; pass them too, 4 is common"
                )
            return None
        check_count("attention_sinks", tokens)
        window = max_cache_len - tokens if window is None else window
        if isinstance(window, int) and tokens + max(window, 1) > max_cache_len:
            raise InputError(
                f"attention_sinks {tokens} and attention_window {max(window, 1)} take {tokens + max(window, 1)} slots, "
                f"max_cache_len is {max_cache_len}; raise max_cache_len, or lower them"
            )
        return cls(tokens, window)


#: Defaults of `max_cache_len` where the model has at least as many positions: in this process, and in an export.
CACHE_LEN, EXPORT_CACHE_LEN = 4096, 1024


@dataclass(frozen=True)
class CacheSpec:
    """Options of a cache: `CacheSpec(1024, batch_size=2)` holds 1024 tokens in each of two rows.

    Attributes:
        max_cache_len: Tokens a full-attention layer can hold.
        batch_size: Rows.
        dtype: Of keys and values; None for what the model writes. A name, such as "float16", becomes the dtype.
        device: Where to allocate; None for where the model is.
        rollback_slots: Extra slots of each ring, so that `crop` can take back `rollback_slots + 1` tokens past the
            window.
        attention_sinks: Have full-attention layers keep this many first tokens and the newest `attention_window`, and
            run without end; None for a layer that keeps all.
        attention_window: What `attention_sinks` leave of `max_cache_len` by default.
        kv_dtype: One of `KV_DTYPES` to keep keys and values so, whole numbers with scales; None for the dtype that the
            model writes.
        max_encoder_len: Longest input of an encoder, in tokens, frames or samples; slots for images of
            cross-attention layers; None for the default, two images there.
        offload: Keep layers in host memory ("host") or in files in this folder, and two of them on the device, see
            `offload.offloaded`; None for all on the device.
        sinks: Both numbers of attention sinks, None where there are none.

    Raises:
        InputError: If a value is out of range, or two do not go together.
    """

    max_cache_len: int = setting(
        REQUIRED,
        "Tokens a full-attention layer holds.",
        flags=("--max-cache-len", "--max-seq-len", "-n"),
        metavar="N",
        kind=int,
        least=1,
    )
    batch_size: int = setting(1, "Rows.", flags=("--batch-size", "-b"), metavar="N", kind=int, least=1)
    dtype: torch.dtype | str | None = setting(
        None,
        "Dtype of weights, keys and values.",
        flags=("--dtype",),
        offered=("float32", "float16", "bfloat16"),
        shown_default=False,
    )
    device: torch.device | str | None = None
    rollback_slots: int = setting(
        0,
        "Extra slots of each sliding layer, so that N + 1 tokens can be taken back past its window.",
        flags=("--rollback-slots",),
        metavar="N",
        kind=int,
        least=0,
    )
    attention_sinks: int | None = setting(
        None,
        "Full-attention layers keep the first K tokens and the newest ones, and run without end.",
        flags=("--attention-sinks",),
        metavar="K",
        kind=int,
        least=1,
        shown_default=False,
    )
    attention_window: int | None = setting(
        None,
        "Newest tokens kept in addition to the sinks.",
        flags=("--attention-window",),
        metavar="W",
        kind=int,
        least=1,
        shown_default="max-cache-len less the sinks",
    )
    kv_dtype: str | None = setting(
        None,
        "Keep keys and values in 16, 8 or 4 bits.",
        flags=("--kv-dtype", "--kv-bits"),
        metavar="|".join(KV_DTYPES),
        choices=KV_DTYPES,
        spellings={"8": "int8", "4": "int4"},
        shown_default=False,
    )
    max_encoder_len: int | None = setting(
        None,
        "Encoder-decoders: longest encoder input, in tokens, frames or samples; slots of images in cross-attention.",
        flags=("--max-encoder-len",),
        metavar="N",
        kind=int,
        least=1,
        shown_default="512 tokens, 30 s of samples, or what the encoder has positions for; two images",
    )
    offload: str | Path | None = None
    sinks: Sinks | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "sinks", Sinks.within(self.max_cache_len, self.attention_sinks, self.attention_window))
        if self.device is not None:
            _check_device(self.device)
        if self.offload is not None:
            _check_offload(self.offload)
        if self.dtype is not None:
            from ..common.tensors import parse_dtype

            object.__setattr__(self, "dtype", parse_dtype(self.dtype))


def _check_offload(offload: str | Path) -> None:
    """Check that layers are offloaded to host memory or to a folder.

    Raises:
        InputError: If not.
    """
    if not isinstance(offload, (str, Path)) or (offload != "host" and not Path(offload).is_dir()):
        raise InputError(
            f"offload is {str(offload)!r}; it must be 'host' for host memory, or a folder, for a file that is mapped"
        )


def _check_device(device: torch.device | str) -> None:
    """Check the device.

    Raises:
        InputError: If torch does not know it.
    """
    import torch

    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {device!r}; it must be one of torch's, such as 'cpu' or 'cuda:0'") from error
