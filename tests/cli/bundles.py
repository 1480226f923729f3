"""A tiny bundle for commands to open, spoiled manifests, and how a command says no."""

import json

from exportable_cache.bundle.files import checksum_of

#: Of the bundle.
MAX_CACHE_LEN = 48


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({**fields, "checksum": checksum_of(fields)}))


def refused(result, *words):
    """The command said no, in words, and nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
