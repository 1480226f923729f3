// A program and its position, over the C interface (exportable_cache.h).
import CExportableCache

/// A call that was refused or failed; the message has the value, the limit and the remedy.
public struct Failure: Error, CustomStringConvertible {
    public let status: UInt32
    public let description: String
}

/// The allowed next tokens, called once before each choice: sets bit `token % 32` of `mask[token / 32]`, initially 0, for each token that
/// is allowed after `tokens`, the tokens chosen so far without the prompt. Returns false if the response is complete, which ends it.
public typealias AllowedTokens = (_ tokens: UnsafeBufferPointer<Int64>, _ mask: UnsafeMutableBufferPointer<UInt32>) -> Bool

/// Options of a generation; the default is greedy, with as many tokens as fit.
public struct Options {
    public var maxNewTokens: Int64 = 0  // 0: as many as fit
    public var temperature: Double = 0  // 0: always the most probable token
    public var topK: Int64 = 0  // 0: no limit
    public var topP: Double = 1  // 1: no limit
    public var fromCheckpoint = false  // sample as its generation_config says; the three above, if set, replace its values
    public var seed: UInt64?
    public var promptLookup: Int64 = 0  // most tokens proposed per step from the text itself; 0: none
    public var allowedTokens: AllowedTokens?  // nil: all are allowed

    public init() {}

    /// `allowed` is kept until the call returns.
    fileprivate func c(_ allowed: Box<AllowedTokens>?) -> ec_options {
        var options = ec_options()
        ec_options_init(&options, MemoryLayout<ec_options>.size)
        options.max_new_tokens = maxNewTokens
        options.temperature = temperature
        options.top_k = topK
        options.top_p = topP
        options.from_checkpoint = fromCheckpoint ? 1 : 0
        options.prompt_lookup = promptLookup
        if let seed {
            options.seed = seed
            options.has_seed = 1
        }
        if let allowed {
            options.allowed_user = Unmanaged.passUnretained(allowed).toOpaque()
            options.allowed_tokens = { tokens, count, mask, words, user in
                let allow = Unmanaged<Box<AllowedTokens>>.fromOpaque(user!).takeUnretainedValue().value
                return allow(UnsafeBufferPointer(start: tokens, count: count), UnsafeMutableBufferPointer(start: mask, count: words)) ? 1 : 0
            }
        }
        return options
    }
}

/// Use it in one thread at a time, except for `cancel`.
public final class Session {
    private let handle: OpaquePointer

    /// Open the bundle in a folder, at position 0.
    public init(_ folder: String) throws {
        var opened: OpaquePointer?
        try check(ec_open(try whole(folder, "folder"), &opened))
        handle = opened!
    }

    deinit { ec_close(handle) }

    /// Set the compute threads of all sessions in this process, 1 to 512; the default is the number of cores. Call it before the first
    /// session is opened: another number is refused while one is open. No other call may run at the same time.
    public static func setThreads(_ threads: Int64) throws { try check(ec_set_threads(threads)) }

    /// The number of cached tokens.
    public var length: Int64 {
        var held: Int64 = 0
        ec_length(handle, &held, nil)
        return held
    }

    /// Feed tokens after the cached ones; returns the logits of the last one.
    public func prefill(_ tokens: [Int64]) throws -> [Float] {
        var logits: UnsafePointer<Float>?
        var vocab = 0
        try check(ec_prefill(handle, tokens, tokens.count, &logits, &vocab))
        return Array(UnsafeBufferPointer(start: logits, count: vocab))
    }

    /// Roll back the newest tokens.
    public func rewind(_ tokens: Int64) throws { try check(ec_rewind(handle, tokens)) }

    /// Start again at position 0.
    public func reset() throws { try check(ec_reset(handle)) }

    /// End the running generation, from any thread.
    public func cancel() { ec_cancel(handle) }

    /// Save the session's state to a file.
    public func saveState(_ path: String) throws { try check(ec_save_state(handle, try whole(path, "path"))) }

    /// Load a saved state of this bundle.
    public func loadState(_ path: String) throws { try check(ec_load_state(handle, try whole(path, "path"))) }

    /// Generate tokens after a prompt; the callback returns false to end it.
    @discardableResult
    public func generate(_ prompt: [Int64], _ options: Options = Options(), onToken: (Int64) -> Bool) throws -> ec_statistics {
        try withoutActuallyEscaping(onToken) { taker in
            let (box, allowed) = (Box(taker), options.allowedTokens.map { Box($0) })
            var (how, statistics) = (options.c(allowed), emptyStatistics())
            let status = ec_generate(
                handle, prompt, prompt.count, &how,
                { token, user in Unmanaged<Box<(Int64) -> Bool>>.fromOpaque(user!).takeUnretainedValue().value(token) ? 1 : 0 },
                Unmanaged.passUnretained(box).toOpaque(), &statistics)
            try withExtendedLifetime((box, allowed)) { try check(status) }
            return statistics
        }
    }

    /// Generate text after a text; the callback returns false to end it.
    @discardableResult
    public func generateText(_ prompt: String, _ options: Options = Options(), onText: (String) -> Bool) throws -> ec_statistics {
        let prompt = try whole(prompt, "prompt")
        return try withoutActuallyEscaping(onText) { taker in
            let (box, allowed) = (Box(taker), options.allowedTokens.map { Box($0) })
            var (how, statistics) = (options.c(allowed), emptyStatistics())
            let status = ec_generate_text(
                handle, prompt, &how,
                { piece, size, user in
                    // Read by its size, because a model may generate a zero byte.
                    let text = String(decoding: UnsafeRawBufferPointer(start: piece, count: size), as: UTF8.self)
                    return Unmanaged<Box<(String) -> Bool>>.fromOpaque(user!).takeUnretainedValue().value(text) ? 1 : 0
                },
                Unmanaged.passUnretained(box).toOpaque(), &statistics)
            try withExtendedLifetime((box, allowed)) { try check(status) }
            return statistics
        }
    }
}

fileprivate final class Box<Value> {
    let value: Value
    init(_ value: Value) { self.value = value }
}

private func emptyStatistics() -> ec_statistics {
    var statistics = ec_statistics()
    statistics.size = MemoryLayout<ec_statistics>.size
    return statistics
}

/// A text for C, which ends strings at a zero byte.
private func whole(_ text: String, _ name: String) throws -> String {
    if text.utf8.contains(0) {
        throw Failure(status: EC_INPUT.rawValue, description: "\(name) must have no zero byte, where C takes it to end; leave it out")
    }
    return text
}

private func check(_ status: ec_status) throws {
    if status != EC_OK { throw Failure(status: status.rawValue, description: String(cString: ec_error())) }
}
