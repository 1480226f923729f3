# ec_executorch from the Python wheel: its headers, and the libraries that its Python bindings are made of.
#
# The wheel is made for Python: its library of runtime, kernels and delegates is the extension module _portable_lib, which
# refers to libtorch and libpython. Both are on the machine that exports, so this is for there, not for a device.
if(EC_OPERATORS)
  message(FATAL_ERROR "EC_OPERATORS is ${EC_OPERATORS}, but the wheel's library has all kernels in it; it is for an installed "
    "ExecuTorch: -DEC_EXECUTORCH=installed")
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(_query [=[
import importlib.util, pathlib, sysconfig
def folder(name):
    spec = importlib.util.find_spec(name)
    return pathlib.Path(list(spec.submodule_search_locations)[0]).as_posix() if spec else ""
get = sysconfig.get_config_var
library = pathlib.Path(get("LIBDIR") or "", get("INSTSONAME") or "")
shared = library.as_posix() if get("Py_ENABLE_SHARED") and library.is_file() else ""
print(";".join([folder("executorch"), folder("pytorch_tokenizers"), folder("torch"), get("EXT_SUFFIX"), shared]))
]=])
execute_process(COMMAND "${Python3_EXECUTABLE}" -c "${_query}" OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
list(GET _found 0 _executorch)
list(GET _found 1 _tokenizers)
list(GET _found 2 _torch)
list(GET _found 3 _suffix)
list(GET _found 4 _python)
if(NOT _executorch OR NOT _tokenizers OR NOT _torch)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no executorch, or not all it depends on. Install it (pip install "
    "executorch==1.4.1), name another Python with -DPython3_EXECUTABLE=..., or build against an "
    "installed ExecuTorch with -DEC_EXECUTORCH=installed")
endif()
if(NOT _python)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no shared libpython, which the wheel's libraries refer to. Install it "
    "(on Debian and Ubuntu: apt install libpython3-dev), or name a Python built with --enable-shared: -DPython3_EXECUTABLE=...")
endif()

set(_libraries
  "${_executorch}/extension/pybindings/_portable_lib${_suffix}"              # runtime, portable and optimised kernels, XNNPACK
  "${_executorch}/extension/llm/custom_ops/libcustom_ops_aot_lib.so"         # llama::update_cache, llama::custom_sdpa
  "${_executorch}/kernels/quantized/libquantized_ops_aot_lib.so"             # quantized_decomposed::*
  "${_executorch}/extension/llm/runner/_llm_runner${_suffix}"                # the reader of tokenizer.json
)
set(EC_KERNELS "" CACHE FILEPATH "Library of kernels/, whose attention is used in place of the wheel's; empty for the wheel's")
if(EC_KERNELS)
  get_filename_component(_kernels "${EC_KERNELS}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  if(NOT EXISTS "${_kernels}")
    message(FATAL_ERROR "EC_KERNELS is ${EC_KERNELS}, but there is no such file; build it with: exportable-cache kernels build")
  endif()
  list(APPEND _libraries "${_kernels}")
endif()
add_library(ec_executorch INTERFACE)
target_include_directories(ec_executorch SYSTEM INTERFACE
  "${_executorch}/include"
  "${_executorch}/include/executorch/runtime/core/portable_type/c10"
  "${_tokenizers}/include"
  "${CMAKE_CURRENT_LIST_DIR}/../../../kernels/cmake/wheel"  # the header of pthreadpool
)
target_compile_definitions(ec_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS)
# Kernels and delegates register themselves as the libraries are loaded: no symbol of theirs is asked for.
target_link_options(ec_executorch INTERFACE "LINKER:--no-as-needed" "LINKER:--allow-shlib-undefined")
target_link_libraries(ec_executorch INTERFACE ${_libraries} "${_python}")
cmake_path(GET _python PARENT_PATH _python_folder)
foreach(_library IN LISTS _libraries)
  cmake_path(GET _library PARENT_PATH _folder)
  target_link_options(ec_executorch INTERFACE "LINKER:-rpath,${_folder}")
endforeach()
target_link_options(ec_executorch INTERFACE "LINKER:-rpath,${_torch}/lib:${_python_folder}")
