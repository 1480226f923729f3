// swift-tools-version:5.7
// The Swift interface of the runner. Not built here: there is no Swift compiler for it. Link libexportable_cache, built with
// -DEC_BUILD_SHARED=ON for the platform, or the static libraries of runners/cpp.
import PackageDescription

let package = Package(
    name: "ExportableCache",
    products: [.library(name: "ExportableCache", targets: ["ExportableCache"])],
    targets: [
        .systemLibrary(name: "CExportableCache"),
        .target(name: "ExportableCache", dependencies: ["CExportableCache"]),
    ]
)
