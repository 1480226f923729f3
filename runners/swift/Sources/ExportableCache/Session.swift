// A program and its position, over the C interface (exportable_cache.h).
import CExportableCache
import Foundation

/// A call that was refused or failed; the message has the value, the limit and the remedy.
public struct Failure: Error, CustomStringConvertible {
    public let status: UInt32
    public let description: String
}

/// The allowed next tokens, called once before each choice: sets bit `token % 32` of `mask[token / 32]`, initially 0, for each token that
/// is allowed after `tokens`, the tokens chosen so far without the prompt. Returns false if the response is complete, which ends it.
public typealias AllowedTokens = (_ tokens: UnsafeBufferPointer<Int64>, _ mask: UnsafeMutableBufferPointer<UInt32>) -> Bool

/// Log probabilities under the model, before temperature and other settings, called before each token: that of the token, and the most
/// probable tokens, in order, with theirs.
public typealias LogProbs = (_ logProb: Double, _ tokens: [Int64], _ logProbs: [Double]) -> Void

/// Options of a generation; the default is greedy, with as many tokens as fit.
public struct Options {
    public var maxNewTokens: Int64 = 0  // 0: as many as fit
    public var temperature: Double = 0  // 0: always the most probable token
    public var topK: Int64 = 0  // 0: no limit
    public var topP: Double = 1  // 1: no limit
    public var minP: Double = 0  // 0: no limit; otherwise only tokens at least minP times as probable as the most probable one
    public var fromCheckpoint = false  // sample as its generation_config says; the four above, if set, replace its values
    public var seed: UInt64?
    public var stopTokens: [Int64] = []
    public var stopStrings: [String] = []
    public var repetitionPenalty: Double = 0  // 0: the checkpoint's; above 1, tokens of the text become less likely
    public var presencePenalty: Double = 0  // subtracted from the logits of tokens that were generated
    public var frequencyPenalty: Double = 0  // subtracted from a token's logit each time that it was generated
    public var countedTokens: [Int64] = []  // tokens of earlier calls that count as generated
    public var logitBias: [Int64: Double] = [:]  // numbers that are added to the logits of tokens
    public var promptLookup: Int64 = 0  // most tokens proposed per step from the text itself; 0: none
    public var draftTokens: Int64 = 0  // most tokens proposed per step by the bundle's draft head, at most 15; 0: none
    public var cachedTokens: Int64 = 0  // the prompt's first tokens that are cached: only the rest is fed; 0: it follows the cached tokens
    public var shiftWhenFull = false  // drop old tokens when the cache is full, and continue
    public var protectedTokens: Int64 = 4  // first tokens that shifts keep
    public var onLogProbs: LogProbs?  // nil: not called
    public var alternatives: Int64 = 0  // most probable tokens that onLogProbs gets
    public var allowedTokens: AllowedTokens?  // nil: all are allowed

    public init() {}
}

