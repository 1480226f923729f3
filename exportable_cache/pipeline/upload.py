"""Upload bundles to the Hugging Face hub, with a model card that is made from their manifests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import TARGETS, backend_for
from ..bundle.bundle import MANIFEST_FILE, Bundle, Manifest
from ..bundle.hub import api_of, check_repository, check_revision, is_manifest
from ..bundle.signing import SIGNATURE_FILE, signer
from ..common.progress import bytes_text, silent
from ..errors import BundleError, InputError, shown
from ..models.loading.location import hub_answers, hub_errors
from ..models.quantization.spec import Quantization
from ..verification.report import VerifyReport, distance_from_model

if TYPE_CHECKING:
    from ..common.progress import Progress

_CARD = "README.md"
#: Lines around the part of a card that an upload replaces; text outside stays.
_BEGIN, _END = "<!-- begin: made by exportable_cache -->", "<!-- end: made by exportable_cache -->"
_SPEECH, _IMAGES = "automatic-speech-recognition", "image-text-to-text"
_RUNTIMES = {"native": "the native runner", "torch": "torch's runtime"}
_PACKAGES = ("exportable-cache", "torch", "transformers", "executorch", "torch-tensorrt")


@dataclass(frozen=True)
class Uploaded:
    """A bundle of a repository, as its card describes it.

    Attributes:
        manifest: Its manifest.
        signed_by: Fingerprint of the key that its signature names, or None.
    """

    manifest: Manifest
    signed_by: str | None = None


def upload(
    folder: str | os.PathLike,
    repository: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: Progress = silent,
) -> str:
    """Upload a bundle to a repository, which is created if it is missing, and update its model card.

    The bundle replaces the files in the folder of its target. Bundles of other targets stay. All files change in one
    commit.

    Args:
        folder: The bundle. Its files are checked first.
        repository: Id such as `user/name`.
        private: True to create a private repository; by default as the account's settings say.
        revision: Branch to commit to; `main` by default.
        token: Token of the hub; by default that of `hf auth login`.
        progress: Called with each stage.

    Returns:
        URL of the commit.

    Raises:
        BundleError: If the folder is not a bundle, or a file is damaged.
        InputError: If the hub refuses the upload, or cannot be reached.
    """
    check_upload(repository, token)
    if revision is not None:
        check_revision(revision)
    bundle = Bundle.open(folder, check_versions=False, known=True, progress=progress)
    progress(f"uploading {bundle.path} to {repository}", 0, None)
    api, branch = api_of(token), "main" if revision is None else revision
    with hub_errors(repository, branch):
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        info = api.model_info(repository, revision=branch)
        names = [one.rfilename for one in info.siblings or ()]
        root = MANIFEST_FILE in names and api.hf_hub_download(repository, MANIFEST_FILE, revision=info.sha)
        if root and is_manifest(Path(root)):
            raise InputError(
                f"repository must have no bundle at its root, got {repository!r} with one, which load() would open in "
                "place of the new one; delete its files there, or pass another repository"
            )
        made = api.create_commit(
            repository,
            [*_changes(bundle, names), _new_card(api, repository, info.sha, names, bundle)],
            commit_message=f"Upload {bundle.manifest.architecture} for {bundle.manifest.target}",
            revision=branch,
            parent_commit=info.sha,
        )
    return str(made.commit_url)


def check_upload(repository: str, token: str | bool | None = None) -> None:
    """Check that an upload can begin, as far as that is known without one.

    Raises:
        InputError: If the name is not that of a repository, the hub cannot be reached, or there is no token.
    """
    from huggingface_hub import get_token

    check_repository(repository)
    reachable, problem = hub_answers()
    if not reachable:
        raise InputError(f"the hub must be reachable to upload to {repository!r}, got: {problem}; connect, and retry")
    if not token and get_token() is None:
        raise InputError(f"an upload to {repository!r} needs a token; log in with `hf auth login`, or set HF_TOKEN")


def _changes(bundle: Bundle, names: Sequence[str]) -> list[Any]:
    """Return the operations that replace the folder of the bundle's target."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    root = f"{bundle.manifest.target}/"
    files = [MANIFEST_FILE, *bundle.manifest.files]
    if (bundle.path / SIGNATURE_FILE).is_file():
        files.append(SIGNATURE_FILE)
    outdated = [name for name in names if name.startswith(root) and name.removeprefix(root) not in files]
    return [
        *(CommitOperationAdd(root + name, bundle.path / name) for name in files),
        *(CommitOperationDelete(name) for name in outdated),
    ]


def _new_card(api: Any, repository: str, commit: str, names: Sequence[str], bundle: Bundle) -> Any:
    """Return the operation that writes the card, which also describes the repository's bundles of other targets."""
    from huggingface_hub import CommitOperationAdd

    def fetched(name: str) -> Path:
        return Path(api.hf_hub_download(repository, name, revision=commit))

    found = {bundle.manifest.target: Uploaded(bundle.manifest, signer(bundle.path))}
    for target in sorted(TARGETS):
        if f"{target}/{MANIFEST_FILE}" in names and target not in found:
            folder = fetched(f"{target}/{MANIFEST_FILE}").parent
            if f"{target}/{SIGNATURE_FILE}" in names:
                fetched(f"{target}/{SIGNATURE_FILE}")
            try:
                found[target] = Uploaded(Manifest.read(folder), signer(folder))
            except BundleError:  # made by a release with another schema
                continue
    present = fetched(_CARD).read_text(encoding="utf-8", errors="replace") if _CARD in names else ""
    return CommitOperationAdd(_CARD, updated_card(present, repository, found).encode())


