# ec_kernels_executorch: headers of the executorch wheel, and its libraries of the runtime, which export the registry of kernels
# and the thread pool.
#
# Before release 1.5 the runtime is in the Python module _portable_lib, which refers to libtorch and libpython. From 1.5 on it is in
# libraries that refer to neither. Sets EC_SITE_PACKAGES, EC_EXECUTORCH_RELEASE, and EC_EXECUTORCH_LIBRARIES: all libraries of
# runtime, kernels and delegates; EC_EXECUTORCH_NEEDS_TORCH is true for those of the Python module.
set(EC_SITE_PACKAGES "" CACHE PATH "Folder of the installed executorch, also for another processor; empty to ask Python3_EXECUTABLE")
if(EC_SITE_PACKAGES)
  set(_site "${EC_SITE_PACKAGES}")
  set(_python "Folder ${_site}")
else()
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND "${Python3_EXECUTABLE}" -c [=[
import importlib.util, pathlib
spec = importlib.util.find_spec("executorch")
print(pathlib.Path(list(spec.submodule_search_locations)[0]).parent.as_posix() if spec else "")
]=] OUTPUT_VARIABLE _site OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(_python "${Python3_EXECUTABLE}")
endif()
set(_executorch "${_site}/executorch")
file(GLOB _metadata "${_site}/executorch-*.dist-info")
string(REGEX REPLACE ".*/executorch-(.*)\\.dist-info.*" "\\1" EC_EXECUTORCH_RELEASE "${_metadata}")
set(EC_EXECUTORCH_LIBRARIES "")
foreach(_part "" _threadpool _kernels_optimized _kernels_quantized _backend_xnnpack)
  file(GLOB _library "${_executorch}/lib/libexecutorch${_part}.so")
  list(APPEND EC_EXECUTORCH_LIBRARIES ${_library})
endforeach()
list(LENGTH EC_EXECUTORCH_LIBRARIES _count)
set(EC_EXECUTORCH_NEEDS_TORCH OFF)
if(NOT _count EQUAL 5)
  set(EC_EXECUTORCH_NEEDS_TORCH ON)
  file(GLOB EC_EXECUTORCH_LIBRARIES "${_executorch}/extension/pybindings/_portable_lib.*.so")
endif()
if(NOT _metadata OR NOT EC_EXECUTORCH_LIBRARIES)
  message(FATAL_ERROR "${_python} has no executorch, or none with a runtime. Install it (pip install executorch==1.4.1), or name "
    "another Python with -DPython3_EXECUTABLE=...")
endif()
list(SUBLIST EC_EXECUTORCH_LIBRARIES 0 2 _runtime)

add_library(ec_kernels_executorch INTERFACE)
target_include_directories(ec_kernels_executorch SYSTEM INTERFACE
  "${_executorch}/include"
  "${_executorch}/include/executorch/runtime/core/portable_type/c10"
  "${CMAKE_CURRENT_LIST_DIR}/wheel"  # headers that a wheel lacks; last, so that the wheel's take precedence
)
target_compile_definitions(ec_kernels_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS)
target_link_libraries(ec_kernels_executorch INTERFACE ${_runtime})
target_link_options(ec_kernels_executorch INTERFACE "LINKER:--allow-shlib-undefined")
option(EC_RELATIVE_PATHS "Leave out paths of executorch, because the installed file has relative ones" OFF)
if(NOT EC_RELATIVE_PATHS)
  foreach(_library IN LISTS _runtime)
    cmake_path(GET _library PARENT_PATH _folder)
    target_link_options(ec_kernels_executorch INTERFACE "LINKER:-rpath,${_folder}")
  endforeach()
endif()
set(EC_SITE_PACKAGES "${_site}")
