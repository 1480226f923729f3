import Foundation
import SwiftUI

/// A prompt, its streamed continuation, and a button that stops it.
@main
struct SampleApp: App {
    // On macOS the first argument; in an app a folder reference among its resources.
    @StateObject private var answers = Answers(
        folder: CommandLine.arguments.dropFirst().first ?? Bundle.main.bundlePath + "/bundle")
    @State private var prompt = ""

    var body: some Scene {
        WindowGroup {
            VStack(alignment: .leading) {
                TextField("Prompt", text: $prompt)
                HStack {
                    Button("Ask") { answers.ask(prompt) }
                    Button("Stop") { answers.stop() }
                }
                ScrollView { Text(answers.text).textSelection(.enabled) }
            }
            .padding()
        }
    }
}
