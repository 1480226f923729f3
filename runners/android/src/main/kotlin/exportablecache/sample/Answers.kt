package exportablecache.sample

import exportablecache.Session
import java.util.concurrent.Executors
import java.util.function.Predicate

/**
 * A session in its own thread, which opens the bundle first and calls the callbacks.
 *
 * It needs no Android class.
 */
class Answers(folder: String, private val failed: (String) -> Unit) : AutoCloseable {
    private val worker = Executors.newSingleThreadExecutor()

    @Volatile
    private var session: Session? = null

    init {
        worker.execute { guarded { session = Session(folder) } }
    }

    /** Generate text after a text, from an empty cache, piece by piece; then report how it ended. */
    fun ask(prompt: String, piece: (String) -> Unit, ended: (Session.Statistics) -> Unit) {
        worker.execute {
            guarded {
                val open = checkNotNull(session) { "the bundle was not opened" }
                open.reset()
                val taker = Predicate<String> { text ->
                    piece(text)
                    true
                }
                ended(open.generateText(prompt, Session.Options(), taker))
            }
        }
    }

    /** End the running generation. */
    fun stop() {
        session?.cancel()
    }

    override fun close() {
        stop()
        worker.execute { session?.close() }
        worker.shutdown()
    }

    private fun guarded(call: () -> Unit) {
        try {
            call()
        } catch (failure: RuntimeException) {
            failed(failure.message ?: failure.toString())
        }
    }
}
