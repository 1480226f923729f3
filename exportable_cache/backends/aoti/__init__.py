"""Target `aoti`: code compiled by AOTInductor for this machine's processor, loaded from Python or C++."""
