# ec_executorch from ExecuTorch as its own `cmake --install` leaves it: static libraries, found as the package `executorch`.
#
# Its preset `llm` builds what is asked for here. executorch::kernels is not: at 1.4.1 it names a library that is only built for
# Python.
option(EC_OWN_KERNELS "Link the attention of kernels/, which needs Google Highway" ON)
set(EC_DELEGATES xnnpack_backend CACHE STRING "ExecuTorch's delegate targets to link")

set(CMAKE_MESSAGE_LOG_LEVEL WARNING)  # The package names every library that was not built, needed or not.
find_package(executorch CONFIG)
unset(CMAKE_MESSAGE_LOG_LEVEL)
set(_whole optimized_native_cpu_ops_lib quantized_ops_lib custom_ops ${EC_DELEGATES})
foreach(_target executorch extension_tensor extension_threadpool tokenizers::tokenizers ${_whole})
  if(NOT TARGET ${_target})
    message(FATAL_ERROR "there is no installed ExecuTorch with ${_target}. Build ExecuTorch 1.4.1 with its preset llm and install "
      "it, then name where: -DCMAKE_PREFIX_PATH=... (now '${CMAKE_PREFIX_PATH}')")
  endif()
endforeach()

add_library(ec_executorch INTERFACE)
target_link_libraries(ec_executorch INTERFACE executorch extension_tensor tokenizers::tokenizers ${_whole})
target_include_directories(ec_executorch SYSTEM INTERFACE ${EXECUTORCH_INCLUDE_DIRS})
# Its headers are all there, which those of the wheel are not.
target_compile_definitions(ec_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS EC_HF_TOKENIZER)
if(ANDROID)
  target_link_libraries(ec_executorch INTERFACE log)
endif()

if(EC_OWN_KERNELS)
  add_library(ec_kernels_executorch INTERFACE)
  target_link_libraries(ec_kernels_executorch INTERFACE extension_threadpool)
  target_include_directories(ec_kernels_executorch SYSTEM INTERFACE ${EXECUTORCH_INCLUDE_DIRS}
    "${CMAKE_CURRENT_LIST_DIR}/../../../kernels/cmake/wheel")
  target_compile_definitions(ec_kernels_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS)
  set(EC_KERNELS_FORM STATIC)
  add_subdirectory("${CMAKE_CURRENT_LIST_DIR}/../../../kernels" "${CMAKE_BINARY_DIR}/kernels")
  target_link_libraries(ec_executorch INTERFACE exportable_cache_kernels)
  list(APPEND _whole exportable_cache_kernels)
endif()

# Kernels and delegates register themselves: no symbol of theirs is asked for, so they are linked whole. Those of ExecuTorch's
# targets that say so by themselves would be linked twice.
foreach(_target IN LISTS _whole)
  get_target_property(_options ${_target} INTERFACE_LINK_OPTIONS)
  if(_options MATCHES "whole-archive|force_load|WHOLEARCHIVE")
    continue()
  endif()
  if(APPLE)
    target_link_options(ec_executorch INTERFACE "LINKER:-force_load,$<TARGET_FILE:${_target}>")
  else()
    target_link_options(ec_executorch INTERFACE
      "SHELL:LINKER:--whole-archive $<TARGET_FILE:${_target}> LINKER:--no-whole-archive")
  endif()
endforeach()
if(NOT APPLE)
  target_link_options(ec_executorch INTERFACE "LINKER:--gc-sections")
endif()
