"""Target `aoti`: machine code made by AOTInductor for this machine's processor, loaded from Python or C++ without
tracing.
"""
