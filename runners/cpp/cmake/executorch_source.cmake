# ec_executorch from ExecuTorch's sources at release 1.4.1, for a device. README.md says what of this was tried.
#
# The targets are those that ExecuTorch's own example links (examples/models/llama/CMakeLists.txt). executorch::kernels is not
# among them: at 1.4.1 it names a library that is only built for Python.
set(EXECUTORCH_BUILD_PRESET_FILE "${EXECUTORCH_ROOT}/tools/cmake/preset/llm.cmake")
add_subdirectory("${EXECUTORCH_ROOT}" "${CMAKE_BINARY_DIR}/executorch" EXCLUDE_FROM_ALL)
include("${EXECUTORCH_ROOT}/tools/cmake/Utils.cmake")

add_library(ec_executorch INTERFACE)
target_link_libraries(ec_executorch INTERFACE executorch extension_llm_runner extension_module_static extension_tensor)
# Kernels and delegates register themselves: no symbol of theirs is asked for, so they are linked whole.
foreach(_library optimized_native_cpu_ops_lib quantized_ops_lib custom_ops ${EC_DELEGATES})
  if(TARGET ${_library})
    executorch_target_link_options_shared_lib(${_library})
    target_link_libraries(ec_executorch INTERFACE ${_library})
  endif()
endforeach()
if(ANDROID)
  target_link_libraries(ec_executorch INTERFACE log)
endif()
set(EC_DEFAULT_ENGINE module)
