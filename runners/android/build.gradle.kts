plugins {
    // Compiles Kotlin by itself.
    id("com.android.application") version "9.1.0"
}

android {
    namespace = "exportablecache.sample"
    compileSdk = 36
    ndkVersion = "28.2.13676358"

    defaultConfig {
        applicationId = "exportablecache.sample"
        minSdk = 24 // java.util.function, which Session has in its interface
        targetSdk = 36
        versionCode = 1
        versionName = "1"
        ndk { abiFilters += "arm64-v8a" }
        externalNativeBuild {
            cmake {
                // Where ExecuTorch and Highway for this ABI were installed, apart by semicolons: the NDK looks nowhere else.
                val prefixes = providers.gradleProperty("executorch").get()
                arguments += listOf("-DEC_EXECUTORCH=installed", "-DCMAKE_FIND_ROOT_PATH=$prefixes", "-DANDROID_STL=c++_shared")
            }
        }
    }
    externalNativeBuild {
        cmake { path = file("CMakeLists.txt") }
    }
    sourceSets {
        getByName("main") { java.directories += "../java" }
    }
    // Unoptimised, a token takes many times as long.
    buildTypes {
        getByName("debug") { externalNativeBuild { cmake { arguments += "-DCMAKE_BUILD_TYPE=Release" } } }
    }
}