/// The options of a call for C, with the memory that they point to.
fileprivate final class CallOptions {
    var c = ec_options()
    private let allowed: Box<AllowedTokens>?
    private let logProbs: Box<LogProbs>?
    private let stopTokens, countedTokens, biased: UnsafeMutableBufferPointer<Int64>
    private let biases: UnsafeMutableBufferPointer<Double>
    private let stops: UnsafeMutableBufferPointer<UnsafePointer<CChar>?>

    init(_ options: Options) throws {
        let texts = try options.stopStrings.map { try whole($0, "options.stopStrings") }
        allowed = options.allowedTokens.map { Box($0) }
        logProbs = options.onLogProbs.map { Box($0) }
        stopTokens = copied(options.stopTokens)
        countedTokens = copied(options.countedTokens)
        biased = copied(Array(options.logitBias.keys))
        biases = copied(Array(options.logitBias.values))
        stops = copied(texts.map { UnsafePointer(strdup($0)) })
        ec_options_init(&c, MemoryLayout<ec_options>.size)
        c.max_new_tokens = options.maxNewTokens
        c.temperature = options.temperature
        c.top_k = options.topK
        c.top_p = options.topP
        c.min_p = options.minP
        c.from_checkpoint = options.fromCheckpoint ? 1 : 0
        if let seed = options.seed {
            c.seed = seed
            c.has_seed = 1
        }
        c.stop_tokens = UnsafePointer(stopTokens.baseAddress)
        c.stop_token_count = stopTokens.count
        c.stop_strings = UnsafePointer(stops.baseAddress)
        c.stop_string_count = stops.count
        c.repetition_penalty = options.repetitionPenalty
        c.presence_penalty = options.presencePenalty
        c.frequency_penalty = options.frequencyPenalty
        c.counted_tokens = UnsafePointer(countedTokens.baseAddress)
        c.counted_token_count = countedTokens.count
        c.bias_tokens = UnsafePointer(biased.baseAddress)
        c.bias_values = UnsafePointer(biases.baseAddress)
        c.bias_count = biased.count
        c.prompt_lookup = options.promptLookup
        c.draft_tokens = options.draftTokens
        c.cached_tokens = options.cachedTokens
        c.shift_when_full = options.shiftWhenFull ? 1 : 0
        c.protected_tokens = options.protectedTokens
        c.alternatives = options.alternatives
        if let allowed {
            c.allowed_user = Unmanaged.passUnretained(allowed).toOpaque()
            c.allowed_tokens = { tokens, count, mask, words, user in
                let allow = Unmanaged<Box<AllowedTokens>>.fromOpaque(user!).takeUnretainedValue().value
                return allow(UnsafeBufferPointer(start: tokens, count: count), UnsafeMutableBufferPointer(start: mask, count: words)) ? 1 : 0
            }
        }
        if let logProbs {
            c.logprobs_user = Unmanaged.passUnretained(logProbs).toOpaque()
            c.on_logprobs = { logProb, tokens, theirs, count, user in
                let take = Unmanaged<Box<LogProbs>>.fromOpaque(user!).takeUnretainedValue().value
                take(logProb, Array(UnsafeBufferPointer(start: tokens, count: count)), Array(UnsafeBufferPointer(start: theirs, count: count)))
            }
        }
    }

    deinit {
        for text in stops { free(UnsafeMutablePointer(mutating: text)) }
        stops.deallocate()
        biases.deallocate()
        for numbers in [stopTokens, countedTokens, biased] { numbers.deallocate() }
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

    /// The limit of cached tokens; -1 for none.
    public var maxLength: Int64 {
        var most: Int64 = 0
        ec_length(handle, nil, &most)
        return most
    }

    /// Feed tokens after the cached ones; returns the logits of the last one.
    public func prefill(_ tokens: [Int64]) throws -> [Float] {
        var logits: UnsafePointer<Float>?
        var vocab = 0
        try check(ec_prefill(handle, tokens, tokens.count, &logits, &vocab))
        return Array(UnsafeBufferPointer(start: logits, count: vocab))
    }

    /// Encode an encoder-decoder's input; the decoder starts again.
    public func encodeInput(_ tokens: [Int64]) throws { try check(ec_encode_tokens(handle, tokens, tokens.count)) }

    /// Encode the values that a speech model's processor makes; the decoder starts again.
    public func encodeInput(_ values: [Float]) throws { try check(ec_encode_values(handle, values, values.count)) }

    /// Add an image, video or audio for the next prompt: one tensor of the model's processor by its name, such as "pixel_values", last
    /// dimension innermost. The prompt has the placeholder token once per embedding; `reset` drops what was added.
    public func addInput(_ name: String, _ values: [Float], shape: [Int64]) throws {
        try checkShape(values.count, shape)
        try check(ec_add_input(handle, try whole(name, "name"), values, Int32(EC_FLOAT32.rawValue), shape, shape.count))
    }

    /// Add a grid or a mask for the next prompt.
    public func addInput(_ name: String, _ values: [Int64], shape: [Int64]) throws {
        try checkShape(values.count, shape)
        try check(ec_add_input(handle, try whole(name, "name"), values, Int32(EC_INT64.rawValue), shape, shape.count))
    }

    /// Token ids of a text; `starts` if it begins a sequence.
    public func tokenize(_ text: String, starts: Bool = true) throws -> [Int64] {
        let text = try whole(text, "text")
        var found = [Int64](repeating: 0, count: text.utf8.count + 16)
        var count = 0
        try check(ec_tokenize(handle, text, starts ? 1 : 0, &found, found.count, &count))
        if count > found.count {  // a tokenizer that writes more tokens than there are bytes
            found = [Int64](repeating: 0, count: count)
            try check(ec_tokenize(handle, text, starts ? 1 : 0, &found, found.count, &count))
        }
        return Array(found.prefix(count))
    }

    /// Roll back the newest tokens.
    public func rewind(_ tokens: Int64) throws { try check(ec_rewind(handle, tokens)) }

    /// Drop `count` tokens from position `first` on; later tokens move to lower positions.
    public func shift(_ count: Int64, from first: Int64 = 0) throws { try check(ec_shift(handle, count, first)) }

    /// Start again at position 0.
    public func reset() throws { try check(ec_reset(handle)) }

    /// End the running generation, from any thread.
    public func cancel() { ec_cancel(handle) }

    /// Save the session's state to a file.
    public func saveState(_ path: String) throws { try check(ec_save_state(handle, try whole(path, "path"))) }

    /// Load a saved state of this bundle.
    public func loadState(_ path: String) throws { try check(ec_load_state(handle, try whole(path, "path"))) }

    /// Load a LoRA adapter that `exportable-cache adapter` wrote into a slot of the program, under a name. A name that is known gets the
    /// new adapter. Needs a bundle exported with `--lora-slots`.
    public func loadAdapter(_ path: String, as name: String) throws {
        try check(ec_load_adapter(handle, try whole(path, "path"), try whole(name, "name")))
    }

    /// Free the slot of an adapter; if it is in use, the model continues without one.
    public func unloadAdapter(_ name: String) throws { try check(ec_unload_adapter(handle, try whole(name, "name"))) }

    /// Run the next steps with an adapter, or with the model itself for nil. Cached tokens keep the values that they were computed with, so
    /// `reset` before a text with another adapter.
    public func useAdapter(_ name: String?) throws {
        if let name { try check(ec_use_adapter(handle, try whole(name, "name"))) } else { try check(ec_use_adapter(handle, nil)) }
    }

    /// The model's chat template over a request in JSON: the messages, or an object with "messages", "tools" and other variables of the
    /// template. Needs a library built with -DEC_TEMPLATES=ON.
    public func render(_ request: String) throws -> String {
        let request = try whole(request, "request"), text = Box("")
        let take: ec_on_text = { piece, size, user in
            Unmanaged<Box<String>>.fromOpaque(user!).takeUnretainedValue().value += decoded(piece, size)
            return 1
        }
        let status = ec_render(handle, request, take, Unmanaged.passUnretained(text).toOpaque())
        try withExtendedLifetime(text) { try check(status) }
        return text.value
    }

    /// Generate tokens after a prompt; the callback returns false to end it.
    @discardableResult
    public func generate(_ prompt: [Int64], _ options: Options = Options(), onToken: (Int64) -> Bool) throws -> ec_statistics {
        try withoutActuallyEscaping(onToken) { taker in
            let box = Box(taker), how = try CallOptions(options)
            var statistics = emptyStatistics()
            let status = ec_generate(
                handle, prompt, prompt.count, &how.c,
                { token, user in Unmanaged<Box<(Int64) -> Bool>>.fromOpaque(user!).takeUnretainedValue().value(token) ? 1 : 0 },
                Unmanaged.passUnretained(box).toOpaque(), &statistics)
            try withExtendedLifetime((box, how)) { try check(status) }
            return statistics
        }
    }

    /// Generate text after a text; the callback returns false to end it.
    @discardableResult
    public func generateText(_ prompt: String, _ options: Options = Options(), onText: (String) -> Bool) throws -> ec_statistics {
        let prompt = try whole(prompt, "prompt")
        return try text(options, onText) { ec_generate_text(handle, prompt, $0, $1, $2, $3) }
    }

    /// Respond to a question with the model's chat template; `system` comes before the first question, or is "".
    @discardableResult
    public func chat(
        _ question: String, system: String = "", _ options: Options = Options(), onText: (String) -> Bool
    ) throws -> ec_statistics {
        let question = try whole(question, "question"), system = try whole(system, "system")
        return try text(options, onText) { ec_chat(handle, question, system, $0, $1, $2, $3) }
    }

    /// Respond to a request with the whole conversation, see `render`; cached tokens of an earlier one are not fed again.
    @discardableResult
    public func chatMessages(_ request: String, _ options: Options = Options(), onText: (String) -> Bool) throws -> ec_statistics {
        let request = try whole(request, "request")
        return try text(options, onText) { ec_chat_messages(handle, request, $0, $1, $2, $3) }
    }

    private func text(
        _ options: Options, _ onText: (String) -> Bool,
        _ call: (UnsafePointer<ec_options>, ec_on_text, UnsafeMutableRawPointer, UnsafeMutablePointer<ec_statistics>) -> ec_status
    ) throws -> ec_statistics {
        try withoutActuallyEscaping(onText) { taker in
            let box = Box(taker), how = try CallOptions(options)
            var statistics = emptyStatistics()
            let take: ec_on_text = { piece, size, user in
                Unmanaged<Box<(String) -> Bool>>.fromOpaque(user!).takeUnretainedValue().value(decoded(piece, size)) ? 1 : 0
            }
            let status = call(&how.c, take, Unmanaged.passUnretained(box).toOpaque(), &statistics)
            try withExtendedLifetime((box, how)) { try check(status) }
            return statistics
        }
    }
}

fileprivate final class Box<Value> {
    var value: Value
    init(_ value: Value) { self.value = value }
}

/// A piece of text, read by its size, because a model may generate a zero byte.
private func decoded(_ piece: UnsafePointer<CChar>?, _ size: Int) -> String {
    String(decoding: UnsafeRawBufferPointer(start: piece, count: size), as: UTF8.self)
}

/// A copy of an array that stays where it is.
private func copied<Value>(_ values: [Value]) -> UnsafeMutableBufferPointer<Value> {
    let found = UnsafeMutableBufferPointer<Value>.allocate(capacity: values.count)
    _ = found.initialize(from: values)
    return found
}

/// C reads as many values as the sizes multiply to.
private func checkShape(_ values: Int, _ shape: [Int64]) throws {
    var count: Int64 = 1
    for size in shape { count = size > 0 && count > 0 && count <= Int64(values) / size ? count * size : -1 }
    if count != Int64(values) {
        throw Failure(
            status: EC_INPUT.rawValue, description: "shape must have the sizes of the \(values) values, got \(shape); pass each size")
    }
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
