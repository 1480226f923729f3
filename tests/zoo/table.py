from pathlib import Path
def write_table(folder: Path) -> None: pass
