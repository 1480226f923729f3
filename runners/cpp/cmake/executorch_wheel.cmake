# ec_executorch from the Python wheel: its headers, and the libraries that its Python bindings are made of.
#
# The wheel is made for Python: runtime, kernels and delegates are in the extension module _portable_lib, or from release 1.5 on
# in _C and libraries of their own; operators for language models refer to libtorch and libpython. Both are on the machine that
# exports, so this is for desktops, not for devices.
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
executorch, suffix = folder("executorch"), get("EXT_SUFFIX")
bindings = pathlib.Path(executorch, "extension", "pybindings")
# From release 1.5 on, and before it.
names = [name for name in ("_C", "_portable_lib") if executorch and (bindings / (name + suffix)).is_file()]
runtime = [(bindings / (names[0] + suffix)).as_posix()] if names else []
parts = ("", "_threadpool", "_kernels_optimized", "_kernels_quantized", "_backend_xnnpack") if names[:1] == ["_C"] else ()
runtime += [pathlib.Path(executorch, "lib", f"libexecutorch{part}.so").as_posix() for part in parts]
print(";".join([executorch, folder("pytorch_tokenizers"), folder("torch"), suffix, shared, *runtime]))
]=])
execute_process(COMMAND "${Python3_EXECUTABLE}" -c "${_query}" OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
list(POP_FRONT _found _executorch _tokenizers _torch _suffix _python)
set(_runtime ${_found})
if(NOT _executorch OR NOT _tokenizers OR NOT _torch OR NOT _runtime)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no executorch, or not all it depends on. Install it (pip install "
    "executorch==1.4.1), name another Python with -DPython3_EXECUTABLE=..., or build against an "
    "installed ExecuTorch with -DEC_EXECUTORCH=installed")
endif()
if(NOT _python)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no shared libpython, which the wheel's libraries refer to. Install it "
    "(on Debian and Ubuntu: apt install libpython3-dev), or name a Python built with --enable-shared: -DPython3_EXECUTABLE=...")
endif()

set(_libraries
  ${_runtime}                                                                # runtime, portable and optimized kernels, XNNPACK
  "${_executorch}/extension/llm/custom_ops/libcustom_ops_aot_lib.so"         # llama::update_cache, llama::custom_sdpa
  "${_executorch}/kernels/quantized/libquantized_ops_aot_lib.so"             # quantized_decomposed::*
  "${_executorch}/extension/llm/runner/_llm_runner${_suffix}"                # the reader of tokenizer.json
)
set(EC_KERNELS "" CACHE FILEPATH "Library of kernels/, whose attention is used in place of the wheel's; empty for the wheel's")
if(TARGET exportable_cache_kernels)
  list(APPEND _libraries exportable_cache_kernels)  # of a project that builds both
elseif(EC_KERNELS)
  get_filename_component(_kernels "${EC_KERNELS}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  if(NOT EXISTS "${_kernels}")
    message(FATAL_ERROR "EC_KERNELS is ${EC_KERNELS}, but there is no such file; build it with: exportable-cache native build")
  endif()
  list(APPEND _libraries "${_kernels}")
endif()
add_library(ec_executorch INTERFACE)
target_include_directories(ec_executorch SYSTEM INTERFACE
  "${_executorch}/include"
  "${_executorch}/include/executorch/runtime/core/portable_type/c10"
  "${_tokenizers}/include"
  "${CMAKE_CURRENT_LIST_DIR}/../../../kernels/cmake/wheel"  # headers that a wheel lacks
)
target_compile_definitions(ec_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS EC_OVER_WHEEL)
# Kernels and delegates register themselves when the libraries are loaded, without any referenced symbol.
target_link_options(ec_executorch INTERFACE "LINKER:--no-as-needed" "LINKER:--allow-shlib-undefined")
target_link_libraries(ec_executorch INTERFACE ${_libraries} "${_python}")
cmake_path(GET _python PARENT_PATH _python_folder)
foreach(_library IN LISTS _libraries)
  if(TARGET ${_library})
    continue()
  endif()
  cmake_path(GET _library PARENT_PATH _folder)
  target_link_options(ec_executorch INTERFACE "LINKER:-rpath,${_folder}")
endforeach()
target_link_options(ec_executorch INTERFACE "LINKER:-rpath,${_torch}/lib:${_python_folder}")
