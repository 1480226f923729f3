# Toolchain file for 64-bit ARM Linux with Debian's and Ubuntu's cross compilers (apt install g++-aarch64-linux-gnu).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# Programs of this machine, libraries of the target; paths in CMAKE_PREFIX_PATH are used unchanged.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
