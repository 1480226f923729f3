"""What acts in traces alone is needed still: without it, a target refuses the model. Slow, as all of it is lowered."""

import pytest

from exportable_cache.common.patch import ORIGINAL
from exportable_cache.models.patches.families import glm5_next, jetmoe, led, zaya
from exportable_cache.models.patches.mechanisms import masks, speech
from exportable_cache.models.patches.registry import PATCHES

from ..zoo.architectures import architectures
from ..zoo.check import check

#: Row of the zoo -> the target that needs a family's patches, all of them but those that other targets need.
NEEDED = {
    "causal-jetmoe": ("executorch", jetmoe, ()),
    "causal-zaya": ("compiled", zaya, ()),
    "image-glm5_next": ("executorch", glm5_next, ()),
    "image-pix2struct": ("executorch", masks, ()),
    "seq2seq-led": ("pt2", led, ("LEDDecoderAttention",)),
    "speech-seamless_m4t": ("executorch", speech, ("SeamlessM4TPreTrainedModel",)),
}


@pytest.mark.canary
@pytest.mark.parametrize("name", NEEDED)
def test_without_its_patches_a_target_refuses_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(one for one in architectures() if one.name == name)
    target, family, others = NEEDED[name]
    left_out = [patch for patch in family.PATCHES[row.model_type] if patch.label not in others]
    for patch in left_out:
        owner, attribute = patch._owner()
        current = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, getattr(current, ORIGINAL, current))
    # Of all types: a decoder inside a model has the same patches under a type of its own.
    for model_type, patches in PATCHES.items():
        monkeypatch.setitem(PATCHES, model_type, tuple(patch for patch in patches if patch not in left_out))
    facts: dict = {}
    check(row, [target], facts.update)
    assert not [patch.name for patch in left_out if hasattr(getattr(*patch._owner()), ORIGINAL)]
    assert facts["targets"][target]["status"] != "pass"