# -- the card ----------------------------------------------------------------------------------------------------------


def updated_card(present: str, repository: str, bundles: Mapping[str, Uploaded]) -> str:
    """Return a model card with the part that describes the bundles; other text of the present card stays.

    Args:
        present: The present card, "" if there is none.
        repository: Id of the repository.
        bundles: Its bundles, by target.
    """
    part = f"{_BEGIN}\n{_description(repository, bundles)}{_END}\n"
    # The last one, because the end of another one may have been deleted.
    before, begin, rest = present.rpartition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return before + part + after.lstrip("\n")
    if present.strip():
        return f"{present.rstrip()}\n\n{part}"
    return f"---\n{_front_matter(bundles)}---\n\n# {repository.partition('/')[2]}\n\n{part}"


def _front_matter(bundles: Mapping[str, Uploaded]) -> str:
    from huggingface_hub import ModelCardData

    manifests = [one.manifest for one in bundles.values()]
    source = manifests[0].source
    data = ModelCardData(
        library_name="exportable_cache",
        pipeline_tag=_task(manifests[0]),
        tags=["exportable_cache", *bundles, *sorted({one.model_type for one in manifests})],
        base_model=source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else None,
        base_model_relation="quantized" if manifests[0].quantization else None,
    )
    return data.to_yaml() + "\n"


def _description(repository: str, bundles: Mapping[str, Uploaded]) -> str:
    manifests = {target: one.manifest for target, one in bundles.items()}
    target, first = next(iter(manifests.items()))
    trusted = bool(backend_for(target).machine_code) if target in TARGETS else False
    given = f"{f', target={target!r}' if len(bundles) > 1 else ''}{', trust=True' if trusted else ''}"
    flags = f"{f' --from-target {target}' if len(bundles) > 1 else ''}{' --trust' if trusted else ''}"
    flags += {_SPEECH: " --audio speech.wav", _IMAGES: " --image photo.png"}.get(_task(first), "")
    lines = [
        f"{_code(first.architecture)} from {_code(first.source)} with its static KV cache, by exportable_cache.",
        "",
        "```python",
        f"from exportable_cache import load; print(load({repository!r}{given}).generate_text('Once upon a time'))"
        if _task(first) != _SPEECH
        else f"from exportable_cache import load; session = load({repository!r}{given})",
        "```",
        "",
        "```sh",
        f"exportable-cache generate {repository}{flags} --prompt 'Once upon a time'",
        "```",
        "",
        "| target | recipe | weights | files | cache | tokens | batch |",
        "|---|---|---|---|---|---|---|",
        *(f"| {target} | {' | '.join(_sizes(one))} |" for target, one in manifests.items()),
        "",
        "| target | compared with the eager model | max logit difference | limit | from the stored model | run by |",
        "|---|---|---|---|---|---|",
        *(f"| {target} | {' | '.join(_verified(one))} |" for target, one in manifests.items()),
        "",
        "| target | made with | signed by |",
        "|---|---|---|",
        *(
            f"| {target} | {_versions(one.manifest)} | {_code(one.signed_by) if one.signed_by else 'not signed'} |"
            for target, one in bundles.items()
        ),
        "",
        *(f"- {target}: {_text(remark)}" for target, one in manifests.items() for remark in one.remarks),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _task(manifest: Manifest) -> str:
    """Return the hub's name for what the model does."""
    methods = manifest.program.methods
    if "encode" in methods:
        return (
            _SPEECH
            if methods["encode"].inputs[0].name in ("input_features", "input_values")
            else "text2text-generation"
        )
    return _IMAGES if "encode_image" in methods else "text-generation"


def _sizes(manifest: Manifest) -> list[str]:
    quantized = manifest.quantization
    weights = manifest.dtype
    if quantized is not None:
        weights = str(Quantization(quantized.linear, quantized.group_size, quantized.embeddings))
    recipe = manifest.recipe
    changed = "" if recipe is None else ", ".join(f"{name} {value}" for name, value in recipe.changed.items())
    cache = manifest.dtype if manifest.kv_cache is None else manifest.kv_cache.dtype
    return [
        _text(f"{recipe.name}{f' with {changed}' if changed else ''}" if recipe else "none"),
        _text(weights),
        bytes_text(sum(file.bytes for file in manifest.files.values())),
        f"{bytes_text(manifest.cache_bytes)} ({_text(cache)})",
        str(manifest.program.max_cache_len),
        str(manifest.program.batch_size),
    ]


def _verified(manifest: Manifest) -> list[str]:
    if manifest.verification is None:
        return ["not verified", "", "", "", ""]
    report, distance = VerifyReport.recorded(manifest.verification), distance_from_model(manifest)
    lengths = ", ".join(str(prompt.length) for prompt in report.prompts)
    return [
        f"{report.steps} positions, prompts of {lengths} tokens",
        f"{report.max_difference:.1e}",
        "" if report.tolerance is None else f"{report.tolerance:.1e}",
        "" if distance is None else f"{distance:.1e}",
        _text(report.remark or _RUNTIMES.get(report.runtime, "its runtime, at export")),
    ]


def _versions(manifest: Manifest) -> str:
    return ", ".join(f"{name} {_text(manifest.packages[name])}" for name in _PACKAGES if name in manifest.packages)


def _text(value: object) -> str:
    """Return a name or a sentence as plain text of a Markdown table."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", shown(value)).replace("\n", " ")


def _code(value: object) -> str:
    return f"`{shown(value).replace('`', '').replace('|', '')}`"
