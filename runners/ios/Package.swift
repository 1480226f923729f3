// swift-tools-version:5.9
// The sample as a program for macOS; the README has what an app for iOS needs besides.
import PackageDescription

let package = Package(
    name: "Sample",
    platforms: [.macOS(.v13), .iOS(.v16)],
    dependencies: [.package(path: "../swift")],
    targets: [.executableTarget(name: "Sample", dependencies: [.product(name: "ExportableCache", package: "swift")])]
)
