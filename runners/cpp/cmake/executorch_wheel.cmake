# ec_executorch from the Python wheel: its headers, and the libraries that its Python bindings are made of.
#
# The wheel is made for Python, so this is for desktops, not for devices. Before release 1.5 everything refers to libtorch and
# libpython. From 1.5 on only the operators of ExecuTorch for language models do: with the kernels of kernels/ in their place, the
# runner loads in a Python without torch.
if(EC_OPERATORS)
  message(FATAL_ERROR "EC_OPERATORS is ${EC_OPERATORS}, but the wheel's library has all kernels in it; it is for an installed "
    "ExecuTorch: -DEC_EXECUTORCH=installed")
endif()
if(NOT TARGET ec_kernels_executorch)
  include("${CMAKE_CURRENT_LIST_DIR}/../../../kernels/cmake/executorch_wheel.cmake")
endif()
set(_executorch "${EC_SITE_PACKAGES}/executorch")
set(EC_KERNELS "" CACHE FILEPATH "Library of kernels/, whose attention is used in place of the wheel's; empty for the wheel's")
set(_kernels "")
if(TARGET exportable_cache_kernels)
  set(_kernels exportable_cache_kernels)  # of a project that builds both
elseif(EC_KERNELS)
  get_filename_component(_kernels "${EC_KERNELS}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  if(NOT EXISTS "${_kernels}")
    message(FATAL_ERROR "EC_KERNELS is ${EC_KERNELS}, but there is no such file; build it with: exportable-cache native build")
  endif()
endif()
if(EC_EXECUTORCH_NEEDS_TORCH OR NOT _kernels)
  file(GLOB _reader "${_executorch}/extension/llm/runner/_llm_runner.*.so")        # the reader of tokenizer.json
  set(_libraries
    ${EC_EXECUTORCH_LIBRARIES}
    "${_executorch}/extension/llm/custom_ops/libcustom_ops_aot_lib.so"             # llama::update_cache, llama::custom_sdpa
    "${_executorch}/kernels/quantized/libquantized_ops_aot_lib.so"                 # quantized_decomposed::*
    ${_reader}
  )
  set(_reads "")
else()
  file(GLOB _reader "${EC_SITE_PACKAGES}/pytorch_tokenizers/pytorch_tokenizers_cpp.*.so")
  set(_libraries ${EC_EXECUTORCH_LIBRARIES} ${_reader})
  set(_reads EC_HF_TOKENIZER)
endif()
if(NOT _reader OR NOT EXISTS "${EC_SITE_PACKAGES}/pytorch_tokenizers/include")
  message(FATAL_ERROR "${EC_SITE_PACKAGES} has no executorch with all it depends on. Install it (pip install executorch==1.4.1), name "
    "another Python with -DPython3_EXECUTABLE=..., or build against an installed ExecuTorch with -DEC_EXECUTORCH=installed")
endif()
list(APPEND _libraries ${_kernels})
# The Python that loads the library has the symbols of libpython. Programs have to link it.
option(EC_IN_PYTHON "Leave libpython out, because a Python loads the library" OFF)
set(_python "")
if(NOT EC_IN_PYTHON)
  execute_process(COMMAND "${Python3_EXECUTABLE}" -c [=[
import pathlib, sysconfig
get = sysconfig.get_config_var
library = pathlib.Path(get("LIBDIR") or "", get("INSTSONAME") or "")
print(library.as_posix() if get("Py_ENABLE_SHARED") and library.is_file() else "")
]=] OUTPUT_VARIABLE _python OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT _python)
    message(FATAL_ERROR "${Python3_EXECUTABLE} has no shared libpython, which the wheel's libraries refer to. Install it "
      "(on Debian and Ubuntu: apt install libpython3-dev), or name a Python built with --enable-shared: -DPython3_EXECUTABLE=...")
  endif()
endif()

add_library(ec_executorch INTERFACE)
target_include_directories(ec_executorch SYSTEM INTERFACE
  "${_executorch}/include"
  "${_executorch}/include/executorch/runtime/core/portable_type/c10"
  "${EC_SITE_PACKAGES}/pytorch_tokenizers/include"
  "${CMAKE_CURRENT_LIST_DIR}/wheel"  # headers that the wheels lack; last, so that theirs take precedence
  "${CMAKE_CURRENT_LIST_DIR}/../../../kernels/cmake/wheel"
)
target_compile_definitions(ec_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS EC_OVER_WHEEL ${_reads})
# Kernels and delegates register themselves when the libraries are loaded, without any referenced symbol.
target_link_options(ec_executorch INTERFACE "LINKER:--no-as-needed" "LINKER:--allow-shlib-undefined")
foreach(_library IN LISTS _libraries _python)
  if(_library STREQUAL _reader)
    # By its name, because it has none in itself.
    cmake_path(GET _library FILENAME _name)
    cmake_path(GET _library PARENT_PATH _folder)
    target_link_directories(ec_executorch INTERFACE "${_folder}")
    set(_library "-l:${_name}")
  endif()
  target_link_libraries(ec_executorch INTERFACE "${_library}")
endforeach()
if(EC_RELATIVE_PATHS)
  return()
endif()
if(EC_EXECUTORCH_NEEDS_TORCH OR NOT _kernels)
  list(APPEND _libraries "${EC_SITE_PACKAGES}/torch/lib/libtorch.so")  # for its folder
endif()
foreach(_library IN LISTS _libraries _python)
  if(NOT TARGET ${_library})
    cmake_path(GET _library PARENT_PATH _folder)
    target_link_options(ec_executorch INTERFACE "LINKER:-rpath,${_folder}")
  endif()
endforeach()
