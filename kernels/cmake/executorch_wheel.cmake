# ec_kernels_executorch: headers of the executorch wheel, and its libraries of the runtime, which export the registry of kernels
# and the thread pool. They refer to libtorch and libpython, which the loading process has loaded.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(_query [=[
import importlib.metadata, importlib.util, pathlib, sysconfig
spec = importlib.util.find_spec("executorch")
folder = pathlib.Path(list(spec.submodule_search_locations)[0]) if spec else None
suffix = sysconfig.get_config_var("EXT_SUFFIX")
# From release 1.5 on, and before it.
names = [folder / "extension" / "pybindings" / (name + suffix) for name in ("_C", "_portable_lib")] if folder else []
found = [path.as_posix() for path in names if path.is_file()]
# Before release 1.5 all of it is in the first.
parts = ("libexecutorch.so", "libexecutorch_threadpool.so")
found[1:] = [path.as_posix() for path in (folder / "lib" / name for name in parts) if path.is_file()] if found else []
release = importlib.metadata.version("executorch") if folder else ""
print(";".join([folder.as_posix() if folder else "", release, *found]))
]=])
execute_process(COMMAND "${Python3_EXECUTABLE}" -c "${_query}" OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
list(POP_FRONT _found _executorch EC_EXECUTORCH_RELEASE)
set(_runtime ${_found})
if(NOT _executorch OR NOT _runtime)
  message(FATAL_ERROR "${Python3_EXECUTABLE} has no executorch, or none with a Python runtime. Install it (pip install "
    "executorch==1.4.1), or name another Python with -DPython3_EXECUTABLE=...")
endif()

add_library(ec_kernels_executorch INTERFACE)
target_include_directories(ec_kernels_executorch SYSTEM INTERFACE
  "${_executorch}/include"
  "${_executorch}/include/executorch/runtime/core/portable_type/c10"
  "${CMAKE_CURRENT_LIST_DIR}/wheel"  # headers that a wheel lacks; last, so that the wheel's take precedence
)
target_compile_definitions(ec_kernels_executorch INTERFACE C10_USING_CUSTOM_GENERATED_MACROS)
target_link_libraries(ec_kernels_executorch INTERFACE ${_runtime})
target_link_options(ec_kernels_executorch INTERFACE "LINKER:--allow-shlib-undefined")
# An installed package finds them relative to itself.
if(NOT SKBUILD)
  foreach(_library IN LISTS _runtime)
    cmake_path(GET _library PARENT_PATH _folder)
    target_link_options(ec_kernels_executorch INTERFACE "LINKER:-rpath,${_folder}")
  endforeach()
endif()
