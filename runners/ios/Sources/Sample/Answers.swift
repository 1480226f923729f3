import Dispatch
import ExportableCache
import SwiftUI

/// A session in its own queue, which opens the bundle first; the screen observes its published values.
final class Answers: ObservableObject {
    @Published private(set) var text = ""

    private let queue = DispatchQueue(label: "session")
    private var session: Session?

    init(folder: String) {
        queue.async { [self] in
            guarded {
                let opened = try Session(folder)
                DispatchQueue.main.async { self.session = opened }
            }
        }
    }

    /// Generate text after a text, from an empty cache.
    func ask(_ prompt: String) {
        guard let session else { return }
        text = ""
        queue.async { [self] in
            guarded {
                try session.reset()
                let found = try session.generateText(prompt) { piece in
                    self.write(piece)
                    return true
                }
                write("\n[\(found.generated_tokens) tokens]")
            }
        }
    }

    /// End the running generation.
    func stop() { session?.cancel() }

    private func write(_ said: String) { DispatchQueue.main.async { self.text += said } }

    private func guarded(_ call: () throws -> Void) {
        do { try call() } catch { write("\n\(error)") }
    }
}
