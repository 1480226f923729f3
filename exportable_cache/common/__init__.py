"""Tools for every room: files, processes, native code, settings, progress, and access to private names of packages."""
