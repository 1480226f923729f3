from pathlib import Path


def write_media_table(results: Path) -> None: ...
